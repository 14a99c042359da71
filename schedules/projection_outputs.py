"""What a kernel of the hoisted projection writes: the cell's hoisted scalars, computed on accumulators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ecornn.schedules.base import Task
from ecornn.schedules.pointwise import emit, invariants


@dataclass
class Outputs:
    """Emits the store of one thread's outputs; n8 tile ``octet * rows + row`` holds a row of 8 units.

    Attributes
    ----------
    acc : accumulators (m16 tile, n8 tile, 4), each n8 tile as ``mma`` leaves it (``tensor_core.py``)
    octets, tiles : groups of 8 units, and m16 tiles, of the thread
    x, hoisted : the buffers; ``hoisted`` is of ``out_dtype``
    vector : (i, unit) -> the value of parameter vector i
    """

    T: Any
    task: Task
    acc: Any
    octets: int
    tiles: int
    x: Any
    hoisted: Any
    out_dtype: str
    vector: Callable[[int, Any], Any]

    def write(self, unit_of: Callable[[Any], Any], row_of: Callable[[Any, Any], Any], end: Any) -> None:
        """Writes units ``unit_of(octet)`` and the next one, of rows ``row_of(tile, half) < end``."""
        T, graph, H = self.T, self.task.graph, self.task.workload.hidden
        with T.unroll(self.octets) as o:
            unit = T.Bind(unit_of(o))
            with T.If(unit < H), T.Then():
                constants = []
                for e in range(2):
                    at = T.Bind(T.min(unit + e, H - 1))
                    env = {v.var: T.Bind(self.vector(i, at)) for i, v in enumerate(graph.vectors)}
                    constants.append(invariants(graph, env))
                with T.unroll(self.tiles) as m, T.unroll(2) as half:
                    here = T.Bind(row_of(m, half))
                    with T.If(here < end), T.Then():
                        self._store(constants, m, o, half, here, unit)

    def _store(self, constants: list[dict[Any, Any]], m: Any, o: Any, half: Any, row: Any, unit: Any) -> None:
        """Two neighbouring units of a row."""
        T, graph, H, out = self.T, self.task.graph, self.task.workload.hidden, self.hoisted
        rows, outputs = len(graph.hoisted_rows), len(graph.hoisted_outputs)
        pairs = []
        for e in range(2):
            env = dict(constants[e])
            for r, product in enumerate(graph.hoisted_rows):
                env[product.var] = self.acc[m, o * rows + r, half * 2 + e]
            if graph.x is not None:
                at = T.cast(row, "int64") * H + T.min(unit + e, H - 1)
                env[graph.x] = T.Bind(T.cast(self.x[at], "float32"))
            env = emit(graph.hoisted, env)
            pairs.append([env[v] for v in graph.hoisted_outputs])
        for q in range(outputs):
            place = T.Bind((T.cast(row, "int64") * outputs + q) * H + unit)
            if H % 2 == 0 and self.out_dtype == "float32":
                T.evaluate(T.ptx["st.global.v2.f32"](out.ptr_to([place]), pairs[0][q], pairs[1][q]))
            else:
                T.buffer_store(out, T.cast(pairs[0][q], self.out_dtype), [place])
                with T.If(unit + 1 < H), T.Then():
                    T.buffer_store(out, T.cast(pairs[1][q], self.out_dtype), [place + 1])
