"""The gate warps of the persistent kernel: partial sums to new state."""

from __future__ import annotations

from typing import Any

from ecornn.schedules.base import Task
from ecornn.schedules.persistent.beside import Beside
from ecornn.schedules.persistent.exchange import SENTINEL, pack, slot_base, word_of
from ecornn.schedules.persistent.plan import RING, PhasePlan, Plan
from ecornn.schedules.pointwise import emit, invariants
from ecornn.schedules.timeline import Timeline

FULL, READ = 1, 3  # named barriers of the two buffers of partial sums: FULL, FULL + 1 and READ, READ + 1


class Gates:
    """Emits the gate warps' code; a thread owns ``plan.items`` (unit, batch row) pairs.

    Neighbouring threads own neighbouring units of one row, so two of them make a 16-bit word.
    """

    def __init__(self, T: Any, task: Task, plan: Plan, math: str, arguments: dict[str, Any],
                 rings: list[Any], shared: Any, group: Any, member: Any, thread: Any, steps: Any,
                 batch: Any, beside: Beside | None) -> None:
        self.T, self.task, self.plan, self.math = T, task, plan, math
        self.graph, self.arguments, self.rings, self.shared = task.graph, arguments, rings, shared
        self.group, self.thread, self.steps, self.batch, self.beside = group, thread, steps, batch, beside
        H, graph = plan.hidden, task.graph
        self.timeline = Timeline(T, task.place, arguments, steps, batch)
        self.local, self.unit, self.column, self.owner = [], [], [], []
        for i in range(plan.items):
            item = T.Bind(thread + i * plan.gate_warps * 32)
            owner = T.Bind(item < plan.units * plan.rows)
            self.local.append(T.Bind(item % plan.units))
            self.unit.append(T.Bind(member * plan.units + item % plan.units))
            self.column.append(T.Bind(T.Select(owner, item // plan.units, 0)))
            self.owner.append(owner)
        self.row = [T.Bind(group * plan.rows + c) for c in self.column]
        self.valid = [T.Bind(T.And(owner, T.And(unit < H, row < batch)))
                      for owner, unit, row in zip(self.owner, self.unit, self.row, strict=True)]

        def local(*shape: int) -> Any:
            return T.alloc_buffer(shape, "float32", scope="local")

        self.constants = local(plan.items, max(1, len(graph.invariant_outputs)))
        self.states = local(plan.items, len(graph.states))
        outputs = max(1, len(graph.hoisted_outputs))
        self.inputs = local(plan.items, outputs)  # of this step
        self.ahead = local(plan.items, outputs)  # of the next one
        place, rows = task.place, (plan.items,)  # of rows, too: these are on the critical path
        self.limits = T.alloc_buffer(rows, "int32", scope="local") if place.lengths else None
        self.fresh = T.alloc_buffer(rows, "int32", scope="local") if place.resets else None

    def run(self) -> None:
        """The whole sequence."""
        T, graph, plan = self.T, self.graph, self.plan
        for i in range(plan.items):
            self._constants(i)
            if self.limits is not None:
                limit = self.timeline.limit(T.min(self.row[i], self.batch - 1))
                T.buffer_store(self.limits, limit, [i])
            for s, name in enumerate(graph.states):
                T.buffer_store(self.states, T.float32(0), [i, s])
                with T.If(self.valid[i]), T.Then():
                    row = self.row[i]
                    given = T.cast(self.arguments[f"{name}_in"][row * plan.hidden + self.unit[i]], "float32")
                    first = self.timeline.fresh(0, row, self._limit(i))
                    (value,) = self.timeline.started(first, [given])
                    T.buffer_store(self.states, value, [i, s])
        self._fetch(T.int32(0))
        self._advance()
        self._fetch(T.int32(1))
        with T.serial(0, self.steps) as t:
            self._step(t)

    def _limit(self, i: int) -> Any:
        return self.steps if self.limits is None else self.limits[i]

    def _constants(self, i: int) -> None:
        T, graph, H = self.T, self.graph, self.plan.hidden
        at = T.Bind(T.min(self.unit[i], H - 1))
        env = {v.var: T.Bind(self.arguments["vectors"][k * H + at]) for k, v in enumerate(graph.vectors)}
        env = invariants(graph, env, self.math)
        for k, var in enumerate(graph.invariant_outputs):
            T.buffer_store(self.constants, env[var], [i, k])

    def _fetch(self, t: Any) -> None:
        """Loads the hoisted inputs of step t into ``ahead``, and whether a sequence starts there."""
        T, outputs, H = self.T, len(self.graph.hoisted_outputs), self.plan.hidden
        if self.beside is not None:
            self.beside.wait(t)
        for i in range(self.plan.items if self.fresh is not None else 0):
            row = T.Bind(T.min(self.row[i], self.batch - 1))
            fresh = self.timeline.fresh(t, row, self._limit(i))
            T.buffer_store(self.fresh, T.cast(fresh, "int32"), [i])
        for i in range(self.plan.items if outputs else 0):
            for q in range(outputs):
                T.buffer_store(self.ahead, T.float32(0), [i, q])
            with T.If(T.And(self.valid[i], t < self.steps)), T.Then():
                row = T.cast(self.timeline.at(t) * self.batch + self.row[i], "int64")
                first = T.Bind(row * (outputs * H) + self.unit[i])
                for q in range(outputs):
                    T.buffer_store(self.ahead, self.arguments["hoisted"][first + q * H], [i, q])

    def _advance(self) -> None:
        for i in range(self.plan.items):
            for q in range(len(self.graph.hoisted_outputs)):
                self.T.buffer_store(self.inputs, self.ahead[i, q], [i, q])

    def _step(self, t: Any) -> None:
        T, plan, graph = self.T, self.plan, self.graph
        last = len(plan.phases) - 1
        envs = [self._before(i) for i in range(plan.items)]
        for p in range(len(plan.phases)):
            use = T.Bind(t * len(plan.phases) + p)
            side = T.Bind(use % 2)
            T.evaluate(T.ptx["bar.sync"](T.cast(side + FULL, "uint32"), T.uint32(plan.threads)))
            sums = [self._sums(i, p, side) for i in range(plan.items)]
            for i in range(plan.items):
                envs[i] = emit(graph.phases[p].assigns, envs[i] | sums[i], self.math)
                if p < last:
                    self._announce(i, p + 1, t % RING, envs[i])
            ended = [self._finish(i, envs[i], t) for i in range(plan.items)] if p == last else []
            self._wipe(p, t)
            self._hand_back(use, side)
            if p == last:
                self._after(t, ended)

    def _before(self, i: int) -> dict[Any, Any]:
        """What is known of an item before the products of its step."""
        graph = self.graph
        env = {v: self.inputs[i, q] for q, v in enumerate(graph.hoisted_outputs)}
        env |= {v: self.constants[i, k] for k, v in enumerate(graph.invariant_outputs)}
        env |= {v: self.states[i, s] for s, v in enumerate(graph.states.values())}
        return emit(graph.prologue, env, self.math)

    def _after(self, t: Any, ended: list[tuple[list[Any], list[Any], Any]]) -> None:
        """What nobody waits for.

        The release of exchange.py comes first, before the next write. It waits for what came before
        it, so y is stored and inputs are fetched after it, two steps ahead: memory is further away
        than L2.
        """
        T = self.T
        T.evaluate(T.ptx["fence.acq_rel.gpu"]())
        for i in range(self.plan.items):
            self._store(i, t, *ended[i])
        self._advance()
        self._fetch(T.Bind(t + 2))

    def _hand_back(self, use: Any, side: Any) -> None:
        """Returns the buffer of partial sums, as often as product warps wait for one."""
        T, plan = self.T, self.plan
        with T.If(use + 2 < self.steps * len(plan.phases)), T.Then():
            T.evaluate(T.ptx["bar.arrive"](T.cast(side + READ, "uint32"), T.uint32(plan.threads)))

    def _sums(self, i: int, p: int, side: Any) -> dict[Any, Any]:
        """The products of phase p: partial sums of all warps, added in a tree."""
        T, plan, phase = self.T, self.plan, self.plan.phases[p]
        stride, e = plan.stride(phase), phase.interleave
        unit = self.local[i]
        base = T.Bind(side * plan.sum_floats + self.column[i] * stride
                      + unit // (8 // e) * 8 + unit % (8 // e) * e)
        rows: list[list[Any]] = [[] for _ in self.graph.phases[p].rows]
        for w in range(plan.warps):
            for outer in range(phase.gates // e):
                place = base + w * plan.columns * stride + outer * plan.units * e
                wide = self._load(place, e)
                for inner in range(e):
                    if outer * e + inner < len(rows):
                        rows[outer * e + inner].append(wide[inner])
        return {row.var: _tree(T, parts)
                for row, parts in zip(self.graph.phases[p].rows, rows, strict=True)}

    def _load(self, place: Any, count: int) -> list[Any]:
        T = self.T
        if count in (2, 4):
            into = T.alloc_buffer((count,), "float32", scope="local")
            T.evaluate(T.ptx[f"ld.shared.v{count}.f32"](*(into[k] for k in range(count)),
                                                        self.shared.ptr_to([place])))
            return [into[k] for k in range(count)]
        return [T.Bind(self.shared[place + k]) for k in range(count)]

    def _slot(self, p: int, slot: Any) -> Any:
        return self.T.Bind(slot_base(self.plan, self.plan.phases[p], self.group, slot))

    def _announce(self, i: int, p: int, slot: Any, env: dict[Any, Any]) -> None:
        """Writes this thread's operands of phase p to the exchange; units beyond H are zero."""
        T, plan, phase = self.T, self.plan, self.plan.phases[p]
        base = self._slot(p, slot)
        for o, operand in enumerate(self.graph.phases[p].operands):
            value = T.Bind(T.Select(self.unit[i] < plan.hidden, env[operand], T.float32(0)))
            self._write(i, p, base + self._place(i, phase, o), self._word(value))

    def _word(self, value: Any) -> Any:
        T = self.T
        if self.plan.dtype == "float32":
            return T.Bind(pack([value], "float32"))
        other = T.Bind(T.cuda.func_call("ecornn_neighbour", value, source_code=_NEIGHBOUR,
                                        return_type="float32"))
        return T.Bind(pack([value, other], self.plan.dtype))

    def _place(self, i: int, phase: PhasePlan, operand: int) -> Any:
        return word_of(self.plan, phase, operand, self.unit[i], self.column[i])

    def _write(self, i: int, p: int, place: Any, word: Any) -> None:
        T = self.T
        writes = T.And(self.owner[i], self.unit[i] < self.plan.hidden)  # no word holds units beyond H
        if self.plan.dtype != "float32":  # the thread of the even unit writes for both
            writes = T.And(writes, self.local[i] % 2 == 0)
        with T.If(writes), T.Then():
            T.evaluate(T.ptx["st.relaxed.gpu.global.b32"](self.rings[p].ptr_to([place]), word))

    def _wipe(self, p: int, t: Any) -> None:
        phase, base = self.plan.phases[p], self._slot(p, (t + (RING - 1)) % RING)
        for i in range(self.plan.items):
            for o in range(phase.operands):
                self._write(i, p, base + self._place(i, phase, o), self.T.uint32(SENTINEL))

    def _finish(self, i: int, env: dict[Any, Any], t: Any) -> tuple[list[Any], list[Any], Any]:
        """States after step t and before the next one, and whether the row took part; what the next
        step's products need goes out at once."""
        T, graph, timeline = self.T, self.graph, self.timeline
        live = timeline.live(t, self._limit(i))
        new = [timeline.masked(live, T.Bind(env[graph.results[s]]), self.states[i, k])
               for k, s in enumerate(graph.states)]
        fresh = None if self.fresh is None else T.Bind(self.fresh[i] != 0)  # of step t + 1, as ``ahead`` is
        carried = timeline.started(fresh, new)
        following = {v: n for v, n in zip(graph.states.values(), carried, strict=True)}
        following |= {v: self.constants[i, k] for k, v in enumerate(graph.invariant_outputs)}
        self._announce(i, 0, (t + 1) % RING, emit(graph.prologue, following, self.math))
        return new, carried, live

    def _store(self, i: int, t: Any, new: list[Any], carried: list[Any], live: Any) -> None:
        T, graph, H, dtype, place = self.T, self.graph, self.plan.hidden, self.plan.dtype, self.task.place
        for s in range(len(new)):
            T.buffer_store(self.states, carried[s], [i, s])
        with T.If(self.valid[i]), T.Then():
            output = self.timeline.masked(live, new[list(graph.states).index(graph.output)], T.float32(0))
            step = self.timeline.at(t)
            at = T.cast(step * self.batch + self.row[i], "int64") * place.y_width(H) + self.unit[i]
            at = at + place.y_offset(H) if place.y_offset(H) else at
            T.buffer_store(self.arguments["y"], T.cast(output, dtype), [at])
            with T.If(t == self.steps - 1), T.Then():
                for s, name in enumerate(graph.states):
                    T.buffer_store(self.arguments[f"{name}_out"], T.cast(new[s], dtype),
                                   [self.row[i] * H + self.unit[i]])


_NEIGHBOUR = """
__device__ __forceinline__ float ecornn_neighbour(float value) {
  return __shfl_xor_sync(0xffffffffu, value, 1);
}"""


def _tree(T: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        pairs = [T.Bind(parts[k] + parts[k + 1]) for k in range(0, len(parts) - 1, 2)]
        parts = pairs + (parts[-1:] if len(parts) % 2 else [])
    return parts[0]
