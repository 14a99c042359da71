"""The adjoint's recurrence over a chunk of time, step by step against the layer's way."""

from __future__ import annotations

from msgspec import structs

from ecornn.program import WORKSPACE, Extent
from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.memory import Place
from ecornn.schedules.cpu.stages import StepPlan
from ecornn.schedules.cpu.tile_task import TileTask
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.cpu.timeline import Timeline
from ecornn.schedules.cpu.training.passes import SLACK
from ecornn.schedules.cpu.worker import Worker
from ecornn.workload import Traversal


class RecurrenceTask(TileTask):
    """A tile of a step; what other parts read is written to the chunk's rows, zero where a row takes no part."""

    o: Recurrence

    def compute(self) -> None:
        o, e = self.o, self.e
        made = [(o.places[v], self.value(v)) for v in o.written[self.stage.name]]
        super().compute()
        if not made:
            return
        live = o.timeline.live(self.t, self.at_row)
        row = e.let("chunk_row", o.row_of_chunk(self.first, self.t, self.at_row))
        values = [(place, o.timeline.masked(live, value, e.splat(0.0))) for place, value in made]
        with e.when(self.at_row < o.batch):  # a row past the batch is one of another step
            for place, value in values:
                e.vstore(place.data, place.at(e, row) + self.unit, value)

    def made_outputs(self) -> list[Expr]:
        """They are written for other parts, by the stage that makes them."""
        return []

    def publish(self, live: Expr | None, results: dict[str, Expr]) -> None:
        """There is no y."""


class Recurrence(Worker):
    """``traversal`` is the layer's; ``written``: stage -> what it writes, in ``rooms`` rows."""

    task = RecurrenceTask

    def __init__(self, plan: StepPlan, shape: Shape, traversal: Traversal, e: Emitter,
                 written: dict[str, tuple[Var, ...]], rooms: int) -> None:
        against = structs.replace(traversal, reverse=not traversal.reverse, backward=True)
        super().__init__(plan, shape, against, "recurrence_", e)
        self.written, self.rooms = written, rooms
        self.places: dict[Var, Place] = {}

    def declare(self, other: Worker) -> None:
        """Declares its buffers; ``other`` has the function's scalars and masks."""
        s = self.shape
        self.share_scalars(other)
        self.timeline = Timeline(self.e, self.traversal, other.data, self.steps, self.batch)
        self.declare_products(self.plan.steps)
        self.declare_constants()
        plane = s.padded_batch * s.width
        for name in self.graph.states:
            self.buffer(f"{name}_state", WORKSPACE, Extent(plane * (1 + (name in self.plan.doubled))))
        for stage in self.plan.steps:
            for number, var in enumerate(stage.keep):
                self.buffer(f"{stage.name}_kept_{number}", WORKSPACE, Extent(plane))
                self.kept[var] = self.data[f"{stage.name}_kept_{number}"]
        if self.totals:
            self.buffer("statistics", WORKSPACE, Extent(s.padded_batch * len(self.totals)))
        for var in dict.fromkeys(v for those in self.written.values() for v in those):
            name = f"made_{len(self.places)}"
            self.buffer(name, WORKSPACE, Extent(self.rooms * s.width + SLACK))
            self.places[var] = Place(self.data[name], s.width)

    def begin(self, first: dict[str, TirBuffer]) -> None:
        """The states before the first step: ``first`` has elements (B, H) for some of them, others are zeros."""
        e, s = self.e, self.shape
        columns = -(-s.hidden // s.lanes)
        with self.tasks("begin", e.index(s.padded_batch * columns)) as task:
            b = e.let("b", e.div(task, columns))
            unit = e.let("unit", e.mod(task, columns) * e.index(s.lanes))
            valid = e.let("valid", e.tirx.Select(b < self.batch, e.index(s.hidden) - unit, e.index(0)))
            at = b * e.index(s.hidden) + unit
            values = {n: e.vload_part(f"{n}_first", first[n], at, valid) if n in first else e.splat(0.0)
                      for n in self.graph.states}
            for name, value in self.timeline.started(e.index(0), b, values).items():
                e.vstore(self.data[f"{name}_state"], b * e.index(s.width) + unit, value)
        self.invariants()

    def steps_of(self, first: Expr, low: Expr, count: Expr) -> None:
        """``count`` steps from the loop's ``first`` on; the chunk's first step of x is ``low``."""
        e = self.e
        with e.loop("step", count) as step:
            t = e.let("t", first + step)
            for part in self.plan.parts:
                self.part(part, low, t, self.batch)
                if self.plan.barriers:
                    e.call("ecornn_barrier")
        if not self.plan.barriers:
            e.call("ecornn_barrier")

    def last(self, name: str) -> Place:
        """A state after the last step."""
        return Place(self.data[f"{name}_state"], self.shape.width, self.slot(name, self.steps))
