"""The states of a step by how their new values depend on their own old ones, which tells how a layer may go through
time.

States that depend on each other are one group; groups are in order, each behind those that it depends on. Where the new
values of a group are an affine map of its old ones, ``s' = M s + c``, with ``M`` and ``c`` of x, parameters and states
of groups before it, the maps of neighbouring steps compose to one, ``M2 (M1 s + c1) + c2``: parts of the time of a
sequence can be carried out side by side (Blelloch 1990, Prefix Sums and Their Applications)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ecornn.analysis.liveness import closure, reads_of
from ecornn.analysis.operators import CUSTOM, key_of, number, variable, where
from ecornn.analysis.scalar import children, is_constant, is_leaf, variables
from ecornn.analysis.step import Assign, Phase, StepGraph

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var

MOST = 16  # entries of a map that is composed, at most: registers of a thread


class Past(Enum):
    """The dependence of a group's new values on its old ones."""

    UNREAD = "unread"  # no step reads the old value
    AFFINE = "affine"  # of each unit's own old values
    NONLINEAR = "nonlinear"  # of each unit's own old values, too
    COUPLED = "coupled"  # of other units' old values, through products or statistics


@dataclass(frozen=True)
class Group:
    """States that depend on each other, or one alone."""

    states: tuple[str, ...]
    past: Past


@dataclass(frozen=True)
class Affine:
    """The map of one step: ``new[n] = sum_o matrix[n, o] * old[o] + rest[n]`` for states by their names. Coefficients
    are constants, or variables that ``assigns`` computes of those of the step; ones that are missing are zero."""

    states: tuple[str, ...]
    assigns: tuple[Assign, ...]
    matrix: Mapping[tuple[str, str], Expr]
    rest: Mapping[str, Expr]

    @property
    def entries(self) -> tuple[tuple[str, str], ...]:
        """The entries of a matrix that may be other than zero if it is the product of any number of steps' matrices,
        none among them: (new, old), in the order of the states."""
        found = {*self.matrix, *((s, s) for s in self.states)}
        for through in self.states:
            found |= {(n, o) for n, k in found for k2, o in found if k == k2 == through}
        return tuple((n, o) for n in self.states for o in self.states if (n, o) in found)


Form = dict["Var | None", "Expr"]  # leaf of a state -> its coefficient; None -> what is added


def groups_of(graph: StepGraph) -> tuple[Group, ...]:
    """All states of a step in groups, each behind those that it depends on."""
    reach, found, taken = _reached(graph), list[Group](), set[str]()
    for name in sorted(graph.states, key=lambda n: len(reach[n])):  # what a group depends on reaches less than it does
        if name not in taken:
            own = tuple(n for n in graph.states if name in reach[n] and n in reach[name])
            taken.update(own)
            found.append(Group(own, _past(graph, own)))
    return tuple(found)


def maps_of(graph: StepGraph) -> tuple[Affine, ...] | None:
    """The maps by which all states that a later step reads go through time, one behind the other: coefficients of each
    may read the states of those before it. As few as possible, of ``MOST`` entries each; None where a group is no such
    map, or is larger."""
    found, last = list[Affine](), None
    for group in groups_of(graph):
        if group.past is Past.UNREAD:
            continue
        if group.past is not Past.AFFINE:
            return None
        states = {*(last.states if last else ()), *group.states}
        wider = affine_map(graph, [n for n in graph.states if n in states])
        if last and (wider is None or len(wider.entries) > MOST):
            found.append(last)
            wider = affine_map(graph, group.states)
        if wider is None or len(wider.entries) > MOST:
            return None
        last = wider
    return (*found, last) if last else tuple(found)


def affine_map(graph: StepGraph, states: Sequence[str]) -> Affine | None:
    """The new values of ``states`` as an affine map of their old ones; None where they are none, unit by unit."""
    forms = _Forms(graph, states)
    matrix, rest = dict[tuple[str, str], Any](), dict[str, Any]()
    for name in states:
        if (form := forms.of(graph.results[name])) is None:
            return None
        matrix |= {(name, old): form[graph.states[old]] for old in states if graph.states[old] in form}
        if None in form:
            rest[name] = form[None]
    return Affine(tuple(states), tuple(forms.assigns), matrix, rest)


def _reached(graph: StepGraph) -> dict[str, set[str]]:
    """State -> itself, and the states whose old values its new one depends on, now or steps later."""
    read, leaves = reads_of(graph), {leaf: name for name, leaf in graph.states.items()}
    reach = {name: {name, *(leaves[v] for v in closure(read, [result], leaves.keys())[1])}
             for name, result in graph.results.items()}
    for through in reach:
        for name in reach:
            if through in reach[name]:
                reach[name] |= reach[through]
    return reach


def _past(graph: StepGraph, states: tuple[str, ...]) -> Past:
    read, own = reads_of(graph), {graph.states[n] for n in states}
    every = [v for those in read.values() for v in those]
    if own.isdisjoint((*every, *graph.results.values(), *graph.outputs)):
        return Past.UNREAD
    used, _ = closure(read, [graph.results[n] for n in states])
    exchanged = [v for phase in graph.phases for v in made_by(phase)]
    if any(v in used and not own.isdisjoint(closure(read, [v])[0]) for v in exchanged):
        return Past.COUPLED
    return Past.NONLINEAR if affine_map(graph, states) is None else Past.AFFINE


def made_by(phase: Phase) -> list[Var]:
    """The variables that the exchange of a phase makes."""
    return [*(p.var for p in phase.products), *(v for s in phase.statistics for v in s.made)]


class _Forms:
    """The values of a step as affine forms in some states. ``assigns``: coefficients that are no leaves, in order."""

    def __init__(self, graph: StepGraph, states: Iterable[str]) -> None:
        self.assigns: list[Assign] = []
        # variable -> its form, None where it has none; variables that do not depend on the states are not in it
        self.forms: dict[Var, Form | None] = {graph.states[n]: {graph.states[n]: number(1.0)} for n in states}
        read = reads_of(graph)
        self.assigned(graph.prologue)
        for phase in graph.phases:
            exchanged = [v for v in made_by(phase) if not self.forms.keys().isdisjoint(read[v])]
            self.forms |= dict.fromkeys(exchanged)
            self.assigned(phase.assigns)

    def assigned(self, assigns: Iterable[Assign]) -> None:
        for a in assigns:
            if not self.forms.keys().isdisjoint(variables(a.value)):
                form = self.of(a.value)
                self.forms[a.var] = None if form is None else {
                    at: self.named(e, f"{a.var.name}_{'rest' if at is None else f'by_{at.name}'}")
                    for at, e in form.items()}

    def named(self, e: Expr, name: str) -> Expr:
        if is_leaf(e):
            return e
        var = variable(name)
        self.assigns.append(Assign(var, e))
        return var

    def of(self, e: Expr) -> Form | None:
        """The form of an expression; None where it has none."""
        if self.forms.keys().isdisjoint(variables(e)):
            return {None: e}
        if is_leaf(e):
            return self.forms[e]
        key, parts = key_of(e), children(e)
        if key == CUSTOM:
            return self.of(parts[0])
        forms = [self.of(part) for part in parts]
        if any(form is None for form in forms):
            return None
        return self.joined(key, parts, [form for form in forms if form is not None])

    def joined(self, key: str, parts: Sequence[Expr], forms: Sequence[Form]) -> Form | None:
        """The form of an operator's result, from its operands and their forms."""
        zero, free = number(0.0), [form.keys() <= {None} for form in forms]
        if key in ("Add", "Sub", "Select", "if_then_else"):
            *condition, a, b = range(len(parts))
            if not all(free[n] for n in condition):
                return None
            def join(one: Expr, other: Expr) -> Expr:
                return one + other if key == "Add" else one - other if key == "Sub" else where(parts[0], one, other)
            found = {at: join(forms[a].get(at, zero), forms[b].get(at, zero)) for at in {**forms[a], **forms[b]}}
        elif key in ("Mul", "Div") and free[1]:
            found = {at: e * parts[1] if key == "Mul" else e / parts[1] for at, e in forms[0].items()}
        elif key == "Mul" and free[0]:
            found = {at: parts[0] * e for at, e in forms[1].items()}
        else:
            return None
        return {at: e for at, e in found.items() if not (is_constant(e) and float(e.value) == 0.0)}
