"""The whole sequence as one function that every thread of the team runs.

    copy initial states to workspace, compute invariants; barrier
    for each chunk of time steps:
        hoisted projection of the chunk's rows; barrier; with statistics of it also their pass; barrier
        for each step: the stages of the step, a barrier after each, or after those that go row by row
    copy states to the caller
"""

from __future__ import annotations

from ecornn.program import WORKSPACE, Extent, Parallel, Program
from ecornn.schedules.assemble import call_buffers
from ecornn.schedules.builder import Expr, PrimFunc
from ecornn.schedules.cpu.stages import StepPlan
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.cpu.timeline import Timeline
from ecornn.schedules.cpu.worker import Worker
from ecornn.workload import Traversal


def sequence(plan: StepPlan, shape: Shape, traversal: Traversal) -> Program:
    """The program of a plan."""
    made = Sequence(plan, shape, traversal)
    function = made.function("worker")
    return Program.running({"worker": function}, made.buffers, (made.call("worker"),))


class Sequence(Worker):
    """Writes the worker function of a layer's own pass."""

    def declare(self) -> None:
        e, s, graph = self.e, self.shape, self.graph
        self.declare_scalars()
        for b in call_buffers(graph.states, self.traversal, s.real):
            self.add(b)
        self.timeline = Timeline(e, self.traversal, self.data, self.steps, self.batch)
        self.declare_products((*self.plan.hoisted, *self.plan.steps))
        self.declare_constants()
        plane = s.padded_batch * s.width
        for name in graph.states:
            self.buffer(f"{name}_state", WORKSPACE, Extent(plane * (1 + (name in self.plan.doubled))))
        for stage in self.plan.steps:
            for number, var in enumerate(stage.keep):
                self.buffer(f"{stage.name}_kept_{number}", WORKSPACE, Extent(plane))
                self.kept[var] = self.data[f"{stage.name}_kept_{number}"]
        if self.place:
            # a tile of rows may reach past the chunk's last row, in either direction of use
            room = s.chunk * s.batch + max(t.rows for t in s.tiles.values())
            self.buffer("hoisted", WORKSPACE, Extent(room * len(graph.hoisted_outputs) * s.width))
            if self.hoisted_totals:
                self.buffer("hoisted_statistics", WORKSPACE, Extent(room * len(self.hoisted_totals)))
        if self.totals:
            self.buffer("statistics", WORKSPACE, Extent(s.padded_batch * len(self.totals)))

    # -- control --------------------------------------------------------------------------------
    def call(self, name: str) -> Parallel:
        """The call of the function of that name."""
        return Parallel(name, self.aliases, self.shape.team, self.work)

    def function(self, name: str) -> PrimFunc:
        """The whole function, of that name."""
        e = self.e
        self.declare()
        self.prelude()
        e.call("ecornn_barrier")
        chunk = e.index(self.shape.chunk)
        with e.loop("chunk", e.ceildiv(self.steps, self.shape.chunk)) as number:
            first = e.let("first", number * chunk)
            count = e.let("count", e.tirx.Min(chunk, self.steps - first))
            # the chunk's first row of x; in reverse, its last step comes first
            low = e.let("low", self.steps - first - count) if self.traversal.reverse else first
            if self.place:
                rows = e.let("rows", count * self.batch)
                for stage in self.plan.hoisted:
                    self.part((stage,), low, low, rows)
                    e.call("ecornn_barrier")
            with e.loop("step", count) as step:
                t = e.let("t", first + step)
                for part in self.plan.parts:
                    self.part(part, low, t, self.batch)
                    if self.plan.barriers:
                        e.call("ecornn_barrier")
            if not self.plan.barriers:
                e.call("ecornn_barrier")
            self.after_steps(low, count)
        self.epilogue()
        return e.function(name)

    def after_steps(self, low: Expr, count: Expr) -> None:
        """Writes the code behind the steps of a chunk, the first of which in x's time is ``low``: none."""

    def prelude(self) -> None:
        e, s = self.e, self.shape
        columns = -(-s.hidden // s.lanes)
        with self.tasks("initial", e.index(s.padded_batch * columns)) as task:
            b = e.let("b", e.div(task, columns))
            unit = e.let("unit", e.mod(task, columns) * e.index(s.lanes))
            inside = e.tirx.Select(b < self.batch, e.index(s.hidden) - unit, e.index(0))
            valid = e.let("valid", inside)
            at = b * e.index(s.hidden) + unit
            given = {name: e.vload_part(f"{name}_first", self.data[f"{name}_in"], at, valid)
                     for name in self.graph.states}
            for name, value in self.timeline.started(e.index(0), b, given).items():
                e.vstore(self.data[f"{name}_state"], b * e.index(s.width) + unit, value)
        self.invariants()

    def epilogue(self) -> None:
        e, s = self.e, self.shape
        columns = -(-s.hidden // s.lanes)
        with self.tasks("final", self.batch * e.index(columns)) as task:
            b = e.let("b", e.div(task, columns))
            unit = e.let("unit", e.mod(task, columns) * e.index(s.lanes))
            valid = e.let("valid", e.index(s.hidden) - unit)
            for name in self.graph.states:
                at = self.slot(name, self.steps) + b * e.index(s.width) + unit
                value = e.let(name, e.vload(self.data[f"{name}_state"], at))
                e.vstore_part(f"{name}_last", self.data[f"{name}_out"], b * e.index(s.hidden) + unit,
                              value, valid)

