"""What only the outputs of a step need of products and statistics: after the last step, for all steps at once.

Of ``y = C h' + D x`` the loop writes h' alone, and one product over all rows follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ecornn.analysis.kept import recompute, rows_of
from ecornn.analysis.liveness import levels
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Phase, StepGraph

if TYPE_CHECKING:
    from tvm.tirx import Var


@dataclass(frozen=True)
class ReadOut:
    """A step in two parts.

    Attributes
    ----------
    loop : the step without what follows; its ``outputs`` are what that reads
    after : a pass over all steps at once, from these and x to ``outputs``, those of the step
    """

    loop: StepGraph
    after: StepGraph


def read_out(graph: StepGraph) -> ReadOut | None:
    """The parts of a cell's step; None where its outputs need no exchange that its states do not, or where it has
    statistics of x, which are not computed twice."""
    if not graph.outputs or graph.hoisted_statistics:
        return None
    reads = _reads(graph)
    state = _closure(reads, graph.results.values())
    own = _closure(reads, graph.outputs) - state
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
    # what the loop has of x besides is not computed twice
    shared = {*_loop(graph, state | _closure(reads, edge), tuple(edge)).hoisted_outputs}
    outputs = tuple(v for v in seen if level[v] >= 0 or v in shared)
    after = recompute(graph, tuple(dict.fromkeys(graph.outputs)), {*outputs, *rows_of(graph)})
    return ReadOut(_loop(graph, state | _closure(reads, outputs), outputs), replace(after, outputs=graph.outputs))


def _reads(graph: StepGraph) -> dict[Var, list[Var]]:
    """Variable -> what it is computed from; of x nothing is said."""
    assigns = (graph.invariants, graph.hoisted, graph.normalized, graph.prologue, *(p.assigns for p in graph.phases))
    found = {a.var: variables(a.value) for those in assigns for a in those}
    found |= {q.var: [t.operand for t in q.terms] for phase in graph.phases for q in phase.products}
    return found | {v: [*s.operands, *((s.total,) if v is not s.total else ())] for s in graph.statistics
                    for v in s.made}


def _closure(reads: dict[Var, list[Var]], wanted: Any) -> set[Var]:
    found: set[Var] = set()
    waiting = list(wanted)
    while waiting:
        var = waiting.pop()
        if var not in found:
            found.add(var)
            waiting += reads.get(var, [])
    return found


def _loop(graph: StepGraph, used: set[Var], outputs: tuple[Var, ...]) -> StepGraph:
    """The step of what is ``used``."""
    def those(items: Any) -> Any:
        return tuple(i for i in items if (i.total if hasattr(i, "total") else i.var) in used)

    phases = []
    for phase in graph.phases:
        products, statistics = those(phase.products), those(phase.statistics)
        if products or statistics:
            operands = tuple(dict.fromkeys(t.operand for q in products for t in q.terms))
            phases.append(Phase(operands, products, those(phase.assigns), statistics))
    late = {v for a in (*graph.prologue, *(a for p in phases for a in p.assigns)) if a.var in used
            for v in variables(a.value)}
    late |= {*graph.results.values(), *outputs, *(o for p in phases for s in p.statistics for o in s.operands)}
    hoisted = tuple(v for v in graph.hoisted_outputs if v in late)
    return replace(
        graph, hoisted_products=those(graph.hoisted_products), hoisted=those(graph.hoisted), hoisted_outputs=hoisted,
        projected=hoisted, prologue=those(graph.prologue), phases=tuple(phases), outputs=outputs,
        x=graph.x if graph.x is not None and graph.x in used else None,
        invariant_outputs=tuple(v for v in graph.invariant_outputs if v in late))
