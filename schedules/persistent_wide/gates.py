"""The gates of the wide persistent kernel, by the threads that multiply: partial sums to new state."""

from __future__ import annotations

from typing import Any

from ecornn.schedules.base import Task
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.items import Ended, Items
from ecornn.schedules.persistent.exchange import pack
from ecornn.schedules.persistent_wide.copies import Memory
from ecornn.schedules.persistent_wide.exchange import counter_of, slot_base, word_of
from ecornn.schedules.persistent_wide.handover import Parcels
from ecornn.schedules.persistent_wide.handover import word_of as handed_word
from ecornn.schedules.persistent_wide.place import Place, multiplier, named, pinned
from ecornn.schedules.persistent_wide.plan import DEPTH, SLOTS, TEAM, Plan
from ecornn.schedules.pointwise import emit

SUMS, STATE, PUBLISHED = 1, 2, 3  # named barriers: partial sums are there; the block's state is; all know of it


class Gates(Items):
    """Emits the gates of a step; ``thread`` counts the multiplying threads."""

    def __init__(self, T: Any, task: Task, plan: Plan, math: str, arguments: dict[str, Any], memory: Memory,
                 place: Place, thread: Any, steps: Any, batch: Any, hoisted: Hoisted) -> None:
        self.plan, self.place, self.memory = plan, place, memory
        super().__init__(T, task, math, arguments, plan.share, place.group, place.first, thread, steps, batch,
                         hoisted, place.count)
        self.sums = memory.words
        self.parcels = Parcels(T, plan, arguments["handed"], self.items) if plan.parts > 1 else None
        self._address()

    def _bind(self, value: Any) -> Any:
        return self.T.Bind(value) if self.plan.rings > 1 else named(self.T, value)

    def _address(self) -> None:
        """Where the items' values lie."""
        T, plan, place = self.T, self.plan, self.place
        self.bases = [self._bind(self.memory.sums(0) + column * plan.stride + self._row(local))
                      for local, column in zip(self.local, self.column, strict=True)]
        self.words = [self._bind(slot_base(plan, place.group, 0) + word_of(plan, unit, column))
                      for unit, column in zip(self.unit, self.column, strict=True)]
        self.writes = [T.Bind(T.And(T.And(owner, unit < plan.hidden), local % 2 == 0))
                       for owner, unit, local in zip(self.owner, self.unit, self.local, strict=True)]
        if self.parcels is not None:
            places = [handed_word(plan, place.part, 0, column, self._row(local))
                      for local, column in zip(self.local[::2], self.column[::2], strict=True)]
            self.parcels.locate(place, places, self.owner[::2])

    def begin(self) -> None:
        super().begin()
        self._load_inputs(self.T.int32(0), self.inputs)
        for t in range(0 if self.numbers is not None else 1, 2):
            self._start_at(self.T.int32(t))

    def meanwhile(self, t: Any) -> None:
        """While the last products of step t are under way."""
        if self.parcels is None:
            self._prepare_addresses(t)

    def _prepare_addresses(self, t: Any) -> None:
        """Where the state that step t computes goes; worked out before anybody waits for it."""
        T, plan = self.T, self.plan
        if plan.rings == 1:  # all addresses anew: kept from step to step they would take too many registers
            self.place = self.place.anew()
            self.first, self.count, self.group = self.place.first, self.place.count, self.place.group
            self._locate(multiplier(T))
            self._address()
        slot = (t + 1) % SLOTS * plan.slot_words
        self.places = [pinned(T, T.Select(writes, word + slot, -1))
                       for writes, word in zip(self.writes, self.words, strict=True)]
        self.counter = pinned(T, self._counter())

    def step(self, t: Any) -> None:
        """From partial sums, stored by all, to the state of step t + 1; then what nobody waits for."""
        T = self.T
        if self.parcels is not None:
            self._prepare_addresses(t)  # while sums travel
            self.parcels.poll(t)
        self._barrier(SUMS)
        ended: list[Ended] = []
        self.announced: list[Any] = []
        for i in range(self.items):
            env = emit(self.first_assigns, self._before(i) | self._products(i), self.math)
            ended.append(self._finish(i, env, t))
        self._exchange()
        T.evaluate(T.ptx["fence.proxy.async.global"]())
        self._barrier(STATE)  # also: nobody stores partial sums that others still read
        self._publish()
        self._barrier(PUBLISHED)  # what follows would make the release wait longer
        for i in range(self.items):
            self._store(i, t, ended[i])
        self._load_inputs(T.Bind(t + 1), self.inputs)  # used a step later
        self._start_at(T.Bind(t + 2))

    def _barrier(self, name: int) -> None:
        self.T.evaluate(self.T.ptx["bar.sync"](self.T.uint32(name), self.T.uint32(self.plan.teams * TEAM)))

    def _row(self, unit: Any) -> Any:
        """Row of partial sums where a unit's interleaved gates begin."""
        return unit * self.plan.interleave

    def _products(self, i: int) -> dict[Any, Any]:
        """An item's products: the sums of all rings, or of all blocks that share K."""
        T, plan, e = self.T, self.plan, self.plan.interleave
        found: dict[Any, Any] = {}
        rows = self.graph.phases[0].rows
        for outer in range(plan.gates // e):
            parts = [self._load(self.bases[i] + ring * plan.columns * plan.stride + outer * plan.finished * e, e)
                     for ring in range(plan.rings)]
            for inner in range(e):
                gate, value = outer * e + inner, parts[0][inner]
                value = T.Bind(value + parts[1][inner]) if plan.rings > 1 else value
                found[rows[gate].var] = value if self.parcels is None else self.parcels.sum(i, gate, value)
        return found

    def _load(self, place: Any, count: int) -> list[Any]:
        T = self.T
        if count in (2, 4):
            into = T.alloc_buffer((count,), "float32", scope="local")
            T.evaluate(T.ptx[f"ld.shared.v{count}.f32"](*(into[k] for k in range(count)), self.sums.ptr_to([place])))
            return [into[k] for k in range(count)]
        return [T.Bind(self.sums[place + k]) for k in range(count)]

    def _announce(self, i: int, p: int, step: Any, env: dict[Any, Any]) -> None:
        """Keeps this item's part of the exchange; units beyond H are zero."""
        T, H, value = self.T, self.plan.hidden, env[self.graph.phases[0].operands[0]]
        self.announced.append(T.Bind(T.Select(self.unit[i] < H, value, T.float32(0)) if H % 2 else value))

    def _exchange(self) -> None:
        """Writes what was kept: the thread of an even unit for both of a word."""
        T = self.T
        words = [T.Bind(pack([value, self._neighbour(value)], self.plan.dtype)) for value in self.announced]
        for place, word in zip(self.places, words, strict=True):
            with T.If(place >= 0), T.Then():
                T.evaluate(T.ptx["st.relaxed.gpu.global.b32"](self.arguments["exchange"].ptr_to([place]), word))

    def _counter(self) -> Any:
        """Place of the counter of a chunk that the block writes, another one for each thread; -1 for the others."""
        T, first, count = self.T, self.place.first, self.place.count
        end = T.min(first + (self.plan.finished if count is None else count), self.plan.hidden)
        chunk = T.Bind(first // DEPTH + self.thread)
        inside = chunk <= (end - 1) // DEPTH
        inside = inside if self.plan.parts == 1 else T.And(first < end, inside)
        return T.Select(inside, counter_of(self.plan, self.group, chunk), -1)

    def _publish(self) -> None:
        """Counts this block's part of the chunks that it has written."""
        T = self.T
        with T.If(self.counter >= 0), T.Then():
            counter = self.arguments["counters"].ptr_to([self.counter])
            T.evaluate(T.ptx["red.release.gpu.global.add.u32"](counter, T.uint32(1)))
