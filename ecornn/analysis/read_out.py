"""Products and statistics that only the outputs of a step need: after the last step, for all steps at once.

Of ``y = C h' + D x`` the loop writes h' alone, and one product over all rows follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ecornn.analysis.kept import among, phases_of, recompute, rows_of
from ecornn.analysis.liveness import closure, levels, reads_of
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import StepGraph

if TYPE_CHECKING:
    from tvm.tirx import Var


@dataclass(frozen=True)
class ReadOut:
    """A step in two parts.

    Attributes
    ----------
    loop : the step without the pass that follows; its ``outputs`` are the values that the pass reads
    after : that pass over all steps at once, from these and x to the ``outputs`` of the step
    """

    loop: StepGraph
    after: StepGraph


def read_out(graph: StepGraph) -> ReadOut | None:
    """The parts of a cell's step; None where its outputs need no exchange that its states do not, or where it has
    statistics of x, which are not computed twice."""
    if not graph.outputs or graph.hoisted_statistics:
        return None
    reads = reads_of(graph)
    state, _ = closure(reads, graph.results.values())
    own = closure(reads, graph.outputs)[0] - state
    late = {v for phase in graph.phases for v in (*(p.var for p in phase.products), *(
        v for s in phase.statistics for v in s.made)) if v in own}
    if not late:
        return None
    for _ in reads:  # assignments are few, and in order
        more = {v for v in own - late if late.intersection(reads.get(v, ()))}
        if not more:
            break
        late |= more
    level = levels(graph)
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
    phases = tuple(p for p in phases_of(graph, used) if p.products or p.statistics)
    late = {v for a in (*graph.prologue, *(a for p in phases for a in p.assigns)) if a.var in used
            for v in variables(a.value)}
    late |= {*graph.results.values(), *outputs, *(o for p in phases for s in p.statistics for o in s.operands)}
    hoisted = tuple(v for v in graph.hoisted_outputs if v in late)
    return replace(
        graph, hoisted_products=among(graph.hoisted_products, used), hoisted=among(graph.hoisted, used),
        hoisted_outputs=hoisted, projected=hoisted, prologue=among(graph.prologue, used), phases=phases,
        outputs=outputs, x=graph.x if graph.x is not None and graph.x in used else None,
        invariant_outputs=tuple(v for v in graph.invariant_outputs if v in late))
