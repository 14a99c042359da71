"""The place of everything that a step reads and writes, in memory, and in a sequence's time, with the batch rows that
take part in a step: what the tasks of a thread know of their function.

Rules of time are those of :mod:`ecornn.schedules.timeline`; a vector is of one row, so a predicate is one scalar."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.analysis.step import Term
from ecornn.program import Buffer
from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.product import Integers, Paired
from ecornn.schedules.cpu.stages import Stage, StepPlan
from ecornn.schedules.cpu.tiling import Shape
from ecornn.workload import Traversal

SCALAR = 8  # multiply-adds that take as long as an assignment of the step


@dataclass(frozen=True)
class Span:
    """A stage's rows: ``rows`` of x from the chunk's ``first`` step on (hoisted), or of the batch in step ``t``."""

    first: Expr
    t: Expr
    rows: Expr


@dataclass(frozen=True)
class Place:
    """The place of a value of each row, its units side by side: from ``start`` on, rows ``stride`` elements apart.
    ``units``: units of a row in an array of the caller, which has the rows of all steps, not of a chunk: nothing beyond
    them is read; 0 for workspace, where there is room behind a row, and behind the last one."""

    data: TirBuffer
    stride: int
    start: Expr | int = 0
    units: int = 0

    def at(self, e: Emitter, row: Expr) -> Expr:
        return e.index(self.start) + row * self.stride  # the index of the row's first unit


class Memory:
    """Buffers by name, and the place of each value of the step in them."""

    timeline: Timeline
    batch: Expr  # B of the call

    def __init__(self, plan: StepPlan, shape: Shape, traversal: Traversal, prefix: str = "",
                 e: Emitter | None = None) -> None:
        """``prefix``: of the names of its own buffers, where a function ``e`` has several parts."""
        self.plan, self.shape, self.graph, self.traversal = plan, shape, plan.graph, traversal
        self.prefix, self.e = prefix, e or Emitter(shape.lanes, shape.real)
        self.buffers: list[Buffer] = []
        self.data: dict[str, TirBuffer] = {}  # buffer name, without the prefix -> its elements
        self.integers: dict[tuple[str, int], Integers] = {}  # (stage, group of rows) -> its operand as integers
        self.paired: dict[tuple[str, int], Paired] = {}  # ... as copies for products of pairs
        self.aliases: dict[str, str] = {}  # further pointer parameters -> their buffer
        self.given: dict[Var, Place] = {}  # what other parts of the function, or its caller, made
        self.kept: dict[Var, TirBuffer] = {}  # value carried between stages -> its buffer
        self.place = {v: i for i, v in enumerate(self.graph.hoisted_outputs)}
        self.projected = {v: i for i, v in enumerate(self.graph.projected)}  # where statistics of them are due
        self.totals = {v: i for i, v in enumerate(v for s in self.graph.statistics for v in s.made)}
        self.hoisted_totals = {v: i for i, v in enumerate(v for s in self.graph.hoisted_statistics for v in s.made)}
        self.row = {v.var: i for i, v in enumerate(self.graph.vectors)}
        self.row.update((a.var, i) for i, a in enumerate(self.graph.invariants))
        self.vectors = {v.var for v in self.graph.vectors}
        self.numbers = {v.var for v in self.graph.vectors if v.numbers}

    def every_step(self, stage: Stage) -> bool:
        """True if a stage works on the batch's rows in each step; else it works on all rows of a chunk."""
        return stage.level >= 0

    def row_of_chunk(self, first: Expr, t: Expr, row: Expr) -> Expr:
        """The row of the chunk from step ``first`` on that is a batch row at step ``t``."""
        return (self.timeline.at(t) - first) * self.batch + row

    def live_row(self, first: Expr, row: Expr) -> Expr | None:
        """True if a row of the chunk takes part in its step; None if all do."""
        if not self.traversal.lengths:
            return None
        e = self.e
        return e.let("live", first + e.div(row, self.batch) < self.timeline.limit(e.mod(row, self.batch)))

    def length(self, operand: Var | None) -> int:
        return self.shape.input if operand is None else self.shape.hidden  # values of a row of an operand

    def depth(self, term: Term) -> int:
        """Values that a unit's weights multiply: a row of the operand, or its head's part of one."""
        return term.columns or self.length(term.operand) // term.heads

    @property
    def x_stride(self) -> int:
        """Values of a row of the caller's x: those of x itself, and the cell's inputs."""
        return self.shape.input + len(self.graph.inputs) * self.shape.hidden

    @property
    def work(self) -> int:
        products = (p for stage in (*self.plan.hoisted, *self.plan.steps) for p in stage.rows)
        hidden = self.shape.hidden
        multiplied = sum(self.depth(term) * (term.rows or hidden) for product in products for term in product.terms)
        return multiplied + hidden * SCALAR * len(self.plan.definition)

    def slot(self, state: str, t: Expr) -> Expr:
        """The index in its workspace at which a state before step ``t`` starts."""
        if state not in self.plan.doubled:
            return self.e.index(0)
        return self.e.mod(t, 2) * self.e.index(self.shape.padded_batch * self.shape.width)

    def operand(self, operand: Var | None, first: Expr, t: Expr) -> tuple[TirBuffer, Expr, int]:
        """Elements of an operand, where its first row starts, and how far its rows are apart."""
        e, s = self.e, self.shape
        if operand is None:
            return self.data["x"], e.let("x_first", first * self.batch * self.x_stride), self.x_stride
        if operand in self.kept:
            return self.kept[operand], e.index(0), s.width
        if operand in self.given:
            place = self.given[operand]
            return place.data, place.at(e, e.index(0)), place.stride
        name = next(n for n, v in self.graph.states.items() if v.same_as(operand))
        return self.data[f"{name}_state"], self.slot(name, t), s.width


class Timeline:
    """Writes the predicates of a traversal, if it has any; ``data`` has ``lengths`` and ``resets`` if it needs them."""

    def __init__(self, e: Emitter, traversal: Traversal, data: dict[str, TirBuffer], steps: Expr, batch: Expr) -> None:
        self.e, self.traversal, self.data, self.steps, self.batch = e, traversal, data, steps, batch
        # The first step of x at which a layer may start anew; an adjoint goes the other way.
        self.first_start = int(traversal.reverse != traversal.backward)

    def at(self, t: Expr) -> Expr:
        """The step of x and y that the loop is at."""
        return self.steps - self.e.index(1) - t if self.traversal.reverse else t

    def limit(self, row: Expr) -> Expr:
        """The number of steps that a row takes part in; ``row`` may be padding."""
        e = self.e
        if not self.traversal.lengths:
            return self.steps
        last = e.tirx.Min(row, self.batch - 1)
        return e.let("limit", e.tirx.Min(e.tirx.Cast("int64", e.load(self.data["lengths"], last)), self.steps))

    def live(self, t: Expr, row: Expr) -> Expr | None:
        """True if a row takes part in step ``t``; None: always."""
        return self.e.let("live", self.at(t) < self.limit(row)) if self.traversal.lengths else None

    def any_live(self, t: Expr, first: Expr, rows: int) -> Expr | None:
        """True if one of ``rows`` rows, from ``first`` on, takes part in step ``t``; None: always."""
        if not self.traversal.lengths:
            return None
        most = self.limit(first)
        for m in range(1, rows):
            most = self.e.tirx.Max(most, self.limit(first + self.e.index(m)))
        return self.at(t) < most

    def masked(self, live: Expr | None, value: Expr, otherwise: Expr) -> Expr:
        """The vector ``value`` where ``live`` holds."""
        e = self.e
        return value if live is None else e.let("masked", e.tirx.Select(e.splat(live), value, otherwise))

    def started(self, t: Expr, row: Expr, values: dict[str, Expr]) -> dict[str, Expr]:
        """States before step ``t``, zero where a new sequence starts there; ``t`` may be T."""
        if not self.traversal.resets:
            return values
        e = self.e
        step = e.let("start", self.at(t) + 1 if self.traversal.reverse else t)
        inside = e.let("inside", e.tirx.And(step >= self.first_start, step < self.limit(row)))
        last = e.tirx.Min(row, self.batch - 1)
        mark = e.let("mark", e.tirx.Select(inside, step, e.index(0)) * self.batch + last)
        fresh = e.let("fresh", e.tirx.And(inside, e.load(self.data["resets"], mark) != e.tirx.const(0, "uint8")))
        return {n: self.masked(fresh, e.splat(0.0), v) for n, v in values.items()}
