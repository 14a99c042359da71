"""Products with heads: block-diagonal matrices, of which parameters have the blocks alone.

    product[b, j] = sum_k operand[b, head * K + k] * parameter[gate, j, k],    head = j // K,  K = H / heads

Units of a head see each other, and no others. A phase has products of one number of heads, so that schedules lay out
and exchange the same for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecornn.analysis.step import Phase, Product, StepGraph

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var


def heads_at(place: Expr, j: Var, k: Var, hidden: int, own: int) -> int:
    """The heads of a product of ``hidden`` values, read at ``place``, with rows of ``own`` values, read at [j, k]; 0:
    it is none."""
    from tvm import sym, tirx

    if hasattr(place, "same_as") and place.same_as(k):
        return 1
    if own < 1 or hidden % own:
        return 0
    wanted = tirx.floordiv(j, tirx.const(own, "int32")) * own + k
    return hidden // own if sym.Analyzer().can_prove_equal(place, wanted) else 0


def heads_of(phase: Phase) -> int:
    return phase.products[0].terms[0].heads if phase.products else 1


def most_heads(graph: StepGraph) -> int:
    return max((heads_of(phase) for phase in graph.phases), default=1)


def by_shape(phase: Phase) -> list[Phase]:
    """A phase as one for each shape (heads, rows, columns); statistics and assignments are in the last one."""
    kinds: dict[tuple[int, int, int], list[Product]] = {}
    for product in phase.products:
        term = product.terms[0]
        kinds.setdefault((term.heads, term.rows, term.columns), []).append(product)
    *first, last = kinds.values() or [()]
    return [*map(Phase.of, first), Phase.of(last, phase.assigns, phase.statistics)]


def multiplied(graph: StepGraph, hidden: int) -> int:
    """Values of the matrices of a step, of one operand each; that is multiply-adds of a row."""
    terms = [product.terms[0] for phase in graph.phases for product in phase.products]
    return sum((t.rows or hidden) * (t.columns or hidden // t.heads) for t in terms)
