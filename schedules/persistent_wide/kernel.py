"""The wide persistent kernel: one launch for the whole sequence, products by wgmma.

Blocks form groups, and sets within these; a group serves its own batch rows and holds all recurrent weights, a
set the rows of ``units`` hidden units, each block of it for a part of K. In every block

* a warp for each ring, or four for the only one, copies chunks of the exchanged state into its stages (``warps.py``),
  and where not all weights fit, another one those, in every step;
* two or three warpgroups multiply, each its half of K or its own rows, with weights in registers and in shared memory
  (``warps.py``), hand partial sums of units that another block of the set finishes to that one (``exchange.py``),
  add those of their own, compute the cell's scalars, and write first the new state, then y (``Gates``). They get what
  registers the copying warpgroup does not need."""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, T, Var
from ecornn.schedules.cuda import isa
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import Stored, keeping
from ecornn.schedules.persistent.exchange import pack
from ecornn.schedules.persistent_wide.exchange import BlockRole, Parcels, handed_word, multiplier, place_of, word_of
from ecornn.schedules.persistent_wide.plan import DEPTH, REGISTERS, SLOTS, SPACING, TEAM, WidePlan
from ecornn.schedules.persistent_wide.warps import Memory, Products, copy, stream
from ecornn.schedules.scalars import gate_threads
from ecornn.schedules.scalars.gate_threads import GateThreads, initial_values
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
        return T.let(name, value) if self.plan.rings > 1 else isa.opaque(name, value)

    def _address(self) -> None:
        plan, role = self.plan, self.role
        rows = [local * plan.interleave for local in self.local]  # of sums, where a unit's interleaved gates begin
        self.bases = [self._bind("sums_at", self.memory.sums(0) + column * plan.stride + row)
                      for row, column in zip(rows, self.column, strict=True)]
        self.words = [self._bind("word_at", role.slot(0) + word_of(plan, unit, column))
                      for unit, column in zip(self.unit, self.column, strict=True)]
        self.writes = [T.let("write", T.And(T.And(owner, unit < plan.hidden), local % 2 == 0))
                       for owner, unit, local in zip(self.owner, self.unit, self.local, strict=True)]
        if self.parcels is not None:
            places = [handed_word(plan, role.part, 0, column, row)
                      for row, column in zip(rows[::2], self.column[::2], strict=True)]
            self.parcels.locate(role, places, self.owner[::2])

    def begin(self) -> None:
        super().begin()
        self._load_inputs(T.int32(0), self.inputs)
        if self.late:
            self._load_inputs(T.int32(1), self.ahead)
        for t in range(0 if self.numbers is not None else 1, 2):
            self._start_at(T.int32(t))

    def prepare(self, t: Expr) -> None:
        """Works out where the state that step t computes goes, before anybody waits for it."""
        plan = self.plan
        if plan.rings == 1:  # all addresses anew: kept from step to step they would take too many registers
            self.role = BlockRole.of(plan, isa.special_register("ctaid"))
            self.first, self.count, self.group = self.role.first, self.role.count, self.role.group
            self._locate(multiplier())
            self._address()
        slot = (t + 1) % SLOTS * plan.slot_words
        self.places = [isa.pinned("word_at", T.Select(writes, word + slot, -1))
                       for writes, word in zip(self.writes, self.words, strict=True)]
        self.counter = isa.pinned("counter", self._counter())

    def step(self, t: Expr) -> None:
        """Emits the way from partial sums, stored by all, to the state of step t + 1; then what nobody waits for."""
        if self.parcels is not None:
            self.prepare(t)  # while sums travel
            self.parcels.poll(t)
        self._barrier(SUMS)
        self.announced: list[list[Expr]] = []
        ended = [self._finish(i, emit(self.urgent.first, self._before(i) | self._products(i), self.math), t)
                 for i in range(self.items)]
        self._exchange()
        T.note("named barrier: all words of the new state are written; then their chunks are counted (release)")
        isa.fence_async_global()
        self._barrier(STATE)  # also: nobody stores partial sums that others still read
        with T.when(self.counter >= 0):
            isa.red_release(self.arguments["counters"].ptr_to([self.counter]))
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
        isa.named_barrier_sync(name, self.plan.teams * TEAM)

    def _products(self, i: int) -> dict[Var, Expr]:
        """An item's products: the sums of all rings, or of all blocks that share K."""
        plan, e, found = self.plan, self.plan.interleave, dict[Var, Expr]()
        for outer in range(0, plan.gates, e):
            place = self.bases[i] + outer * plan.finished
            parts = [gate_threads.partial_sums(self.memory.words, place + ring * plan.columns * plan.stride, e)
                     for ring in range(plan.rings)]
            for gate, (value, *others) in enumerate(zip(*parts, strict=True), outer):
                value = T.let("sum", value + others[0]) if others else value
                value = value if self.parcels is None else self.parcels.sum(i, gate, value)
                found[self.graph.phases[0].products[gate].var] = value
        return found

    def _announce(self, i: int, p: int, step: Expr, env: dict[Var, Expr]) -> None:
        """Keeps this item's part of the exchange, a value of each operand; units beyond H are zero."""
        H, values = self.plan.hidden, [env[operand] for operand in self.graph.phases[0].operands]
        self.announced.append([T.let("announced", T.Select(self.unit[i] < H, value, T.float32(0)) if H % 2 else value)
                               for value in values])

    def _exchange(self) -> None:
        """Writes what was kept: the thread of an even unit for both of a word."""
        exchange, words = self.arguments["exchange"], self.plan.reach * self.plan.columns * (DEPTH // 2)  # an operand's
        sent = [[T.let("word", pack(self._shared(value), self.plan.dtype)) for value in values]
                for values in self.announced]
        for place, own in zip(self.places, sent, strict=True):
            with T.when(place >= 0):
                for o, word in enumerate(own):
                    isa.st_relaxed(exchange.ptr_to([place + o * words]), [word])

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
        return T.Select(inside, self.role.counter(chunk + behind), -1)


def wide_kernel(task: Task, plan: WidePlan, hoisted: Hoisted, kept: Stored) -> PrimFunc:
    """``persistent_wide(T, B, hoisted, vectors, <state>_in, <state>_out, recurrent, exchange, counters, y)``, and
    ``handed`` where blocks share K; of an adjoint's recurrence ``outputs`` in place of y; ``persistent_wide_keeping``
    stores what is ``kept``, too."""
    own = ("recurrent", "exchange", "counters", "handed")[:4 if plan.parts > 1 else 3]
    with T.kernel(keeping("persistent_wide", kept)) as made:
        kernel = SequenceKernel.declare(task, hoisted, plan.knobs.math, dict.fromkeys(own, "uint32"), kept)
        a = kernel.arguments
        T.device_entry()
        block, thread = T.block(plan.groups * plan.blocks), T.thread(plan.threads)
        words = T.shared(plan.shared // 4, 1024)  # in order: stages of state, weights, partial sums, barriers
        memory = Memory(plan, words)
        role, (copying, multiplying) = BlockRole.of(plan, block), REGISTERS[plan.teams]
        _prepare(plan, memory, thread)
        # without this bound ptxas ignores setmaxnreg
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1}), T.If(thread < TEAM):
            with T.Then():
                T.note("producer warpgroup: few registers; what it gives back, the MMA warpgroups get")
                isa.register_dealloc(copying)
                with T.when(thread < plan.rings * plan.copiers * 32):
                    copy(kernel, plan, memory, role, T.let("warp", thread // 32), T.let("lane", thread % 32))
                if plan.streamed:
                    ring = T.let("ring", thread // 32 - plan.rings * plan.copiers)
                    with T.when(T.And(T.And(ring >= 0, ring < plan.rings), thread % 32 == 0)):
                        stream(kernel.steps, plan, memory, role, ring, a["recurrent"])
            with T.Else():
                T.note("MMA warpgroups: weights to registers, then products and gates of every step")
                isa.register_alloc(multiplying)
                worker = T.let("worker", thread - TEAM)
                products = Products(plan, memory, role, T.let("team", worker // TEAM),
                                    T.let("team_thread", worker % TEAM), a["recurrent"])
                T.note("gates, prologue: constants, states and first inputs of each thread's (unit, batch row) pairs")
                gates = Gates(kernel, plan, memory, role, worker)
                gates.begin()
                with T.serial("t", 0, kernel.steps) as t:
                    products.run(t, gates.prepare if plan.parts == 1 else lambda t: None)
                    T.note("MMA warpgroups: partial sums to shared memory, or to the CTA that finishes their units")
                    products.store(a.get("handed"))
                    T.note("gates, epilogue: wait for all partial sums; the cell's scalars")
                    gates.step(t)
    return made()


def _prepare(plan: WidePlan, memory: Memory, thread: Expr) -> None:
    """The barriers, by the first thread, for all."""
    T.note("prologue: one thread initialises the mbarriers of all stages: full, empty, weights")
    warps = plan.sharers * TEAM // 32
    with T.when(thread == 0):
        for ring in range(plan.rings):
            memory.state(ring).init(consumers=warps)
            if plan.resident:
                memory.resident(ring).init(producers=plan.resident)
            memory.streamed(ring).init(consumers=warps)
        isa.fence_mbarrier_init()
        isa.fence_async_shared()  # bulk copies arrive through this proxy
    isa.sync_block()


def start_kernel(task: Task, plan: WidePlan, layout: Hoisted) -> PrimFunc:
    """``start(T, B, <state>_in ..., vectors, [hoisted,] exchange, counters)``, before it: zeros into counters, the
    initial state into the exchange. Words beyond H, which pad the last chunks, are zero in both slots, and stay so."""
    with T.kernel("start") as made:
        kernel = gate_threads.declare_start(task, layout, plan.knobs.math)
        exchange, counters = T.pointer("exchange", "uint32"), T.pointer("counters", "uint32")
        T.device_entry()
        T.note("before the recurrence: chunk counters to zero, the first state into the exchange")
        first, threads = gate_threads.start_thread(), gate_threads.BLOCKS * gate_threads.THREADS
        with T.when(first < plan.groups * plan.counters):
            T.buffer_store(counters, T.uint32(0), [first * SPACING])
        with T.strided("place", plan.groups * SLOTS * plan.slot_words, first, threads) as place:
            group = T.let("group", place // (SLOTS * plan.slot_words))
            unit, column, operand = place_of(plan, T.let("word", place % plan.slot_words))
            unit, column = T.let("unit", unit), T.let("column", column)
            row = T.let("row", group * plan.rows + column)
            slot = place // plan.slot_words % SLOTS
            given = T.And(slot == 0, T.And(unit < plan.hidden, column < plan.rows))
            with T.If(given if plan.operands == 1 else T.And(given, operand < plan.operands)):
                with T.Then():
                    values = initial_values(kernel, (unit, row, operand))
                    T.buffer_store(exchange, pack(values, plan.dtype), [place])
                with T.Else():
                    T.buffer_store(exchange, T.uint32(0), [place])
    return made()
