"""Values of less than H units: W1 (W2 h) of two narrow matrices, or a projection of H to P values.

    u[b, p] = sum_k h[b, k] * W2[0, p, k], p < P,    and then    sum_p f(u[b, p]) * W1[gate, j, p]

A scalar of a step graph has H units. A narrow one has its values in units below P; those beyond are multiplied by
nothing, or by zeros, with which packings are filled. So they must be finite where the products are 0. An expression
that reads a narrow value reads no other that is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ecornn.analysis.scalar import is_constant
from ecornn.analysis.statistics import Statistics
from ecornn.analysis.step import Assign, Phase, StepGraph, Term
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var


def check_width(what: str, width: int, hidden: int) -> None:
    """Raises :class:`CellError` where an operand, not x itself, has more than H = ``hidden`` values a row."""
    if width > hidden:
        raise CellError(f"{what} has {width} values a row; what is not x itself has H at most, here {hidden}: add two "
                        "products of its parts")


def value_of_zeros(assigns: Iterable[Assign], statistics: Statistics, hidden: int,
                   unit: Var | None) -> dict[Expr, Any]:
    """Each value as it is where all products are 0, in a unit that no narrow value has; ``unit``: the variable that has
    its number. Statistics of such values are among them, though nothing here reads them."""
    import numpy as np

    from ecornn.analysis.evaluate import evaluate

    values: defaultdict[Expr, Any] = defaultdict(float, {} if unit is None else {unit: float(hidden)})
    with np.errstate(all="ignore"):
        for a in assigns:
            values[a.var] = evaluate(a.value, values)
        for total, (_, operands) in statistics.found.items():
            _, count = statistics.units.get(total) or (0, hidden)
            those = [values[o] for o in operands]
            values[total] = max(those) if total in statistics.maxima else sum(those) * count
    return values


def check_value(what: str, value: Expr, narrow: bool, assigns: Iterable[Assign], statistics: Statistics, hidden: int,
                unit: Var | None) -> None:
    """Raises :class:`CellError` where an operand is a constant, or ``narrow`` and not finite where all products are
    0."""
    import numpy as np

    if is_constant(value):
        raise CellError(f"{what} is a constant")
    if not narrow:
        return
    values = value_of_zeros(assigns, statistics, hidden, unit)
    if not np.isfinite(values[value]):
        raise CellError(f"{what} is narrower than H, and not finite where the products are 0 that it is computed of")


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
