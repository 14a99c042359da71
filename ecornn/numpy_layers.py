"""Layers in NumPy float64 of any step on arrays: stacks, both directions, lengths and resets.

The steps are formulas (``numpy_reference.py``) or those of te graphs (``interpreter.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.errors import ArgumentError, ShapeError, WeightsError

Array = NDArray[np.float64]
States = tuple[Array, ...]


@dataclass(frozen=True)
class Formula:
    """One step of a cell on arrays, and its weights.

    Attributes
    ----------
    cell : its name, for messages
    kinds : names of the weights of a layer, in the order in which ``step`` takes them
    named : (kind, layer, True for the direction from the end) -> the name under which a user passes it
    shapes : (I, H) -> the weights' shapes as a user passes them
    hidden : (I, the weights by name, the shape of a state or None) -> H
    states : the number of states
    outputs : places of the outputs, side by side in y, among the arrays that ``step`` returns
    step : (x (B, I), states (B, H), weights) -> the new states, and behind them outputs that are no states
    """

    cell: str
    kinds: tuple[str, ...]
    named: Callable[[str, int, bool], str]
    shapes: Callable[[int, int], Sequence[tuple[int, ...]]]
    hidden: Callable[[int, Mapping[str, Any], tuple[int, ...] | None], int]
    states: int
    outputs: tuple[int, ...]
    step: Callable[[Any, States, Sequence[Any]], States]


@dataclass(frozen=True)
class Call:
    """The arguments of :func:`run`: x (T, B, I), weights by name, first states (L*D, B, H) of each kind, lengths (B,),
    resets (T, B); ``whole`` where all rows go through all steps; ``outer`` is (L*D,) where states have that axis, else
    ()."""

    formula: Formula
    x: Any
    weights: Mapping[str, Any]
    before: Sequence[Any]
    ends: Any
    starts: Any
    whole: bool
    layers: int
    directions: int
    outer: tuple[int, ...]


def checked(formula: Formula, x: Any, weights: Mapping[str, Any], state: Sequence[Any] | None, lengths: Any,
            resets: Any) -> Call:
    """Checks the arguments of :func:`~ecornn.numpy_reference.reference`, which lists the errors, and makes them
    float64."""
    count = formula.states
    layers, directions = _extent(formula, weights)
    x = shaped("x", np.asarray(x, dtype=np.float64), (None, None, None))
    steps, batch, parts = x.shape[0], x.shape[1], layers * directions
    hidden = formula.hidden(x.shape[2], weights, np.shape(state[0]) if state is not None and len(state) else None)
    outer: tuple[int, ...] = () if parts == 1 else (parts,)
    if state is None:
        state = (np.zeros((*outer, batch, hidden)),) * count
    if len(state) != count:
        raise ShapeError("len(state)", len(state), f"{count} for {formula.cell!r}")
    before = [shaped(f"state[{n}]", np.asarray(s, dtype=np.float64), (*outer, batch, hidden))
              .reshape(parts, batch, hidden) for n, s in enumerate(state)]
    ends = np.full(batch, steps) if lengths is None else np.asarray(lengths)
    starts = np.zeros((steps, batch), bool) if resets is None else np.asarray(resets, bool)
    shaped("lengths", ends, (batch,))
    shaped("resets", starts, (steps, batch))
    if not ((ends >= 0) & (ends <= steps)).all():
        raise ArgumentError("lengths", ends.tolist(), f"integers from 0 to T={steps}")
    named: dict[str, Array] = {}
    for layer in range(layers):
        shapes = formula.shapes(directions * hidden if layer else x.shape[2], hidden)
        for reverse in (False, True)[:directions]:
            names = [formula.named(kind, layer, reverse) for kind in formula.kinds]
            named |= {name: weight(weights, name, shape) for name, shape in zip(names, shapes, strict=True)}
    return Call(formula, x, named, before, ends, starts, lengths is None and resets is None, layers, directions, outer)


def run(call: Call) -> tuple[Any, tuple[Any, ...]]:
    """y (T, B, D*H) and the states after the last step; of arrays, or of arrays with a tape."""
    formula = call.formula
    y, after = call.x, [list[Any]() for _ in range(formula.states)]
    for layer in range(call.layers):
        outputs = []
        for reverse in (False, True)[:call.directions]:
            weights = [call.weights[formula.named(kind, layer, reverse)] for kind in formula.kinds]
            first = tuple(s[layer * call.directions + reverse] for s in call.before)
            columns, last = [], []
            groups = [slice(None)] if call.whole else [slice(b, b + 1) for b in range(y.shape[1])]
            for rows in groups:  # one row at a time, cut into its sequences
                now = tuple(s[rows] for s in first)
                out = [np.zeros((len(now[0]), len(formula.outputs) * now[0].shape[1]))] * len(y)
                for low, high, fresh in _sequences(call.starts[:, rows], int(call.ends[rows].max(initial=0)), reverse,
                                                   call.whole):
                    now = tuple(np.zeros_like(s) for s in now) if fresh else now
                    for t in range(high - 1, low - 1, -1) if reverse else range(low, high):
                        returned = formula.step(y[t, rows], now, weights)
                        now = returned[:formula.states]
                        ends = [returned[n] for n in formula.outputs]
                        out[t] = np.concatenate(ends, axis=1) if ends[1:] else ends[0]
                columns.append(np.stack(out) if out else np.zeros((0, *now[0].shape)))
                last.append(now)
            outputs.append(np.concatenate(columns, axis=1) if columns else np.zeros((len(y), 0, first[0].shape[1])))
            for n, states in enumerate(after):
                states.append(np.concatenate([now[n] for now in last]) if last else first[n])
        y = np.concatenate(outputs, axis=2)
    return y, tuple(np.stack(parts).reshape(*call.outer, *parts[0].shape) for parts in after)


def _sequences(starts: NDArray[np.bool_], end: int, reverse: bool, whole: bool) -> list[tuple[int, int, bool]]:
    """(first step, step after the last, whether the state is cleared before), in the order of running."""
    marks = [] if whole else [t for t in range(end) if starts[t, 0]]
    edges = [0, *(t for t in marks if t), end]
    spans = list(pairwise(edges))
    if reverse:
        return [(low, high, high != end) for low, high in reversed(spans)]
    return [(low, high, low in marks) for low, high in spans]


def _extent(formula: Formula, weights: Mapping[str, Any]) -> tuple[int, int]:
    """Layers and directions that the names of the weights speak of."""
    if not formula.kinds:
        layers, directions = 1, 1
    else:
        directions = 2 if any(formula.named(kind, 0, True) in weights for kind in formula.kinds) else 1
        layers = max(1, -(-len(weights) // (len(formula.kinds) * directions)))
    expected = [formula.named(kind, k, reverse) for k in range(layers) for reverse in (False, True)[:directions]
                for kind in formula.kinds]
    missing, extra = set(expected) - set(weights), set(weights) - set(expected)
    if missing or extra:
        raise WeightsError(f"weights of {formula.cell!r}: missing {sorted(missing)}, unexpected "
                           f"{sorted(extra)}; expected {', '.join(expected)}", sorted(missing | extra))
    return layers, directions


def weight(weights: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Array:
    return shaped(name, np.asarray(weights[name], dtype=np.float64), shape)


def shaped(name: str, array: Array, shape: tuple[int | None, ...]) -> Array:
    fits = array.ndim == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not fits:
        text = "(T, B, I)" if None in shape else str(shape)
        raise ShapeError(f"{name}.shape", array.shape, text)
    return array
