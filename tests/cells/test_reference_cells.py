"""``ecornn.reference`` of a user's cell: its te step, against formulas written apart and against built-in layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import step_cells
from tvm import te

import ecornn
from ecornn.cells import Cell, get, pointwise, product
from ecornn.errors import ArgumentError, CellError, ShapeError, WeightsError
from ecornn.numpy_reference import STEPS, random_weights

T, B, I, H = 5, 3, 7, 6
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64 rounding of sums of a few terms, through some steps
LENGTHS = [T, 2, 0]
RESETS = np.array([[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]], bool)


def weights_of(cell: Cell, input: int, hidden: int, rng: Any, layers: int = 1, directions: int = 1) -> dict[str, Any]:
    found = {}
    for layer in range(layers):
        for reverse in (False, True)[:directions]:
            shapes = cell.parameters(directions * hidden if layer else input, hidden)
            found |= {cell.parameter_name(n, layer, reverse): rng.uniform(-1, 1, (s[0] * s[1], *s[2:]))
                      for n, s in shapes.items()}
    return found


@pytest.mark.parametrize("name", ["gated", "pair", "highway", "blend"])
@pytest.mark.parametrize("masks", [{}, {"lengths": LENGTHS, "resets": RESETS}], ids=["whole", "masked"])
def test_a_users_cell_is_its_formula(name: str, masks: dict[str, Any]):
    rng, cell = np.random.default_rng(1), step_cells.CELLS[name]
    x, weights = rng.normal(size=(T, B, I)), weights_of(cell, I, H, rng)
    y, after = ecornn.reference(cell, x, weights, **masks)
    expected, last = step_cells.layer(name, H, x, weights, *(np.asarray(m) for m in masks.values()))
    np.testing.assert_allclose(y, expected, **EXACT)
    for got, want in zip(after, last.values(), strict=True):
        np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize("name", STEPS)
def test_stacks_of_a_cell_are_those_of_the_formula(name: str):
    """The te step of a built-in cell, given as a Cell, against the formula that its name stands for."""
    rng = np.random.default_rng(2)
    x, weights = rng.normal(size=(T, B, I)), random_weights(name, I, H, layers=2, directions=2)
    state = [rng.normal(size=(4, B, H)) for _ in get(name).states]
    masks = {"lengths": LENGTHS, "resets": RESETS}
    expected, last = ecornn.reference(name, x, weights, state, **masks)
    y, after = ecornn.reference(get(name), x, weights, state, **masks)
    assert y.dtype == np.float64 and y.shape == (T, B, 2 * H)
    np.testing.assert_allclose(y, expected, **EXACT)
    for got, want in zip(after, last, strict=True):
        np.testing.assert_allclose(got, want, **EXACT)


def test_sizes_come_from_the_weights_or_a_state():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(T, B, H))
    for cell in (step_cells.Average(), step_cells.Decay()):
        weights = weights_of(cell, H, H, rng)
        assert ecornn.reference(cell, x, weights)[0].shape == (T, B, H)
        np.testing.assert_allclose(ecornn.reference(cell, x, weights, [x[0]])[0],
                                   step_cells.run(cell, x, {"h": x[0]}, {n.removesuffix("_l0"): w.reshape(1, H) for
                                                                         n, w in weights.items()})[0], **EXACT)


class Halves(Cell):
    """Refuses hidden sizes that are odd, with an error of its own."""

    name = "halves"
    states = ("h",)

    def parameters(self, input, hidden):
        if hidden % 2:
            raise ValueError("H must be even")
        return {"W": (2, hidden, input), "b": (1, hidden)}

    def step(self, x, states, parameters):
        (h,), wx = states, product(x, parameters["W"])
        return [pointwise(lambda b, j: wx[b, 0, j] * h[b, j] + parameters["b"][0, j], h)]


def test_a_cell_that_refuses_sizes_is_asked_for_those_that_fit():
    rng = np.random.default_rng(4)
    x, weights = rng.normal(size=(T, B, I)), weights_of(Halves(), I, H, rng)
    y, (last,) = ecornn.reference(Halves(), x, weights)
    h = np.zeros((B, H))
    for row in x:
        h = (row @ weights["W_l0"][:H].T) * h + weights["b_l0"]
    np.testing.assert_allclose(last, h, **EXACT)
    np.testing.assert_array_equal(y[-1], last)


class Partly(Cell):
    """A sum of a part of each row."""

    name = "partly"
    states = ("h",)

    def parameters(self, input, hidden):
        return {}

    def step(self, x, states, parameters):
        (h,), k = states, te.reduce_axis((0, x.shape[1]), "k")
        part = te.compute((x.shape[0],), lambda b: te.sum(x[b, k], axis=k, where=k < 2), name="part")
        return [pointwise(lambda b, j: h[b, j] + part[b], h)]


def test_errors_name_what_is_wrong():
    rng, cell = np.random.default_rng(5), step_cells.CELLS["gated"]
    x, weights = rng.normal(size=(T, B, I)), weights_of(cell, I, H, rng)
    with pytest.raises(WeightsError, match=r"weights of 'gated': missing \['b_l0'\], unexpected \['bias'\]"):
        ecornn.reference(cell, x, {"bias" if n == "b_l0" else n: w for n, w in weights.items()})
    with pytest.raises(ShapeError, match=r"b_l0.shape=\(6,\).*\(12,\)"):
        ecornn.reference(cell, x, weights | {"b_l0": np.zeros(6)})
    with pytest.raises(ShapeError, match=r"len\(state\)=2.*1 for 'gated'"):
        ecornn.reference(cell, x, weights, [np.zeros((B, H))] * 2)
    with pytest.raises(ArgumentError, match=r"cell=3 is not allowed; expected an ecornn\.Cell"):
        ecornn.reference(3, x, weights)
    with pytest.raises(CellError, match="the sum 'part', which has a condition"):
        ecornn.reference(Partly(), x, {})
