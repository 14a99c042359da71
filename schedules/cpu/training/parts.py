"""The parts of a backward pass: an adjoint cut into those that a CPU carries out one after the other.

    gather      the rows that others read: what forward left, and the gradient of y
    replay      what forward computed and did not keep, of all rows of a chunk of time
    recurrence  the adjoint step, from the chunk's last step to its first
    inputs      gradients of products of x, of all rows
    dx          the gradient of x
    outer       gradients of matrices: gradient[j, k] += sum_r value[r, j] * operand[r, k] over the chunk's rows
    finish      gradients of the first states, after the last chunk
    once        gradients of parameter vectors

Rows that take no part in a step have finite values, and gradients of zero.

Outer products go in register tiles of some j and vectors of k. Rows of values and operands are pages apart, so both are
copied first, once for all products: panels (panel, row, values of j or vectors of k of a tile). Each element is of one
task: how many threads there are changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain

from msgspec import structs

from ecornn.analysis import StepGraph
from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.kept import Kept
from ecornn.analysis.liveness import levels, needed
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Phase
from ecornn.program import WORKSPACE, Extent
from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.memory import Place, Stage, StepPlan, pass_plan
from ecornn.schedules.cpu.memory import plan as plan_step
from ecornn.schedules.cpu.tasks import TileTask
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.cpu.worker import SLACK, Worker
from ecornn.workload import Traversal


@dataclass(frozen=True)
class Backward:
    """The plans of an adjoint: passes, of which other parts read what they keep, and that of the recurrence."""

    adjoint: Adjoint
    kept: Kept
    replay: StepPlan
    recurrence: StepPlan
    written: dict[str, tuple[Var, ...]]  # stage of the recurrence -> what it writes for other parts
    inputs: StepPlan
    dx: StepPlan | None  # None where x has no gradient
    finish: StepPlan


def backward_plans(adjoint: Adjoint, kept: Kept) -> Backward:
    recurrence, inputs = adjoint.recurrence, adjoint.inputs
    wanted = [*recurrence.outputs, *(s.value for s in recurrence.sums)]
    wanted += [v for o in recurrence.outer_products for v in (o.value, o.operand)]
    own = _made(recurrence) | {*recurrence.states.values()}  # a gradient may be what the step after left, as it is
    # factors are computed where they are read, from what other parts made; outputs by the stages that make them
    plan = plan_step(replace(recurrence, hoisted_outputs=(), projected=()))
    plan = replace(plan, graph=replace(plan.graph, outputs=()), hoisted=(),
                   parts=tuple(tuple(replace(s, name=f"recurrence_{s.name}") for s in part) for part in plan.parts),
                   level={v: max(at, 0) if at > -3 else at for v, at in plan.level.items()})
    written: dict[str, list[Var]] = {stage.name: [] for stage in plan.steps}
    for var in dict.fromkeys(v for v in wanted if v in own):
        written[plan.maker(var).name].append(var)

    last = inputs.phases[0] if inputs.phases else Phase((), (), ())
    before = replace(inputs, phases=())
    read = [t.operand for p in last.products for t in p.terms] + [v for a in last.assigns for v in variables(a.value)]
    read += [v for o in inputs.outer_products for v in (o.value, o.operand)] + [s.value for s in inputs.sums]
    read += [v for v in (adjoint.dx, *adjoint.dinputs.values()) if v is not None]
    made, dx = _made(before), None
    if adjoint.dx is not None:
        invariants, read_last = needed(inputs.invariants, {v for a in last.assigns for v in variables(a.value)})
        graph = replace(inputs, hoisted=(), hoisted_statistics=(), normalized=(), prologue=(), phases=(last,),
                        invariants=invariants, vectors=tuple(v for v in inputs.vectors if v.var in read_last))
        dx = pass_plan("dx", graph, (adjoint.dx,))
        # its stages keep nothing; it has one even where what it stores is known before
        stages = dx.steps or (Stage("dx_0", 0, (), ()),)
        dx = replace(dx, parts=tuple((replace(stage, keep=()),) for stage in stages))
    finish, ends = adjoint.finish, _made(adjoint.finish)
    return Backward(
        adjoint, kept, pass_plan("replay", kept.replay, kept.replay.outputs), plan,
        {name: tuple(those) for name, those in written.items()},
        pass_plan("inputs", before, tuple(dict.fromkeys(v for v in read if v in made))), dx,
        pass_plan("finish", finish, tuple(dict.fromkeys(
            v for v in (*adjoint.gradients.values(), *(s.value for s in finish.sums)) if v in ends))))


def _made(graph: StepGraph) -> set[Var]:
    return {v for v, at in levels(graph).items() if at > -3} - {*graph.states.values(), *graph.given}


@dataclass(frozen=True)
class Copy:
    """``length`` elements of each row of ``source``, by step and batch row. ``kind``: ``at``, the step's own; ``live``,
    or zeros where a row takes no part; ``before``, those of the step before, at first of ``first``."""

    kind: str
    to: Place
    source: Place
    length: int
    first: Place | None = None


def gather(worker: Worker, low: Expr, rows: Expr, copies: Sequence[Copy]) -> None:
    """Copies ``rows`` rows from step ``low`` on; ``worker`` has the layer's traversal."""
    e = worker.e
    if not copies:
        return
    with worker.tasks("gather", rows) as row:
        b, t = e.let("b", e.mod(row, worker.batch)), e.let("at_step", low + e.div(row, worker.batch))
        at, limit = e.let("source_row", t * worker.batch + b), worker.timeline.limit(b)
        for copy in copies:
            if copy.kind == "before":
                _before(worker, copy, row, b, t, at, limit)
            elif copy.kind == "live" and worker.traversal.lengths:
                live = e.let("live", t < limit)
                with e.when(live):
                    _row(worker, copy, row, copy.source, at)
                with e.when(e.tirx.Not(live)):
                    _row(worker, copy, row, None, at)
            else:
                _row(worker, copy, row, copy.source, at)


def _before(worker: Worker, copy: Copy, row: Expr, b: Expr, t: Expr, at: Expr, limit: Expr) -> None:
    e, reverse = worker.e, worker.traversal.reverse
    after = t + 1
    begins = e.let("begins", after >= limit if reverse else e.tirx.EQ(t, e.index(0)))
    previous = e.let("previous", at + worker.batch if reverse else at - worker.batch)
    fresh = None
    if worker.traversal.resets:
        inside = e.let("inside", after < limit if reverse else t < limit)
        mark = e.tirx.Select(inside, after if reverse else t, e.index(0)) * worker.batch + b
        fresh = e.let("fresh", e.tirx.And(inside, e.load(worker.data["resets"], mark) != e.tirx.const(0, "uint8")))
        with e.when(fresh):
            _row(worker, copy, row, None, at)
    with nullcontext() if fresh is None else e.when(e.tirx.Not(fresh)):
        with e.when(begins):
            _row(worker, copy, row, copy.first, b)
        with e.when(e.tirx.Not(begins)):
            _row(worker, copy, row, copy.source, previous)


def _row(worker: Worker, copy: Copy, row: Expr, source: Place | None, at: Expr) -> None:
    """One row from row ``at`` of ``source``; zeros where that is None."""
    e, lanes = worker.e, worker.e.lanes
    into = e.let("into", copy.to.at(e, row))
    start = None if source is None else e.let("from", source.at(e, at))
    whole, left = divmod(copy.length, lanes)

    def move(unit: Expr, valid: int) -> None:
        if source is None or start is None:
            value = e.splat(0.0)
        elif valid == lanes:
            value = e.vload(source.data, start + unit)
        else:
            value = e.vload_part("rest", source.data, start + unit, e.index(valid))
        e.vstore(copy.to.data, into + unit, value)

    with e.loop("vector", whole) as vector:
        move(vector * lanes, lanes)
    if left:
        move(e.index(whole * lanes), left)


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
        self.leave(row, [(place, o.timeline.masked(live, value, e.splat(0.0))) for place, value in made])

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
        s = self.shape
        self.share_scalars(other)
        self.declare_step(s.padded_batch)
        self.declare_statistics(s.padded_batch)
        for var in dict.fromkeys(v for those in self.written.values() for v in those):
            data = self.buffer(f"made_{len(self.places)}", WORKSPACE, Extent(self.rooms * s.width + SLACK))
            self.places[var] = Place(data, s.width)

    def last(self, name: str) -> Place:
        return Place(self.data[f"{name}_state"], self.shape.width, self.slot(name, self.steps))


TOGETHER = 32  # tiles of j that go through a panel of k: their values stay in the second cache for the next panels
COPIED = 8  # narrow panels that a thread copies side by side: what it reads of a row are whole cache lines


@dataclass(frozen=True)
class Outer:
    """``data[start + j * columns + k]``, j < ``rows``, gets outer products; ``heads``: this is the first head's."""

    data: TirBuffer
    start: int
    rows: int
    columns: int
    value: Place
    operand: Place
    heads: int = 1


@dataclass(frozen=True)
class Panels:
    """Panels of ``width`` elements of a row; those from number ``fewer`` on are one vector of ``lanes`` narrower."""

    data: TirBuffer
    source: Place
    width: int
    count: int  # panels of a head
    stride: int  # elements from one panel to the next
    heads: int
    length: int  # elements of a head in a row of ``source``
    fewer: int
    lanes: int

    def first(self, e: Emitter, panel: Expr) -> Expr:
        """The element of a row that a panel of a head begins with."""
        start = panel * self.width
        return start if self.fewer == self.count else start - e.tirx.Max(panel - self.fewer, e.index(0)) * self.lanes


class OuterProducts:
    """A function's outer products, of chunks of at most ``rooms`` rows, on a CPU of so many vector ``registers``."""

    def __init__(self, worker: Worker, outers: Sequence[Outer], rooms: int, registers: int) -> None:
        self.worker, lanes = worker, worker.e.lanes
        self.height, most = (8, 3) if registers > 16 else (6, 2)  # of j, and vectors of k, of a tile
        self.panels: dict[tuple[Place, int, int], Panels] = {}
        self.work: list[tuple[Outer, Panels, Panels]] = []  # with the panels of j and of k
        for outer in outers:
            # the last vector alone may reach past a row: panels that differ by one vector are as many as are needed
            vectors = -(-outer.columns // lanes)
            panels = -(-vectors // most)
            wide = -(-vectors // panels)
            found, tall = [], -(-outer.rows // self.height)
            for place, width, length, count, fewer in (
                    (outer.value, self.height, outer.rows, tall, tall),
                    (outer.operand, wide * lanes, outer.columns, panels, vectors - (wide - 1) * panels)):
                key = place, width, outer.heads
                if key not in self.panels:
                    # room for the last row's vector, which may be wider than a panel
                    stride = -(-rooms * width // lanes) * lanes + lanes
                    data = worker.buffer(f"panels_{len(self.panels)}", WORKSPACE, Extent(outer.heads * count * stride))
                    self.panels[key] = Panels(data, place, width, count, stride, outer.heads, length, fewer, lanes)
                found.append(self.panels[key])
            self.work.append((outer, found[0], found[1]))

    def add(self, rows: Expr) -> None:
        """Adds the products over ``rows`` rows, after a barrier, of what :meth:`copy` has copied."""
        if not self.work:
            return
        e = self.worker.e
        e.call("ecornn_barrier")
        totals = [outer.heads * -(-values.count // TOGETHER) * operands.count for outer, values, operands in self.work]
        before = 0
        with self.worker.taken("outer", e.index(sum(totals))) as task:
            for some, total in zip(self.work, totals, strict=True):
                with e.when(e.tirx.And(task >= before, task < before + total)):
                    self._outer(*some, rows, e.let("outer_task", task - before))
                before += total

    def copy(self, rows: Expr) -> None:
        """Fills all panels, some in each task. A vector that reaches past its row is written before the next."""
        e, lanes, made = self.worker.e, self.worker.e.lanes, list(self.panels.values())
        together = [COPIED if p.width % lanes else 1 for p in made]
        totals = [-(-p.count * p.heads // some) for p, some in zip(made, together, strict=True)]
        for p, some, tasks in zip(made, together, self.worker.pooled("copy", totals), strict=True):
            with tasks as task:
                first = e.let("first_panel", task * some)
                count = e.let("panels_here", e.tirx.Min(e.index(some), p.count * p.heads - first))
                with e.loop("row", rows) as row, e.loop("panel", count) as number:
                    panel = first + number
                    inside = (p.first(e, panel) if p.heads == 1 else
                              e.div(panel, p.count) * p.length + p.first(e, e.mod(panel, p.count)))
                    source = e.let("source", p.source.at(e, row) + inside)
                    into = e.let("into", panel * p.stride + row * p.width)
                    for at in range(0, p.width, lanes):
                        e.vstore(p.data, into + at, e.vload(p.source.data, source + at))

    def _outer(self, outer: Outer, values: Panels, operands: Panels, rows: Expr, task: Expr) -> None:
        e, blocks = self.worker.e, -(-values.count // TOGETHER)
        each = -(-values.count // blocks)
        panel = e.let("k_panel", e.mod(task, operands.count))
        head, part = None, e.div(task, operands.count)
        if outer.heads > 1:
            head, part = e.let("head", e.div(part, blocks)), e.mod(part, blocks)
        top = e.let("first_tile", part * each)
        for low, high, vectors in ((0, operands.fewer, operands.width // e.lanes),
                                   (operands.fewer, operands.count, operands.width // e.lanes - 1)):
            if low < high:
                with e.when(e.tirx.And(panel >= low, panel < high)), \
                        e.loop("tile", e.tirx.Min(e.index(each), e.index(values.count) - top)) as number:
                    self._tile(outer, values, operands, e.let("j_tile", top + number), panel, rows, head, vectors)

    def _tile(self, outer: Outer, values: Panels, operands: Panels, tile: Expr, panel: Expr, rows: Expr,
              head: Expr | None, vectors: int) -> None:
        e, lanes, height = self.worker.e, self.worker.e.lanes, self.height
        j, k = e.let("j", tile * height), e.let("k", operands.first(e, panel))
        first, left, right = e.index(outer.start), tile, panel
        if head is not None:
            first = e.let("first", first + head * (outer.rows * outer.columns))
            left, right = head * values.count + left, head * operands.count + right
        left, right = e.let("left", left * values.stride), e.let("right", right * operands.stride)
        sums = [[e.local(f"outer_{m}_{n}") for n in range(vectors)] for m in range(height)]
        for m, registers in enumerate(sums):
            start = e.let("start", first + (j + m) * outer.columns + k)
            for n, register in enumerate(registers):
                e.prefetch(outer.data, start + n * lanes)
                e.vstore(register, 0, e.splat(0.0))
        with e.loop("row", rows) as row:
            columns = [e.let("column", e.vload(operands.data, right + row * operands.width
                                               + n * lanes)) for n in range(vectors)]
            for m in range(height):
                value = e.let("value", e.splat(e.load(values.data, left + row * height + m)))
                for n in range(vectors):
                    e.vstore(sums[m][n], 0, e.fma(value, columns[n], e.vload(sums[m][n], 0)))
        inside = e.let("inside", e.tirx.And(j + height <= outer.rows, k + vectors * lanes <= outer.columns))
        with e.when(inside):
            for m in range(height):
                start = e.let("start", first + (j + m) * outer.columns + k)
                for n in range(vectors):
                    at = start + n * lanes
                    e.vstore(outer.data, at, e.vload(outer.data, at) + e.vload(sums[m][n], 0))
        with e.when(e.tirx.Not(inside)):  # row by row, and in part
            edge = e.local("tile", size=height * vectors * lanes)
            for number, register in enumerate(chain(*sums)):
                e.vstore(edge, number * lanes, e.vload(register, 0))
            with e.loop("m", e.tirx.Min(e.index(height), outer.rows - j)) as m:
                for n in range(vectors):
                    at = e.let("at", first + (j + m) * outer.columns + k + n * lanes)
                    valid = e.let("valid", outer.columns - k - n * lanes)
                    total = e.vload_part("before", outer.data, at, valid) + e.vload(edge, (m * vectors + n) * lanes)
                    e.vstore_part("total", outer.data, at, total, valid)
