"""A step graph as stages that threads run between barriers, and where each value lives.

    hoisted projection ┐ once a chunk of steps
    barrier            ┘
    [stage 0] barrier    only where a product reads a value that no product precedes, say f(h)
    stage 1   barrier    phase 1: products, then everything that the later stages need of it
    ...
    stage P   barrier    phase P: products, new states, y

Statistics are computed by row, and so is what follows from them without a product: each row by one thread, through
as many phases as there are, with one barrier behind the last.

Pointwise values of level 0 are computed again by each stage that reads them; values of later
levels are carried in workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ecornn.analysis import Row, Statistic, StepGraph
from ecornn.analysis.graph import variables
from ecornn.schedules.row_sums import parts_of

Var = Any  # tvm.tirx.Var


@dataclass(frozen=True)
class Stage:
    """What threads do between two barriers: products ``rows``, then values to ``keep``.

    ``keep`` are stored in workspace for later stages; ``level`` is that of the rows. A stage ``by_row`` has no
    products: one thread computes ``statistics`` of a row, then, if it ``finishes``, all values of the row.
    """

    name: str
    level: int
    rows: tuple[Row, ...]
    keep: tuple[Var, ...]
    last: bool = False  # computes the new states and y
    statistics: tuple[Statistic, ...] = ()
    by_row: bool = False
    finishes: bool = True


@dataclass(frozen=True)
class Plan:
    """The stages of a step, in the parts that barriers separate.

    ``hoisted`` are those of the hoisted projection. ``definition``: variable -> its expression; ``level``:
    variable -> level as in :mod:`ecornn.analysis.step`; ``doubled``: states kept twice, for even and odd
    steps, because other threads still read the old one; ``barriers``: False where no thread waits for
    another within a chunk.
    """

    graph: StepGraph
    hoisted: tuple[Stage, ...]
    parts: tuple[tuple[Stage, ...], ...]
    definition: dict[Var, Any]
    level: dict[Var, int]
    doubled: tuple[str, ...]
    barriers: bool

    @property
    def steps(self) -> tuple[Stage, ...]:
        """The stages of a step, in order."""
        return tuple(stage for part in self.parts for stage in part)


def plan(graph: StepGraph) -> Plan:
    """Sorts the graph's values into stages."""
    definition: dict[Var, Any] = {}
    level: dict[Var, int] = {v.var: -3 for v in graph.vectors}
    levels = [(-3, (), graph.invariants), (-2, graph.hoisted_rows, graph.hoisted), (-1, (), graph.normalized),
              (0, (), graph.prologue)]
    levels += [(p, phase.rows, phase.assigns) for p, phase in enumerate(graph.phases, 1)]
    if graph.x is not None:
        level[graph.x] = -2
    due = [(-1, graph.hoisted_statistics), *((p, phase.statistics) for p, phase in enumerate(graph.phases, 1))]
    totals = {v: p for p, statistics in due for s in statistics for v in s.made}
    level.update(totals)
    level.update((v, 0) for v in graph.states.values())
    for number, rows, assigns in levels:
        level.update((r.var, number) for r in rows)
        for a in assigns:
            level[a.var], definition[a.var] = number, a.value

    states = set(graph.states.values())
    kept: dict[int, list[Var]] = {p: [] for p in range(len(graph.phases) + 1)}
    for phase in graph.phases:
        for operand in phase.operands:
            if operand not in states and operand not in kept[level[operand]]:
                kept[level[operand]].append(operand)

    last = len(graph.phases)
    early = {v for v in kept[0]} if last else set()
    for number in range(last, 0, -1):
        roots = list(kept[number]) + (list(graph.results.values()) if number == last else [])
        roots += [o for s in graph.phases[number - 1].statistics for o in s.operands]
        seen: set[Var] = set()
        while roots:
            var = roots.pop()
            if var in seen or var in early or var in totals:
                continue
            seen.add(var)
            if 1 <= level[var] < number:
                if var not in kept[level[var]]:
                    kept[level[var]].append(var)
            elif var in definition and level[var] >= 0:
                roots.extend(variables(definition[var]))

    def stage(p: int, by_row: bool) -> Stage:
        phase = graph.phases[p]
        if by_row and phase.rows:
            return Stage(f"rows{p + 1}", p + 1, (), (), statistics=phase.statistics, by_row=True, finishes=False)
        return Stage(f"phase{p + 1}", p + 1, phase.rows, tuple(kept[p + 1]), last=p + 1 == last,
                     statistics=phase.statistics if by_row else (), by_row=by_row)

    parts = [tuple(stage(p, True) for p in part) if isinstance(part, tuple) else (stage(part, False),)
             for part in parts_of(graph) if graph.phases]
    if kept[0] or not parts:
        parts.insert(0, (Stage("prologue", 0, (), tuple(kept[0]), last=not parts),))
    operands = graph.phases[0].operands if len(graph.phases) == 1 else ()
    doubled = tuple(n for n, v in graph.states.items() if v in operands)
    hoisted = [Stage("hoisted", -2, graph.hoisted_rows, tuple(dict.fromkeys(graph.projected)))]
    if graph.hoisted_statistics:
        hoisted.append(Stage("normalized", -1, (), tuple(dict.fromkeys(graph.hoisted_outputs)),
                             statistics=graph.hoisted_statistics, by_row=True))
    return Plan(graph, tuple(hoisted), tuple(parts), definition, level, doubled, barriers=bool(graph.phases))


def groups(rows: tuple[Row, ...]) -> list[tuple[Var | None, list[Row]]]:
    """Rows by operand, in the order of the first row of each."""
    found: list[tuple[Var | None, list[Row]]] = []
    for row in rows:
        for operand, members in found:
            if operand is row.operand or (operand is not None and operand.same_as(row.operand)):
                members.append(row)
                break
        else:
            found.append((row.operand, [row]))
    return found
