"""A part of the backward pass that goes over all rows of a chunk of time, or of the batch, stage by stage."""

from __future__ import annotations

from ecornn.program import WORKSPACE, Extent
from ecornn.schedules.builder import Expr, Var
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.memory import Place
from ecornn.schedules.cpu.stages import Stage, StepPlan
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.cpu.timeline import Timeline
from ecornn.schedules.cpu.worker import Worker
from ecornn.workload import ALONE

SLACK = 512  # elements behind the last row that a tile may read


class Pass(Worker):
    """``rooms``: rows that its values have room for, those of a tile past the last one among them."""

    def __init__(self, name: str, plan: StepPlan, shape: Shape, e: Emitter, rooms: int) -> None:
        super().__init__(plan, shape, ALONE, f"{name}_", e)
        self.rooms = rooms
        self.totals = {v: i for i, v in enumerate(v for s in plan.steps for t in s.statistics for v in t.made)}
        self.hoisted_totals = {}

    def room(self, stage: Stage) -> int:
        return self.rooms

    def every_step(self, stage: Stage) -> bool:
        return False

    def row_of_chunk(self, first: Expr, t: Expr, row: Expr) -> Expr:
        return row

    def declare(self, other: Worker) -> None:
        """Declares its buffers; ``other`` has the function's scalars, and x."""
        self.share_scalars(other)
        self.timeline = Timeline(self.e, ALONE, {}, self.steps, self.batch)
        if "x" in other.data:
            self.data["x"] = other.data["x"]
        self.declare_products(self.plan.steps)
        self.declare_constants()
        for stage in self.plan.steps:
            for number, var in enumerate(stage.keep):
                name = f"{stage.name}_kept_{number}"
                self.buffer(name, WORKSPACE, Extent(self.rooms * self.shape.width + SLACK))
                self.kept[var] = self.data[name]
        if self.totals:
            self.buffer("statistics", WORKSPACE, Extent(self.rooms * len(self.totals)))

    @property
    def places(self) -> dict[Var, Place]:
        """The places of its values."""
        return {v: Place(data, self.shape.width) for v, data in self.kept.items()}

    def run(self, first: Expr, rows: Expr, wait: bool = True) -> None:
        """Runs all stages over ``rows`` rows, of x from step ``first`` on; each ends with a barrier, the last one only
        where the threads are to ``wait`` for what it made."""
        for number, part in enumerate(self.plan.parts, 1):
            self.part(part, first, self.e.index(0), rows)
            if wait or number < len(self.plan.parts):
                self.e.call("ecornn_barrier")
