"""Step graphs carried out in NumPy float64, for one step or for all steps of a sequence at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ecornn.analysis.operators import operator_of
from ecornn.analysis.scalar import children, is_constant
from ecornn.analysis.step import Assign, Product, Statistic, StepGraph, Term

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var

Array = NDArray[np.float64]
Values = dict["Var", Array]
Weights = Mapping[str, Array]


def evaluate(e: Expr, values: Mapping[Var, Array]) -> Any:
    """A scalar expression over arrays of its variables, (..., B, H), (..., B, 1) or (H,)."""
    if type(e).__name__ == "Var":
        return values[e]
    if is_constant(e):
        return float(e.value)
    return operator_of(e).numpy(*(evaluate(c, values) for c in children(e)))


def assign(assigns: Iterable[Assign], values: Values) -> None:
    """Adds the variables of ``assigns`` to ``values``."""
    for a in assigns:
        values[a.var] = evaluate(a.value, values)


def multiply(products: Iterable[Product], values: Values, weights: Weights, hidden: int,
             x: Array | None = None) -> None:
    """Adds the variables of ``products``, of H = ``hidden`` units each; an operand None is ``x``."""
    for product in products:
        parts = []
        for term in product.terms:
            matrix = weights[term.parameter][term.gate]
            operand = x
            if term.operand is not None:
                value = values[term.operand]
                if value.shape[-1] == 1:  # one value a row, for all units
                    value = np.broadcast_to(value, (*value.shape[:-1], hidden))
                operand = value[..., :term.columns or None]
            part = product_of(operand, matrix, term)
            parts.append(np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, hidden - term.rows)]) if term.rows else part)
        values[product.var] = sum(parts[1:], parts[0])


def product_of(operand: Array | None, matrix: Array, term: Term) -> Array:
    """A term: operand (..., B, K) with a gate (H, K) or (H, K / heads) of its parameter."""
    assert operand is not None, "products of x are given x"
    if term.heads == 1:
        return operand @ (matrix if term.transposed else matrix.T)
    blocks = matrix.reshape(term.heads, -1, matrix.shape[1])
    parts = operand.reshape(*operand.shape[:-1], term.heads, -1)
    product = np.einsum("...nk,nkj->...nj" if term.transposed else "...nk,njk->...nj", parts, blocks)
    return product.reshape(*operand.shape[:-1], -1)


def outer(value: Array, operand: Array, heads: int) -> Array:
    """Outer products of rows (..., H) added up, (H, K / heads): the gradient of a gate."""
    left, right = (a.reshape(-1, heads, a.shape[-1] // heads) for a in (value, operand))
    return np.concatenate([left[:, n].T @ right[:, n] for n in range(heads)])


def summarize(statistics: Iterable[Statistic], values: Values, shape: tuple[int, ...]) -> None:
    """Adds the variables of ``statistics``, (..., B, 1) each; their operands broadcast to ``shape``, (..., B, H)."""
    for one in statistics:
        first, count = one.units or (0, shape[-1])
        operands = np.stack([np.broadcast_to(values[o], shape)[..., first:first + count] for o in one.operands])
        values[one.total] = (operands.max if one.largest else operands.sum)(axis=(0, -1))[..., None]
        if one.squares is not None:
            mean = operands.mean(axis=(0, -1))[..., None]
            values[one.squares] = np.square(operands - mean).sum(axis=(0, -1))[..., None]


def start(graph: StepGraph, weights: Weights, given: Mapping[Var, Array] | None = None) -> Values:
    """The values that depend on parameters only, ``weights`` in te shape, beside the ``given`` ones."""
    values = dict(given or {}) | {
        v.var: np.arange(v.gate, dtype=float) if v.numbers else weights[v.parameter][v.gate] for v in graph.vectors}
    assign(graph.invariants, values)
    return values


def hoist(graph: StepGraph, weights: Weights, values: Values, x: Array | None, shape: tuple[int, ...]) -> None:
    """Adds the values of all steps that do not depend on the state: x (T, B, I), with the graph's inputs behind it in
    its rows, ``shape`` (T, B, H)."""
    if x is not None:
        values |= inputs_of(graph, x, shape[-1])
        x = x[..., :graph.own_input(x.shape[-1], shape[-1])]
        if graph.x is not None:
            values[graph.x] = x
    multiply(graph.hoisted_products, values, weights, shape[-1], x)
    assign(graph.hoisted, values)
    summarize(graph.hoisted_statistics, values, shape)
    assign(graph.normalized, values)


def inputs_of(graph: StepGraph, rows: Array, hidden: int) -> Values:
    """The leaves of a graph's inputs, from rows of x that have them."""
    return {v: rows[..., at:at + hidden] for v, at in graph.input_offsets(rows.shape[-1], hidden).items()}


def step(graph: StepGraph, weights: Weights, values: Values, shape: tuple[int, ...]) -> None:
    """Adds the rest of a step, ``shape`` (B, H); or of all steps, (T, B, H), where none depends on the one before."""
    assign(graph.prologue, values)
    for phase in graph.phases:
        summarize(phase.statistics, values, shape)
        multiply(phase.products, values, weights, shape[-1])
        assign(phase.assigns, values)


def at(values: Mapping[Var, Array], t: int, names: Iterable[Var]) -> Values:
    """The values of these names at step t; a value without steps is as it is."""
    return {v: values[v][t] if np.ndim(values[v]) == 3 else values[v] for v in names if v in values}
