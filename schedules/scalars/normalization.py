"""The pass behind the hoisted product of a cell that has statistics of it: once over its rows, in place.

    hoisted[t, b, q, j] = hoisted output q of unit j, from what the product left there and the row's statistics

Or it only writes the statistics, for a recurrence that then does the rest (:func:`deferred`): that takes fewer bytes,
and what is rounded to 16 bits is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ecornn.analysis import StepGraph
from ecornn.analysis.scalar import variables
from ecornn.program import WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var, ceil_div
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import emit, invariants, vectors_at
from ecornn.schedules.scalars.row_sums import Env, RowSums

THREADS = 256
BLOCKS = 6  # a multiprocessor


def deferred(graph: StepGraph) -> StepGraph:
    """The graph of a recurrence that gets what the product left, and the rows' statistics as ``row_inputs``."""
    known = {*(v.var for v in graph.vectors), *(a.var for a in graph.invariants)}
    read = [v for a in graph.normalized for v in variables(a.value) if v in known]
    return graph if not graph.hoisted_statistics else replace(
        graph, hoisted_outputs=graph.projected, hoisted_statistics=(), normalized=(),
        row_inputs=_made(graph), prologue=(*graph.normalized, *graph.prologue),
        invariant_outputs=tuple(dict.fromkeys((*graph.invariant_outputs, *read))))


def _made(graph: StepGraph) -> tuple[Var, ...]:
    return tuple(v for s in graph.hoisted_statistics for v in s.made)


def normalize(task: Task, layout: Hoisted, deferred: bool = False) -> Component:
    """The kernel, with the workspace of statistics (T*B, N), ``row_sums``, where the rest is ``deferred``; nothing
    where the cell has no such statistics."""
    if not task.graph.hoisted_statistics:
        return Component()
    blocks, words = BLOCKS * task.device.cores, RowSums.words(THREADS, task.graph.hoisted_statistics)
    kernel = _kernel(task, layout, blocks, words, deferred)
    sums = Buffer("row_sums", WORKSPACE, "float32", Extent(0, task.workload.batch * len(_made(task.graph))))
    return Component({"normalize": kernel}, (sums,) if deferred else (),
                     (Launch("normalize", blocks, THREADS, 4 * words),))


def _kernel(task: Task, layout: Hoisted, blocks: int, words: int, deferred: bool) -> PrimFunc:
    """``normalize(T, B, vectors, hoisted)`` or ``(T, B, hoisted, row_sums)``: blocks take rows of T*B in turn."""
    with T.kernel("normalize") as made:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        vectors = None if deferred else T.pointer("vectors", "float32")
        hoisted = T.pointer("hoisted", layout.dtype)
        into = T.pointer("row_sums", "float32") if deferred else None
        T.device_entry()
        block, thread = T.block(blocks), T.thread(THREADS)
        memory = T.shared(words)  # (statistic, warp)
        rows = T.let("rows", steps * batch)
        T.note("a CTA a row of hoisted values: statistics over its units, then the values normalized")
        with T.serial("turn", 0, T.let("turns", (rows - block + (blocks - 1)) // blocks)) as turn:
            row = T.let("row", T.cast(turn * blocks + block, "int64"))
            _Row(task, layout, vectors, hoisted, thread, row).run(memory, into)
    return made()


class _Row:
    """Emits one row. A thread has every THREADS-th unit, or pair of units where values are packed."""

    def __init__(self, task: Task, layout: Hoisted, vectors: TirBuffer, hoisted: TirBuffer, thread: Expr,
                 row: Expr) -> None:
        self.task, self.graph, self.layout = task, task.graph, layout
        self.vectors, self.hoisted, self.thread, self.row = vectors, hoisted, thread, row
        self.span = 2 if layout.packed else 1

    def run(self, memory: TirBuffer, into: TirBuffer | None = None) -> None:
        made = _made(self.graph)
        sums = RowSums(THREADS, self.thread, memory)
        found = sums.statistics(self.graph.hoisted_statistics, self.task.workload.hidden, self._each)
        if into is not None:
            with T.when(self.thread == 0):
                for k, var in enumerate(made):
                    T.buffer_store(into, found[var], [self.row * len(made) + k])
            return
        self._units(lambda unit, envs: self._write(unit, envs, found))

    def _each(self, function: Callable[[Env, Expr], None]) -> None:
        H = self.task.workload.hidden

        def visit(unit: Expr, envs: list[Env]) -> None:
            for e, env in enumerate(envs):
                with T.when(unit + e < H):
                    function(env, unit + e)

        self._units(visit)

    def _units(self, function: Callable[[Expr, list[Env]], None]) -> None:
        """Calls a function with the units of this thread, and what the product left of each."""
        H, span = self.task.workload.hidden, self.span
        with T.serial("turn", 0, ceil_div(H, THREADS * span)) as turn:
            unit = T.let("unit", (turn * THREADS + self.thread) * span)
            with T.when(unit < H):
                envs = []
                for e in range(span):  # the row's padding has room for the second of a pair
                    loaded = [T.let("loaded", v) for v in self.layout.load(self.hoisted, self.row, unit + e)]
                    (values,) = self.layout.values(loaded)
                    envs.append(dict(zip(self.graph.projected, values, strict=True)))
                function(unit, envs)

    def _write(self, unit: Expr, envs: list[Env], found: Env) -> None:
        graph, H, values = self.graph, self.task.workload.hidden, []
        for e, env in enumerate(envs):
            at = T.let("at", T.min(unit + e, H - 1))
            given = vectors_at(graph.vectors, self.vectors, H, at)
            env = emit(graph.normalized, invariants(graph, given) | env | found)
            values.append([env[v] for v in graph.hoisted_outputs])
        if self.layout.packed:
            self.layout.store(self.hoisted, self.row, unit, values)
            return
        first = T.let("first", self.row * self.layout.row + unit)
        for piece, value in zip(self.layout.pieces(), values[0], strict=True):
            T.buffer_store(self.hoisted, value, [first + piece.base])
