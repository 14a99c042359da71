"""An adjoint carried out in NumPy float64: what compiled gradients can be checked against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.evaluate import Array, Values, Weights, at, hoist, start, step
from ecornn.analysis.kept import Kept, kept
from ecornn.analysis.step import StepGraph


def backpropagate(adjoint: Adjoint, x: Any, parameters: Mapping[str, Any], states: Sequence[Any], dy: Any,
                  dstates: Sequence[Any], keep: str = "gates") -> tuple[Array, dict[str, Array], tuple[Array, ...]]:
    """The gradients of one layer that runs forward in time.

    Parameters
    ----------
    x, dy : (T, B, I) and (T, B, H), the input and the gradient of y
    parameters : by the cell's names in te shape, (G, H, K) or (G, H)
    states, dstates : (B, H) each, the first states, and the gradients of the last ones
    keep : what the forward pass keeps, one of :data:`~ecornn.analysis.kept.KEEP`

    Returns
    -------
    dx (T, B, I), gradients of all parameters, gradients of the first states; float64
    """
    forward = adjoint.forward
    weights = {n: np.asarray(p, np.float64) for n, p in parameters.items()}
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    known = replayed(forward, kept(adjoint, keep), weights, x, [np.asarray(s, np.float64) for s in states])
    known[adjoint.dy] = dy
    gradients = {n: np.zeros_like(w) for n, w in weights.items()}
    totals: Values = {}
    found = _recur(adjoint, weights, known, dstates, totals)
    graph, values = adjoint.inputs, start(adjoint.inputs, weights, known)
    hoist(graph, weights, values, None, dy.shape)
    step(graph, weights, values, dy.shape)
    _add_sums(graph, values, totals, dy.shape)
    dx = np.zeros_like(x) if adjoint.dx is None else np.broadcast_to(values[adjoint.dx], x.shape)
    for o in (*adjoint.recurrence.outer_products, *graph.outer_products):
        value, operand = (x if v is None else np.broadcast_to(values[v], dy.shape) for v in (o.value, o.operand))
        gradients[o.parameter][o.gate] += np.einsum("tbj,tbk->jk", value, operand)
    values = start(adjoint.once, weights, totals)
    for vector in adjoint.vectors:
        gradients[vector.parameter][vector.gate] += values[vector.var]
    return dx, gradients, found


def replayed(forward: StepGraph, keep: Kept, weights: Weights, x: Array, states: Sequence[Array]) -> Values:
    """All that the adjoint reads of a forward pass, (T, B, H) each, from what is kept of it."""
    values, shape = start(forward, weights), states[0].shape
    hoist(forward, weights, values, x, (len(x), *shape))
    current, steps = list(states), []
    for t in range(len(x)):
        now = at(values, t, values) | dict(zip(forward.states.values(), current, strict=True))
        step(forward, weights, now, shape)
        current = [np.broadcast_to(now[v], shape) for v in forward.results.values()]
        steps.append(now)
    read = [v for n in keep.states for v in (forward.results[n], forward.states[n])]
    known = {v: np.stack([np.broadcast_to(now[v], shape) for now in steps]) for v in read}
    known |= {v: np.stack([now[v] for now in steps]) for v in keep.values}
    if forward.x is not None:
        known[forward.x] = x
    found = start(keep.replay, weights, known)
    hoist(keep.replay, weights, found, x, (len(x), *shape))
    step(keep.replay, weights, found, (len(x), *shape))
    return known | {v: found[v] for v in keep.replay.outputs}


def _recur(adjoint: Adjoint, weights: Weights, known: Values, dstates: Sequence[Any],
           totals: Values) -> tuple[Array, ...]:
    """Adds the recurrence's outputs to ``known`` and its sums to ``totals``; gradients of the first states."""
    graph, (length, *shape) = adjoint.recurrence, known[adjoint.dy].shape
    values = start(graph, weights, known)
    hoist(graph, weights, values, None, (length, *shape))
    current = {v: np.zeros(shape) for v in graph.states.values()}
    for name, gradient in zip(adjoint.forward.states, dstates, strict=True):
        current[graph.states[adjoint.first[name]]] = np.asarray(gradient, np.float64)
    steps = []
    for t in reversed(range(length)):
        now = at(values, t, values) | current
        step(graph, weights, now, tuple(shape))
        _add_sums(graph, now, totals, tuple(shape))
        current = {graph.states[n]: np.broadcast_to(now[v], shape) for n, v in graph.results.items()}
        steps.append(now)
    known |= {v: np.stack([np.broadcast_to(now[v], shape) for now in reversed(steps)]) for v in graph.outputs}
    values = start(adjoint.finish, weights, current)
    step(adjoint.finish, weights, values, tuple(shape))
    _add_sums(adjoint.finish, values, totals, tuple(shape))
    return tuple(np.broadcast_to(values[adjoint.gradients[n]], shape) for n in adjoint.forward.states)


def _add_sums(graph: StepGraph, values: Values, totals: Values, shape: tuple[int, ...]) -> None:
    for s in graph.sums:
        every = np.broadcast_to(values[s.value], shape).reshape(-1, shape[-1]).sum(axis=0)
        totals[s.var] = totals.get(s.var, 0.0) + every
