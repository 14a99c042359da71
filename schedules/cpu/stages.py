"""A step graph as stages that threads run between barriers, and where each value lives.

    hoisted projection ┐ once a chunk of steps
    barrier            ┘
    [stage 0] barrier    only where a product reads a value that no product precedes, say f(h)
    stage 1   barrier    phase 1: products, then everything that the later stages need of it
    ...
    stage P   barrier    phase P: products, new states, y

Pointwise values of level 0 are computed again by each stage that reads them; values of later
levels are carried in workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ecornn.analysis import Row, StepGraph
from ecornn.analysis.graph import variables

Var = Any  # tvm.tirx.Var


@dataclass(frozen=True)
class Stage:
    """What threads do between two barriers: products ``rows``, then values to ``keep``.

    ``keep`` are stored in workspace for later stages; ``level`` is that of the rows.
    """

    name: str
    level: int
    rows: tuple[Row, ...]
    keep: tuple[Var, ...]
    last: bool = False  # computes the new states and y


@dataclass(frozen=True)
class Plan:
    """The stages of a step.

    ``definition``: variable -> its expression; ``level``: variable -> level as in
    :mod:`ecornn.analysis.step`; ``doubled``: states kept twice, for even and odd steps, because
    other threads still read the old one; ``barriers``: False where no thread waits for another
    within a chunk.
    """

    graph: StepGraph
    hoisted: Stage
    steps: tuple[Stage, ...]
    definition: dict[Var, Any]
    level: dict[Var, int]
    doubled: tuple[str, ...]
    barriers: bool


def plan(graph: StepGraph) -> Plan:
    """Sorts the graph's values into stages."""
    definition: dict[Var, Any] = {}
    level: dict[Var, int] = {v.var: -2 for v in graph.vectors}
    levels = [(-2, (), graph.invariants), (-1, graph.hoisted_rows, graph.hoisted), (0, (), graph.prologue)]
    levels += [(p, phase.rows, phase.assigns) for p, phase in enumerate(graph.phases, 1)]
    if graph.x is not None:
        level[graph.x] = -1
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
        seen: set[Var] = set()
        while roots:
            var = roots.pop()
            if var in seen or var in early:
                continue
            seen.add(var)
            if 1 <= level[var] < number:
                if var not in kept[level[var]]:
                    kept[level[var]].append(var)
            elif var in definition and level[var] >= 0:
                roots.extend(variables(definition[var]))

    steps = [Stage(f"phase{p}", p, phase.rows, tuple(kept[p]), last=p == last)
             for p, phase in enumerate(graph.phases, 1)]
    if kept[0] or not steps:
        steps.insert(0, Stage("prologue", 0, (), tuple(kept[0]), last=not steps))
    operands = graph.phases[0].operands if len(graph.phases) == 1 else ()
    doubled = tuple(n for n, v in graph.states.items() if v in operands)
    return Plan(graph, Stage("hoisted", -1, graph.hoisted_rows, graph.hoisted_outputs), tuple(steps),
                definition, level, doubled, barriers=bool(graph.phases))


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
