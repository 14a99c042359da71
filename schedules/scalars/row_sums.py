"""Statistics of rows: when they are due, how a block sums them, and the pass over hoisted values with some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from ecornn.analysis import Statistic, StepGraph
from ecornn.analysis.scalar import variables
from ecornn.program import WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda.isa import largest_xor, sum_xor, sync_block
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import emit, invariants, vectors_at

Env = dict[Var, Expr]  # variable -> its value
Each = Callable[[Callable[[Env, Expr], None]], None]


def parts_of(graph: StepGraph) -> list[tuple[int, ...] | int]:
    """The parts of a step between which all units wait: a phase with a product, or phases with statistics that can be
    computed row by row, of which only the last may have a product, then a part of its own."""
    found: list[tuple[int, ...] | int] = []
    together: tuple[int, ...] = ()
    for p, phase in enumerate(graph.phases):
        if phase.statistics:
            together += (p,)
        if phase.products:
            found += [together, p] if together else [p]
            together = ()
    return [*found, together] if together else found or [0]


Kind = Any  # whether a statistic is a maximum, not a sum: a bool, or an expression where only a thread knows
LOWEST = -3.4028234663852886e38  # below all numbers of float32 that there are


def among(s: Statistic, unit: Expr) -> Expr:
    """True if a unit is one of those that a statistic is of; for statistics of some units, not of all."""
    assert s.units is not None
    first, end = s.units[0], sum(s.units)
    return T.And(unit >= first, unit < end) if first else unit < end


def combine(a: Expr, b: Expr, largest: Kind) -> Expr:
    """The sum of two parts of a statistic, or the larger one."""
    if isinstance(largest, bool):
        return T.max(a, b) if largest else a + b
    return T.Select(largest, T.max(a, b), a + b)


def neutral(largest: Kind) -> Expr:
    """The value that :func:`combine` leaves out of account."""
    if isinstance(largest, bool):
        return T.float32(LOWEST if largest else 0)
    return T.Select(largest, T.float32(LOWEST), T.float32(0))


def across_warp(values: list[Expr], lanes: int = 32, largest: Sequence[Kind] = ()) -> list[Expr]:
    """Sums, maxima where ``largest``, over ``lanes`` = 2**n lanes, the same bits in all; several hide latency."""
    while lanes > 1:
        lanes //= 2
        values = across_lanes(values, lanes, largest)
    return values


def across_lanes(values: list[Expr], lanes: int, largest: Sequence[Kind] = ()) -> list[Expr]:
    """The sums of each lane's value and that of the lane which is ``lanes`` (a power of two) away."""
    def across(value: Expr, largest: bool) -> Expr:
        return largest_xor(value, lanes) if largest else sum_xor(value, lanes)

    found = []
    for value, kind in zip(values, largest or [False] * len(values), strict=True):
        if isinstance(kind, bool):
            found.append(T.let("sum", across(value, kind)))
        else:  # all lanes shuffle
            added, most = T.let("sum", across(value, False)), T.let("largest", across(value, True))
            found.append(T.let("sum", T.Select(kind, most, added)))
    return found


class RowSums:
    """Emits sums over all ``threads`` of a block, in a fixed order, through shared memory of :meth:`words` floats."""

    def __init__(self, threads: int, thread: Expr, memory: TirBuffer) -> None:
        self.warps, self.thread, self.memory = threads // 32, thread, memory

    @staticmethod
    def words(threads: int, statistics: Sequence[Statistic]) -> int:
        return max(1, len(statistics)) * threads // 32  # floats of shared memory

    def statistics(self, statistics: Sequence[Statistic], hidden: int, each: Each) -> Env:
        """The variables. ``each`` calls a function with units' operands and numbers; itself twice for squares."""
        totals = self._over(statistics, each, lambda s, value: value)
        found = Env(zip((s.total for s in statistics), totals, strict=True))
        about = [s for s in statistics if s.squares is not None]
        means = {s: T.let("mean", found[s.total] * T.float32(1.0 / s.count(hidden))) for s in about}

        def squared(s: Statistic, value: Expr) -> Expr:
            apart = T.let("apart", value - means[s])
            return apart * apart

        return found | Env(zip((s.squares for s in about), self._over(about, each, squared), strict=True))

    def _over(self, statistics: Sequence[Statistic], each: Each,
              function: Callable[[Statistic, Expr], Expr]) -> list[Expr]:
        if not statistics:
            return []
        kinds = [s.largest for s in statistics]
        sums = T.local("sums", (len(kinds),), "float32")  # a statistic each
        for n, kind in enumerate(kinds):
            T.buffer_store(sums, neutral(kind), [n])

        def add(env: Env, unit: Expr) -> None:
            for n, s in enumerate(statistics):
                total = sums[n]
                for operand in s.operands:
                    total = combine(total, function(s, env[operand]), s.largest)
                T.buffer_store(sums, total if s.units is None else T.Select(among(s, unit), total, sums[n]), [n])

        each(add)
        sync_block()  # what was there before has been read
        for n, total in enumerate(across_warp([sums[n] for n in range(len(kinds))], largest=kinds)):
            with T.when(self.thread % 32 == 0):
                T.buffer_store(self.memory, total, [n * self.warps + self.thread // 32])
        sync_block()
        found = []
        for n, kind in enumerate(kinds):
            parts = (self.memory[n * self.warps + warp] for warp in range(self.warps))
            found.append(T.let("sum", reduce(partial(combine, largest=kind), parts)))
        return found


THREADS = 256
BLOCKS = 6  # a multiprocessor


def deferred(graph: StepGraph) -> StepGraph:
    """The graph of a recurrence that gets what the product left, and the rows' statistics as ``row_inputs``."""
    known = {*(v.var for v in graph.vectors), *(a.var for a in graph.invariants)}
    read = [v for a in graph.normalized for v in variables(a.value) if v in known]
    return graph if not graph.hoisted_statistics else replace(
        graph, hoisted_outputs=graph.projected, hoisted_statistics=(), normalized=(), row_inputs=_made(graph),
        prologue=(*graph.normalized, *graph.prologue),
        invariant_outputs=tuple(dict.fromkeys((*graph.invariant_outputs, *read))))


def _made(graph: StepGraph) -> tuple[Var, ...]:
    return tuple(v for s in graph.hoisted_statistics for v in s.made)


def normalize(task: Task, layout: Hoisted, deferred: bool = False) -> Component:
    """Applies rows' statistics to what the product left, in place; or with ``deferred`` writes them alone, (T*B, N), to
    ``row_sums``, for a recurrence that does the rest: fewer bytes, rounded once to 16 bits."""
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
        memory, rows = T.shared(words), T.let("rows", steps * batch)  # memory: (statistic, warp)
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
        made, sums = _made(self.graph), RowSums(THREADS, self.thread, memory)
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
            given = vectors_at(graph.vectors, self.vectors, H, T.let("at", T.min(unit + e, H - 1)))
            env = emit(graph.normalized, invariants(graph, given) | env | found)
            values.append([env[v] for v in graph.hoisted_outputs])
        if self.layout.packed:
            self.layout.store(self.hoisted, self.row, unit, values)
            return
        first = T.let("first", self.row * self.layout.row + unit)
        for piece, value in zip(self.layout.pieces(), values[0], strict=True):
            T.buffer_store(self.hoisted, value, [first + piece.base])
