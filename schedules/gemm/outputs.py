"""What a kernel of the hoisted projection writes: the cell's hoisted scalars, computed on accumulators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var
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
    acc : accumulators (m16 tile, n8 tile, 4)
    octets, tiles : groups of 8 units, and m16 tiles, of the thread
    x, hoisted : the buffers; ``hoisted`` is as ``layout`` says
    vector : (i, unit) -> the value of parameter vector i
    span : neighbouring units that a thread has, 2 or 4
    """

    task: Task
    acc: TirBuffer
    octets: int
    tiles: int
    x: TirBuffer
    hoisted: TirBuffer
    layout: Hoisted
    vector: Callable[[int, Expr], Expr]
    span: int = 2

    def write(self, unit_of: Callable[[Expr], Expr], row_of: Callable[[Expr, Expr], Expr], end: Expr) -> None:
        """Writes units ``unit_of(group)`` and those next to it, of rows ``row_of(tile, half) < end``."""
        graph, H = self.task.graph, self.task.workload.hidden
        with T.unroll("o", self.octets * 2 // self.span) as o:
            unit = T.let("unit", unit_of(o))
            with T.If(unit < H), T.Then():
                constants = []
                for e in range(self.span):
                    env = {v.var: T.let(v.var.name, self.vector(i, self._within(unit, e)))
                           for i, v in enumerate(graph.vectors)}
                    constants.append(invariants(graph, env))
                with T.unroll("m", self.tiles) as m, T.unroll("upper", 2) as half:
                    here = T.let("here", row_of(m, half))
                    with T.If(here < end), T.Then():
                        self._store(constants, m, o, half, here, unit)

    def _within(self, unit: Expr, e: int) -> Expr:
        """Unit ``unit + e``, or the last one."""
        H = self.task.workload.hidden
        return T.let("own_unit", unit + e if H % self.span == 0 else T.min(unit + e, H - 1))

    def _store(self, constants: list[dict[Var, Expr]], m: Expr, o: Expr, half: Expr, row: Expr, unit: Expr) -> None:
        """Neighbouring units of a row."""
        graph, H, out = self.task.graph, self.task.workload.hidden, self.hoisted
        rows, outputs = len(graph.hoisted_products), len(graph.hoisted_outputs)
        values = []
        for e in range(self.span):
            env = dict(constants[e])
            for r, product in enumerate(graph.hoisted_products):
                env[product.var] = self.acc[m, (o * (self.span // 2) + e // 2) * rows + r, half * 2 + e % 2]
            if graph.x is not None:
                at = T.cast(row, "int64") * H + self._within(unit, e)
                env[graph.x] = T.let("x", T.cast(self.x[at], "float32"))
            env = emit(graph.hoisted, env)
            values.append([env[v] for v in graph.projected])
        if self.layout.packed:
            self.layout.store(out, T.cast(row, "int64"), unit, values)
            return
        step = next(n for n in (self.span, 2, 1) if H % n == 0)
        for q in range(outputs):
            place = T.let("place", (T.cast(row, "int64") * outputs + q) * H + unit)
            for e in range(0, self.span, step):
                with ExitStack() as guard:
                    if e:
                        guard.enter_context(T.If(unit + e < H))
                        guard.enter_context(T.Then())
                    if step == 1:
                        T.buffer_store(out, values[e][q], [place + e])
                    else:
                        T.evaluate(T.ptx[f"st.global.v{step}.f32"](
                            out.ptr_to([place + e]), *(values[e + i][q] for i in range(step))))
