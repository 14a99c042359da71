"""Outer products of a chunk's rows by the matrix unit: gradient[j, k] += sum_r value[r, j] * operand[r, k].

The unit sums over rows r, so both factors are first copied into its tiles, in bfloat16, once for all products: values
as (panel, tile of 16 j, block of 32 r, j, r), operands as (panel, block of 32 r, pair of r, k, r of the pair). A panel
is 32 j, or 32 k. Rows past the last are zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecornn.program import WORKSPACE, Extent
from ecornn.schedules.builder import Expr, TirBuffer
from ecornn.schedules.cpu import matrix
from ecornn.schedules.cpu.memory import Place
from ecornn.schedules.cpu.training.parts import Outer
from ecornn.schedules.cpu.worker import Worker

SIDE = 32  # j, and k, of a panel: two tiles
TILE = matrix.ROWS * matrix.DEPTH  # elements


@dataclass(frozen=True)
class Panels:
    """The tiles of a factor."""

    data: TirBuffer
    source: Place
    count: int


class MatrixOuterProducts:
    """A function's outer products, of chunks of at most ``rooms`` rows; none has heads."""

    def __init__(self, worker: Worker, outers: Sequence[Outer], rooms: int) -> None:
        self.worker, self.blocks = worker, -(-rooms // matrix.DEPTH)
        self.values: dict[tuple[Place, int], Panels] = {}
        self.operands: dict[tuple[Place, int], Panels] = {}
        self.work: list[tuple[Outer, Panels, Panels]] = []
        for outer in outers:
            self.work.append((outer, self._panels("values", self.values, outer.value, outer.rows),
                              self._panels("operands", self.operands, outer.operand, outer.columns)))

    def _panels(self, name: str, made: dict[tuple[Place, int], Panels], source: Place, length: int) -> Panels:
        if (source, length) not in made:
            count = -(-length // SIDE)
            data = self.worker.buffer(f"{name}_{len(made)}", WORKSPACE, Extent(count * self.blocks * 2 * TILE),
                                      dtype="bfloat16", element="uint32" if name == "operands" else None)
            made[source, length] = Panels(data, source, count)
        return made[source, length]

    def copy(self, rows: Expr) -> None:
        """Fills all tiles."""
        e, made = self.worker.e, [*self.values.values(), *self.operands.values()]
        for number, (panels, tasks) in enumerate(zip(made, self.worker.pooled("copy", [p.count for p in made]),
                                                     strict=True)):
            with tasks as panel, e.loop("block", e.ceildiv(rows, matrix.DEPTH)) as block, \
                    e.loop("pair", matrix.DEPTH // 2) as pair:
                at = e.let("copied", block * matrix.DEPTH + 2 * pair)
                for tile in range(SIDE // matrix.UNITS):
                    unit = panel * SIDE + tile * matrix.UNITS
                    both = [self._row(panels.source, at + n, rows, unit) for n in range(2)]
                    if number < len(self.values):
                        start = ((panel * 2 + tile) * self.blocks + block) * TILE + 2 * pair
                        for n, value in enumerate(both):
                            places = e.tirx.Ramp(start + n, e.index(matrix.DEPTH), matrix.UNITS)
                            narrow = e.narrowed(panels.data, value, matrix.UNITS)
                            e.add(e.tirx.BufferStore(panels.data, narrow, [places]))
                    else:
                        first, second = (e.rounded(value, matrix.UNITS) for value in both)
                        words = first >> e.splat(16, "uint32") | (second & e.splat(0xFFFF0000, "uint32"))
                        place = (panel * self.blocks + block) * TILE + pair * SIDE + tile * matrix.UNITS
                        e.vstore(panels.data, place, words)

    def _row(self, source: Place, row: Expr, rows: Expr, unit: Expr) -> Expr:
        e = self.worker.e
        place = e.let("from", source.at(e, e.tirx.Min(row, rows - 1)) + unit)
        return e.tirx.Select(e.splat(row < rows), e.vload(source.data, place), e.splat(0.0))

    def add(self, rows: Expr) -> None:
        """Adds the products over ``rows`` rows, after a barrier, of what :meth:`copy` has copied."""
        if not self.work:
            return
        e, before = self.worker.e, 0
        e.call("ecornn_barrier")
        totals = [values.count * operands.count for _, values, operands in self.work]
        with self.worker.taken("outer", e.index(sum(totals))) as task:
            for some, total in zip(self.work, totals, strict=True):
                with e.when(e.tirx.And(task >= before, task < before + total)):
                    self._outer(*some, rows, e.let("outer_task", task - before))
                before += total

    def _outer(self, outer: Outer, values: Panels, operands: Panels, rows: Expr, task: Expr) -> None:
        e, columns = self.worker.e, SIDE // matrix.UNITS
        left, right = e.let("j_panel", e.mod(task, values.count)), e.let("k_panel", e.div(task, values.count))
        starts = [e.let("start", (left * 2 + tile) * self.blocks * TILE) for tile in range(2)]
        matrix.clear(e, SIDE, columns)
        matrix.multiply(e, columns, values.data, starts, matrix.DEPTH, operands.data,
                        e.let("operands_start", right * (self.blocks * TILE)), e.ceildiv(rows, matrix.DEPTH), TILE)
        sums = e.local("outer_sums", size=SIDE * SIDE)
        matrix.keep(e, sums, SIDE, columns)
        j, k = e.let("j", left * SIDE), e.let("k", right * SIDE)
        with e.loop("m", e.tirx.Min(e.index(SIDE), outer.rows - j)) as m:
            for n in range(0, SIDE, matrix.UNITS):
                at = e.let("at", outer.start + (j + m) * outer.columns + k + n)
                valid = e.let("valid", outer.columns - k - n)
                total = e.vload_part("before", outer.data, at, valid) + e.vload(sums, m * SIDE + n)
                e.vstore_part("total", outer.data, at, total, valid)
