"""The layers in NumPy float64: what a compiled module is checked against.

Written from the formulas, apart from ``ecornn.cells`` and without TVM, so that an error in either
cannot hide in the other. Gates are stacked in PyTorch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.errors import ArgumentError, ShapeError, WeightsError

Array = NDArray[np.float64]
States = tuple[Array, ...]

KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
GAINS = ("weight_ln_ih", "weight_ln_hh")  # of layer normalization, as many values as a bias has
STATE_GAINS = ("weight_ln_c", "bias_ln_c")  # H values each


def _sigmoid(z: Array) -> Array:
    # The same function as 1 / (1 + exp(-z)), which overflows for large negative z.
    return 0.5 * (1.0 + np.tanh(0.5 * z))


def _lstm(wx: Array, states: States, r: Array, b: Array) -> States:
    """Gates i, f, g, o. Hochreiter and Schmidhuber 1997, forget gate of Gers et al. 2000."""
    h, c = states
    i, f, g, o = np.split(wx + h @ r.T + b, 4, axis=1)
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return _sigmoid(o) * np.tanh(c), c


def _gru(wx: Array, states: States, r: Array, b: Array) -> States:
    """Gates r, z, n; the reset gate scales the finished product R_n h + b_n."""
    (h,) = states
    xr, xz, xn = np.split(wx, 3, axis=1)
    hr, hz, hn = np.split(h @ r.T + b, 3, axis=1)
    z = _sigmoid(xz + hz)
    return ((1.0 - z) * np.tanh(xn + _sigmoid(xr + hr) * hn) + z * h,)


def _gru_reset_before(wx: Array, states: States, r: Array, b: Array) -> States:
    """Gates r, z, n; the reset gate scales h before R_n sees it. Cho et al. 2014, arXiv 1406.1078."""
    (h,) = states
    size = h.shape[1]
    rz = _sigmoid(wx[:, :2 * size] + h @ r[:2 * size].T + b[:2 * size])
    reset, z = rz[:, :size], rz[:, size:]
    n = np.tanh(wx[:, 2 * size:] + (reset * h) @ r[2 * size:].T + b[2 * size:])
    return ((1.0 - z) * n + z * h,)


def _rnn_tanh(wx: Array, states: States, r: Array, b: Array) -> States:
    """Elman 1990."""
    return (np.tanh(wx + states[0] @ r.T + b),)


def _rnn_relu(wx: Array, states: States, r: Array, b: Array) -> States:
    """Elman 1990, with max(0, .)."""
    return (np.maximum(wx + states[0] @ r.T + b, 0.0),)


def _normal(values: Array, gain: Array | float = 1.0) -> Array:
    """Layer normalization of each row. Ba et al. 2016, arXiv 1607.06450."""
    apart = values - values.mean(axis=1, keepdims=True)
    return apart / np.sqrt(np.square(apart).mean(axis=1, keepdims=True) + 1e-5) * gain


def _normal_in_parts(values: Array, gain: Array, gates: int) -> Array:
    """All gates of an LSTM together; of a GRU r and z together, and n."""
    cut = values.shape[1] if gates == 4 else 2 * (values.shape[1] // 3)
    parts = [_normal(values[:, part], gain[part]) for part in (slice(0, cut), slice(cut, None)) if values[:, part].size]
    return np.concatenate(parts, axis=1)


def _lstm_normalized(wx: Array, states: States, r: Array, b: Array, gains: Sequence[Array]) -> States:
    """As _lstm, with LN(R h) and LN(c'); ``wx`` has LN(W x). Ba et al. 2016, supplement."""
    h, c = states
    of_h, of_c, shift = gains
    i, f, g, o = np.split(wx + _normal_in_parts(h @ r.T, of_h, 4) + b, 4, axis=1)
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return _sigmoid(o) * np.tanh(_normal(c, of_c) + shift), c


def _gru_normalized(wx: Array, states: States, r: Array, b: Array, gains: Sequence[Array]) -> States:
    """As _gru, with LN(R h); ``wx`` has LN(W x). Ba et al. 2016, supplement."""
    (h,), (of_h,) = states, gains
    xr, xz, xn = np.split(wx, 3, axis=1)
    hr, hz, hn = np.split(_normal_in_parts(h @ r.T, of_h, 3) + b, 3, axis=1)
    z = _sigmoid(xz + hz)
    return ((1.0 - z) * np.tanh(xn + _sigmoid(xr + hr) * hn) + z * h,)


Step = Callable[[Array, States, Array, Array], States]
STEPS: dict[str, tuple[int, int, Step]] = {  # cell -> (G, number of states, step)
    "lstm": (4, 2, _lstm),
    "gru": (3, 1, _gru),
    "gru_reset_before": (3, 1, _gru_reset_before),
    "rnn_tanh": (1, 1, _rnn_tanh),
    "rnn_relu": (1, 1, _rnn_relu),
}
NORMALIZED: dict[str, tuple[int, int, Callable[..., States]]] = {  # the same with gains beside the weights
    "lstm(layer_norm)": (4, 2, _lstm_normalized),
    "gru(layer_norm)": (3, 1, _gru_normalized),
}


def reference(cell: str, x: Any, weights: Mapping[str, Any], state: Sequence[Any] | None = None, *,
              lengths: Any = None, resets: Any = None) -> tuple[Array, States]:
    """Runs a layer, or a stack of them, in float64. Layers and directions are those of the weights' names.

    Parameters
    ----------
    cell : ``lstm``, ``gru``, ``gru_reset_before``, ``rnn_tanh``, ``rnn_relu``, ``lstm(layer_norm)`` or
        ``gru(layer_norm)``
    x : (T, B, I), any real dtype, anything that ``numpy.asarray`` takes
    weights : ``weight_ih_l0`` (G*H, I), ``weight_hh_l0`` (G*H, H), ``bias_ih_l0`` and
        ``bias_hh_l0`` (G*H,), any real dtype; those of layer k end in ``_l<k>`` and, with inputs D*H wide
        for k > 0, of the reverse direction in ``_l<k>_reverse``. With ``layer_norm`` also ``weight_ln_ih_l0`` and
        ``weight_ln_hh_l0`` (G*H,), and of an LSTM ``weight_ln_c_l0`` and ``bias_ln_c_l0`` (H,)
    state : (h, c) for ``lstm``, (h,) otherwise, each (B, H), or (L*D, B, H) where L*D > 1; None: zeros
    lengths : (B,) integers from 0 to T; y is zero beyond, states are those of the last step within
    resets : (T, B) booleans; True where a new sequence starts from a state of zeros

    Returns
    -------
    y : (T, B, D*H) float64
    state : the states after the last step, of the shape of ``state``, float64

    Raises
    ------
    ArgumentError : a cell that is not one of these, or a length that is not from 0 to T
    WeightsError : a weight is missing, or one is too many
    ShapeError : a shape does not fit the others
    """
    return run(checked(cell, x, weights, state, lengths, resets))


@dataclass(frozen=True)
class Call:
    """What :func:`run` takes: x (T, B, I), weights by name, first states (L*D, B, H) of each kind, lengths (B,), resets
    (T, B); ``whole`` where all rows go through all steps; ``outer`` is (L*D,) where states have that axis, else ()."""

    cell: str
    x: Any
    weights: Mapping[str, Any]
    before: Sequence[Any]
    ends: Any
    starts: Any
    whole: bool
    layers: int
    directions: int
    outer: tuple[int, ...]


def checked(cell: str, x: Any, weights: Mapping[str, Any], state: Sequence[Any] | None, lengths: Any,
            resets: Any) -> Call:
    """The arguments of :func:`reference` in float64; raises what it raises."""
    gates, count, _ = _lookup(cell)
    layers, directions = _extent(cell, weights)
    x = _shaped("x", np.asarray(x, dtype=np.float64), (None, None, None))
    steps, batch, parts = x.shape[0], x.shape[1], layers * directions
    hidden = np.shape(weights["weight_hh_l0"])[-1] if np.ndim(weights["weight_hh_l0"]) else 0
    _weight(weights, "weight_hh_l0", (gates * hidden, hidden))
    outer: tuple[int, ...] = () if parts == 1 else (parts,)
    if state is None:
        state = (np.zeros((*outer, batch, hidden)),) * count
    if len(state) != count:
        raise ShapeError("len(state)", len(state), f"{count} for {cell!r}")
    before = [_shaped(f"state[{n}]", np.asarray(s, dtype=np.float64), (*outer, batch, hidden))
              .reshape(parts, batch, hidden) for n, s in enumerate(state)]
    ends = np.full(batch, steps) if lengths is None else np.asarray(lengths)
    starts = np.zeros((steps, batch), bool) if resets is None else np.asarray(resets, bool)
    _shaped("lengths", ends, (batch,))
    _shaped("resets", starts, (steps, batch))
    if not ((ends >= 0) & (ends <= steps)).all():
        raise ArgumentError("lengths", ends.tolist(), f"integers from 0 to T={steps}")
    found: dict[str, Array] = {}
    for layer in range(layers):
        shapes = _shapes(cell, directions * hidden if layer else x.shape[2], hidden)
        for end in ("", "_reverse")[:directions]:
            found |= {f"{kind}_l{layer}{end}": _weight(weights, f"{kind}_l{layer}{end}", shape)
                      for kind, shape in zip(_kinds(cell), shapes, strict=True)}
    return Call(cell, x, found, before, ends, starts, lengths is None and resets is None, layers, directions, outer)


def run(call: Call) -> tuple[Any, tuple[Any, ...]]:
    """y (T, B, D*H) and the states after the last step; of arrays, or of arrays with a tape."""
    gates, count, step = _lookup(call.cell)
    y, after = call.x, [list[Any]() for _ in range(count)]
    for layer in range(call.layers):
        outputs = []
        for reverse in (False, True)[:call.directions]:
            suffix = f"_l{layer}" + ("_reverse" if reverse else "")
            w, r, b_ih, b_hh, *gains = (call.weights[f"{kind}{suffix}"] for kind in _kinds(call.cell))
            one: Step = partial(step, gains=gains[1:]) if gains else step
            first = tuple(s[layer * call.directions + reverse] for s in call.before)
            columns, last = [], []
            groups = [slice(None)] if call.whole else [slice(b, b + 1) for b in range(y.shape[1])]
            for rows in groups:  # one row at a time, cut into its sequences
                now = tuple(s[rows] for s in first)
                out = [np.zeros(now[0].shape)] * len(y)
                for low, high, fresh in _sequences(call.starts[:, rows], int(call.ends[rows].max(initial=0)), reverse,
                                                   call.whole):
                    now = tuple(np.zeros_like(s) for s in now) if fresh else now
                    for t in range(high - 1, low - 1, -1) if reverse else range(low, high):
                        wx = y[t, rows] @ w.T
                        wx = _normal_in_parts(wx, gains[0], gates) if gains else wx
                        now = one(wx + b_ih, now, r, b_hh)
                        out[t] = now[0]
                columns.append(np.stack(out) if out else np.zeros((0, *now[0].shape)))
                last.append(now)
            outputs.append(np.concatenate(columns, axis=1) if columns else np.zeros((len(y), 0, first[0].shape[1])))
            for n, kept in enumerate(after):
                kept.append(np.concatenate([now[n] for now in last]) if last else first[n])
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


def _extent(cell: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    """Layers and directions that the names of the weights speak of."""
    directions = 2 if any(str(name).endswith("_reverse") for name in weights) else 1
    kinds = _kinds(cell)
    layers = max(1, -(-len(weights) // (len(kinds) * directions)))
    expected = [f"{kind}_l{k}{end}" for k in range(layers) for end in ("", "_reverse")[:directions] for kind in kinds]
    missing, extra = set(expected) - set(weights), set(weights) - set(expected)
    if missing or extra:
        raise WeightsError(f"weights of {cell!r}: missing {sorted(missing)}, unexpected "
                           f"{sorted(extra)}; expected {', '.join(expected)}", sorted(missing | extra))
    return layers, directions


def _kinds(cell: str) -> tuple[str, ...]:
    """What a layer's weights are, in order."""
    more = GAINS + STATE_GAINS if cell == "lstm(layer_norm)" else GAINS
    return KINDS + more if cell in NORMALIZED else KINDS


def _shapes(cell: str, inputs: int, hidden: int) -> list[tuple[int, ...]]:
    """Their shapes."""
    rows = _lookup(cell)[0] * hidden
    special: dict[str, tuple[int, ...]] = {"weight_ih": (rows, inputs), "weight_hh": (rows, hidden)}
    special |= dict.fromkeys(STATE_GAINS, (hidden,))
    return [special.get(kind, (rows,)) for kind in _kinds(cell)]


def _weight(weights: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Array:
    return _shaped(name, np.asarray(weights[name], dtype=np.float64), shape)


def random_weights(cell: str, input: int, hidden: int, seed: int = 0, layers: int = 1,
                   directions: int = 1) -> dict[str, NDArray[np.float32]]:
    """Weights as PyTorch initialises them: float32, uniform in +-1/sqrt(H), by PyTorch's names; gains about 1."""
    generator, bound = np.random.default_rng(seed), hidden ** -0.5
    found = {}
    for layer in range(layers):
        inputs = directions * hidden if layer else input
        for end in ("", "_reverse")[:directions]:
            for kind, shape in zip(_kinds(cell), _shapes(cell, inputs, hidden), strict=True):
                value = generator.uniform(-bound, bound, shape) + kind.startswith("weight_ln")
                found[f"{kind}_l{layer}{end}"] = value.astype(np.float32)
    return found


def _lookup(cell: str) -> tuple[int, int, Callable[..., States]]:
    if cell in NORMALIZED:
        return NORMALIZED[cell]
    if cell not in STEPS:
        raise ArgumentError("cell", cell, f"one of {', '.join((*STEPS, *NORMALIZED))}: the cells with a reference")
    return STEPS[cell]


def _shaped(name: str, array: Array, shape: tuple[int | None, ...]) -> Array:
    fits = array.ndim == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not fits:
        text = "(T, B, I)" if None in shape else str(shape)
        raise ShapeError(f"{name}.shape", array.shape, text)
    return array
