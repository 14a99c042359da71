"""Layers in JAX on a CPU: values, gradients, jit, vmap, and what is refused."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from c_abi_sample import weights_of
from rooms import ROOT

import ecornn
from ecornn.errors import ArgumentError, DTypeError, ModuleError, ShapeError, WeightsError

jax = pytest.importorskip("jax", reason="the extra jax")
jnp = jax.numpy
jax.config.update("jax_platforms", "cpu")

import ecornn.jax  # noqa: E402

T, B, MOST, I, H = 7, 2, 4, 5, 12
CLOSE = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def lstm() -> ecornn.jax.Recurrent:
    module = ecornn.compile("lstm", hidden=H, input=I, batch=MOST, seq=T, target="cpu", training=True)
    return ecornn.jax.recurrent(module)


@pytest.fixture(scope="module")
def gru() -> ecornn.jax.Recurrent:
    return ecornn.jax.recurrent(ecornn.compile("gru", hidden=H, input=I, batch=MOST, seq=T, target="cpu", layers=2,
                                               bidirectional=True, lengths=True, resets=True), threads=2)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_values(lstm: ecornn.jax.Recurrent):
    weights, x, state = weights_of(lstm.module), normal(T, B, I), (normal(B, H, seed=1), normal(B, H, seed=2))
    wanted, (h, c) = ecornn.reference("lstm", x, weights, state)
    for function in (lstm, jax.jit(lstm)):
        y, after = function(weights, x, state)
        for found, exact in zip((y, *after), (wanted, h, c), strict=True):
            np.testing.assert_allclose(found, exact, **CLOSE)
    half = {name: jnp.asarray(w, jnp.bfloat16) for name, w in weights.items()}
    rounded = {name: np.asarray(w, np.float64) for name, w in half.items()}
    np.testing.assert_allclose(lstm(half, x)[0], ecornn.reference("lstm", x, rounded)[0], **CLOSE)
    again, _ = jax.jit(lstm)({name: -w for name, w in weights.items()}, x)  # new weights in a layer that is there
    np.testing.assert_allclose(again, ecornn.reference("lstm", x, {n: -w for n, w in weights.items()})[0], **CLOSE)


def test_a_stack_with_masks(gru: ecornn.jax.Recurrent):
    weights, x, h = weights_of(gru.module), normal(T, B, I), normal(4, B, H, seed=1)
    lengths, resets = np.array([3, 7]), np.random.default_rng(3).random((T, B)) < 0.3
    y, (after,) = jax.jit(gru)(weights, x, (h,), lengths=lengths, resets=resets)
    wanted, (exact,) = ecornn.reference("gru", x, weights, (h,), lengths=lengths, resets=resets)
    np.testing.assert_allclose(y, wanted, **CLOSE)
    np.testing.assert_allclose(after, exact, **CLOSE)
    np.testing.assert_allclose(gru(weights, x)[0], ecornn.reference("gru", x, weights)[0], **CLOSE)


def test_gradients(lstm: ecornn.jax.Recurrent):
    weights, x, state = weights_of(lstm.module), normal(T, B, I), (normal(B, H, seed=1), normal(B, H, seed=2))
    dy, dh, dc = normal(T, B, H, seed=3), normal(B, H, seed=4), normal(B, H, seed=5)
    def loss(weights, x, state):
        y, (h, c) = lstm(weights, x, state)
        return jnp.vdot(y, dy) + jnp.vdot(h, dh) + jnp.vdot(c, dc)
    dx, dweights, dstate = ecornn.reference_gradients("lstm", x, weights, state, dy=dy, dstate=(dh, dc))
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    for function in (gradient, jax.jit(gradient), jax.jit(gradient)):  # gradients must not add up over calls
        found = function(weights, x, state)
        np.testing.assert_allclose(found[1], dx, rtol=1e-5, atol=2e-5)
        for name, value in dweights.items():
            np.testing.assert_allclose(found[0][name], value, rtol=1e-5, atol=5e-5)
        for one, exact in zip(found[2], dstate, strict=True):
            np.testing.assert_allclose(one, exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("own_weights", [False, True])
def test_vmap(lstm: ecornn.jax.Recurrent, gru: ecornn.jax.Recurrent, own_weights: bool):
    for layer, cell in ((lstm, "lstm"), (gru, "gru")):
        many = [weights_of(layer.module, seed) for seed in range(3)]
        weights = {n: np.stack([w[n] for w in many]) for n in many[0]} if own_weights else many[0]
        x = normal(3, T, I, B)
        y, after = jax.jit(jax.vmap(layer, in_axes=(0 if own_weights else None, 0)))(weights, x.swapaxes(2, 3))
        for n in range(3):
            wanted, states = ecornn.reference(cell, x[n].swapaxes(1, 2), many[n if own_weights else 0])
            np.testing.assert_allclose(y[n], wanted, **CLOSE)
            for one, exact in zip(after, states, strict=True):
                np.testing.assert_allclose(one[n], exact, **CLOSE)


def test_gradients_under_vmap(lstm: ecornn.jax.Recurrent):
    weights, x, dy = weights_of(lstm.module), normal(3, T, B, I), normal(3, T, B, H, seed=1)
    found = jax.grad(lambda w: jnp.vdot(jax.vmap(lstm, in_axes=(None, 0))(w, x)[0], dy))(weights)
    each = jax.vmap(jax.grad(lambda w, x, dy: jnp.vdot(lstm(w, x)[0], dy)), in_axes=(None, 0, 0))(weights, x, dy)
    exact = [ecornn.reference_gradients("lstm", x[n], weights, dy=dy[n])[1] for n in range(3)]
    for name in weights:
        np.testing.assert_allclose(found[name], sum(e[name] for e in exact), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(each[name], np.stack([e[name] for e in exact]), rtol=1e-5, atol=5e-5)


def test_what_is_refused(lstm: ecornn.jax.Recurrent, gru: ecornn.jax.Recurrent):
    (weights, others), x = (weights_of(one.module) for one in (lstm, gru)), normal(T, B, I)
    cases = (
        (ShapeError, r"x\.shape=\(7, 5, 5\).*B from 1 to 4", lambda: lstm(weights, normal(T, MOST + 1, I))),
        (DTypeError, r"x\.dtype", lambda: lstm(weights, x.astype(np.float64))),
        (ShapeError, r"state\[1\]", lambda: lstm(weights, x, (normal(B, H), normal(B, H + 1)))),
        (ShapeError, r"len\(state\)=1", lambda: lstm(weights, x, (normal(B, H),))),
        (WeightsError, "weight_hh_l0", lambda: lstm({"weight_ih_l0": weights["weight_ih_l0"]}, x)),
        (ShapeError, "bias_ih_l0", lambda: lstm(weights | {"bias_ih_l0": normal(3)}, x)),
        (ArgumentError, "lengths=True", lambda: lstm(weights, x, lengths=[1, 2])),
        (ShapeError, "resets", lambda: gru(others, x, resets=np.zeros((T, 3), bool))),
        (ArgumentError, "threads=0", lambda: ecornn.jax.recurrent(lstm.module, threads=0)),
        (ModuleError, "training=True", lambda: jax.grad(lambda w: gru(w, x)[0].sum())(others)),
        # known when it runs: XLA's error, the module's message
        (Exception, "lengths go from", lambda: jax.block_until_ready(gru(others, x, lengths=np.array([1, T + 1])))))
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()


@pytest.mark.parametrize(("number", "needs", "lower"), [(0, "jax", 10), (1, "equinox", 2), (2, "flax", 2)])
def test_the_programs_of_the_documentation(capsys: pytest.CaptureFixture[str], number: int, needs: str, lower: float):
    pytest.importorskip(needs)
    text = (ROOT / "docs" / "JAX.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number], {"__name__": __name__})
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0] / lower


def test_a_program_of_another_process(lstm: ecornn.jax.Recurrent, tmp_path: Path):
    """jax.export keeps the module's digest: it runs where that module is loaded, and says so where it is not."""
    weights, x = weights_of(lstm.module), normal(T, B, I)
    check = jax.export.DisabledSafetyCheck.custom_call("ecornn")
    exported = jax.export.export(jax.jit(lstm), disabled_checks=[check])(weights, x)
    (tmp_path / "program").write_bytes(exported.serialize())
    lstm.module.save(tmp_path / "module.so")
    np.savez(tmp_path / "arrays.npz", x=x, **weights)
    code = """
import sys, jax, numpy as np
jax.config.update("jax_platforms", "cpu")
import ecornn, ecornn.jax
from ecornn.jax import library
folder = sys.argv[1]
program = jax.export.deserialize(open(folder + "/program", "rb").read())
weights = dict(np.load(folder + "/arrays.npz"))
x = weights.pop("x")
library()
try:
    jax.block_until_ready(program.call(weights, x))
except Exception as error:
    assert "has not loaded" in str(error), error
else:
    sys.exit("it ran without its module")
ecornn.jax.recurrent(ecornn.load(folder + "/module.so"))
np.save(folder + "/y.npy", program.call(weights, x)[0])
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), ecornn.reference("lstm", x, weights)[0], **CLOSE)
