"""Forward that keeps states after each step for the backward pass, beside y."""

from __future__ import annotations

from ecornn.schedules.builder import Expr
from ecornn.schedules.cpu.sequence import Sequence
from ecornn.schedules.cpu.stages import StepPlan
from ecornn.schedules.cpu.tile_task import TileTask
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.keeping import kept_buffers
from ecornn.workload import Traversal


class KeepingTask(TileTask):
    """A tile that stores kept states where it stores y."""

    o: KeepingSequence

    def publish(self, live: Expr | None, results: dict[str, Expr]) -> None:
        super().publish(live, results)
        e, s, o, timeline = self.e, self.s, self.o, self.o.timeline
        row = timeline.at(self.t) * o.batch + self.at_row
        at = e.let("kept_at", row * e.index(s.hidden) + self.unit)
        valid = e.let("kept", e.tirx.Select(self.at_row < o.batch, e.index(s.hidden) - self.unit, e.index(0)))
        for name in o.keeps:
            value = timeline.masked(live, results[name], e.splat(0.0))
            e.vstore_part("kept_part", o.data[f"{name}_kept"], at, value, valid)


class KeepingSequence(Sequence):
    """``states``: what backward reads; y has the output state."""

    task = KeepingTask

    def __init__(self, plan: StepPlan, shape: Shape, traversal: Traversal, states: tuple[str, ...]) -> None:
        super().__init__(plan, shape, traversal)
        self.states = states
        self.keeps = tuple(name for name in states if name != self.graph.output)

    def declare(self) -> None:
        super().declare()
        for buffer in kept_buffers(self.keeps, self.shape.batch, self.shape.hidden, "float32"):
            self.add(buffer)
