"""ONNX's recurrent operators: ONNX's own node tests, and what they leave out against the operators' text."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx_backend import RecurrentBackend  # noqa: E402

import ecornn.onnx  # noqa: E402
from ecornn.errors import ArgumentError, ModuleError, ShapeError, WeightsError  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # making the other operators' data overflows on purpose
    from onnx.backend.test.loader import load_model_tests

    NODES = [t for t in load_model_tests(kind="node") if RecurrentBackend.is_compatible(t.model)]

T, B, I, H = 4, 3, 5, 6


@pytest.mark.parametrize("device", ["CPU", pytest.param("CUDA", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", NODES, ids=lambda c: c.name)
def test_onnx_backend_node(case: Any, device: str):
    """As onnx.backend.test's runner does it, with each test's own tolerances."""
    assert len(NODES) >= 18
    prepared = RecurrentBackend.prepare(case.model, device)
    for inputs, outputs in case.data_sets:
        found = prepared.run(list(inputs))
        assert len(found) == len(outputs)
        for one, other in zip(found, outputs, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=case.rtol, atol=case.atol)


def model_of(op: str, gates: int, directions: int, seed: int = 0, bias: bool = True, peepholes: bool = False,
             **attributes: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A model of one node with its weights as initializers."""
    rng = np.random.default_rng(seed)
    tensors = {"W": rng.uniform(-1, 1, (directions, gates * H, I)), "R": rng.uniform(-1, 1, (directions, gates * H, H))}
    tensors |= {"B": rng.uniform(-1, 1, (directions, 2 * gates * H))} if bias else {}
    tensors |= {"P": rng.uniform(-1, 1, (directions, 3 * H))} if peepholes else {}
    tensors = {n: t.astype(np.float32) for n, t in tensors.items()}
    inputs = ["X", "W", "R", "B" if bias else "", "lens", "h0"]
    inputs += ["c0", "P" if peepholes else ""] if op == "LSTM" else []
    outputs = ["Y", "Y_h", "Y_c"][:3 if op == "LSTM" else 2]
    node = helper.make_node(op, inputs, outputs, name="recurrent", hidden_size=H, **attributes)
    shapes = {"X": (T, B, I), "lens": (B,), "h0": (directions, B, H), "c0": (directions, B, H)}
    infos = [helper.make_tensor_value_info(n, TensorProto.INT32 if n == "lens" else TensorProto.FLOAT, s)
             for n, s in shapes.items() if n in inputs]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info(n, TensorProto.FLOAT, None)
                                                   for n in outputs],
                              [numpy_helper.from_array(t, n) for n, t in tensors.items()])
    return helper.make_model(graph), tensors


def lstm_by_the_text(x: Any, h: Any, c: Any, w: Any, r: Any, b: Any, p: Any, f: Any, g: Any, o: Any, clip: float,
                     coupled: bool) -> tuple[Any, Any]:
    """One step of one direction, in the operator's own order i, o, f, c."""
    wb, rb = np.split(b, 2)
    zi, zo, zf, zc = np.split(x @ w.T + h @ r.T + wb + rb, 4, axis=1)
    pi, po, pf = np.split(p, 3)

    def bounded(z: Any) -> Any:
        return np.clip(z, -clip, clip)

    i = f(bounded(zi + pi * c))
    forget = 1 - i if coupled else f(bounded(zf + pf * c))
    c = forget * c + i * g(bounded(zc))
    return f(bounded(zo + po * c)) * o(c), c


def relative(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted))


def test_everything_an_lstm_node_may_have():
    attributes = {"direction": "bidirectional", "clip": 1.5, "input_forget": 1,
                  "activations": ["HardSigmoid", "LeakyRelu", "Softsign"] * 2,
                  "activation_alpha": [0.3, 0.02] * 2, "activation_beta": [0.4, 0.4]}
    model, t = model_of("LSTM", 4, 2, peepholes=True, **attributes)
    node = ecornn.onnx.read(model)
    assert node.cell.identity() == ("lstm(peepholes,coupled,clip=1.5,gate=hard_sigmoid:0.3:0.4,new=leaky_relu:0.02,"
                                    "out=softsign)")
    rng = np.random.default_rng(1)
    x = rng.standard_normal((T, B, I)).astype(np.float32)
    h0, c0 = rng.uniform(-1, 1, (2, 2, B, H)).astype(np.float32)
    lengths = np.array([2, 4, 3], np.int32)
    y, y_h, y_c = ecornn.onnx.compile(node, batch=B, seq=T, target="cpu")(x, lengths, h0, c0)
    wanted = np.zeros((T, 2, B, H))
    for d in range(2):
        for row in range(B):
            h, c = h0[d, row:row + 1].astype(float), c0[d, row:row + 1].astype(float)
            steps = range(lengths[row])
            for s in reversed(steps) if d else steps:
                h, c = lstm_by_the_text(
                    x[s, row:row + 1].astype(float), h, c, *(t[n][d].astype(float) for n in "WRBP"),
                    lambda z: np.clip(0.3 * z + 0.4, 0, 1), lambda z: np.where(z < 0, 0.02 * z, z),
                    lambda z: z / (1 + np.abs(z)), 1.5, True)
                wanted[s, d, row] = h[0]
            assert relative(y_h[d, row], h[0]) <= 1e-6
            assert relative(y_c[d, row], c[0]) <= 1e-6
    assert relative(y, wanted) <= 1e-6


def test_gru_reset_forms_differ_as_the_text_says():
    for after in (0, 1):
        model, t = model_of("GRU", 3, 1, linear_before_reset=after)
        node = ecornn.onnx.read(model, "recurrent")
        assert node.cell.name == ("gru" if after else "gru_reset_before")
        x = np.random.default_rng(2).standard_normal((1, B, I)).astype(np.float32)
        h = np.random.default_rng(3).standard_normal((1, B, H)).astype(np.float32)
        y, y_h = ecornn.onnx.compile(node, batch=B, seq=1, target="cpu")(x, None, h)
        (wz, wr, wh), (rz, rr, rh) = (np.split(t[n][0].astype(float), 3) for n in "WR")
        bz, br, bh, cz, cr, ch = np.split(t["B"][0].astype(float), 6)
        z = 1 / (1 + np.exp(-(x[0] @ wz.T + h[0] @ rz.T + bz + cz)))
        r = 1 / (1 + np.exp(-(x[0] @ wr.T + h[0] @ rr.T + br + cr)))
        inner = r * (h[0] @ rh.T + ch) if after else (r * h[0]) @ rh.T + ch
        wanted = (1 - z) * np.tanh(x[0] @ wh.T + inner + bh) + z * h[0]
        assert relative(y[0, 0], wanted) <= 1e-6
        assert relative(y_h[0], wanted) <= 1e-6


def test_what_cannot_be_compiled_is_named(tmp_path: Path):
    with pytest.raises(ArgumentError, match="one of recurrent"):
        ecornn.onnx.read(model_of("GRU", 3, 1)[0], "another")
    with pytest.raises(ArgumentError, match="both directions"):
        ecornn.onnx.read(model_of("RNN", 1, 2, direction="bidirectional", activations=["Tanh", "Relu"])[0])
    with pytest.raises(ArgumentError, match="one of Relu, Tanh"):
        ecornn.onnx.read(model_of("RNN", 1, 1, activations=["Gelu"])[0])
    model, _ = model_of("RNN", 1, 1)
    del model.graph.initializer[0]
    with pytest.raises(WeightsError, match="W must be a constant"):
        ecornn.onnx.read(model)
    with pytest.raises(ShapeError, match=r"recurrent\.W\.shape"):
        ecornn.onnx.read(model_of("GRU", 4, 1)[0])
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"not a model")
    with pytest.raises(ModuleError, match=r"bad\.onnx"):
        ecornn.onnx.read(bad)
