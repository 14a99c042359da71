"""The layers in NumPy float64, which compiled modules are checked against.

Built-in cells are written from the formulas, apart from ``ecornn.cells`` and without TVM, so that an error in either
cannot hide in the other; gates are stacked in PyTorch's order. The step of a user's cell is that of its te graph
(``interpreter.py``), which shares nothing with the analysis either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ecornn.boundary import public
from ecornn.errors import ArgumentError
from ecornn.numpy_layers import Array, Formula, States, checked, run, weight
from ecornn.outputs import by_output

if TYPE_CHECKING:
    from ecornn.cells import Cell

KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
GAINS = ("weight_ln_ih", "weight_ln_hh")  # of layer normalization, as many values as a bias has
STATE_GAINS = ("weight_ln_c", "bias_ln_c")  # H values each


def _sigmoid(z: Array) -> Array:
    # The same function as 1 / (1 + exp(-z)), which overflows for large negative z.
    return 0.5 * (1.0 + np.tanh(0.5 * z))


def _normal(values: Array, gain: Array) -> Array:
    """Layer normalization of each row. Ba et al. 2016, arXiv 1607.06450."""
    apart = values - values.mean(axis=1, keepdims=True)
    return apart / np.sqrt(np.square(apart).mean(axis=1, keepdims=True) + 1e-5) * gain


def _normal_in_parts(values: Array, gates: int, gain: Array | None = None) -> Array:
    """:func:`_normal` of all gates of an LSTM together; of a GRU r and z together, and n. As they are without gain."""
    if gain is None:
        return values
    cut = values.shape[1] if gates == 4 else 2 * (values.shape[1] // 3)
    parts = [_normal(values[:, part], gain[part]) for part in (slice(0, cut), slice(cut, None)) if values[:, part].size]
    return np.concatenate(parts, axis=1)


def _lstm(wx: Array, states: States, r: Array, b: Array, gains: Sequence[Array] = ()) -> States:
    """Gates i, f, g, o. Hochreiter and Schmidhuber 1997, forget gate of Gers et al. 2000.

    With ``gains`` LN(R h) and LN(c'); ``wx`` has LN(W x) then. Ba et al. 2016, supplement.
    """
    h, c = states
    i, f, g, o = np.split(wx + _normal_in_parts(h @ r.T, 4, *gains[:1]) + b, 4, axis=1)
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return _sigmoid(o) * np.tanh(_normal(c, gains[1]) + gains[2] if gains else c), c


def _gru(wx: Array, states: States, r: Array, b: Array, gains: Sequence[Array] = ()) -> States:
    """Gates r, z, n; the reset gate scales the finished product R_n h + b_n.

    With ``gains`` LN(R h); ``wx`` has LN(W x) then. Ba et al. 2016, supplement.
    """
    (h,) = states
    xr, xz, xn = np.split(wx, 3, axis=1)
    hr, hz, hn = np.split(_normal_in_parts(h @ r.T, 3, *gains) + b, 3, axis=1)
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


STEPS: dict[str, tuple[int, int, Callable[..., States]]] = {  # cell -> (G, number of states, step)
    "lstm": (4, 2, _lstm),
    "gru": (3, 1, _gru),
    "gru_reset_before": (3, 1, _gru_reset_before),
    "rnn_tanh": (1, 1, _rnn_tanh),
    "rnn_relu": (1, 1, _rnn_relu),
}
NORMALIZED: dict[str, tuple[int, int, Callable[..., States]]] = {  # the same with gains beside the weights
    "lstm(layer_norm)": (4, 2, _lstm),
    "gru(layer_norm)": (3, 1, _gru),
}


def formula_of(cell: str) -> Formula:
    """The formula of a built-in cell. Raises :class:`ArgumentError` for a cell that has none."""
    gates, count, one = _lookup(cell)

    def step(x: Array, states: States, weights: Sequence[Array]) -> States:
        w, r, b_ih, b_hh, *gains = weights
        wx = x @ w.T
        if gains:
            return one(_normal_in_parts(wx, gates, gains[0]) + b_ih, states, r, b_hh, gains=gains[1:])
        return one(wx + b_ih, states, r, b_hh)

    def hidden(_: int, weights: Mapping[str, Any], __: tuple[int, ...] | None) -> int:
        r = weights["weight_hh_l0"]
        size = np.shape(r)[-1] if np.ndim(r) else 0
        weight(weights, "weight_hh_l0", (gates * size, size))
        return size

    return Formula(cell, _kinds(cell), _as_in_pytorch, lambda inputs, size: _shapes(cell, inputs, size), hidden, count,
                   (0,), step)


def _as_in_pytorch(kind: str, layer: int, reverse: bool) -> str:
    return f"{kind}_l{layer}" + ("_reverse" if reverse else "")


@public
def reference(cell: str | Cell, x: Any, weights: Mapping[str, Any], state: Sequence[Any] | None = None, *,
              lengths: Any = None, resets: Any = None) -> tuple[Any, States]:
    """Runs a layer, or a stack of them, in float64. Layers and directions are those of the weights' names.

    Parameters
    ----------
    cell : ``lstm``, ``gru``, ``gru_reset_before``, ``rnn_tanh``, ``rnn_relu``, ``lstm(layer_norm)`` or
        ``gru(layer_norm)``, by formulas in NumPy; or a :class:`Cell`, whose te step is carried out as it was written,
        operation by operation, not as it was analysed
    x : (T, B, I), any real dtype, anything that ``numpy.asarray`` takes; of a Cell with sequences beside x these, H
        values each, behind it in its rows
    weights : ``weight_ih_l0`` (G*H, I), ``weight_hh_l0`` (G*H, H), ``bias_ih_l0`` and
        ``bias_hh_l0`` (G*H,), any real dtype; those of layer k end in ``_l<k>`` and, with inputs D*H wide
        for k > 0, of the reverse direction in ``_l<k>_reverse``. With ``layer_norm`` also ``weight_ln_ih_l0`` and
        ``weight_ln_hh_l0`` (G*H,), and of an LSTM ``weight_ln_c_l0`` and ``bias_ln_c_l0`` (H,). Of a Cell its
        parameters, named and shaped as :meth:`Layer.bind` takes them
    state : (h, c) for ``lstm``, (h,) otherwise, those of a Cell in its order; each (B, H), or (L*D, B, H) where
        L*D > 1; None: zeros
    lengths : (B,) integers from 0 to T; y is zero beyond, states are those of the last step within
    resets : (T, B) booleans; True where a new sequence starts from a state of zeros

    Returns
    -------
    y : (T, B, D*H) float64; of a Cell with several outputs a dict of these, by name
    state : the states after the last step, of the shape of ``state``, float64

    Raises
    ------
    ArgumentError : a cell that is not one of these, or a length that is not from 0 to T
    WeightsError : a weight is missing, or one is too many
    ShapeError : a shape does not fit the others
    CellError : a Cell's step uses what NumPy has no reference for
    """
    if isinstance(cell, str):
        formula = formula_of(cell)
    else:
        from ecornn.interpreter import formula_of_cell

        formula = formula_of_cell(cell, x, weights, state)
    call = checked(formula, x, weights, state, lengths, resets)
    y, last = run(call)
    if isinstance(cell, str) or len(formula.outputs) == 1:
        return y, last
    return by_output(y, cell.output_names(), call.directions), last


def _kinds(cell: str) -> tuple[str, ...]:
    """The kinds of a layer's weights, in order."""
    more = GAINS + STATE_GAINS if cell == "lstm(layer_norm)" else GAINS
    return KINDS + more if cell in NORMALIZED else KINDS


def _shapes(cell: str, inputs: int, hidden: int) -> list[tuple[int, ...]]:
    """The shapes of a layer's weights, in order."""
    rows = _lookup(cell)[0] * hidden
    special: dict[str, tuple[int, ...]] = {"weight_ih": (rows, inputs), "weight_hh": (rows, hidden)}
    special |= dict.fromkeys(STATE_GAINS, (hidden,))
    return [special.get(kind, (rows,)) for kind in _kinds(cell)]


def random_weights(cell: str, input: int, hidden: int, seed: int = 0, layers: int = 1,
                   directions: int = 1) -> dict[str, NDArray[np.float32]]:
    """Weights as PyTorch initialises them: float32, uniform in +-1/sqrt(H), by PyTorch's names; gains about 1."""
    generator, bound = np.random.default_rng(seed), hidden ** -0.5
    weights = {}
    for layer in range(layers):
        inputs = directions * hidden if layer else input
        for end in ("", "_reverse")[:directions]:
            for kind, shape in zip(_kinds(cell), _shapes(cell, inputs, hidden), strict=True):
                value = generator.uniform(-bound, bound, shape) + kind.startswith("weight_ln")
                weights[f"{kind}_l{layer}{end}"] = value.astype(np.float32)
    return weights


def _lookup(cell: str) -> tuple[int, int, Callable[..., States]]:
    if cell in NORMALIZED:
        return NORMALIZED[cell]
    if cell not in STEPS:
        raise ArgumentError("cell", cell, f"one of {', '.join((*STEPS, *NORMALIZED))}: the cells with a reference")
    return STEPS[cell]
