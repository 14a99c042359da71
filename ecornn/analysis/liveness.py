"""The phases that make and read each value of a step, and so the values that live across exchanges, for all schedules.

Phases are numbered from 0, as in ``StepGraph.phases``; a step without exchanges has one, which makes the new states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Assign, Level, Phase, StepGraph

if TYPE_CHECKING:
    from tvm.tirx import Var


def phase_count(graph: StepGraph) -> int:
    """Phases of a step, one where it has no exchange at all."""
    return max(1, len(graph.phases))


def assigns_of(graph: StepGraph, p: int) -> tuple[Assign, ...]:
    return graph.phases[p].assigns if graph.phases else ()


def levels(graph: StepGraph) -> dict[Var, int]:
    """Every variable of the step -> its level, as in :mod:`ecornn.analysis.step`."""
    leaves = [(Level.INVARIANT, [v.var for v in graph.vectors]), (Level.STATE, graph.states.values()),
              (Level.INPUT, [*([] if graph.x is None else [graph.x]), *graph.inputs.values()]),
              (Level.NORMALIZED, [v for s in graph.hoisted_statistics for v in s.made])]
    parts = [(Level.INVARIANT, Phase.of((), graph.invariants)),
             (Level.INPUT, Phase.of(graph.hoisted_products, graph.hoisted)),
             (Level.NORMALIZED, Phase.of((), graph.normalized)), (Level.STATE, Phase.of((), graph.prologue)),
             *enumerate(graph.phases, 1)]
    level_of = {v: level for level, those in leaves for v in those}
    level_of |= {v: level for level, phase in parts for v in phase.made}
    return level_of | {v: p + 1 for v, p in statistics(graph).items()}


def statistics(graph: StepGraph) -> dict[Var, int]:
    """Variables of statistics -> the phase that they belong to."""
    return {v: p for p, phase in enumerate(graph.phases) for s in phase.statistics for v in s.made}


def reads(graph: StepGraph, p: int) -> list[Var]:
    """Variables that phase ``p`` reads, in order, each once; in the last phase the new states and outputs, too.
    Operands of its products are exchanged, and not among them; those of the next phase's products that were known
    before are: products of one level are several phases if their matrices have several shapes."""
    read = [v for a in assigns_of(graph, p) for v in variables(a.value)]
    read += [v for phase in graph.phases[p:p + 1] for s in phase.statistics for v in s.operands]
    early = {v for phase in graph.phases[:p] for v in phase.made}
    early |= {v for v, made in statistics(graph).items() if made < p}
    read += [v for phase in graph.phases[p + 1:p + 2] for v in phase.operands if v in early]
    if p == phase_count(graph) - 1:
        read += [*graph.results.values(), *graph.outputs]
    return list(dict.fromkeys(read))


def carried(graph: StepGraph) -> dict[Var, int]:
    """Scalars, not of a row as statistics, that a phase computes and a later one reads -> the phase that computes."""
    phase_of: dict[Var, int] = {}
    for p, phase in enumerate(graph.phases):
        made = {*phase.made}
        phase_of |= {v: p for later in range(p + 1, len(graph.phases)) for v in reads(graph, later) if v in made}
    return phase_of


def opening(graph: StepGraph) -> tuple[Assign, ...]:
    """The assignments of the prologue that states and parameters determine: they are known before the step's inputs."""
    unknown, known = {*graph.hoisted_outputs, *graph.row_inputs}, []
    for a in graph.prologue:
        if unknown.isdisjoint(variables(a.value)):
            known.append(a)
        else:
            unknown.add(a.var)
    return tuple(known)


@dataclass(frozen=True)
class Urgent:
    """Assignments that operands of the next step's first product need, and those that can wait until these are sent."""

    opening: tuple[Assign, ...]  # the assignments of `before_first` that the operands need
    states: tuple[str, ...]  # states that are known after `first`, the operands' among them
    first: tuple[Assign, ...]  # the assignments after this step's last exchange, in two parts
    late: tuple[Assign, ...]


def urgent(graph: StepGraph) -> Urgent:
    """:class:`Urgent` of a step that has a product."""
    start, wanted = needed(before_first(graph), {*graph.product_phases[0].operands})
    last = graph.phases[-1].assigns
    first, _ = needed(last, {graph.results[name] for name, var in graph.states.items() if var in wanted})
    soon = {a.var for a in first}
    late = tuple(a for a in last if a.var not in soon)
    later = {a.var for a in late}
    return Urgent(start, tuple(n for n, var in graph.results.items() if var not in later), first, late)


def needed(assigns: Iterable[Assign], wanted: set[Var]) -> tuple[tuple[Assign, ...], set[Var]]:
    """The ``assigns`` that ``wanted`` depends on, in order, and ``wanted`` with the variables that they read."""
    used, wanted = [], set(wanted)
    for a in reversed(tuple(assigns)):
        if a.var in wanted:
            used.append(a)
            wanted.update(variables(a.value))
    return tuple(reversed(used)), wanted


def late_operands(graph: StepGraph) -> tuple[Var, ...]:
    """Operands of a step's first exchange that are its inputs, or need them beside states and parameters."""
    late = {a.var for a in graph.prologue} - {a.var for a in opening(graph)} | {*graph.hoisted_outputs}
    return tuple(o for phase in graph.phases[:1] for o in phase.operands if o in late)


def before_first(graph: StepGraph) -> tuple[Assign, ...]:
    """The assignments of the prologue for the first exchange; they read inputs for :func:`late_operands`."""
    return graph.prologue if late_operands(graph) else opening(graph)


def reads_of(graph: StepGraph) -> dict[Var, list[Var]]:
    """Variable -> the variables that it is computed from, in order."""
    read = {a.var: variables(a.value) for a in graph.every_assign}
    read |= {q.var: [t.operand for t in q.terms if t.operand is not None] for q in graph.every_product}
    return read | {v: [*s.operands] if v is s.total else [s.total, *s.operands]
                   for s in graph.every_statistic for v in s.made}


def closure(read: Mapping[Var, Iterable[Var]], wanted: Iterable[Var],
            known: Set[Var] = frozenset()) -> tuple[set[Var], dict[Var, None]]:
    """All that must be computed for ``wanted``, and the ``known`` ones that it needs, in the order of going back."""
    used: set[Var] = set()
    given: dict[Var, None] = {}
    waiting = list(wanted)
    while waiting:
        var = waiting.pop()
        if var in known:
            given[var] = None
        elif var not in used:
            used.add(var)
            waiting += read.get(var, ())
    return used, given
