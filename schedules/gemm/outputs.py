"""The outputs of a kernel of products over all rows: values that are computed on its accumulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.cuda.isa.memory import st_global
from ecornn.schedules.gemm.job import Epilogue, Vectors
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import emit, invariants


@dataclass
class Outputs:
    """Emits the store of one thread's outputs.

    An n8 tile is as ``mma`` leaves it (``tensor_core.py``): two neighbouring columns a thread. Tile
    ``octet * rows + row`` has product ``row`` of 8 units. With a ``span`` of 2 the columns are the units
    in order, with 4 those of two octets are dealt out so that a thread has 4 neighbouring units.

    Attributes
    ----------
    epilogue, arguments : what is made of the products, and the buffers that it needs
    units, rows : of the job
    acc : accumulators (m16 tile, n8 tile, 4)
    octets, tiles : groups of 8 units, and m16 tiles, of the thread
    vector : (i, unit) -> the value of parameter vector i
    span : neighbouring units that a thread has, 2 or 4
    """

    epilogue: Epilogue
    arguments: Mapping[str, TirBuffer]
    units: int
    rows: int
    acc: TirBuffer
    octets: int
    tiles: int
    vector: Callable[[int, Expr], Expr]
    span: int = 2

    def write(self, unit_of: Callable[[Expr], Expr], row_of: Callable[[Expr, Expr], Expr], end: Expr) -> None:
        """Writes units ``unit_of(group)`` and those next to it, of rows ``row_of(tile, half) < end``."""
        with T.unroll("o", self.octets * 2 // self.span) as o:
            unit = T.let("unit", unit_of(o))
            with T.If(unit < self.units), T.Then():
                constants = [self.epilogue.constants(self._of_unit(unit, e)) for e in range(self.span)]
                with T.unroll("m", self.tiles) as m, T.unroll("upper", 2) as half:
                    here = T.let("here", row_of(m, half))
                    with T.If(here < end), T.Then():
                        sums = [[self.acc[m, (o * (self.span // 2) + e // 2) * self.rows + r, half * 2 + e % 2]
                                 for r in range(self.rows)] for e in range(self.span)]
                        self.epilogue.store(self.arguments, here, unit, self._within, constants, sums)

    def _of_unit(self, unit: Expr, e: int) -> Vectors:
        return lambda i: (T.cast(self._within(unit, e), "float32") if i is None else
                          self.vector(i, self._within(unit, e)))

    def _within(self, unit: Expr, e: int) -> Expr:
        """Unit ``unit + e``, or the last one."""
        return T.let("own_unit", unit + e if self.units % self.span == 0 else T.min(unit + e, self.units - 1))


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
    """The variables that are read of a row of x as it is -> where their H values begin there."""
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
            with ExitStack() as guard:
                if e:
                    guard.enter_context(T.If(unit + e < H))
                    guard.enter_context(T.Then())
                if step == 1:
                    T.buffer_store(into, values[e][q], [place + e])
                else:
                    st_global(into.ptr_to([place + e]), [values[e + i][q] for i in range(step)], "f32")
