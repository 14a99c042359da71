"""The tangent of a cell, in NumPy float64: beside differences of the cell's own results, of all published cells."""

from typing import Any

import numpy as np
import pytest
from published import CELLS

from ecornn.analysis.graph import analyse
from ecornn.cells import Cell, get
from ecornn.cells.tangent import VALUE, Tangent
from ecornn.interpreter import Tangents, interpret

T, B, STEP = 3, 2, 1e-6
SPECS = ("lstm", "lstm(peepholes,coupled,projection)", "lstm(layer_norm)", "gru", "gru(layer_norm)", "gru_reset_before",
         "rnn_tanh", "rnn_relu", "indrnn", "slstm", "slstm(heads=2)")
KNOWN: dict[str, Any] = {spec: get(spec) for spec in SPECS} | CELLS
# a second each
CASES = [pytest.param(name, marks=[pytest.mark.exhaustive] * (n > 6 and n % 5 > 0)) for n, name in enumerate(KNOWN)]


def sizes(cell: Any) -> tuple[int, int]:
    hidden = getattr(cell, "hidden", 6)
    return hidden if getattr(cell, "square", False) else 3, hidden


def drawn(cell: Cell, width: int, hidden: int, rng: Any) -> tuple[Any, dict[str, Any], list[Any]]:
    """x, parameters and states."""
    def values(name: str, shape: tuple[int, ...]) -> Any:
        value = rng.standard_normal(shape)
        return np.abs(value) + 0.1 if name in cell.nonnegative else value

    x = np.concatenate([rng.standard_normal((T, B, width)), *(values(n, (T, B, hidden)) for n in cell.inputs)], -1)
    weights = {n: np.asarray(cell.sample(n, s, rng), float) for n, s in cell.parameters(width, hidden).items()}
    return x, weights, [values(n, (B, hidden)) for n in cell.states]


def packed(tangent: Tangent, x: Any, dx: Any, weights: Any, turned: Any) -> tuple[Any, dict[str, Any]]:
    width, end = tangent.input, tangent.end
    (own, inputs), (moved, d_inputs) = ((v[..., :width], v[..., width:]) for v in (x, dx))
    beside = [inputs, own, d_inputs, moved] if VALUE in tangent.inputs else [inputs, d_inputs]
    given = {}
    for n, w in weights.items():
        given[tangent.x_name(n)] = np.block([[[w, 0 * w]], [[turned[n], w]]]).reshape(
            2 * w.shape[0], w.shape[1], -1) if w.ndim == 3 else None
        given |= {n: w, f"{n}{end}": turned[n]}
    return np.concatenate([own, moved, *beside], -1), {n: given[n] for n in tangent.shapes}


@pytest.mark.parametrize("name", CASES)
def test_tangents_are_differences(name: str) -> None:
    cell, (width, hidden), rng = KNOWN[name], sizes(KNOWN[name]), np.random.default_rng(7)
    tangent = Tangent(cell, width, hidden)
    at, turn = (drawn(cell, width, hidden, rng) for _ in range(2))
    said: Tangents = []  # derivatives that the cell says itself
    interpret(cell, at[0], at[1], at[2], said)

    def moved(share: float) -> Any:
        x, weights, states = at
        dx, turned, d_states = turn
        y, last = interpret(cell, x + share * dx, {n: w + share * turned[n] for n, w in weights.items()},
                            [s + share * d for s, d in zip(states, d_states, strict=True)], said or None)
        return [*np.split(y, len(cell.output_names()), -1), *last]

    rows, weights = packed(tangent, at[0], turn[0], at[1], turn[1])
    y, last = interpret(tangent, rows, weights, [*at[2], *turn[2]])
    y, count = np.split(y, 2, -1), len(cell.states)
    found = [*np.split(y[1], len(cell.output_names()), -1), *last[count:]]
    for value, same in zip(moved(0.0), [*np.split(y[0], len(cell.output_names()), -1), *last[:count]], strict=True):
        # float64: a tangent cell has the same values, of regrouped sums
        np.testing.assert_allclose(same, value, rtol=1e-12, atol=1e-12)
    for value, ahead, behind in zip(found, moved(STEP), moved(-STEP), strict=True):
        wanted = (ahead - behind) / (2 * STEP)
        # a central difference is off by the third derivative, and by roundings over its step
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6 * (1 + np.abs(wanted).max()))
    graph = analyse(tangent, tangent.row_width(2 * width, hidden), hidden)  # which a schedule takes
    assert len(graph.states) == 2 * count
