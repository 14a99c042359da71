"""Epilogues of products over all rows: values that are computed on accumulators, and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.cuda.isa.memory import st_global
from ecornn.schedules.gemm.job import Epilogue, Job, Vectors
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import emit, invariants


def write_tile(job: Job, epilogue: Epilogue, arguments: Mapping[str, TirBuffer], acc: TirBuffer,
               vector: Callable[[int, Expr], Expr], unit_of: Callable[[Expr], Expr],
               row_of: Callable[[Expr, Expr], Expr], end: Expr, span: int = 2) -> None:
    """Writes what ``epilogue`` makes of a thread's sums: of units ``unit_of(group)`` and those next to it, ``span`` in
    all, of rows ``row_of(tile, half) < end``.

    ``acc`` has accumulators (m16 tile, n8 tile, 4) as ``mma`` leaves them (``tensor_core.py``): two neighbouring
    columns a thread. Tile ``octet * rows + row`` has product ``row`` of 8 units. With a ``span`` of 2 the columns are
    the units in order, with 4 those of two octets are dealt out so that a thread has 4 neighbouring units.
    ``vector(i, unit)`` is the value of parameter vector i.
    """
    tiles, products = (int(n) for n in acc.shape[:2])

    def within(unit: Expr, e: int) -> Expr:
        """Unit ``unit + e``, or the last one."""
        return T.let("own_unit", unit + e if job.units % span == 0 else T.min(unit + e, job.units - 1))

    def vectors(unit: Expr, e: int) -> Vectors:
        return lambda i: T.cast(within(unit, e), "float32") if i is None else vector(i, within(unit, e))

    with T.unroll("o", products // max(job.rows, 1) * 2 // span) as o:
        unit = T.let("unit", unit_of(o))
        with T.when(unit < job.units):
            constants = [epilogue.constants(vectors(unit, e)) for e in range(span)]
            with T.unroll("m", tiles) as m, T.unroll("upper", 2) as half:
                here = T.let("here", row_of(m, half))
                with T.when(here < end):
                    sums = [[acc[m, (o * (span // 2) + e // 2) * job.rows + r, half * 2 + e % 2]
                             for r in range(job.rows)] for e in range(span)]
                    epilogue.store(arguments, here, unit, within, constants, sums)


class HoistedValues(Epilogue):
    """A cell's hoisted scalars, written to ``hoisted`` as ``layout`` says."""

    def __init__(self, task: Task, layout: Hoisted) -> None:
        self.graph, self.layout, self.span = task.graph, layout, layout.span
        self.offsets, self.stride = leaves_of_rows(task), task.workload.input
        self.reads = {"x": task.workload.dtype} if self.offsets else {}
        self.writes = {"hoisted": layout.dtype}

    def constants(self, vector: Vectors) -> dict[Var, Expr]:
        env = {v.var: T.let(v.var.name, vector(None if v.numbers else i)) for i, v in enumerate(self.graph.vectors)}
        return invariants(self.graph, env)

    def store(self, arguments: Mapping[str, TirBuffer], row: Expr, unit: Expr, within: Callable[[Expr, int], Expr],
              constants: Sequence[dict[Var, Expr]], sums: Sequence[Sequence[Expr]]) -> None:
        graph, values = self.graph, []
        for e, own in enumerate(sums):
            env = constants[e] | {p.var: v for p, v in zip(graph.hoisted_products, own, strict=True)}
            for var, offset in self.offsets.items():
                at = T.cast(row, "int64") * self.stride + within(unit, e)
                env[var] = T.let(var.name, T.cast(arguments["x"][at + offset if offset else at], "float32"))
            env = emit(graph.hoisted, env)
            values.append([env[v] for v in graph.projected])
        store_hoisted(self.layout, arguments["hoisted"], row, unit, values)


def leaves_of_rows(task: Task) -> dict[Var, int]:
    """Variables that are read from a row of x as it is -> the place in it where their H values begin."""
    graph, w = task.graph, task.workload
    return ({} if graph.x is None else {graph.x: 0}) | graph.input_offsets(w.input, w.hidden)


def store_hoisted(layout: Hoisted, into: TirBuffer, row: Expr, unit: Expr, values: Sequence[Sequence[Expr]],
                  finite: bool = True) -> None:
    """``values[e][q]`` of 2 or 4 neighbouring units of a row, a multiple of as many; those beyond H are none.
    ``finite``: as of :meth:`Hoisted.store`."""
    if layout.packed:
        layout.store(into, T.cast(row, "int64"), unit, values, finite)
        return
    H, outputs, span = layout.hidden, layout.outputs, len(values)
    step = next(n for n in (span, 2, 1) if H % n == 0)
    for q in range(outputs):
        place = T.let("place", (T.cast(row, "int64") * outputs + q) * H + unit)
        for e in range(0, span, step):
            with T.when(e == 0 or unit + e < H):
                if step == 1:
                    T.buffer_store(into, values[e][q], [place + e])
                else:
                    st_global(into.ptr_to([place + e]), [values[e + i][q] for i in range(step)], "f32")
