"""Step graphs carried out in NumPy float64, for one step or for all steps of a sequence at once; and adjoints, to check
compiled gradients against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.kept import Kept, kept
from ecornn.analysis.scalar import evaluate
from ecornn.analysis.step import Assign, Product, Statistic, StepGraph, Term

if TYPE_CHECKING:
    from tvm.tirx import Var

Array = NDArray[np.float64]
Values = dict["Var", Array]
Weights = Mapping[str, Array]


def assign(assigns: Iterable[Assign], values: Values) -> None:
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
    """Adds the values ``shape`` (T, B, H) that no state determines: x is (T, B, I), inputs behind it in its rows."""
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


# -- adjoints
@dataclass(frozen=True)
class Backpropagated:
    """The gradients of a layer, and the values that the recurrence of its adjoint read and computed."""

    dx: Array  # (T, B, I)
    parameters: dict[str, Array]  # by the cell's names in te shape
    states: tuple[Array, ...]  # of the first states, (B, H) each
    hoisted: Array  # (T, B, Q, H), in the order of the recurrence's graph
    outputs: Array  # (T, B, O, H), in that order, too
    first: dict[str, Array]  # (B, H), its states before it
    last: dict[str, Array]  # and after it


def backpropagate(adjoint: Adjoint, x: Any, parameters: Mapping[str, Any], states: Sequence[Any], dy: Any,
                  dstates: Sequence[Any], keep: str = "gates") -> tuple[Array, dict[str, Array], tuple[Array, ...]]:
    """The gradients of one layer that runs forward in time: dx (T, B, I), of parameters, and of first states; float64.
    x and dy are (T, B, I) and (T, B, H), or (T, B, O H) of several outputs; parameters in te shape; first states, and
    gradients of the last, (B, H) each; ``keep`` is one of :data:`~ecornn.analysis.kept.KEEP`."""
    result = carry_out(adjoint, x, parameters, states, dy, dstates, keep)
    return result.dx, result.parameters, result.states


def carry_out(adjoint: Adjoint, x: Any, parameters: Mapping[str, Any], states: Sequence[Any], dy: Any,
              dstates: Sequence[Any], keep: str = "gates") -> Backpropagated:
    """Carries out an adjoint as :func:`backpropagate` does, and returns the recurrence's own values, too."""
    forward = adjoint.forward
    weights = {n: np.asarray(p, np.float64) for n, p in parameters.items()}
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    known = replayed(forward, kept(adjoint, keep), weights, x, [np.asarray(s, np.float64) for s in states])
    known |= zip(adjoint.dys, np.split(dy, len(adjoint.dys), axis=-1), strict=True)
    shape = known[adjoint.dys[0]].shape
    gradients = {n: np.zeros_like(w) for n, w in weights.items()}
    totals: Values = {}
    hoisted, first, last = _recur(adjoint, weights, known, dstates, totals)
    dfirst = _finish(adjoint, weights, last, totals)
    graph, values = adjoint.inputs, start(adjoint.inputs, weights, known)
    hoist(graph, weights, values, None, shape)
    step(graph, weights, values, shape)
    _add_sums(graph, values, totals, shape)
    dx = np.zeros_like(x)
    own = dx[..., :forward.own_input(x.shape[-1], shape[-1])]
    if adjoint.dx is not None:
        own[:] = values[adjoint.dx]
    for var, at_value in forward.input_offsets(x.shape[-1], shape[-1]).items():
        if (gradient := adjoint.dinputs[var]) is not None:
            dx[..., at_value:at_value + shape[-1]] = values[gradient]
    x = x[..., :own.shape[-1]]
    for o in (*adjoint.recurrence.outer_products, *graph.outer_products):
        value, operand = (x if v is None else np.broadcast_to(values[v], shape) for v in (o.value, o.operand))
        gradients[o.parameter][o.gate] += outer(value[..., :o.rows or None], operand[..., :o.columns or None], o.heads)
    values = start(adjoint.once, weights, totals)
    for vector in adjoint.vectors:
        gradients[vector.parameter][vector.gate] += values[vector.var]
    graph = adjoint.recurrence
    outputs = _together([known[v] for v in graph.outputs], shape)
    return Backpropagated(dx, gradients, dfirst, hoisted, outputs, first, last)


def replayed(forward: StepGraph, keep: Kept, weights: Weights, x: Array, states: Sequence[Array]) -> Values:
    """The values of a forward pass that the adjoint reads, (T, B, H) each, from those that are kept."""
    values, shape = start(forward, weights), states[0].shape
    hoist(forward, weights, values, x, (len(x), *shape))
    current, steps = list(states), []
    for t in range(len(x)):
        now = at(values, t, values) | dict(zip(forward.states.values(), current, strict=True))
        step(forward, weights, now, shape)
        current = [np.broadcast_to(now[v], shape) for v in forward.results.values()]
        steps.append(now)
    known = _all_steps(steps, [v for n in keep.states for v in (forward.results[n], forward.states[n])], shape)
    known |= {v: np.stack([now[v] for now in steps]) for v in keep.values}
    if forward.x is not None:
        known[forward.x] = x
    known |= inputs_of(forward, x, shape[-1])
    again = start(keep.replay, weights, known)
    hoist(keep.replay, weights, again, x, (len(x), *shape))
    step(keep.replay, weights, again, (len(x), *shape))
    return known | {v: again[v] for v in keep.replay.outputs}


def _recur(adjoint: Adjoint, weights: Weights, known: Values, dstates: Sequence[Any],
           totals: Values) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Adds outputs to ``known`` and sums to ``totals``; returns the hoisted values, and states before and after."""
    graph, (length, *rest) = adjoint.recurrence, known[adjoint.dys[0]].shape
    values, shape = start(graph, weights, known), tuple(rest)
    hoist(graph, weights, values, None, (length, *shape))
    current = {v: np.zeros(shape) for v in graph.states.values()}
    for name, gradient in zip(adjoint.forward.states, dstates, strict=True):
        current[graph.states[adjoint.first[name]]] = np.asarray(gradient, np.float64)
    first = {n: current[v] for n, v in graph.states.items()}
    steps: list[Values] = []
    for t in reversed(range(length)):
        now = at(values, t, values) | current
        step(graph, weights, now, shape)
        _add_sums(graph, now, totals, shape)
        current = {graph.states[n]: np.broadcast_to(now[v], shape) for n, v in graph.results.items()}
        steps.insert(0, now)
    known |= _all_steps(steps, graph.outputs, shape)
    hoisted = _together([values[v] for v in graph.hoisted_outputs], (length, *shape))
    return hoisted, first, {n: current[v] for n, v in graph.states.items()}


def _all_steps(steps: Sequence[Values], names: Iterable[Var], shape: tuple[int, ...]) -> Values:
    """Values (B, H) of each step as (T, B, H)."""
    return {v: np.stack([np.broadcast_to(now[v], shape) for now in steps]) for v in names}


def _finish(adjoint: Adjoint, weights: Weights, last: Mapping[str, Array], totals: Values) -> tuple[Array, ...]:
    """The gradients of the first states, from the last ones of the recurrence; adds the rest of the sums."""
    graph, states = adjoint.finish, adjoint.recurrence.states
    shape = next(iter(last.values())).shape
    values = start(graph, weights, {states[n]: v for n, v in last.items()})
    step(graph, weights, values, shape)
    _add_sums(graph, values, totals, shape)
    return tuple(np.broadcast_to(values[adjoint.gradients[n]], shape) for n in adjoint.forward.states)


def _together(values: Sequence[Array], shape: tuple[int, ...]) -> Array:
    every = [np.broadcast_to(v, shape) for v in values]
    return np.stack(every, axis=2) if every else np.zeros((*shape[:2], 0, shape[2]))


def _add_sums(graph: StepGraph, values: Values, totals: Values, shape: tuple[int, ...]) -> None:
    for s in graph.sums:
        every = np.broadcast_to(values[s.value], shape).reshape(-1, shape[-1]).sum(axis=0)
        totals[s.var] = totals.get(s.var, 0.0) + every
