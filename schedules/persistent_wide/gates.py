"""The gates of the wide persistent kernel, by the threads that multiply: partial sums to new state."""

from __future__ import annotations

from typing import Any

from ecornn.schedules.base import Task
from ecornn.schedules.items import Items
from ecornn.schedules.persistent.exchange import pack
from ecornn.schedules.persistent_wide.copies import Memory
from ecornn.schedules.persistent_wide.exchange import counter_of, slot_base, word_of
from ecornn.schedules.persistent_wide.plan import DEPTH, SLOTS, TEAM, TEAMS, Plan
from ecornn.schedules.pointwise import emit

SUMS, STATE = 1, 2  # named barriers: partial sums are there; the block's state is


class Gates(Items):
    """Emits the gates of a step; ``thread`` counts the multiplying threads."""

    def __init__(self, T: Any, task: Task, plan: Plan, math: str, arguments: dict[str, Any], memory: Memory,
                 group: Any, member: Any, thread: Any, steps: Any, batch: Any) -> None:
        super().__init__(T, task, math, arguments, plan.share, group, member, thread, steps, batch)
        self.plan, self.member = plan, member
        self.sums = memory.words
        self.bases = [T.Bind(memory.sums(0) + column * plan.stride + self._row(local))
                      for local, column in zip(self.local, self.column, strict=True)]
        self.words = [T.Bind(slot_base(plan, group, 0) + word_of(plan, unit, column))
                      for unit, column in zip(self.unit, self.column, strict=True)]
        self.writes = [T.Bind(T.And(T.And(owner, unit < plan.hidden), local % 2 == 0))
                       for owner, unit, local in zip(self.owner, self.unit, self.local, strict=True)]

    def begin(self) -> None:
        super().begin()
        self._load_inputs(self.T.int32(0), self.inputs)
        self._start_at(self.T.int32(1))

    def step(self, t: Any) -> None:
        """From partial sums, stored by all, to the state of step t + 1; then what nobody waits for."""
        T, (phase,) = self.T, self.graph.phases
        self._barrier(SUMS)
        ended = []
        for i in range(self.items):
            env = emit(phase.assigns, self._before(i) | self._products(i), self.math)
            ended.append(self._finish(i, env, t))
        T.evaluate(T.ptx["fence.proxy.async.global"]())
        self._barrier(STATE)  # also: nobody stores partial sums that others still read
        self._publish()
        for i in range(self.items):
            self._store(i, t, *ended[i])
        self._load_inputs(T.Bind(t + 1), self.inputs)  # used a step later
        self._start_at(T.Bind(t + 2))

    def _barrier(self, name: int) -> None:
        self.T.evaluate(self.T.ptx["bar.sync"](self.T.uint32(name), self.T.uint32(TEAMS * TEAM)))

    def _row(self, unit: Any) -> Any:
        """Row of partial sums where a unit's interleaved gates begin."""
        return unit * self.plan.interleave

    def _products(self, i: int) -> dict[Any, Any]:
        """An item's products: the sums of all warpgroups."""
        T, plan, e = self.T, self.plan, self.plan.interleave
        found: dict[Any, Any] = {}
        rows = self.graph.phases[0].rows
        for outer in range(plan.gates // e):
            parts = [self._load(self.bases[i] + team * plan.columns * plan.stride + outer * plan.units * e, e)
                     for team in range(TEAMS)]
            for inner in range(e):
                found[rows[outer * e + inner].var] = T.Bind(parts[0][inner] + parts[1][inner])
        return found

    def _load(self, place: Any, count: int) -> list[Any]:
        T = self.T
        if count in (2, 4):
            into = T.alloc_buffer((count,), "float32", scope="local")
            T.evaluate(T.ptx[f"ld.shared.v{count}.f32"](*(into[k] for k in range(count)), self.sums.ptr_to([place])))
            return [into[k] for k in range(count)]
        return [T.Bind(self.sums[place + k]) for k in range(count)]

    def _announce(self, i: int, p: int, step: Any, env: dict[Any, Any]) -> None:
        """Writes this thread's part of the exchange; units beyond H are zero."""
        T, plan = self.T, self.plan
        value = T.Bind(T.Select(self.unit[i] < plan.hidden, env[self.graph.phases[0].operands[0]], T.float32(0)))
        word = T.Bind(pack([value, self._neighbour(value)], plan.dtype))
        with T.If(self.writes[i]), T.Then():  # the thread of the even unit writes for both
            place = self.words[i] + step % SLOTS * plan.slot_words
            T.evaluate(T.ptx["st.relaxed.gpu.global.b32"](self.arguments["exchange"].ptr_to([place]), word))

    def _publish(self) -> None:
        """Counts this block's part of the chunks that it has written."""
        T, plan = self.T, self.plan
        first, end = self.member * plan.units, T.min(self.member * plan.units + plan.units, plan.hidden)
        chunk = T.Bind(first // DEPTH + self.thread)
        with T.If(chunk <= (end - 1) // DEPTH), T.Then():
            place = counter_of(plan, self.group, chunk)
            T.evaluate(T.ptx["red.release.gpu.global.add.u32"](self.arguments["counters"].ptr_to([place]), T.uint32(1)))
