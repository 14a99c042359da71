"""Passes over all steps at once: for the adjoint, and after the last step for the outputs. The rest is done in turn.

Values that the forward pass keeps for the adjoint: with the states of all steps every product of a step is one matrix
product over time and batch, since what it multiplies is known; so ``states`` keeps these alone. ``gates`` keeps the
values besides from which scalars and statistics give everything else.

Products and statistics that only the outputs of a step need: of ``y = C h' + D x`` the loop writes h' alone, and one
product over all rows follows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.liveness import closure, levels, needed, reads_of
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Phase, Statistic, StepGraph

if TYPE_CHECKING:
    from tvm.tirx import Var

KEEP = ("gates", "states")


@dataclass(frozen=True)
class Kept:
    """The values that are kept of each step."""

    # states whose values after every step, and before the first, are kept, y among them where it is read
    states: tuple[str, ...]
    # other variables of the forward step, which it has to write: one value for each unit
    values: tuple[Var, ...]
    # a pass over all steps, from these and x; its `outputs` are the other values that the adjoint reads
    replay: StepGraph

    @property
    def units(self) -> int:
        return len(self.states) + len(self.values)


def kept(adjoint: Adjoint, keep: str, by_steps: bool = False) -> Kept:
    """The values that a step keeps with ``keep``, one of :data:`KEEP`; ``by_steps``: none that steps do not have."""
    forward, level = adjoint.forward, levels(adjoint.forward)
    known = {*forward.states.values(), *forward.results.values(), *rows_of(forward)}
    maxima = [s for s in forward.every_statistic if s.largest and s.total in adjoint.needed]
    known -= {s.total for s in maxima if not known.issuperset(s.operands)}
    wanted = sorted((v for v in adjoint.needed if v not in known), key=list(level).index)
    before = {*(q.var for q in forward.hoisted_products), *(a.var for a in (*forward.hoisted, *forward.normalized)),
              *(v for s in forward.hoisted_statistics for v in s.made)}
    beyond = before - {*forward.hoisted_outputs} if by_steps else set()
    values = tuple(v for v in wanted if v not in beyond) if keep == "gates" else ()
    for var in reversed(values):  # one that takes no product to compute again need not be kept
        others = tuple(v for v in values if v is not var)
        if not recompute(forward, (var,), known.union(others)).every_product:
            values = others
    # a maximum is compared with its operands: all are computed again, or all are kept, since values that are computed
    # again are rounded otherwise
    again = {s.total for s in maxima if not known.union(values).issuperset(s.operands)}
    values = tuple(v for v in values if v not in again)
    replay = recompute(forward, tuple(v for v in wanted if v not in values), known.union(values))
    used = {*adjoint.needed, *replay.given}
    states = tuple(n for n, leaf in forward.states.items() if leaf in used or forward.results[n] in used)
    return Kept(states, values, replay)


def rows_of(forward: StepGraph) -> set[Var]:
    """The leaves that rows of x have at [b, j]."""
    return {*forward.inputs.values()} | ({forward.x} if forward.x is not None else set())


def recompute(forward: StepGraph, wanted: tuple[Var, ...], known: set[Var]) -> StepGraph:
    """The part of a step that gives ``wanted`` from ``known`` and x, as a pass over all steps at once."""
    # parameters are there anyway, also where a state is one and so is kept
    known = known - {v.var for v in forward.vectors} - {a.var for a in forward.invariants}
    used, given = closure(reads_of(forward), wanted, known)
    invariants, _ = needed(forward.invariants, used)
    return replace(
        only(forward, used), cell=f"{forward.cell}_replay", states={}, results={}, output="",
        x=forward.x if forward.x in given else None, vectors=among(forward.vectors, used), invariants=invariants,
        hoisted_statistics=among(forward.hoisted_statistics, used), normalized=among(forward.normalized, used),
        hoisted_outputs=tuple(v for v in forward.hoisted_outputs if v in used),
        projected=tuple(v for v in forward.projected if v in used),
        invariant_outputs=tuple(v for v in forward.invariant_outputs if v in used),
        given=tuple(v for v in given if v not in rows_of(forward)), outputs=wanted)


def only(graph: StepGraph, used: set[Var]) -> StepGraph:
    """A step whose products of x, prologue and phases have no more in them than is ``used``."""
    return replace(graph, hoisted_products=among(graph.hoisted_products, used), hoisted=among(graph.hoisted, used),
                   prologue=among(graph.prologue, used), phases=tuple(Phase.of(
                       among(p.products, used), among(p.assigns, used), among(p.statistics, used))
                       for p in graph.phases))


def among(items: Iterable[Any], used: set[Var]) -> tuple[Any, ...]:
    """The assignments, products, vectors or statistics whose variables are ``used``."""
    return tuple(i for i in items if (i.total if isinstance(i, Statistic) else i.var) in used)


@dataclass(frozen=True)
class ReadOut:
    loop: StepGraph  # the step without the pass that follows; its `outputs` are the values that the pass reads
    after: StepGraph  # that pass over all steps at once, from these and x to the `outputs` of the step


def read_out(graph: StepGraph) -> ReadOut | None:
    """The parts of a cell's step; None where its outputs need no exchange that its states do not, or where it has
    statistics of x, which are not computed twice."""
    if not graph.outputs or graph.hoisted_statistics:
        return None
    reads, level = reads_of(graph), levels(graph)
    state, _ = closure(reads, graph.results.values())
    own = closure(reads, graph.outputs)[0] - state
    exchanged = {v for phase in graph.phases for v in (*(p.var for p in phase.products), *(
        v for s in phase.statistics for v in s.made))}
    late = {v for v in own if exchanged & own & closure(reads, [v])[0]}
    if not late:
        return None
    read = [v for u in level if u in late for v in reads.get(u, ())]
    seen = [v for v in dict.fromkeys((*read, *graph.outputs)) if v not in late]
    edge = [v for v in seen if level[v] >= 0]
    # values of x that the loop has besides are not computed twice
    shared = {*_loop(graph, state | closure(reads, edge)[0], tuple(edge)).hoisted_outputs}
    outputs = tuple(v for v in seen if level[v] >= 0 or v in shared)
    after = recompute(graph, tuple(dict.fromkeys(graph.outputs)), {*outputs, *rows_of(graph)})
    return ReadOut(_loop(graph, state | closure(reads, outputs)[0], outputs), replace(after, outputs=graph.outputs))


def _loop(graph: StepGraph, used: set[Var], outputs: tuple[Var, ...]) -> StepGraph:
    """The step with no more in it than is ``used``, and without exchanges that this leaves nothing of."""
    loop = only(graph, used)
    loop = replace(loop, phases=tuple(p for p in loop.phases if p.products or p.statistics))
    late = {v for a in (*loop.prologue, *(a for p in loop.phases for a in p.assigns)) for v in variables(a.value)}
    late |= {*graph.results.values(), *outputs, *(o for s in loop.statistics for o in s.operands)}
    hoisted = tuple(v for v in graph.hoisted_outputs if v in late)
    return replace(loop, hoisted_outputs=hoisted, projected=hoisted, outputs=outputs,
                   x=graph.x if graph.x is not None and graph.x in used else None,
                   invariant_outputs=tuple(v for v in graph.invariant_outputs if v in late))
