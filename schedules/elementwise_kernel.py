"""The code of the elementwise schedule: a thread has neighbouring units of one batch row for the whole sequence.

Hoisted inputs go through a ring of registers: those of step t are used, and those of step t + ``prefetch`` loaded
in their place. The loop is unrolled by the ring, so that every place in it is a register; nothing that is loaded is
looked at before its step, since a warp waits for the first instruction that does.
"""

from __future__ import annotations

from typing import Any

from ecornn.schedules.base import Task
from ecornn.schedules.pointwise import emit, invariants
from ecornn.schedules.tensor_core import pack_pair
from ecornn.schedules.timeline import Timeline, row_arguments


def sequence_kernel(task: Task, units: int, threads: int, blocks: int, prefetch: int, math: str) -> Any:
    """``sequence(T, B, hoisted, vectors, <state>_in, <state>_out, y, lengths, resets)``."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    graph, w = task.graph, task.workload
    columns, big = w.hidden // units, T.int64(1 << 40)
    with IRBuilder() as builder, T.prim_func():
        T.func_name("sequence")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        kinds = {"hoisted": "float32"} if graph.hoisted_outputs else {}
        kinds |= {"vectors": "float32"} | {f"{s}_{end}": w.dtype for s in graph.states for end in ("in", "out")}
        kinds["y"] = w.dtype
        arguments = {name: T.arg(name, T.buffer((big,), kind)) for name, kind in kinds.items()}
        arguments |= row_arguments(T, task.place)
        T.device_entry()
        item = T.Bind(T.cta_id([blocks]) * threads + T.thread_id([threads]))
        row = T.Bind(item // columns)
        with T.If(row < batch), T.Then():
            unit = T.Bind(item % columns * units)
            _Units(T, task, units, prefetch, math, arguments, row, unit, steps, batch).run()
    return builder.get()


class _Units:
    """Emits the code of a thread for units ``unit`` .. ``unit + count - 1`` of a row."""

    def __init__(self, T: Any, task: Task, count: int, prefetch: int, math: str, arguments: dict[str, Any], row: Any,
                 unit: Any, steps: Any, batch: Any) -> None:
        self.T, self.task, self.graph, self.math, self.arguments = T, task, task.graph, math, arguments
        self.count, self.prefetch, self.row, self.unit, self.steps, self.batch = count, prefetch, row, unit, steps, batch
        self.timeline = Timeline(T, task.place, arguments, steps, batch)
        self.states = T.alloc_buffer((len(self.graph.states), count), "float32", scope="local")
        ring = (prefetch, max(1, len(self.graph.hoisted_outputs)), count)
        self.inputs = T.alloc_buffer(ring, "float32", scope="local")
        self.marks = T.alloc_buffer((prefetch,), "int32", scope="local") if task.place.resets else None

    def run(self) -> None:
        """The whole sequence."""
        T, H = self.T, self.task.workload.hidden
        for place in range(self.prefetch):
            self._load(place, T.int32(place))
        vectors = enumerate(self.graph.vectors)
        found = [(v.var, [T.Bind(self.arguments["vectors"][k * H + self.unit + e]) for e in range(self.count)])
                 for k, v in vectors]
        self.constants = [invariants(self.graph, {var: values[e] for var, values in found}, self.math)
                          for e in range(self.count)]
        self.limit = T.Bind(self.timeline.limit(self.row))
        first = T.Bind(self.row * H + self.unit)
        for s, name in enumerate(self.graph.states):
            for e in range(self.count):
                T.buffer_store(self.states, T.cast(self.arguments[f"{name}_in"][first + e], "float32"), [s, e])
        turns = T.Bind(self.steps // self.prefetch)
        with T.serial(0, turns) as turn:
            for place in range(self.prefetch):
                t = T.Bind(turn * self.prefetch + place)
                self._step(place, t)
                self._load(place, T.Bind(t + self.prefetch))
        for place in range(self.prefetch - 1):
            t = T.Bind(turns * self.prefetch + place)
            with T.If(t < self.steps), T.Then():
                self._step(place, t)
        for s, name in enumerate(self.graph.states):
            for e in range(self.count):
                value = T.cast(self.states[s, e], self.task.workload.dtype)
                T.buffer_store(self.arguments[f"{name}_out"], value, [first + e])

    def _load(self, place: int, t: Any) -> None:
        """Loads what step t needs; of the last step again where t is beyond it, since a branch takes longer."""
        T, outputs, H = self.T, len(self.graph.hoisted_outputs), self.task.workload.hidden
        t = T.Bind(T.min(t, self.steps - 1))
        if self.marks is not None:
            T.buffer_store(self.marks, T.cast(self.timeline.mark(t, self.row), "int32"), [place])
        if not outputs:
            return
        at = T.cast(self.timeline.at(t) * self.batch + self.row, "int64") * (outputs * H)
        first = T.Bind(at + self.unit)
        for q in range(outputs):
            into = [self.inputs[place, q, e] for e in range(self.count)]
            if self.count == 1:
                T.buffer_store(self.inputs, self.arguments["hoisted"][first + q * H], [place, q, 0])
            else:
                T.evaluate(T.ptx[f"ld.global.v{self.count}.f32"](*into, self.arguments["hoisted"].ptr_to([first + q * H])))

    def _step(self, place: int, t: Any) -> None:
        """Step t, from the inputs in ``place``."""
        T, graph, timeline = self.T, self.graph, self.timeline
        live = timeline.live(t, self.limit)
        fresh = None if self.marks is None else timeline.starts(t, self.limit, self.marks[place])
        outputs = []
        for e in range(self.count):
            before = timeline.started(fresh, [T.Bind(self.states[s, e]) for s in range(len(graph.states))])
            env = self.constants[e] | {v: self.inputs[place, q, e] for q, v in enumerate(graph.hoisted_outputs)}
            env = emit(graph.prologue, env | dict(zip(graph.states.values(), before, strict=True)), self.math)
            after = {name: timeline.masked(live, T.Bind(env[var]), old)
                     for (name, var), old in zip(graph.results.items(), before, strict=True)}
            for s, value in enumerate(after.values()):
                T.buffer_store(self.states, value, [s, e])
            outputs.append(timeline.masked(live, after[graph.output], T.float32(0)))
        self._store(t, outputs)

    def _store(self, t: Any, outputs: list[Any]) -> None:
        """y of step t."""
        T, w, place = self.T, self.task.workload, self.task.place
        row = T.cast(self.timeline.at(t) * self.batch + self.row, "int64")
        at = T.Bind(row * place.y_width(w.hidden) + (self.unit + place.y_offset(w.hidden)))
        y = self.arguments["y"]
        if self.count == 1:
            T.buffer_store(y, T.cast(outputs[0], w.dtype), [at])
        elif w.dtype == "float32":
            T.evaluate(T.ptx[f"st.global.v{self.count}.f32"](y.ptr_to([at]), *outputs))
        else:
            words = [pack_pair(*outputs[e:e + 2], w.dtype) for e in range(0, self.count, 2)]
            T.evaluate(T.ptx[f"st.global{'.v2' if len(words) > 1 else ''}.b32"](y.ptr_to([at]), *words))
