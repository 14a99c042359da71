"""The whole sequence as one function that every thread of the team runs.

    copy initial states to workspace, compute invariants; barrier
    for each chunk of time steps:
        hoisted projection of the chunk's rows; barrier; with statistics of it also their pass; barrier
        for each step: the stages of the step, a barrier after each, or after those that go row by row
        what only outputs need, where they are made apart: a pass over the chunk's rows, to y
    copy states to the caller"""

from __future__ import annotations

from dataclasses import replace

from ecornn.program import WORKSPACE, Extent, Parallel, Program
from ecornn.schedules.assemble import call_buffers
from ecornn.schedules.base import After, Task
from ecornn.schedules.builder import Expr, PrimFunc
from ecornn.schedules.cpu import matrix
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.memory import Place, StepPlan, pass_plan
from ecornn.schedules.cpu.tasks import TileTask
from ecornn.schedules.cpu.tiling import PAIRS, Shape, pairs_pay, tile_for
from ecornn.schedules.cpu.worker import SLACK, Pass, Worker
from ecornn.workload import Traversal


class Sequence(Worker):
    """Writes the worker function of a layer's own pass."""

    def declare(self) -> None:
        s, graph = self.shape, self.graph
        self.declare_scalars()
        for b in call_buffers(graph.states, self.traversal, s.dtype):
            self.add(b)
        self.declare_step(s.padded_batch)
        if self.place:
            # a tile of rows may reach past the chunk's last row, in either direction of use
            room = s.chunk * s.batch + max(t.rows for t in s.tiles.values())
            self.buffer("hoisted", WORKSPACE, Extent(room * len(graph.hoisted_outputs) * s.width))
            if self.hoisted_totals:
                self.buffer("hoisted_statistics", WORKSPACE, Extent(room * len(self.hoisted_totals)))
        self.declare_statistics(s.padded_batch)

    def program(self) -> Program:
        return Program.running({"worker": self.function("worker")}, self.buffers, (self.call("worker"),))

    def call(self, name: str) -> Parallel:
        return Parallel(name, self.aliases, self.shape.team, self.work)

    def function(self, name: str) -> PrimFunc:
        e = self.e
        self.declare()
        if self.shape.by_matrix:
            matrix.configure(e)
        self.prelude()
        e.call("ecornn_barrier")
        with self.chunks() as (first, low, count):
            if self.place:
                rows = e.let("rows", count * self.batch)
                for stage in self.plan.hoisted:
                    self.part((stage,), low, low, rows)
                    e.call("ecornn_barrier")
            self.steps_of(first, low, count)
            self.after_steps(low, count)
        self.epilogue()
        if self.shape.by_matrix:
            matrix.release(e)
        return e.function(name)

    def after_steps(self, low: Expr, count: Expr) -> None:
        """Writes the code behind the steps of a chunk, the first of which in x's time is ``low``: none."""

    def prelude(self) -> None:
        self.begin("initial", {name: self.data[f"{name}_in"] for name in self.graph.states})

    def epilogue(self) -> None:
        e, s = self.e, self.shape
        with self.vectors_of("final", self.batch) as (b, unit):
            valid = e.let("valid", e.index(s.hidden) - unit)
            for name in self.graph.states:
                at = self.slot(name, self.steps) + b * s.width + unit
                value = e.let(name, e.vload(self.data[f"{name}_state"], at))
                e.vstore_part(f"{name}_last", self.data[f"{name}_out"], b * s.hidden + unit, value, valid)


class LoopTask(TileTask):
    """A tile of a step, which leaves what the pass reads; zero where a row takes no part."""

    o: ReadOutSequence

    def publish(self, live: Expr | None, results: dict[str, Expr]) -> None:
        e, o = self.e, self.o
        values = [o.timeline.masked(live, value, e.splat(0.0)) for value in self.outputs]
        row = e.let("chunk_row", o.row_of_chunk(self.first, self.t, self.at_row))
        self.leave(row, list(zip((o.left[var] for var in o.graph.outputs), values, strict=True)))


class ReadOutTask(TileTask):
    o: ReadOutPass

    def compute(self) -> None:
        super().compute()
        e, o, hidden = self.e, self.o, self.s.hidden
        if self.stage is not o.plan.steps[-1]:
            return
        values = [self.value(var) for var in o.graph.outputs]
        live, own = o.owner.live_row(self.first, self.at_row), len(values) * hidden
        at = e.let("y_at", (self.first * o.batch + self.at_row) * o.y.y_width(own) + o.y.y_offset(own) + self.unit)
        valid = e.let("valid", e.tirx.Select(self.at_row < self.rows, hidden - self.unit, e.index(0)))
        for number, value in enumerate(values):
            value = o.owner.timeline.masked(live, value, e.splat(0.0))
            e.vstore_part("y_part", o.owner.data["y"], at + number * hidden, value, valid)


class ReadOutPass(Pass):
    task = ReadOutTask

    def __init__(self, owner: ReadOutSequence, plan: StepPlan, shape: Shape, e: Emitter, y: Traversal) -> None:
        super().__init__("read_out", plan, shape, e, owner.rooms)
        self.owner, self.y = owner, y


class ReadOutSequence(Sequence):
    """Writes the worker function of a layer whose y is computed chunk by chunk, after the steps."""

    task = LoopTask

    def __init__(self, plan: StepPlan, shape: Shape, traversal: Traversal, after: After, passes: StepPlan,
                 own: Shape) -> None:
        super().__init__(plan, shape, traversal)
        self.rooms = shape.chunk * shape.batch + max(t.rows for s in (shape, own) for t in s.tiles.values())
        self.read_out = ReadOutPass(self, passes, own, self.e, after.traversal)

    def declare(self) -> None:
        super().declare()
        width, self.left = max(self.shape.width, self.read_out.shape.width), {}
        for number, var in enumerate(self.graph.outputs):
            self.left[var] = Place(self.buffer(f"left_{number}", WORKSPACE, Extent(self.rooms * width + SLACK)), width)
        self.read_out.declare(self)
        self.read_out.given.update(self.left)
        self.buffers += self.read_out.buffers
        self.aliases |= {alias: self.read_out.prefix + name for alias, name in self.read_out.aliases.items()}

    def prelude(self) -> None:
        super().prelude()
        self.read_out.invariants()

    def after_steps(self, low: Expr, count: Expr) -> None:
        self.read_out.run(low, self.e.let("rows_made", count * self.batch))

    @property
    def work(self) -> int:
        return super().work + self.read_out.work


def sequence_with_read_out(task: Task, plan: StepPlan, shape: Shape) -> Program:
    assert task.after is not None
    graph = task.after.graph
    last = {*(p.var for p in graph.phases[-1].products), *(v for s in graph.phases[-1].statistics for v in s.made),
            *(a.var for a in graph.phases[-1].assigns)}
    passes = pass_plan("read_out", graph, [v for v in graph.outputs if v not in last])
    rows, pairs = shape.chunk * shape.batch, PAIRS if pairs_pay(task) else (0,)
    tiles = {stage.name: tile_for(task, rows, len(stage.rows), pairs) for stage in passes.steps}
    return ReadOutSequence(plan, shape, task.traversal, task.after, passes, replace(shape, tiles=tiles)).program()
