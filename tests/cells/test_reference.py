"""The float64 reference: against scalar loops, closed forms, and PyTorch where it is installed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ecornn.errors import ArgumentError, ShapeError, WeightsError
from ecornn.numpy_reference import NORMALIZED, STEPS, random_weights, reference

T, B, I, H = 6, 3, 5, 4  # all different, so that a swapped axis shows
EXACT = 1e-13  # float64 rounding of sums of a few terms


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def problem(cell, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((T, B, I))
    state = tuple(generator.standard_normal((B, H)) for _ in range(STEPS[cell][1]))
    return x, random_weights(cell, I, H, seed), state


def scalar_loop(cell, x, weights, state):
    """One scalar at a time with ``math``: shares no expression with the reference."""
    w, r, bw, br = (weights[n].astype(float) for n in
                    ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"))
    steps, batch, size = len(x), x.shape[1], r.shape[1]
    h, c = state[0].copy(), (state[1].copy() if len(state) == 2 else None)
    y = np.zeros((steps, batch, size))
    for t in range(steps):
        old = h.copy()
        for b in range(batch):
            def ix(g, j, b=b, t=t):
                return sum(w[g * size + j, k] * x[t, b, k] for k in range(x.shape[2])) + bw[g * size + j]

            def rec(g, j, vector):
                return sum(r[g * size + j, k] * vector[k] for k in range(size)) + br[g * size + j]

            reset = [sigmoid(ix(0, j) + rec(0, j, old[b])) * old[b, j] for j in range(size)]
            for j in range(size):
                if cell == "lstm":
                    i, f, o = (sigmoid(ix(g, j) + rec(g, j, old[b])) for g in (0, 1, 3))
                    c[b, j] = f * c[b, j] + i * math.tanh(ix(2, j) + rec(2, j, old[b]))
                    h[b, j] = o * math.tanh(c[b, j])
                elif cell.startswith("gru"):
                    z = sigmoid(ix(1, j) + rec(1, j, old[b]))
                    if cell == "gru":
                        inner = sigmoid(ix(0, j) + rec(0, j, old[b])) * rec(2, j, old[b])
                    else:
                        inner = rec(2, j, reset)
                    h[b, j] = (1 - z) * math.tanh(ix(2, j) + inner) + z * old[b, j]
                else:
                    sum_ = ix(0, j) + rec(0, j, old[b])
                    h[b, j] = math.tanh(sum_) if cell == "rnn_tanh" else max(0.0, sum_)
        y[t] = h
    return y, (h,) if c is None else (h, c)


@pytest.mark.parametrize("cell", STEPS)
def test_scalar_loop(cell):
    x, weights, state = problem(cell)
    y, after = reference(cell, x, weights, state)
    expected, expected_after = scalar_loop(cell, x, weights, state)
    np.testing.assert_allclose(y, expected, rtol=EXACT, atol=EXACT)
    for got, want in zip(after, expected_after, strict=True):
        np.testing.assert_allclose(got, want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_pytorch(cell):
    import torch
    x, weights, state = problem(cell, seed=1)
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(cell, torch.nn.RNN)
    options = {"nonlinearity": cell[4:]} if cell.startswith("rnn") else {}
    layer = layer(I, H, dtype=torch.float64, **options)
    layer.load_state_dict({name: torch.from_numpy(value.astype(float)) for name, value in weights.items()})
    tensors = [torch.from_numpy(s)[None] for s in state]
    with torch.no_grad():
        expected, after = layer(torch.from_numpy(x), tuple(tensors) if cell == "lstm" else tensors[0])
    y, got = reference(cell, x, weights, state)
    np.testing.assert_allclose(y, expected.numpy(), rtol=EXACT, atol=EXACT)
    for one, other in zip(got, after if cell == "lstm" else (after,), strict=True):
        np.testing.assert_allclose(one, other[0].numpy(), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("cell", STEPS)
def test_goes_on_where_it_stopped(cell):
    x, weights, state = problem(cell, seed=2)
    whole, end = reference(cell, x, weights, state)
    first, middle = reference(cell, x[:2], weights, state)
    second, last = reference(cell, x[2:], weights, middle)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)
    for one, other in zip(last, end, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("cell", STEPS)
def test_no_state_is_zeros_and_nothing_is_written_to_arguments(cell):
    x, weights, state = problem(cell, seed=3)
    zeros = tuple(np.zeros_like(s) for s in state)
    np.testing.assert_array_equal(reference(cell, x, weights)[0], reference(cell, x, weights, zeros)[0])
    kept = [s.copy() for s in state]
    reference(cell, x, weights, state)
    for one, other in zip(state, kept, strict=True):
        np.testing.assert_array_equal(one, other)


def test_relu_with_identity_weights_sums_positive_inputs():
    eye, zero = np.eye(H), np.zeros(H)
    weights = {"weight_ih_l0": eye, "weight_hh_l0": eye, "bias_ih_l0": zero, "bias_hh_l0": zero}
    x = np.random.default_rng(0).uniform(0, 1, (T, B, H))
    y, (h,) = reference("rnn_relu", x, weights)
    np.testing.assert_allclose(y, np.cumsum(x, axis=0), rtol=EXACT)
    np.testing.assert_array_equal(h, y[-1])


def test_lstm_with_open_gates_counts():
    """Gates at one and a candidate of one (sigmoid(50), tanh(50) round so): c is the step's number."""
    weights = {"weight_ih_l0": np.zeros((4, 1)), "weight_hh_l0": np.zeros((4, 1)),
               "bias_ih_l0": np.full(4, 50.0), "bias_hh_l0": np.zeros(4)}
    y, (_, c) = reference("lstm", np.zeros((T, 1, 1)), weights)
    np.testing.assert_allclose(y[:, 0, 0], np.tanh(np.arange(1, T + 1)), rtol=EXACT)
    np.testing.assert_allclose(c, T, rtol=EXACT)


@pytest.mark.parametrize("cell", ["gru", "gru_reset_before"])
def test_gru_keeps_its_state_while_the_update_gate_is_one(cell):
    x, weights, state = problem(cell, seed=4)
    weights["bias_ih_l0"][H:2 * H] = 1000
    y, _ = reference(cell, x, weights, state)
    np.testing.assert_array_equal(y, np.broadcast_to(state[0], y.shape))


def test_the_reset_forms_differ_by_the_bias_and_the_product():
    x, weights, state = problem("gru", seed=5)
    after, before = (reference(c, x, weights, state)[0] for c in ("gru", "gru_reset_before"))
    assert np.abs(after - before).max() > 1e-3


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
    with pytest.raises(ArgumentError, match="cell='mamba'"):
        reference("mamba", x, weights)
    with pytest.raises(WeightsError, match=r"missing \['bias_hh_l0'\], unexpected \['bias_hh'\]"):
        reference("lstm", x, {n.replace("hh_l0", "hh") if n == "bias_hh_l0" else n: v
                              for n, v in weights.items()})
    with pytest.raises(ShapeError, match=r"weight_ih_l0.shape=\(16, 5\).*\(16, 4\)"):
        reference("lstm", x[:, :, :4], weights)
    with pytest.raises(ShapeError, match=r"weight_hh_l0.shape"):
        reference("gru", x, weights)
    with pytest.raises(ShapeError, match=r"x.shape=\(3, 5\)"):
        reference("lstm", x[0], weights)
    for length in (4, -1):
        with pytest.raises(ArgumentError, match=rf"lengths=\[{length}, 1\].*from 0 to T=3"):
            reference("lstm", np.zeros((3, 2, 5)), random_weights("lstm", 5, 4), lengths=[length, 1])
    with pytest.raises(ShapeError, match=r"len\(state\)=1"):
        reference("lstm", x, weights, state[:1])
    with pytest.raises(ShapeError, match=r"state\[1\].shape=\(2, 4\)"):
        reference("lstm", x, weights, (state[0], state[1][:2]))


@pytest.mark.parametrize("cell", NORMALIZED)
def test_layer_normalization(cell):
    """Two layers in both directions, each step by PyTorch's ``layer_norm`` and ``LSTMCell``'s formulas."""
    import torch
    from torch.nn.functional import layer_norm

    x, lengths = np.random.default_rng(4).standard_normal((T, B, I)), [T, 2, 0]
    weights = random_weights(cell, I, H, 3, layers=2, directions=2)
    w = {n: torch.from_numpy(v.astype(float)) for n, v in weights.items()}
    gates = 4 if cell.startswith("lstm") else 3

    def ln(values, gain, first=0):
        return layer_norm(values, values.shape[-1:], gain[first:first + values.shape[-1]], eps=1e-5)

    def advance(given, h, c, end):
        wx, rh = given @ w[f"weight_ih{end}"].T, h @ w[f"weight_hh{end}"].T
        gx, gh, bx, bh = (w[f"{n}{end}"] for n in ("weight_ln_ih", "weight_ln_hh", "bias_ih", "bias_hh"))
        if gates == 4:
            i, f, g, o = (ln(wx, gx) + bx + ln(rh, gh) + bh).split(H)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * (ln(c, w[f"weight_ln_c{end}"]) + w[f"bias_ln_c{end}"]).tanh(), c
        r, z = (ln(wx[:2 * H], gx) + bx[:2 * H] + ln(rh[:2 * H], gh) + bh[:2 * H]).sigmoid().split(H)
        n = (ln(wx[2 * H:], gx, 2 * H) + bx[2 * H:] + r * (ln(rh[2 * H:], gh, 2 * H) + bh[2 * H:])).tanh()
        return (1 - z) * n + z * h, c

    given = torch.from_numpy(x)
    for layer in range(2):
        outputs = torch.zeros(T, B, 2 * H, dtype=torch.float64)
        for reverse in (False, True):
            for b, n in enumerate(lengths):
                h, c = torch.zeros(2, H, dtype=torch.float64)
                for t in range(n - 1, -1, -1) if reverse else range(n):
                    h, c = advance(given[t, b], h, c, f"_l{layer}" + ("_reverse" if reverse else ""))
                    outputs[t, b, H * reverse:H * (1 + reverse)] = h
        given = outputs
    y, _ = reference(cell, x, weights, lengths=lengths)
    # both are float64, in other orders of summation; 1e-12 is 4500 of its roundings, and |h| <= 1
    np.testing.assert_allclose(y, given.numpy(), rtol=1e-12, atol=1e-12)
