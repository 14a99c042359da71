"""Scalars of all rows without a product, with statistics of the rows where there are some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ecornn.analysis.step import Statistic
from ecornn.program import Launch
from ecornn.schedules.backward.scalars import Env, Scalars
from ecornn.schedules.base import Component
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, ceil_div
from ecornn.schedules.gemm.job import counted, rows_of
from ecornn.schedules.scalars.row_sums import RowSums

THREADS = 256
BLOCKS = 6  # a multiprocessor


def scalar_pass(name: str, cores: int, scalars: Scalars, statistics: Sequence[Sequence[Statistic]], units: int,
                each: str) -> Component:
    """A kernel for ``cores`` multiprocessors: the statistics, group after group, where one may read the result of
    another; then the scalars.

    With statistics a block has whole rows; else threads take some neighbouring units each. ``each``: what there is a
    row of, as of a :class:`~ecornn.schedules.gemm.job.Job`.
    """
    words, blocks = max((RowSums.words(THREADS, s) for s in statistics), default=0), BLOCKS * cores
    kernel = _kernel(name, scalars, statistics, units, each, blocks, words)
    return Component({name: kernel}, (), (Launch(name, blocks, THREADS, 4 * words),))


def _kernel(name: str, scalars: Scalars, statistics: Sequence[Sequence[Statistic]], units: int, each: str,
            blocks: int, words: int) -> PrimFunc:
    """The kernel ``(T, B, what is read, vectors, what is written)``."""
    made = [v for those in statistics for s in those for v in s.made]
    operands = {o for those in statistics for s in those for o in s.operands}
    kinds = scalars.reads(made, operands) | ({"vectors": "float32"} if scalars.vectors else {}) | counted(each)
    kinds |= {n: kind for n, kind in scalars.writes().items() if n not in kinds}
    with T.kernel(name) as made:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = {n: T.pointer(n, kind) for n, kind in kinds.items()} | {"B": batch}
        T.device_entry()
        block, thread = T.block(blocks), T.thread(THREADS)
        rows = T.let("rows", rows_of(each, arguments, steps, batch))
        work = _Units(scalars, arguments, units)
        T.note("the adjoint's scalars of all T*B rows")
        if statistics:
            memory = T.shared(words)
            with T.serial("turn", 0, T.let("turns", (rows - block + (blocks - 1)) // blocks)) as turn:
                _row(work, statistics, T.let("row", turn * blocks + block), thread, memory)
        else:
            _every_unit(work, rows, block * THREADS + thread, blocks * THREADS)
    return made()


class _Units:
    """The work of a thread on some neighbouring units of a row."""

    def __init__(self, scalars: Scalars, arguments: dict[str, TirBuffer], units: int) -> None:
        self.scalars, self.arguments, self.units = scalars, arguments, units
        self.span = 4 if units % 4 == 0 else 2

    @property
    def chunks(self) -> int:
        """Chunks of ``span`` units in a row."""
        return ceil_div(self.units, self.span)

    def within(self, unit: Expr, e: int) -> Expr:
        """Unit ``unit`` + e, or the last one if that is beyond it."""
        return unit + e if self.units % self.span == 0 else T.min(unit + e, self.units - 1)

    def values(self, row: Expr, unit: Expr, found: Env, wanted: set[object] | None = None) -> list[Env]:
        """The wanted values of each unit; ``found``: statistics of the row."""
        known = [self.scalars.constants(partial(self._vector, unit, e), wanted) | found for e in range(self.span)]
        return self.scalars.values(self.arguments, row, unit, self.within, known, wanted)

    def _vector(self, unit: Expr, e: int, i: int | None) -> Expr:
        if i is None:
            return T.cast(self.within(unit, e), "float32")
        return self.arguments["vectors"][i * self.units + self.within(unit, e)]

    def store(self, row: Expr, unit: Expr, found: Env) -> None:
        """Computes and stores all values."""
        self.scalars.store(self.arguments, row, unit, self.values(row, unit, found))


def _every_unit(work: _Units, rows: Expr, thread: Expr, threads: int) -> None:
    first = T.let("first_item", T.cast(thread, "int64"))
    total = T.let("total", T.cast(rows, "int64") * work.chunks)
    with T.serial("turn", T.int64(0), T.let("turns", (total - first + (threads - 1)) // threads)) as turn:
        item = T.let("item", turn * threads + first)
        row, unit = T.cast(item // work.chunks, "int32"), T.cast(item % work.chunks, "int32") * work.span
        work.store(T.let("row", row), T.let("unit", unit), {})


def _row(work: _Units, statistics: Sequence[Sequence[Statistic]], row: Expr, thread: Expr, memory: TirBuffer) -> None:
    T.note("a CTA a row: statistics over its units, then what needs them")
    sums, found = RowSums(THREADS, thread, memory), Env()

    def units(function: Callable[[Expr], None]) -> None:
        with T.serial("again", 0, ceil_div(work.chunks, THREADS)) as again:
            chunk = T.let("chunk", again * THREADS + thread)
            with T.when(chunk < work.chunks):
                function(T.let("unit", chunk * work.span))

    for those in statistics:
        wanted, known = {o for s in those for o in s.operands}, dict(found)

        def each(function: Callable[[Env, Expr], None], wanted: set[object] = wanted, known: Env = known) -> None:
            def visit(unit: Expr) -> None:
                for e, env in enumerate(work.values(row, unit, known, wanted)):
                    with T.when(unit + e < work.units):
                        function(env, unit + e)

            units(visit)

        found |= sums.statistics(those, work.units, each)
    units(lambda unit: work.store(row, unit, found))
