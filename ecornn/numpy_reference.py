"""The layers in NumPy float64: what a compiled module is checked against.

Written from the formulas, apart from ``ecornn.cells`` and without TVM, so that an error in either
cannot hide in the other. Gates are stacked in PyTorch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.errors import ArgumentError, ShapeError, WeightsError

Array = NDArray[np.float64]
States = tuple[Array, ...]

NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


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


Step = Callable[[Array, States, Array, Array], States]
STEPS: dict[str, tuple[int, int, Step]] = {  # cell -> (G, number of states, step)
    "lstm": (4, 2, _lstm),
    "gru": (3, 1, _gru),
    "gru_reset_before": (3, 1, _gru_reset_before),
    "rnn_tanh": (1, 1, _rnn_tanh),
    "rnn_relu": (1, 1, _rnn_relu),
}


def reference(cell: str, x: Any, weights: Mapping[str, Any],
              state: Sequence[Any] | None = None) -> tuple[Array, States]:
    """Runs one layer in float64.

    Parameters
    ----------
    cell : ``lstm``, ``gru``, ``gru_reset_before``, ``rnn_tanh`` or ``rnn_relu``
    x : (T, B, I), any real dtype, anything that ``numpy.asarray`` takes
    weights : ``weight_ih_l0`` (G*H, I), ``weight_hh_l0`` (G*H, H), ``bias_ih_l0`` and
        ``bias_hh_l0`` (G*H,), any real dtype
    state : (h, c) for ``lstm``, (h,) otherwise, each (B, H); None for zeros

    Returns
    -------
    y : (T, B, H) float64
    state : the states after the last step, each (B, H) float64

    Raises
    ------
    ArgumentError : a cell that is not one of these
    WeightsError : a weight is missing, or one is too many
    ShapeError : a shape does not fit the others
    """
    gates, count, step = _lookup(cell)
    missing, extra = set(NAMES) - set(weights), set(weights) - set(NAMES)
    if missing or extra:
        raise WeightsError(f"weights of {cell!r}: missing {sorted(missing)}, unexpected "
                           f"{sorted(extra)}; expected {', '.join(NAMES)}", sorted(missing | extra))
    w, r, b_ih, b_hh = (np.asarray(weights[n], dtype=np.float64) for n in NAMES)
    x = _shaped("x", np.asarray(x, dtype=np.float64), (None, None, None))
    hidden = r.shape[-1] if r.ndim else 0
    _shaped("weight_hh_l0", r, (gates * hidden, hidden))
    _shaped("weight_ih_l0", w, (gates * hidden, x.shape[2]))
    _shaped("bias_ih_l0", b_ih, (gates * hidden,))
    _shaped("bias_hh_l0", b_hh, (gates * hidden,))
    if state is None:
        state = (np.zeros((x.shape[1], hidden)),) * count
    if len(state) != count:
        raise ShapeError("len(state)", len(state), f"{count} for {cell!r}")
    states = tuple(_shaped(f"state[{n}]", np.array(s, dtype=np.float64), (x.shape[1], hidden))
                   for n, s in enumerate(state))
    y = np.empty((x.shape[0], x.shape[1], hidden))
    for t in range(x.shape[0]):
        states = step(x[t] @ w.T + b_ih, states, r, b_hh)
        y[t] = states[0]
    return y, states


def random_weights(cell: str, input: int, hidden: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Weights as PyTorch initialises them: float32, uniform in +-1/sqrt(H), by PyTorch's names."""
    gates = _lookup(cell)[0]
    shapes = ((gates * hidden, input), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
    generator, bound = np.random.default_rng(seed), hidden ** -0.5
    return {name: generator.uniform(-bound, bound, shape).astype(np.float32)
            for name, shape in zip(NAMES, shapes, strict=True)}


def _lookup(cell: str) -> tuple[int, int, Step]:
    if cell not in STEPS:
        raise ArgumentError("cell", cell, f"one of {', '.join(STEPS)}: the cells with a reference")
    return STEPS[cell]


def _shaped(name: str, array: Array, shape: tuple[int | None, ...]) -> Array:
    fits = array.ndim == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not fits:
        text = "(T, B, I)" if None in shape else str(shape)
        raise ShapeError(f"{name}.shape", array.shape, text)
    return array
