"""Forward that keeps what the backward pass reads: states after each step, beside y, which has the output state, and
other values of the step."""

from __future__ import annotations

from collections.abc import Mapping

from ecornn.analysis.kept import Kept
from ecornn.schedules.builder import Expr, Var
from ecornn.schedules.cpu.sequence import Sequence
from ecornn.schedules.cpu.stages import Stage, StepPlan
from ecornn.schedules.cpu.tile_task import TileTask
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.keeping import kept_buffers, value_buffers
from ecornn.workload import Traversal


class KeepingTask(TileTask):
    """A tile that stores kept values where it makes them, and kept states where it stores y."""

    o: KeepingSequence

    def compute(self) -> None:
        made = {name: self.value(var) for name, var in self.o.written.get(self.stage.name, {}).items()}
        super().compute()
        row = self.at_row
        if self.stage.level < 0:  # of all steps of the chunk
            self.store(self.first * self.o.batch + row, self.rows, made)
        elif made:
            self.store(self.o.timeline.at(self.t) * self.o.batch + row, self.o.batch, made)

    def store(self, row: Expr, rows: Expr, values: Mapping[str, Expr]) -> None:
        """Stores values at a ``row`` of all steps, if this one is among the first ``rows`` of the stage."""
        e, hidden = self.e, self.s.hidden
        if not values:
            return
        at = e.let("kept_at", row * e.index(hidden) + self.unit)
        valid = e.let("kept", e.tirx.Select(self.at_row < rows, e.index(hidden) - self.unit, e.index(0)))
        for name, value in values.items():
            e.vstore_part("kept_part", self.o.data[name], at, value, valid)

    def publish(self, live: Expr | None, results: dict[str, Expr]) -> None:
        super().publish(live, results)
        e, timeline = self.e, self.o.timeline
        row = timeline.at(self.t) * self.o.batch + self.at_row
        self.store(row, self.o.batch, {f"{name}_kept": timeline.masked(live, results[name], e.splat(0.0))
                                       for name in self.o.states})


class KeepingSequence(Sequence):
    """``kept``: what backward reads; y has the output state."""

    task = KeepingTask

    def __init__(self, plan: StepPlan, shape: Shape, traversal: Traversal, kept: Kept) -> None:
        super().__init__(plan, shape, traversal)
        self.states = tuple(name for name in kept.states if name != self.graph.output)
        self.values = kept.values
        self.written: dict[str, dict[str, Var]] = {}  # stage -> buffer -> what it writes there
        for number, var in enumerate(kept.values):
            self.written.setdefault(self.maker(var).name, {})[f"value{number}_kept"] = var

    def one_by_one(self, stage: Stage) -> bool:
        """The projection of a chunk, which is alone between its barriers."""
        return stage.name == "hoisted"

    def maker(self, var: Var) -> Stage:
        """The first stage that has the value for all units; what is not handed on to the step is of a stage before."""
        level = self.plan.level[var]
        if level < 0 and var not in self.place:
            return next(s for s in self.plan.hoisted if s.level >= level)
        # statistics of a row are left to the stage behind, which has all units
        return next((s for s in self.plan.steps if s.level >= level and s.finishes), self.plan.steps[-1])

    def declare(self) -> None:
        super().declare()
        size = self.shape.batch, self.shape.hidden, self.shape.real
        for buffer in (*kept_buffers(self.states, *size), *value_buffers(len(self.values), *size)):
            self.add(buffer)
