"""The values that only the outputs of a layer need, after the steps of a chunk: a pass over its rows, from what the
steps left, to y."""

from __future__ import annotations

from ecornn.program import WORKSPACE, Extent, Program
from ecornn.schedules.base import After, Task
from ecornn.schedules.builder import Expr
from ecornn.schedules.cpu.cost import PAIRS, best_tile, gates_at_once, pairs_pay
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.memory import Place
from ecornn.schedules.cpu.sequence import Sequence
from ecornn.schedules.cpu.stages import StepPlan
from ecornn.schedules.cpu.tile_task import TileTask
from ecornn.schedules.cpu.tiling import Shape, Tile, column_choices, row_choices, vectors_of
from ecornn.schedules.cpu.training.graphs import pass_plan
from ecornn.schedules.cpu.training.passes import SLACK, Pass
from ecornn.workload import Traversal


class LoopTask(TileTask):
    """A tile of a step, which leaves what the pass reads; zero where a row takes no part."""

    o: ReadOutSequence

    def publish(self, live: Expr | None, results: dict[str, Expr]) -> None:
        e, o = self.e, self.o
        values = [o.timeline.masked(live, value, e.splat(0.0)) for value in self.outputs]
        row = e.let("chunk_row", o.row_of_chunk(self.first, self.t, self.at_row))
        with e.when(self.at_row < o.batch):  # a row past the batch is one of another step
            for var, value in zip(o.graph.outputs, values, strict=True):
                place = o.left[var]
                e.vstore(place.data, place.at(e, row) + self.unit, value)


class ReadOutTask(TileTask):
    """A tile of the pass; the last stage stores y."""

    o: ReadOutPass

    def compute(self) -> None:
        super().compute()
        e, o, hidden = self.e, self.o, self.s.hidden
        if self.stage is not o.plan.steps[-1]:
            return
        values = [self.value(var) for var in o.graph.outputs]
        live = o.owner.live_row(self.first, self.at_row)
        own = len(values) * hidden
        row = (self.first * o.batch + self.at_row) * e.index(o.y.y_width(own))
        at = e.let("y_at", row + e.index(o.y.y_offset(own)) + self.unit)
        valid = e.let("valid", e.tirx.Select(self.at_row < self.rows, e.index(hidden) - self.unit, e.index(0)))
        for number, value in enumerate(values):
            value = o.owner.timeline.masked(live, value, e.splat(0.0))
            e.vstore_part("y_part", o.owner.data["y"], at + e.index(number * hidden), value, valid)


class ReadOutPass(Pass):
    """The pass. ``y``: the traversal of the layer, which says where y lies."""

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
        width = max(self.shape.width, self.read_out.shape.width)
        self.left = {}
        for number, var in enumerate(self.graph.outputs):
            self.buffer(f"left_{number}", WORKSPACE, Extent(self.rooms * width + SLACK))
            self.left[var] = Place(self.data[f"left_{number}"], width)
        self.read_out.declare(self)
        self.read_out.given.update(self.left)
        self.buffers += self.read_out.buffers
        self.aliases |= {alias: self.read_out.prefix + name for alias, name in self.read_out.aliases.items()}

    def live_row(self, first: Expr, row: Expr) -> Expr | None:
        """True if a row of the chunk takes part in its step; None if all do."""
        if not self.traversal.lengths:
            return None
        e = self.e
        return e.let("live", first + e.div(row, self.batch) < self.timeline.limit(e.mod(row, self.batch)))

    def prelude(self) -> None:
        super().prelude()
        self.read_out.invariants()

    def after_steps(self, low: Expr, count: Expr) -> None:
        self.read_out.run(low, self.e.let("rows_made", count * self.batch))

    @property
    def work(self) -> int:
        return super().work + self.read_out.work


def sequence_with_read_out(task: Task, plan: StepPlan, shape: Shape) -> Program:
    """The program of a task with what follows it."""
    assert task.after is not None
    graph = task.after.graph
    last = {*(p.var for p in graph.phases[-1].products), *(v for s in graph.phases[-1].statistics for v in s.made),
            *(a.var for a in graph.phases[-1].assigns)}
    passes = pass_plan("read_out", graph, [v for v in graph.outputs if v not in last])
    rows, tiles = shape.chunk * shape.batch, dict[str, Tile]()
    for stage in passes.steps:
        gates = len(stage.rows)
        tiles[stage.name] = Tile(1, 1, 1)
        if gates:
            height, width, pairs, at_once = best_tile(
                task, rows, [gates], row_choices(task.device, rows), column_choices(task.device, gates, task.workload),
                PAIRS if pairs_pay(task) else (0,), gates_at_once(task), True)
            tiles[stage.name] = Tile(height, vectors_of(width, gates), 4 if height * width <= 12 else 2, pairs,
                                     gates=at_once)
    own = Shape(shape.batch, shape.input, shape.hidden, shape.lanes, shape.chunk, tiles, shape.weights, shape.team)
    made = ReadOutSequence(plan, shape, task.traversal, task.after, passes, own)
    function = made.function("worker")
    return Program.running({"worker": function}, made.buffers, (made.call("worker"),))
