"""What follows the hoisted product where the cell has statistics of it: one pass over its rows, in place.

    hoisted[t, b, q, j] = hoisted output q of unit j, from what the product left there and the row's statistics
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ecornn.program import Launch
from ecornn.schedules.base import Task
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.pointwise import emit, invariants
from ecornn.schedules.row_sums import Env, RowSums

THREADS = 256
BLOCKS = 6  # a multiprocessor


def normalize(task: Task, layout: Hoisted) -> tuple[dict[str, Any], tuple[Launch, ...]]:
    """The kernel and its launch; nothing where the cell has no such statistics."""
    if not task.graph.hoisted_statistics:
        return {}, ()
    blocks, words = BLOCKS * task.device.cores, RowSums.words(THREADS, task.graph.hoisted_statistics)
    return {"normalize": _kernel(task, layout, blocks, words)}, (Launch("normalize", blocks, THREADS, 4 * words),)


def _kernel(task: Task, layout: Hoisted, blocks: int, words: int) -> Any:
    """``normalize(T, B, vectors, hoisted)``: blocks take rows of T*B in turn."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    with IRBuilder() as builder, T.prim_func():
        T.func_name("normalize")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        vectors = T.arg("vectors", T.buffer((T.int64(1 << 40),), "float32"))
        hoisted = T.arg("hoisted", T.buffer((T.int64(1 << 40),), layout.dtype))
        T.device_entry()
        block, thread = T.cta_id([blocks]), T.thread_id([THREADS])
        memory = T.alloc_buffer((words,), "float32", scope="shared.dyn", align=16)
        rows = T.Bind(steps * batch)
        with T.serial(0, T.Bind((rows - block + (blocks - 1)) // blocks)) as turn:
            row = T.Bind(T.cast(turn * blocks + block, "int64"))
            _Row(T, task, layout, vectors, hoisted, thread, row).run(memory)
    return builder.get()


class _Row:
    """Emits one row. A thread has every THREADS-th unit, or pair of units where values are packed."""

    def __init__(self, T: Any, task: Task, layout: Hoisted, vectors: Any, hoisted: Any, thread: Any, row: Any) -> None:
        self.T, self.task, self.graph, self.layout = T, task, task.graph, layout
        self.vectors, self.hoisted, self.thread, self.row = vectors, hoisted, thread, row
        self.span = 2 if layout.packed else 1

    def run(self, memory: Any) -> None:
        sums = RowSums(self.T, THREADS, self.thread, memory)
        found = sums.statistics(self.graph.hoisted_statistics, self.task.workload.hidden, self._each)
        self._units(lambda unit, envs: self._write(unit, envs, found))

    def _each(self, function: Callable[[Env], None]) -> None:
        T, H = self.T, self.task.workload.hidden

        def visit(unit: Any, envs: list[Env]) -> None:
            for e, env in enumerate(envs):
                with T.If(unit + e < H), T.Then():
                    function(env)

        self._units(visit)

    def _units(self, function: Callable[[Any, list[Env]], None]) -> None:
        """Calls a function with the units of this thread, and what the product left of each."""
        T, H, span = self.T, self.task.workload.hidden, self.span
        with T.serial(0, -(-H // (THREADS * span))) as turn:
            unit = T.Bind((turn * THREADS + self.thread) * span)
            with T.If(unit < H), T.Then():
                envs = []
                for e in range(span):  # the row's padding has room for the second of a pair
                    loaded = [T.Bind(v) for v in self.layout.load(T, self.hoisted, self.row, unit + e)]
                    (values,) = self.layout.values(loaded)
                    envs.append(dict(zip(self.graph.projected, values, strict=True)))
                function(unit, envs)

    def _write(self, unit: Any, envs: list[Env], found: Env) -> None:
        T, graph, H, values = self.T, self.graph, self.task.workload.hidden, []
        for e, env in enumerate(envs):
            at = T.Bind(T.min(unit + e, H - 1))
            given = {v.var: T.Bind(self.vectors[i * H + at]) for i, v in enumerate(graph.vectors)}
            env = emit(graph.normalized, invariants(graph, given) | env | found)
            values.append([env[v] for v in graph.hoisted_outputs])
        if self.layout.packed:
            self.layout.store(T, self.hoisted, self.row, unit, values)
            return
        first = T.Bind(self.row * self.layout.row + unit)
        for piece, value in zip(self.layout.pieces(), values[0], strict=True):
            T.buffer_store(self.hoisted, value, [first + piece.base])
