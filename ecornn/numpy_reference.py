"""The layers in NumPy float64, which compiled modules are checked against: stacks, both directions, lengths and resets.
Steps of built-in cells are written from the formulas, apart from ``ecornn.cells`` and without TVM, so that an error in
either cannot hide in the other; gates are stacked in PyTorch's order. The step of a user's cell is that of its te graph
(``interpreter.py``), which shares nothing with the analysis either."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ecornn.boundary import public
from ecornn.errors import ArgumentError, ShapeError, WeightsError

if TYPE_CHECKING:
    from ecornn.cells import Cell

Array = NDArray[np.float64]
States = tuple[Array, ...]
KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
GAINS = ("weight_ln_ih", "weight_ln_hh")  # of layer normalization, as many values as a bias has
STATE_GAINS = ("weight_ln_c", "bias_ln_c")  # H values each


@dataclass(frozen=True)
class Formula:
    """One step of a cell on arrays, and its weights."""

    cell: str  # its name, for messages
    kinds: tuple[str, ...]  # names of the weights of a layer, in the order in which `step` takes them
    named: Callable[[str, int, bool], str]  # (kind, layer, True: from the end) -> the name by which a user passes it
    shapes: Callable[[int, int], Sequence[tuple[int, ...]]]  # (I, H) -> the weights' shapes as a user passes them
    hidden: Callable[[Mapping[str, Any]], int]  # the weights by name -> H
    states: int  # how many
    outputs: tuple[int, ...]  # their places, side by side in y, among the arrays that `step` returns
    # (x (B, I), states (B, H), weights) -> the new states, and behind them outputs that are no states
    step: Callable[[Any, States, Sequence[Any]], States]


@dataclass(frozen=True)
class Call:
    """The arguments of :func:`run`."""

    formula: Formula
    x: Any  # (T, B, I)
    weights: Mapping[str, Any]  # by name
    before: Sequence[Any]  # first states (L*D, B, H) of each kind
    ends: Any  # lengths (B,)
    starts: Any  # resets (T, B)
    whole: bool  # all rows go through all steps
    layers: int
    directions: int
    outer: tuple[int, ...]  # (L*D,) where states have that axis, else ()


def checked(formula: Formula, x: Any, weights: Mapping[str, Any], state: Sequence[Any] | None, lengths: Any,
            resets: Any) -> Call:
    """Checks the arguments of :func:`~ecornn.numpy_reference.reference`, which lists the errors; makes them float64."""
    count, (layers, directions) = formula.states, _extent(formula, weights)
    x = _shaped("x", np.asarray(x, dtype=np.float64), (None, None, None))
    steps, batch, parts = x.shape[0], x.shape[1], layers * directions
    hidden = formula.hidden(weights)
    outer: tuple[int, ...] = () if parts == 1 else (parts,)
    state = (np.zeros((*outer, batch, hidden)),) * count if state is None else state
    if len(state) != count:
        raise ShapeError("len(state)", len(state), f"{count} for {formula.cell!r}")
    before = [_shaped(f"state[{n}]", np.asarray(s, dtype=np.float64), (*outer, batch, hidden))
              .reshape(parts, batch, hidden) for n, s in enumerate(state)]
    ends = np.full(batch, steps) if lengths is None else np.asarray(lengths)
    starts = np.zeros((steps, batch), bool) if resets is None else np.asarray(resets, bool)
    _shaped("lengths", ends, (batch,))
    _shaped("resets", starts, (steps, batch))
    if not ((ends >= 0) & (ends <= steps)).all():
        raise ArgumentError("lengths", ends.tolist(), f"integers from 0 to T={steps}")
    named: dict[str, Array] = {}
    for layer in range(layers):
        shapes = formula.shapes(directions * hidden if layer else x.shape[2], hidden)
        for reverse in (False, True)[:directions]:
            names = [formula.named(kind, layer, reverse) for kind in formula.kinds]
            named |= {name: _weight(weights, name, shape) for name, shape in zip(names, shapes, strict=True)}
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
    spans = list(pairwise([0, *(t for t in marks if t), end]))
    if reverse:
        return [(low, high, high != end) for low, high in reversed(spans)]
    return [(low, high, low in marks) for low, high in spans]


def _extent(formula: Formula, weights: Mapping[str, Any]) -> tuple[int, int]:
    """Layers and directions that the names of the weights speak of."""
    directions = 1 + any(formula.named(kind, 0, True) in weights for kind in formula.kinds)
    layers = max(1, -(-len(weights) // (len(formula.kinds) * directions))) if formula.kinds else 1
    expected = [formula.named(kind, k, reverse) for k in range(layers) for reverse in (False, True)[:directions]
                for kind in formula.kinds]
    missing, extra = set(expected) - set(weights), set(weights) - set(expected)
    if missing or extra:
        raise WeightsError(f"weights of {formula.cell!r}: missing {sorted(missing)}, unexpected "
                           f"{sorted(extra)}; expected {', '.join(expected)}", sorted(missing | extra))
    return layers, directions


def _weight(weights: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Array:
    return _shaped(name, np.asarray(weights[name], dtype=np.float64), shape)


def _shaped(name: str, array: Array, shape: tuple[int | None, ...]) -> Array:
    if array.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, array.shape, strict=True)):
        raise ShapeError(f"{name}.shape", array.shape, "(T, B, I)" if None in shape else str(shape))
    return array


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
    """Gates i, f, g, o. Hochreiter and Schmidhuber 1997, forget gate of Gers et al. 2000. With ``gains`` LN(R h) and
    LN(c'); ``wx`` has LN(W x) then. Ba et al. 2016, supplement."""
    h, c = states
    i, f, g, o = np.split(wx + _normal_in_parts(h @ r.T, 4, *gains[:1]) + b, 4, axis=1)
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return _sigmoid(o) * np.tanh(_normal(c, gains[1]) + gains[2] if gains else c), c


def _gru(wx: Array, states: States, r: Array, b: Array, gains: Sequence[Array] = ()) -> States:
    """Gates r, z, n; r scales R_n h + b_n. ``gains``: LN(R h), and ``wx`` has LN(W x) (Ba et al. 2016, supplement)."""
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


STEPS: dict[str, tuple[int, int, Callable[..., States]]] = {  # cell -> (G, number of states, step)
    "lstm": (4, 2, _lstm), "gru": (3, 1, _gru), "gru_reset_before": (3, 1, _gru_reset_before),
    "rnn_tanh": (1, 1, lambda wx, states, r, b: (np.tanh(wx + states[0] @ r.T + b),)),  # Elman 1990
    "rnn_relu": (1, 1, lambda wx, states, r, b: (np.maximum(wx + states[0] @ r.T + b, 0.0),))}
NORMALIZED: dict[str, tuple[int, int, Callable[..., States]]] = {  # the same with gains beside the weights
    "lstm(layer_norm)": (4, 2, _lstm), "gru(layer_norm)": (3, 1, _gru)}


def formula_of(cell: str) -> Formula:
    """The formula of a built-in cell. Raises :class:`ArgumentError` for a cell that has none."""
    gates, count, one = _lookup(cell)

    def step(x: Array, states: States, weights: Sequence[Array]) -> States:
        w, r, b_ih, b_hh, *gains = weights
        wx = x @ w.T
        if gains:
            return one(_normal_in_parts(wx, gates, gains[0]) + b_ih, states, r, b_hh, gains=gains[1:])
        return one(wx + b_ih, states, r, b_hh)

    def named(kind: str, layer: int, reverse: bool) -> str:
        return f"{kind}_l{layer}" + ("_reverse" if reverse else "")

    def hidden(weights: Mapping[str, Any]) -> int:
        size = (0, *np.shape(weights["weight_hh_l0"]))[-1]
        _weight(weights, "weight_hh_l0", (gates * size, size))
        return size

    return Formula(cell, _kinds(cell), named, lambda inputs, size: _shapes(cell, inputs, size), hidden, count, (0,),
                   step)


def formula_of_cell(cell: Cell, x: Any, weights: Mapping[str, Any], state: Sequence[Any] | None) -> Formula:
    """A cell's te step for :func:`reference`; the shapes of x, weights and state tell its sizes."""
    from ecornn.cells import Cell

    if not isinstance(cell, Cell):
        raise ArgumentError("cell", cell, "an ecornn.Cell, or the name of one that has a formula in NumPy")
    from ecornn.interpreter import Step, output_numbers

    hidden = _hidden_size(cell, np.shape(x)[-1] if np.ndim(x) else 1, weights, state)
    steps: dict[tuple[tuple[int, ...], ...], Step] = {}  # by the shapes of x and a state

    def step(row: Array, states: tuple[Array, ...], weights: Sequence[Array]) -> tuple[Array, ...]:
        shapes = row.shape, states[0].shape
        if shapes not in steps:
            steps[shapes] = Step(cell, *shapes)
        in_te = cell.parameters(cell.own_input(row.shape[1], hidden), hidden).items()
        return steps[shapes](row, states, {n: w.reshape(s) for (n, s), w in zip(in_te, weights, strict=True)})

    return Formula(cell.name, tuple(cell.parameters(hidden, hidden)), cell.parameter_name,
                   lambda inputs, hidden: list(_flat_shapes(cell, inputs, hidden).values()), lambda _: hidden,
                   len(cell.states), output_numbers(cell), step)


def _flat_shapes(cell: Cell, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters as a user passes them, for rows of ``width`` values, the cell's inputs among them."""
    return {n: (s[0] * s[1], *s[2:]) for n, s in cell.parameters(cell.own_input(width, hidden), hidden).items()}


def _hidden_size(cell: Cell, input: int, weights: Mapping[str, Any], state: Sequence[Any] | None) -> int:
    """H: that of a state; else the one that fits most weights of the first layer; without parameters I."""
    if state is not None and len(state) and np.ndim(state[0]):
        return np.shape(state[0])[-1]
    given = {n: np.shape(w) for n, w in weights.items()}
    rows = {shape[0] for shape in given.values() if shape}
    matches = {input: 0}  # H -> weights that fit
    for hidden in sorted({d for r in rows for d in range(1, r + 1) if r % d == 0}):
        with contextlib.suppress(Exception):  # a cell may refuse sizes
            matches[hidden] = sum(given.get(cell.parameter_name(n)) == shape
                                  for n, shape in _flat_shapes(cell, input, hidden).items())
    return max(matches, key=matches.__getitem__)


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
    CellError : a Cell's step uses what NumPy has no reference for"""
    formula = formula_of(cell) if isinstance(cell, str) else formula_of_cell(cell, x, weights, state)
    call = checked(formula, x, weights, state, lengths, resets)
    y, last = run(call)
    if isinstance(cell, str) or len(formula.outputs) == 1:
        return y, last
    from ecornn.workload import by_output  # and with it msgspec

    return by_output(y, cell.output_names(), call.directions), last


def _kinds(cell: str) -> tuple[str, ...]:
    return KINDS + (GAINS if cell in NORMALIZED else ()) + (STATE_GAINS if cell == "lstm(layer_norm)" else ())


def _shapes(cell: str, inputs: int, hidden: int) -> list[tuple[int, ...]]:
    rows = _lookup(cell)[0] * hidden
    special = {"weight_ih": (rows, inputs), "weight_hh": (rows, hidden), **dict.fromkeys(STATE_GAINS, (hidden,))}
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
    every = STEPS | NORMALIZED
    if cell not in every:
        raise ArgumentError("cell", cell, f"one of {', '.join(every)}: the cells with a reference")
    return every[cell]
