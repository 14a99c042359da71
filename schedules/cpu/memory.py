"""A step graph as stages that threads run between barriers, and where each value lives.

    hoisted projection ┐ once a chunk of steps
    barrier            ┘
    [stage 0] barrier    only where a product reads a value that no product precedes, say f(h)
    stage 1   barrier    phase 1: products, then everything that the later stages need of it
    ...
    stage P   barrier    phase P: products, new states, y

Statistics, and what follows from them without a product, are computed by row: each row by one thread, through as many
phases as there are, with one barrier behind the last. Pointwise values of level 0 are computed again by each stage that
reads them; later ones are carried in workspace. A vector is of one row, so predicates of time are scalars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ecornn.analysis import Product, Statistic, StepGraph
from ecornn.analysis.liveness import carried, levels
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Assign, Term
from ecornn.program import Buffer
from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.product import Integers, Paired
from ecornn.schedules.cpu.tiling import Shape
from ecornn.schedules.scalars.row_sums import parts_of
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
    """Rows of a value, from ``start`` on, ``stride`` elements apart. ``units``: of a row in an array of the caller,
    beyond which nothing is read; 0 for workspace, where there is room behind each row."""

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
        self.prefix, self.e = prefix, e or Emitter(shape.lanes, shape.real, shape.narrow)
        self.buffers: list[Buffer] = []
        self.data: dict[str, TirBuffer] = {}  # buffer name, without the prefix -> its elements
        self.integers: dict[tuple[str, int], Integers] = {}  # (stage, group of rows) -> its operand as integers
        self.paired: dict[tuple[str, int], Paired] = {}  # ... as copies for products of pairs
        # (stage, operand) -> its rows in another data type, and how far they are apart
        self.copied: dict[tuple[str, Var | None], tuple[TirBuffer, int]] = {}
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


@dataclass(frozen=True)
class Stage:
    """Work between two barriers: products; or ``by_row`` statistics and, if it ``finishes``, all values of a row."""

    name: str
    level: int  # of the rows
    rows: tuple[Product, ...]
    keep: tuple[Var, ...]  # stored in workspace for later stages
    last: bool = False  # computes the new states and y
    statistics: tuple[Statistic, ...] = ()
    by_row: bool = False
    finishes: bool = True


@dataclass(frozen=True)
class StepPlan:
    """The stages of a step, in the parts that barriers separate."""

    graph: StepGraph
    hoisted: tuple[Stage, ...]  # of the hoisted projection
    parts: tuple[tuple[Stage, ...], ...]
    definition: dict[Var, Expr]  # variable -> its expression
    level: dict[Var, int]  # variable -> level as in :mod:`ecornn.analysis.step`
    doubled: tuple[str, ...]  # states kept twice, for even and odd steps: other threads still read the old one
    barriers: bool  # False where no thread waits for another within a chunk

    def maker(self, var: Var) -> Stage:
        """The first stage of a step that has the value for all units: a row's statistics are left to the one behind."""
        return next((s for s in self.steps if s.level >= self.level[var] and s.finishes), self.steps[-1])

    @property
    def steps(self) -> tuple[Stage, ...]:
        return tuple(stage for part in self.parts for stage in part)  # the stages of a step, in order


def plan(graph: StepGraph) -> StepPlan:
    parts = (graph.invariants, graph.hoisted, graph.normalized, graph.prologue, *(p.assigns for p in graph.phases))
    definition = {a.var: a.value for assigns in parts for a in assigns}
    level, states, last = levels(graph), set(graph.states.values()), len(graph.phases)
    kept: dict[int, list[Var]] = {p: [] for p in range(last + 1)}  # in the order of the workspace; any would do
    made = [product.var for phase in graph.phases for product in reversed(phase.products)]
    made += [a.var for phase in graph.phases for a in phase.assigns]
    later, multiplied = carried(graph), (o for phase in graph.phases for o in phase.operands if o not in states)
    for var in dict.fromkeys((*multiplied, *(v for v in made if v in later))):
        kept[max(0, level.get(var, 0))].append(var)  # of an adjoint also gradients of outputs, and what they determine

    def stage(p: int, by_row: bool) -> Stage:
        phase = graph.phases[p]
        if by_row and phase.products:
            return Stage(f"rows{p + 1}", p + 1, (), (), statistics=phase.statistics, by_row=True, finishes=False)
        return Stage(f"phase{p + 1}", p + 1, phase.products, tuple(kept[p + 1]), last=p + 1 == last,
                     statistics=phase.statistics if by_row else (), by_row=by_row)

    stages = [tuple(stage(p, True) for p in part) if isinstance(part, tuple) else (stage(part, False),)
              for part in parts_of(graph) if graph.phases]
    if kept[0] or not stages:
        stages.insert(0, (Stage("prologue", 0, (), tuple(kept[0]), last=not stages),))
    operands = graph.phases[-1].operands if graph.phases else ()  # before it no state is written
    doubled = tuple(n for n, v in graph.states.items() if v in operands)
    hoisted = [Stage("hoisted", -2, graph.hoisted_products, tuple(dict.fromkeys(graph.projected)))]
    if graph.hoisted_statistics:
        hoisted.append(Stage("normalized", -1, (), tuple(dict.fromkeys(graph.hoisted_outputs)),
                             statistics=graph.hoisted_statistics, by_row=True))
    return StepPlan(graph, tuple(hoisted), tuple(stages), definition, level, doubled, barriers=bool(graph.phases))


def pass_plan(name: str, graph: StepGraph, wanted: Iterable[Var]) -> StepPlan:
    """The stages of a graph without states, which go over all rows one after the other; ``wanted`` is kept."""
    parts: list[tuple[tuple[Product, ...], tuple[Statistic, ...], tuple[Assign, ...]]] = [
        (graph.hoisted_products, (), graph.hoisted),
                          ((), graph.hoisted_statistics, graph.normalized), ((), (), graph.prologue)]
    parts += [(p.products, p.statistics, p.assigns) for p in graph.phases]
    made = [(*(p.var for p in products), *(v for s in statistics for v in s.made), *(a.var for a in assigns))
            for products, statistics, assigns in parts]
    level: dict[Var, int] = dict.fromkeys((v for v, at in levels(graph).items() if at == -3), -3)
    level.update((v, number) for number, those in enumerate(made) for v in those)
    rows = (*graph.given, *graph.inputs.values(), *([graph.x] if graph.x is not None else []))
    level.update((v, 0) for v in rows if v not in level)
    later = set(wanted)
    for number, (products, statistics, assigns) in enumerate(parts):
        read = [t.operand for p in products for t in p.terms] + [v for s in statistics for v in s.operands]
        read += [v for a in assigns for v in variables(a.value)]
        later.update(v for v in read if level.get(v, number) < number)
    stages = []
    for number, (products, statistics, _) in enumerate(parts):
        # a statistic is one number a row; it is kept as such, and for all units where it is wanted
        totals = {v for s in statistics for v in s.made} - set(wanted)
        keep = tuple(v for v in made[number] if v in later and v not in totals)
        if statistics:
            stages.append(Stage(f"{name}_rows{number}", number, (), () if products else keep, statistics=statistics,
                                by_row=True, finishes=not products))
        if products or (keep and not statistics):
            stages.append(Stage(f"{name}_{number}", number, products, keep))
    definition = {a.var: a.value for assigns in (graph.invariants, *(p[2] for p in parts)) for a in assigns}
    return StepPlan(graph, (), tuple((stage,) for stage in stages), definition, level, (), barriers=True)


@dataclass(frozen=True)
class Group:
    """Products of a stage with the same operands, in the same registers; ``first``: the number of the first one."""

    first: int
    products: tuple[Product, ...]

    @property
    def parts(self) -> list[tuple[Var | None, tuple[Term, ...]]]:
        return [(terms[0].operand, terms) for terms in zip(*(p.terms for p in self.products), strict=True)]


def groups(rows: tuple[Product, ...], most: int = 0) -> list[Group]:
    """Products by their operands, in the order of the first product of each; no more than ``most`` in one (0: all)."""
    found: dict[tuple, list[Product]] = {}
    for row in rows:
        alike = tuple((t.operand, t.transposed, t.heads, t.rows, t.columns) for t in row.terms)
        found.setdefault(alike, []).append(row)
    made, first = [], 0
    for members in found.values():
        for start in range(0, len(members), most or len(members)):
            made.append(Group(first, tuple(members[start:start + (most or len(members))])))
            first += len(members[0].terms)
    return made


def operands(rows: tuple[Product, ...]) -> list[tuple[int, Term]]:
    """The number of each operand of products, none of which has heads, and a term of it."""
    return [(number, terms[0]) for group in groups(rows) for number, (_, terms) in enumerate(group.parts, group.first)]
