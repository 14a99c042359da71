"""The scalars of a pass over all rows: what a (row, unit) reads, computes and stores; the kernel without products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ecornn.analysis.liveness import needed
from ecornn.analysis.step import Assign, Product, Statistic, Vector
from ecornn.program import Launch
from ecornn.schedules.backward.memory import Place, Within
from ecornn.schedules.base import Component
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var, ceil_div
from ecornn.schedules.gemm.job import Epilogue, Vectors, counted, rows_of, store_hoisted
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import emit
from ecornn.schedules.scalars.row_sums import RowSums
from ecornn.schedules.timeline import takes_part

Env = dict[Var, Expr]
Arguments = Mapping[str, TirBuffer]


@dataclass(frozen=True)
class Scalars:
    """Values of a row and unit, and where they go."""

    vectors: tuple[Vector, ...]  # of the forward step; the buffer ``vectors`` has them in this order
    invariants: tuple[Assign, ...]  # assignments that these determine
    assigns: tuple[Assign, ...]  # the others, in order
    leaves: Mapping[Var, Place]  # where a value lies that is made elsewhere
    stores: tuple[tuple[Var, Place], ...]  # values, and where they go
    hoisted: tuple[Var, ...] = ()  # hoisted, layout: values that go to the buffer ``hoisted``
    layout: Hoisted | None = None
    # of :func:`~ecornn.schedules.timeline.rows_mask`: where a row takes no part in the step zeros are stored
    mask: str | None = None
    # of some values, the one that is stored there in place of zeros
    instead: Mapping[Var, Var] = field(default_factory=dict)
    math: str = "exact"

    @property
    def wanted(self) -> set[Var]:
        return {*(v for v, _ in self.stores), *self.hoisted}  # the variables that are stored

    @property
    def reads_vectors(self) -> bool:
        read = self._needed(self.wanted)
        return any(v.var in read for v in self.vectors)

    def reads(self, known: Iterable[Var] = (), besides: Iterable[Var] = ()) -> dict[str, str]:
        """The buffers, with types, to read for what is stored and what is wanted ``besides``, if ``known`` is known."""
        read = self._needed({*self.wanted, *besides}) - set(known)
        found = {p.columns.name: p.dtype for v, p in self.leaves.items() if v in read}
        return found | ({self.mask: "int32"} if self.mask else {})

    def writes(self) -> dict[str, str]:
        found = {p.columns.name: p.dtype for _, p in self.stores}
        return found | ({"hoisted": self.layout.dtype} if self.layout is not None and self.hoisted else {})

    def _needed(self, wanted: set[Var]) -> set[Var]:
        return needed(self.invariants, needed(self.assigns, wanted)[1])[1]

    def constants(self, vector: Vectors, wanted: set[Var] | None = None) -> Env:
        """The values that parameters determine, as far as ``wanted`` (default: what is stored) needs them."""
        read = self._needed(self.wanted if wanted is None else wanted)
        env = {v.var: T.let(v.var.name, vector(None if v.numbers else i))
               for i, v in enumerate(self.vectors) if v.var in read}
        return emit([a for a in self.invariants if a.var in read], env, self.math)

    def values(self, arguments: Arguments, row: Expr, unit: Expr, within: Within, known: Sequence[Env],
               wanted: set[Var] | None = None) -> list[Env]:
        """The values of neighbouring units, an environment each: ``known``, and what ``wanted`` needs besides."""
        assigns, read = needed(self.assigns, self.wanted if wanted is None else wanted)
        assigns = tuple(a for a in assigns if a.var not in known[0])
        envs = [dict(env) for env in known]
        for var, place in self.leaves.items():
            if var in read and var not in known[0]:
                for env, value in zip(envs, place.load(arguments, row, unit, within, len(known)), strict=True):
                    env[var] = value
        return [emit(assigns, env, self.math) for env in envs]

    def store(self, arguments: Arguments, row: Expr, unit: Expr, envs: Sequence[Env]) -> None:
        """Stores the result of :meth:`values`."""
        mask = self.mask
        live = None if mask is None else T.let("live", takes_part(mask, arguments[mask], row, arguments["B"]))
        for var, place in self.stores:
            values = [env[var] for env in envs]
            if live is not None:
                others = [env[self.instead[var]] if var in self.instead else T.float32(0) for env in envs]
                values = [T.Select(live, value, other) for value, other in zip(values, others, strict=True)]
            place.store(arguments, row, unit, values)
        if self.hoisted:
            assert self.layout is not None
            store_hoisted(self.layout, arguments["hoisted"], row, unit, [[env[v] for v in self.hoisted]
                                                                         for env in envs], finite=False)


class Pointwise(Epilogue):
    """Scalars computed on the products of a job."""

    def __init__(self, scalars: Scalars, products: Sequence[Product], span: int) -> None:
        self.scalars, self.products, self.span = scalars, products, span
        self.reads, self.writes = scalars.reads([p.var for p in products]), scalars.writes()

    def constants(self, vector: Vectors) -> Env:
        return self.scalars.constants(vector)

    def store(self, arguments: Arguments, row: Expr, unit: Expr, within: Callable[[Expr, int], Expr],
              constants: Sequence[Any], sums: Sequence[Sequence[Expr]]) -> None:
        known = [own | {p.var: value for p, value in zip(self.products, values, strict=True)}
                 for own, values in zip(constants, sums, strict=True)]
        self.scalars.store(arguments, row, unit, self.scalars.values(arguments, row, unit, within, known))


THREADS = 256
BLOCKS = 6  # a multiprocessor


def scalar_pass(name: str, cores: int, scalars: Scalars, statistics: Sequence[Sequence[Statistic]], units: int,
                each: str) -> Component:
    """A kernel for ``cores`` multiprocessors: statistics in groups, then scalars. ``each``: as of a ``Job``."""
    words, blocks = max((RowSums.words(THREADS, s) for s in statistics), default=0), BLOCKS * cores
    kernel = _kernel(name, scalars, statistics, units, each, blocks, words)
    return Component({name: kernel}, (), (Launch(name, blocks, THREADS, 4 * words),))


def _kernel(name: str, scalars: Scalars, statistics: Sequence[Sequence[Statistic]], units: int, each: str,
            blocks: int, words: int) -> PrimFunc:
    found = [v for those in statistics for s in those for v in s.made]
    operands = {o for those in statistics for s in those for o in s.operands}
    kinds = scalars.reads(found, operands) | ({"vectors": "float32"} if scalars.vectors else {}) | counted(each)
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
            total = T.cast(rows, "int64") * work.chunks
            with T.items(total, block * THREADS + thread, blocks * THREADS) as item:
                row, unit = T.cast(item // work.chunks, "int32"), T.cast(item % work.chunks, "int32") * work.span
                work.store(T.let("row", row), T.let("unit", unit), {})
    return made()


class _Units:
    """The work of a thread on some neighbouring units of a row."""

    def __init__(self, scalars: Scalars, arguments: dict[str, TirBuffer], units: int) -> None:
        self.scalars, self.arguments, self.units = scalars, arguments, units
        self.span = 4 if units % 4 == 0 else 2

    @property
    def chunks(self) -> int:
        return ceil_div(self.units, self.span)  # chunks of ``span`` units in a row

    def within(self, unit: Expr, e: int) -> Expr:
        return unit + e if self.units % self.span == 0 else T.min(unit + e, self.units - 1)

    def values(self, row: Expr, unit: Expr, found: Env, wanted: set[object] | None = None) -> list[Env]:
        """The wanted values of each unit; ``found``: statistics of the row."""
        known = [self.scalars.constants(partial(self._vector, unit, e), wanted) | found for e in range(self.span)]
        return self.scalars.values(self.arguments, row, unit, self.within, known, wanted)

    def _vector(self, unit: Expr, e: int, i: int | None) -> Expr:
        at = self.within(unit, e)
        return T.cast(at, "float32") if i is None else self.arguments["vectors"][i * self.units + at]

    def store(self, row: Expr, unit: Expr, found: Env) -> None:
        self.scalars.store(self.arguments, row, unit, self.values(row, unit, found))


def _row(work: _Units, statistics: Sequence[Sequence[Statistic]], row: Expr, thread: Expr, memory: TirBuffer) -> None:
    T.note("a CTA a row: statistics over its units, then what needs them")
    sums, found = RowSums(THREADS, thread, memory), Env()

    def each(wanted: set[object], known: Env, function: Callable[[Env, Expr], None]) -> None:
        with T.strided("chunk", work.chunks, thread, THREADS) as chunk:
            unit = T.let("unit", chunk * work.span)
            for e, env in enumerate(work.values(row, unit, known, wanted)):
                with T.when(unit + e < work.units):
                    function(env, unit + e)

    for those in statistics:
        wanted = {o for s in those for o in s.operands}
        found |= sums.statistics(those, work.units, partial(each, wanted, dict(found)))
    with T.strided("chunk", work.chunks, thread, THREADS) as chunk:
        work.store(row, T.let("unit", chunk * work.span), found)
