"""Values of less than H units: W1 (W2 h) of two narrow matrices, or a projection of H to P values.

    u[b, p] = sum_k h[b, k] * W2[0, p, k], p < P,    and then    sum_p f(u[b, p]) * W1[gate, j, p]

A scalar of a step graph has H units. A narrow one has its values in units below P; those beyond are multiplied by
nothing, or by zeros, with which packings are filled. So they must be finite where the products are 0. An expression
that reads a narrow value reads no other that is not."""

from __future__ import annotations

from ecornn.analysis.step import Phase, StepGraph, Term


def narrow_terms(graph: StepGraph) -> list[Term]:
    """The products of a step whose parameters are narrower than H."""
    return [term for product in graph.every_product for term in product.terms if term.narrow]


def columns_of(phase: Phase, hidden: int) -> int:
    """The number of values of an operand that the products of a phase read."""
    terms = [term for product in phase.products for term in product.terms]
    return max((term.columns or hidden // term.heads for term in terms), default=hidden)


def narrow_of(phase: Phase) -> tuple[int, int]:
    """Rows and columns of the matrices of a phase, which are alike; 0 where they have all of H."""
    term = phase.products[0].terms[0] if phase.products else None
    return (term.rows, term.columns) if term else (0, 0)
