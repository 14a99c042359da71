"""Training on a CPU: a forward pass that keeps what the backward pass reads, and that pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.kept import Kept, kept
from ecornn.program import BACKWARD, FORWARD, Buffer, Entry, Parallel, Program
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, Var
from ecornn.schedules.cpu import matrix
from ecornn.schedules.cpu.memory import Stage, StepPlan
from ecornn.schedules.cpu.memory import plan as plan_step
from ecornn.schedules.cpu.sequence import Sequence
from ecornn.schedules.cpu.tasks import TileTask
from ecornn.schedules.cpu.tiling import Shape, Tile, beyond_l2, head_size, head_vectors, matrix_tile, tile_for
from ecornn.schedules.cpu.training.backward import BackwardWorker
from ecornn.schedules.cpu.training.parts import Backward, backward_plans
from ecornn.schedules.keeping import Stored
from ecornn.schedules.rates import cpu_rates
from ecornn.workload import Traversal

CHUNK_ROWS = 256  # rows of the batch in a chunk of the backward pass, about


def training_program(task: Task, shape: Shape) -> Program:
    """The program of a layer with the entries ``run``, ``forward`` and ``backward``."""
    assert task.traversal.keep is not None
    plan = plan_step(task.graph)
    run = Sequence(plan, shape, task.traversal).program()
    made = adjoint(task.graph, task.workload.hidden, starts_anew=task.traversal.resets)
    plans = backward_plans(made, kept(made, task.traversal.keep))
    keeping = KeepingSequence(plan, shape, task.traversal, plans.kept)
    backward = BackwardWorker(task, plans, *backward_shapes(task, plans, shape))
    functions = {**run.functions, "forward_worker": keeping.function("forward_worker"),
                 "backward_worker": backward.function("backward_worker")}
    forward_call, backward_call = keeping.call("forward_worker"), Parallel("backward_worker", work=backward.work)
    entries = {**run.entries, FORWARD: Entry((forward_call,), tuple(b.name for b in keeping.buffers)),
               BACKWARD: Entry((backward_call,), tuple(b.name for b in backward.buffers))}
    buffers: dict[str, Buffer] = {}
    for b in (*run.buffers, *keeping.buffers, *backward.buffers):
        known = buffers.setdefault(b.name, b)
        assert known == b, f"two buffers {b.name}"
    return replace(run, functions=functions, buffers=tuple(buffers.values()), entries=entries)


def backward_shapes(task: Task, plans: Backward, forward: Shape) -> tuple[Shape, Shape]:
    work = task.workload
    chunk, none = max(1, CHUNK_ROWS // work.batch), {"none": Tile(1, 1, 1)}

    def tiles(plan: StepPlan, rows: int, of: Task, every_step: bool) -> dict[str, Tile]:
        return {stage.name: tile(of, rows, len(stage.rows), every_step) for stage in plan.steps}

    def tile(of: Task, rows: int, gates: int, every_step: bool) -> Tile:
        head = head_vectors(task) if of is task else 0
        if by_matrix and gates:
            height, columns, at_once = matrix_tile(rows, gates)
            return Tile(height, columns // gates, 1, gates=at_once, matrix=True)
        made = tile_for(of, rows, gates, hoisted=not every_step, head=head, exact=True)
        ahead = cpu_rates(of.device).slow_l3 and every_step and beyond_l2(task) and rows > made.rows and gates > 0
        return replace(made, ahead=ahead)

    # heads are transposed as whole words
    whole, weights = chunk * work.batch, forward.real if head_size(task) else forward.weights
    terms = [term for plan in (plans.replay, plans.recurrence, plans.inputs, plans.dx) if plan is not None
             for stage in plan.steps for row in stage.rows for term in row.terms]
    by_matrix = forward.by_matrix and not head_size(task) and all((t.columns or 0) % matrix.DEPTH == 0 for t in terms)
    made = {**tiles(plans.replay, whole, task, False), **tiles(plans.recurrence, work.batch, task, True),
            **tiles(plans.inputs, whole, task, False), **tiles(plans.finish, work.batch, task, False)}
    shape = replace(forward, chunk=chunk, tiles=made or none, weights=weights, team=0)
    across = replace(task, workload=structs.replace(work, hidden=task.own_input, input=work.hidden))
    dx = {} if plans.dx is None else tiles(plans.dx, whole, across, False)
    return shape, Shape(work.batch, work.hidden, task.own_input, forward.lanes, chunk, dx or none, weights, work.dtype)


class KeepingTask(TileTask):
    """A tile that stores kept values where it makes them, and kept states where it stores y."""

    o: KeepingSequence

    def compute(self) -> None:
        made = {name: self.value(var) for name, var in self.o.written.get(self.stage.name, {}).items()}
        super().compute()
        if self.stage.level < 0:  # of all steps of the chunk
            self.store(self.first * self.o.batch + self.at_row, self.rows, made)
        elif made:
            self.store(self.o.timeline.at(self.t) * self.o.batch + self.at_row, self.o.batch, made)

    def store(self, row: Expr, rows: Expr, values: Mapping[str, Expr]) -> None:
        """Stores values at a ``row`` of all steps, if this one is among the first ``rows`` of the stage."""
        e, hidden = self.e, self.s.hidden
        if not values:
            return
        at = e.let("kept_at", row * hidden + self.unit)
        valid = e.let("kept", e.tirx.Select(self.at_row < rows, hidden - self.unit, e.index(0)))
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
        return self.plan.maker(var)

    def declare(self) -> None:
        super().declare()
        for buffer in Stored(self.states, self.values).buffers(self.shape.batch, self.shape.hidden, self.shape.dtype):
            self.add(buffer)
