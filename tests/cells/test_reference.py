"""The float64 reference of built-in and users' cells: against formulas written apart, and differences of itself."""

from typing import Any

import numpy as np
import pytest
import step_cells
import test_variants as variants
from exact import in_float64, of_stack
from refusals import refused
from tvm import te

import ecornn
from ecornn.cells import Cell, get, pointwise, product
from ecornn.errors import ArgumentError, CellError, ShapeError, WeightsError
from ecornn.numpy_reference import NORMALIZED, STEPS, random_weights, reference
from ecornn.workload import SINGLE, Stack

T, B, I, H = 6, 3, 5, 4  # all different, so that a swapped axis shows
EXACT = 1e-13  # float64 rounding of sums of a few terms
NEAR = {"rtol": 1e-12, "atol": 1e-12}  # the same through some steps
LENGTHS = [T, 2, 0]
RESETS = np.array([[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]], bool)


def close(found, wanted, **limits):
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, **limits)


def problem(cell, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((T, B, I))
    return x, random_weights(cell, I, H, seed), tuple(generator.standard_normal((B, H)) for _ in range(STEPS[cell][1]))


@pytest.mark.parametrize("cell", [*STEPS, *NORMALIZED])
def test_it_is_the_formula(cell):
    found, rng = get(cell), np.random.default_rng(0)
    x, weights = rng.standard_normal((T, B, I)), random_weights(cell, I, H)
    states = {n: rng.standard_normal((B, H)) for n in found.states}
    shaped = {n: weights[found.parameter_name(n)].reshape(s) for n, s in found.parameters(I, H).items()}
    expected, last = variants.expected(cell.partition("(")[0], found.options, x, states, shaped)
    y, after = reference(cell, x, weights, list(states.values()))
    close((y, *after), (expected, *last), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("cell", STEPS)
def test_goes_on_where_it_stopped(cell):
    x, weights, state = problem(cell, seed=2)
    whole, end = reference(cell, x, weights, state)
    first, middle = reference(cell, x[:2], weights, state)
    second, last = reference(cell, x[2:], weights, middle)
    close((np.concatenate([first, second]), *last), (whole, *end), rtol=0)


@pytest.mark.parametrize("cell", STEPS)
def test_no_state_is_zeros_and_nothing_is_written_to_arguments(cell):
    x, weights, state = problem(cell, seed=3)
    zeros = tuple(np.zeros_like(s) for s in state)
    np.testing.assert_array_equal(reference(cell, x, weights)[0], reference(cell, x, weights, zeros)[0])
    kept = [s.copy() for s in state]
    reference(cell, x, weights, state)
    close(state, kept, rtol=0)


def test_large_arguments_do_not_overflow():
    x, weights, state = problem("lstm", seed=6)
    with np.errstate(all="raise"):
        y, _ = reference("lstm", np.sign(x) * 1e4, weights, state)
    assert np.isfinite(y).all()


def test_random_weights():
    weights = random_weights("gru", 7, 100, seed=3)
    assert {n: v.shape for n, v in weights.items()} == {
        "weight_ih_l0": (300, 7), "weight_hh_l0": (300, 100), "bias_ih_l0": (300,), "bias_hh_l0": (300,)}
    everything = np.concatenate([v.ravel() for v in weights.values()])
    assert everything.dtype == np.float32 and 0.099 < np.abs(everything).max() <= np.float32(0.1)
    again, other = random_weights("gru", 7, 100, seed=3), random_weights("gru", 7, 100, seed=4)
    np.testing.assert_array_equal(weights["weight_hh_l0"], again["weight_hh_l0"])
    assert (weights["weight_hh_l0"] != other["weight_hh_l0"]).any()


def test_errors_name_what_is_wrong():
    x, weights, state = problem("lstm")
    refused(ArgumentError, "cell='mamba'", reference, "mamba", x, weights)
    with pytest.raises(WeightsError, match=r"missing \['bias_hh_l0'\], unexpected \['bias_hh'\]"):
        reference("lstm", x, {n.replace("hh_l0", "hh") if n == "bias_hh_l0" else n: v for n, v in weights.items()})
    refused(ShapeError, r"weight_ih_l0.shape=\(16, 5\).*\(16, 4\)", reference, "lstm", x[:, :, :4], weights)
    refused(ShapeError, r"weight_hh_l0.shape", reference, "gru", x, weights)
    refused(ShapeError, r"x.shape=\(3, 5\)", reference, "lstm", x[0], weights)
    for length in (4, -1):
        with pytest.raises(ArgumentError, match=rf"lengths=\[{length}, 1\].*from 0 to T=3"):
            reference("lstm", np.zeros((3, 2, 5)), random_weights("lstm", 5, 4), lengths=[length, 1])
    refused(ShapeError, r"len\(state\)=1", reference, "lstm", x, weights, state[:1])
    refused(ShapeError, r"state\[1\].shape=\(2, 4\)", reference, "lstm", x, weights, (state[0], state[1][:2]))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("cell", [*STEPS, *NORMALIZED])
def test_gradients_are_differences(cell: str, layers: int, directions: int, ragged: bool):
    rng, parts, step = np.random.default_rng(0), layers * directions, 1e-6
    weights: dict[str, Any] = random_weights(cell, I, H, 1, layers, directions)
    count = (STEPS | NORMALIZED)[cell][1]
    shape = (parts, B, H) if parts > 1 else (B, H)
    x, dy = rng.normal(size=(T, B, I)), rng.normal(size=(T, B, directions * H))
    states, dstates = ([rng.normal(size=shape) for _ in range(count)] for _ in range(2))
    rows: dict[str, Any] = {"lengths": [T, 0, 3], "resets": rng.random((T, B)) < 0.3} if ragged else {}
    dx, dweights, firsts = ecornn.reference_gradients(cell, x, weights, states, dy=dy, dstate=dstates, **rows)
    assert dx.shape == x.shape and {n: g.shape for n, g in dweights.items()} == {n: w.shape for n, w in weights.items()}
    def loss(sign: float) -> float:
        moved = {n: w + sign * step * ways[1][n] for n, w in weights.items()}
        y, last = reference(cell, x + sign * step * ways[0], moved,
                            [s + sign * step * w for s, w in zip(states, ways[2], strict=True)], **rows)
        return float((y * dy).sum() + sum((s * d).sum() for s, d in zip(last, dstates, strict=True)))

    for _ in range(3):
        ways: Any = (rng.normal(size=x.shape), {n: rng.normal(size=w.shape) for n, w in weights.items()},
                     [rng.normal(size=shape) for _ in states])
        expected = (dx * ways[0]).sum() + sum((dweights[n] * w).sum() for n, w in ways[1].items())
        expected += sum((g * w).sum() for g, w in zip(firsts, ways[2], strict=True))
        got = (8 * (loss(1) - loss(-1)) - loss(2) + loss(-2)) / (12 * step)  # of fourth order
        assert abs(got - expected) <= 1e-6 * max(1.0, abs(expected))


def test_steps_beyond_a_length_have_no_gradient():
    weights, x = random_weights("gru", I, H), np.ones((T, B, I))
    dx, _, (first,) = ecornn.reference_gradients("gru", x, weights, dy=np.ones((T, B, H)), lengths=[2, 0, T])
    assert not dx[2:, 0].any() and not dx[:, 1].any() and dx[:2, 0].all() and dx[:, 2].all()
    assert not first[1].any() and first[0].all()


def test_shapes_of_gradients_are_checked():
    weights, x = random_weights("lstm", I, H), np.ones((T, B, I))
    with pytest.raises(ShapeError, match=r"dy.shape.*\(6, 3, 4\)"):
        ecornn.reference_gradients("lstm", x, weights, dy=np.ones((T, B, H + 1)))
    with pytest.raises(ShapeError, match="len\\(dstate\\)"):
        ecornn.reference_gradients("lstm", x, weights, dy=np.ones((T, B, H)), dstate=[np.ones((B, H))])
    with pytest.raises(ShapeError, match=r"dstate\[1\].shape"):
        ecornn.reference_gradients("lstm", x, weights, dy=np.ones((T, B, H)), dstate=[np.ones((B, H)), np.ones((H,))])


def weights_of(cell: Cell, input: int, hidden: int, rng: Any, layers: int = 1, directions: int = 1) -> dict[str, Any]:
    found = {}
    for layer in range(layers):
        for reverse in (False, True)[:directions]:
            shapes = cell.parameters(directions * hidden if layer else input, hidden)
            found |= {cell.parameter_name(n, layer, reverse): rng.uniform(-1, 1, (s[0] * s[1], *s[2:]))
                      for n, s in shapes.items()}
    return found


@pytest.mark.parametrize("name", ["gated", "pair", "highway", "blend"])
@pytest.mark.parametrize("stack", [SINGLE, Stack(2, True)], ids=["layer", "stack"])
@pytest.mark.parametrize("masks", [{}, {"lengths": LENGTHS, "resets": RESETS}], ids=["whole", "masked"])
def test_a_users_cell_is_its_formula(name: str, masks: dict[str, Any], stack: Stack):
    rng, cell = np.random.default_rng(1), step_cells.CELLS[name]
    x, weights = rng.normal(size=(T, B, I)), weights_of(cell, I, H, rng, stack.layers, stack.directions)
    y, after = ecornn.reference(cell, x, weights, **masks)
    zeros = [np.zeros((B, H) if stack == SINGLE else (stack.count, B, H))] * len(cell.states)
    expected, last = of_stack(name, stack, x, zeros, weights, masks, in_float64)
    close((y, *after), (expected, *last), **NEAR)


@pytest.mark.parametrize("name", [*STEPS, *NORMALIZED])
def test_stacks_of_a_cell_are_those_of_the_formula(name: str):
    """The te step of a built-in cell, given as a Cell, against the formula that its name stands for."""
    rng = np.random.default_rng(2)
    x, weights = rng.normal(size=(T, B, I)), random_weights(name, I, H, layers=2, directions=2)
    state = [rng.normal(size=(4, B, H)) for _ in get(name).states]
    masks = {"lengths": LENGTHS, "resets": RESETS}
    expected, last = ecornn.reference(name, x, weights, state, **masks)
    y, after = ecornn.reference(get(name), x, weights, state, **masks)
    assert y.dtype == np.float64 and y.shape == (T, B, 2 * H)
    close((y, *after), (expected, *last), **NEAR)


def test_sizes_come_from_the_weights_or_a_state():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(T, B, H))
    for cell in (step_cells.Average(), step_cells.Decay()):
        weights = weights_of(cell, H, H, rng)
        assert ecornn.reference(cell, x, weights)[0].shape == (T, B, H)
        np.testing.assert_allclose(ecornn.reference(cell, x, weights, [x[0]])[0],
                                   step_cells.run(cell, x, {"h": x[0]}, {n.removesuffix("_l0"): w.reshape(1, H) for
                                                                         n, w in weights.items()})[0], **NEAR)


class Halves(step_cells.Formula):
    name, states, shapes = "halves", ("h",), {"W": (2, "I"), "b": (1,)}

    def parameters(self, input, hidden):
        if hidden % 2:
            raise ValueError("H must be even")
        return super().parameters(input, hidden)

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"])
        return [pointwise(lambda b, j: wx[b, 0, j] * h[b, j] + p["b"][0, j], h)]


def test_a_cell_that_refuses_sizes_is_asked_for_those_that_fit():
    rng = np.random.default_rng(4)
    x, weights = rng.normal(size=(T, B, I)), weights_of(Halves(), I, H, rng)
    y, (last,) = ecornn.reference(Halves(), x, weights)
    h = np.zeros((B, H))
    for row in x:
        h = (row @ weights["W_l0"][:H].T) * h + weights["b_l0"]
    np.testing.assert_allclose(last, h, **NEAR)
    np.testing.assert_array_equal(y[-1], last)


def partly(x, h, p):
    k = te.reduce_axis((0, x.shape[1]), "k")
    part = te.compute((x.shape[0],), lambda b: te.sum(x[b, k], axis=k, where=k < 2), name="part")
    return [pointwise(lambda b, j: h[b, j] + part[b], h)]


def test_errors_name_what_is_wrong_with_a_users_cell():
    rng, cell = np.random.default_rng(5), step_cells.CELLS["gated"]
    x, weights = rng.normal(size=(T, B, I)), weights_of(cell, I, H, rng)
    with pytest.raises(WeightsError, match=r"weights of 'gated': missing \['b_l0'\], unexpected \['bias'\]"):
        ecornn.reference(cell, x, {"bias" if n == "b_l0" else n: w for n, w in weights.items()})
    refused(ShapeError, r"b_l0.shape=\(4,\).*\(8,\)", ecornn.reference, cell, x, weights | {"b_l0": np.zeros(H)})
    refused(ShapeError, r"len\(state\)=2.*1 for 'gated'", ecornn.reference, cell, x, weights, [np.zeros((B, H))] * 2)
    refused(ArgumentError, r"cell=3: expected an ecornn\.Cell", ecornn.reference, 3, x, weights)
    with pytest.raises(CellError, match="the sum 'part', which has a condition"):
        ecornn.reference(step_cells.Given(partly), x, {})
