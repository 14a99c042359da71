"""The work of a thread on one row: statistics over all of its units, then what follows from them."""

from __future__ import annotations

from collections.abc import Callable

from ecornn.analysis import Statistic
from ecornn.schedules.builder import Expr, Var
from ecornn.schedules.cpu.memory import Memory, Span
from ecornn.schedules.cpu.stages import Stage
from ecornn.schedules.cpu.tile_task import TileTask
from ecornn.schedules.cpu.tiling import Tile

ONE = Tile(1, 1, 1)  # a vector of units of the row
LOWEST = {"float32": -3.4028234663852886e38, "float64": -1.7976931348623157e308}  # no number is below


class RowTask:
    """One row of the batch, or of the chunk where the stage is of the hoisted projection."""

    def __init__(self, owner: Memory, stage: Stage, span: Span, row: Expr, kind: type[TileTask] = TileTask) -> None:
        self.o, self.e, self.stage, self.span = owner, owner.e, stage, span
        self.row, self.lanes = row, owner.shape.lanes
        self.hidden, self.kind = owner.shape.hidden, kind

    def run(self) -> None:
        for s in self.stage.statistics:
            self.summarize(s)
        if self.stage.finishes:
            with self.e.loop("vector", -(-self.hidden // self.lanes)) as vector:
                self.task(vector).pointwise(0, 0)

    def task(self, vector: Expr) -> TileTask:
        """The task that has the values of a vector of units."""
        return self.kind(self.o, self.stage, ONE, self.span, vector, self.row)

    def summarize(self, s: Statistic) -> None:
        """The total, and in a second pass the squares."""
        e, count = self.e, s.count(self.hidden)
        total = self.over(s, lambda value: value)
        self.keep(s.total, total)
        if s.squares is not None:
            mean = e.let("mean", e.splat(total * e.number(1.0 / count)))

            def squared(value: Expr) -> Expr:
                apart = e.let("apart", value - mean)
                return apart * apart

            self.keep(s.squares, self.over(s, squared))

    def over(self, s: Statistic, function: Callable[[Expr], Expr]) -> Expr:
        """The sum of a function of all operands and of the statistic's units; or the largest."""
        e, lanes = self.e, self.lanes
        first, end = (0, self.hidden) if s.units is None else (s.units[0], sum(s.units))
        whole = max(end // lanes - -(-first // lanes), 0)
        nothing = LOWEST[self.o.shape.real] if s.largest else 0.0
        sums = e.local("sums")
        e.vstore(sums, 0, e.splat(nothing))

        def combined(a: Expr, b: Expr) -> Expr:
            return e.tirx.Max(a, b) if s.largest else a + b

        def add(vector: Expr, inside: Expr | None) -> None:
            values = self.task(vector)
            values.locate(0, 0)
            for operand in s.operands:
                value = e.let("term", function(values.value(operand)))
                value = value if inside is None else e.tirx.Select(inside, value, e.splat(nothing))
                e.vstore(sums, 0, combined(e.vload(sums, 0), value))

        def edge(vector: int) -> None:
            """One of the vectors that are of other units as well."""
            lane, inside, before = e.ramp(0), None, vector * lanes
            if before < first:
                inside = e.tirx.GE(lane, e.splat(first - before, "int64"))
            if before + lanes > end:
                below = e.tirx.LT(lane, e.splat(end - before, "int64"))
                inside = below if inside is None else e.tirx.And(inside, below)
            add(e.index(vector), inside)

        if first % lanes:
            edge(first // lanes)
        with e.loop("vector", whole) as vector:
            add(vector if first == 0 else e.let("own_vector", vector + e.index(-(-first // lanes))), None)
        if end % lanes and (end // lanes != first // lanes or not first % lanes):
            edge(end // lanes)
        total = e.local("total")
        e.store(total, 0, e.number(nothing))
        with e.loop("lane", self.lanes) as lane:
            e.store(total, 0, combined(e.load(total, 0), e.load(sums, lane)))
        return e.let("total_value", e.load(total, 0))

    def keep(self, var: Var, value: Expr) -> None:
        """Stores a statistic where other threads, and this one, will find it."""
        place = self.task(self.e.index(0))
        place.locate(0, 0)
        buffer, at = place.total(var)
        self.e.store(buffer, at, value)
