"""A step graph as stages that threads run between barriers, and where each value lives.

    hoisted projection ┐ once a chunk of steps
    barrier            ┘
    [stage 0] barrier    only where a product reads a value that no product precedes, say f(h)
    stage 1   barrier    phase 1: products, then everything that the later stages need of it
    ...
    stage P   barrier    phase P: products, new states, y

Statistics are computed by row, and so is what follows from them without a product: each row by one thread, through
as many phases as there are, with one barrier behind the last. Pointwise values of level 0 are computed again by each
stage that reads them; later ones are carried in workspace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ecornn.analysis import Product, Statistic, StepGraph
from ecornn.analysis.liveness import carried, levels
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Assign, Term
from ecornn.schedules.builder import Expr, Var
from ecornn.schedules.scalars.row_sums import parts_of


@dataclass(frozen=True)
class Stage:
    """The work of threads between two barriers: products ``rows``, then values to ``keep``. A stage ``by_row`` has no
    products: one thread computes ``statistics`` of a row, then, if it ``finishes``, all values of the row."""

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
    """Products of a stage whose terms have the same operands. Each term is a product in the same registers, of weights
    of its own; ``first`` is the number of the first one in the stage."""

    first: int
    products: tuple[Product, ...]

    @property
    def parts(self) -> list[tuple[Var | None, tuple[Term, ...]]]:
        """Each operand, and the terms that multiply it, one of each product."""
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
