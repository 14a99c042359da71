"""The gates of the wide persistent kernel, by the threads that multiply: partial sums to new state."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T, Var
from ecornn.schedules.cuda.isa.memory import fence_async_global, red_release, st_relaxed
from ecornn.schedules.cuda.isa.registers import opaque, pinned
from ecornn.schedules.cuda.isa.threads import named_barrier_sync
from ecornn.schedules.persistent.exchange import pack
from ecornn.schedules.persistent_wide.copies import Memory
from ecornn.schedules.persistent_wide.exchange import (
    BlockRole,
    Parcels,
    counter_of,
    handed_word,
    multiplier,
    operand_words,
    slot_base,
    word_of,
)
from ecornn.schedules.persistent_wide.plan import DEPTH, SLOTS, TEAM, WidePlan
from ecornn.schedules.scalars.gate_threads import Ended, GateThreads, partial_sums
from ecornn.schedules.scalars.pointwise import emit
from ecornn.schedules.sequence_kernel import SequenceKernel

SUMS, STATE, PUBLISHED = 1, 2, 3  # named barriers: partial sums are there; the block's state is; all know of it


class Gates(GateThreads):
    """Emits the gates of a step; ``thread`` counts the multiplying threads."""

    def __init__(self, kernel: SequenceKernel, plan: WidePlan, memory: Memory, role: BlockRole, thread: Expr) -> None:
        self.plan, self.role, self.memory = plan, role, memory
        super().__init__(kernel, plan.share, role.group, role.first, thread, role.count)
        self.parcels = Parcels(plan, self.arguments["handed"], self.items) if plan.parts > 1 else None
        self._address()

    def _bind(self, name: str, value: Expr) -> Expr:
        return T.let(name, value) if self.plan.rings > 1 else opaque(name, value)

    def _address(self) -> None:
        """Works out where the items' values lie."""
        plan, role = self.plan, self.role
        self.bases = [self._bind("sums_at", self.memory.sums(0) + column * plan.stride + self._row(local))
                      for local, column in zip(self.local, self.column, strict=True)]
        self.words = [self._bind("word_at", slot_base(plan, role.group, 0) + word_of(plan, unit, column))
                      for unit, column in zip(self.unit, self.column, strict=True)]
        self.writes = [T.let("write", T.And(T.And(owner, unit < plan.hidden), local % 2 == 0))
                       for owner, unit, local in zip(self.owner, self.unit, self.local, strict=True)]
        if self.parcels is not None:
            places = [handed_word(plan, role.part, 0, column, self._row(local))
                      for local, column in zip(self.local[::2], self.column[::2], strict=True)]
            self.parcels.locate(role, places, self.owner[::2])

    def begin(self) -> None:
        super().begin()
        self._load_inputs(T.int32(0), self.inputs)
        if self.late:
            self._load_inputs(T.int32(1), self.ahead)
        for t in range(0 if self.numbers is not None else 1, 2):
            self._start_at(T.int32(t))

    def meanwhile(self, t: Expr) -> None:
        """Emits what is done while the last products of step t are under way."""
        if self.parcels is None:
            self._prepare_addresses(t)

    def _prepare_addresses(self, t: Expr) -> None:
        """Works out where the state that step t computes goes, before anybody waits for it."""
        plan = self.plan
        if plan.rings == 1:  # all addresses anew: kept from step to step they would take too many registers
            self.role = self.role.anew()
            self.first, self.count, self.group = self.role.first, self.role.count, self.role.group
            self._locate(multiplier())
            self._address()
        slot = (t + 1) % SLOTS * plan.slot_words
        self.places = [pinned("word_at", T.Select(writes, word + slot, -1))
                       for writes, word in zip(self.writes, self.words, strict=True)]
        self.counter = pinned("counter", self._counter())

    def step(self, t: Expr) -> None:
        """Emits the way from partial sums, stored by all, to the state of step t + 1; then what nobody waits for."""
        if self.parcels is not None:
            self._prepare_addresses(t)  # while sums travel
            self.parcels.poll(t)
        self._barrier(SUMS)
        ended: list[Ended] = []
        self.announced: list[list[Expr]] = []
        for i in range(self.items):
            env = emit(self.urgent.first, self._before(i) | self._products(i), self.math)
            ended.append(self._finish(i, env, t))
        self._exchange()
        T.note("named barrier: all words of the new state are written; then their chunks are counted (release)")
        fence_async_global()
        self._barrier(STATE)  # also: nobody stores partial sums that others still read
        self._publish()
        T.note("what nobody waits for: y, last states, the next inputs")
        self._barrier(PUBLISHED)  # what follows would make the release wait longer
        for i in range(self.items):
            self._store(i, t, ended[i])
        if self.late:  # the next step's are at hand: its operands took them
            self._advance()
            self._load_inputs(T.let("t_ahead", t + 2), self.ahead)
        else:
            self._load_inputs(T.let("t_next", t + 1), self.inputs)  # used a step later
        self._start_at(T.let("after_next", t + 2))

    def _barrier(self, name: int) -> None:
        named_barrier_sync(name, self.plan.teams * TEAM)

    def _row(self, unit: Expr) -> Expr:
        """Product of partial sums where a unit's interleaved gates begin."""
        return unit * self.plan.interleave

    def _products(self, i: int) -> dict[Var, Expr]:
        """An item's products: the sums of all rings, or of all blocks that share K."""
        plan, e = self.plan, self.plan.interleave
        found: dict[Var, Expr] = {}
        rows = self.graph.phases[0].products
        for outer in range(plan.gates // e):
            place = self.bases[i] + outer * plan.finished * e
            parts = [partial_sums(self.memory.words, place + ring * plan.columns * plan.stride, e)
                     for ring in range(plan.rings)]
            for inner in range(e):
                gate, value = outer * e + inner, parts[0][inner]
                value = T.let("sum", value + parts[1][inner]) if plan.rings > 1 else value
                found[rows[gate].var] = value if self.parcels is None else self.parcels.sum(i, gate, value)
        return found

    def _announce(self, i: int, p: int, step: Expr, env: dict[Var, Expr]) -> None:
        """Keeps this item's part of the exchange, a value of each operand; units beyond H are zero."""
        H, values = self.plan.hidden, [env[operand] for operand in self.graph.phases[0].operands]
        self.announced.append([T.let("announced", T.Select(self.unit[i] < H, value, T.float32(0)) if H % 2 else value)
                               for value in values])

    def _exchange(self) -> None:
        """Writes what was kept: the thread of an even unit for both of a word."""
        exchange, apart = self.arguments["exchange"], operand_words(self.plan)
        words = [[T.let("word", pack([value, self._neighbour(value)], self.plan.dtype)) for value in values]
                 for values in self.announced]
        for place, own in zip(self.places, words, strict=True):
            with T.when(place >= 0):
                for o, word in enumerate(own):
                    st_relaxed(exchange.ptr_to([place + o * apart]), [word])

    def _counter(self) -> Expr:
        """Place of the counter of a chunk that the block writes, another one for each thread; -1 for the others."""
        plan, first, count = self.plan, self.role.first, self.role.count
        end = T.min(first + (plan.finished if count is None else count), plan.hidden)
        if plan.operands == 1:
            chunk, behind = T.let("chunk", first // DEPTH + self.thread), 0
            inside = chunk <= (end - 1) // DEPTH
        else:
            most = (plan.finished + DEPTH - 2) // DEPTH + 1  # chunks that a block's units are of
            chunk, operand = T.let("chunk", first // DEPTH + self.thread % most), self.thread // most
            inside, behind = T.And(operand < plan.operands, chunk <= (end - 1) // DEPTH), operand * plan.reach
        inside = inside if plan.parts == 1 else T.And(first < end, inside)
        return T.Select(inside, counter_of(plan, self.group, chunk + behind), -1)

    def _publish(self) -> None:
        """Counts this block's part of the chunks that it has written."""
        with T.when(self.counter >= 0):
            counter = self.arguments["counters"].ptr_to([self.counter])
            red_release(counter)
