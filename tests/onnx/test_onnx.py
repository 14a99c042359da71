"""ONNX's recurrent operators: ONNX's own node tests, and what they leave out against the operators' text."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exact import relative
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.base import Backend, BackendRep
from onnxruntime_sample import session, value
from refusals import refused

import ecornn.onnx
from ecornn.errors import ArgumentError, DTypeError, ModuleError, ShapeError, WeightsError
from ecornn.onnx import compile
from ecornn.onnx.node import from_proto


class Prepared(BackendRep):
    def __init__(self, model: Any, device: str) -> None:
        (self.node,), self.graph, self.device = model.graph.node, model.graph, device

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        values = dict(zip((i.name for i in self.graph.input), inputs, strict=True))
        node = from_proto(self.node, values)
        names = (*self.node.input, *("",) * 8)
        x, lengths, h, c = (values.get(names[k]) for k in (0, 4, 5, 6))
        batch, seq = x.shape[:2] if node.batch_first else x.shape[1::-1]
        made = compile(node, batch=batch, seq=seq, target=self.device)(x, lengths, h, c)
        return tuple(np.ascontiguousarray(made[k]) for k, o in enumerate(self.node.output) if o)


class RecurrentBackend(Backend):
    """Serves models whose only node is LSTM, GRU or RNN."""

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **_: Any) -> bool:
        return len(model.graph.node) == 1 and model.graph.node[0].op_type in ("LSTM", "GRU", "RNN")

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **_: Any) -> Prepared:
        return Prepared(model, {"CPU": "cpu", "CUDA": "cuda"}[device])


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # making the other operators' data overflows on purpose
    # these make no others' data, which takes seconds
    from onnx.backend.test.case.node import _NodeTestCases, gru, lstm, rnn

    assert gru and lstm and rnn
    NODES = [t for t in _NodeTestCases if RecurrentBackend.is_compatible(t.model)]

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
             constants: dict[str, np.ndarray] | None = None, **attributes: Any) -> tuple[Any, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    tensors = {"W": rng.uniform(-1, 1, (directions, gates * H, I)), "R": rng.uniform(-1, 1, (directions, gates * H, H))}
    tensors |= {"B": rng.uniform(-1, 1, (directions, 2 * gates * H))} if bias else {}
    tensors |= {"P": rng.uniform(-1, 1, (directions, 3 * H))} if peepholes else {}
    tensors = {n: t.astype(np.float32) for n, t in tensors.items()}
    inputs = ["X", "W", "R", "B" if bias else "", "lens", "h0"]
    inputs += ["c0", "P" if peepholes else ""] if op == "LSTM" else []
    outputs = ["Y", "Y_h", "Y_c"][:2 + (op == "LSTM")]
    node = helper.make_node(op, inputs, outputs, name="recurrent", hidden_size=H, **attributes)
    shapes = {"X": (T, B, I), "lens": (B,), "h0": (directions, B, H), "c0": (directions, B, H)}
    tensors |= constants or {}
    infos = [value(n, TensorProto.INT32 if n == "lens" else TensorProto.FLOAT, s)
             for n, s in shapes.items() if n in inputs and n not in tensors]
    graph = helper.make_graph([node], "g", infos, [*map(value, outputs)],
                              [numpy_helper.from_array(t, n) for n, t in tensors.items()])
    return helper.make_model(graph), tensors


def lstm_by_the_text(x: Any, h: Any, c: Any, w: Any, r: Any, b: Any, p: Any, f: Any, g: Any, o: Any, clip: float,
                     coupled: bool) -> tuple[Any, Any]:
    zi, zo, zf, zc = np.split(x @ w.T + h @ r.T + sum(np.split(b, 2)), 4, axis=1)
    pi, po, pf = np.split(p, 3)
    i = f(np.clip(zi + pi * c, -clip, clip))
    forget = 1 - i if coupled else f(np.clip(zf + pf * c, -clip, clip))
    c = forget * c + i * g(np.clip(zc, -clip, clip))
    return f(np.clip(zo + po * c, -clip, clip)) * o(c), c


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
            assert relative(y_h[d, row], h[0]) <= 1e-6 and relative(y_c[d, row], c[0]) <= 1e-6
    assert relative(y, wanted) <= 1e-6


@pytest.mark.parametrize("peepholes", [False, True])
def test_clip_is_that_of_onnx_runtime(peepholes: bool):
    """It bounds sums that gates and new values are activations of, and not the c that h is of, as the text would."""
    model, t = model_of("LSTM", 4, 1, peepholes=peepholes, clip=0.3)
    model.ir_version = 10
    model.opset_import[0].version = 20
    rng = np.random.default_rng(6)
    x, h0 = (rng.standard_normal(shape).astype(np.float32) for shape in ((T, B, I), (1, B, H)))
    c0, lengths = 3 * np.ones((1, B, H), np.float32), np.full(B, T, np.int32)
    h, c, bounded = h0[0].astype(float), c0[0].astype(float), h0[0]
    for step in x.astype(float):
        p = t["P"][0].astype(float) if peepholes else np.zeros(3 * H)
        h, c = lstm_by_the_text(step, h, c, *(t[n][0].astype(float) for n in "WRB"), p, lambda z: 1 / (1 + np.exp(-z)),
                                np.tanh, np.tanh, 0.3, False)
        bounded = h / np.tanh(c) * np.tanh(np.clip(c, -0.3, 0.3))
    theirs = session(model).run(["Y_h", "Y_c"], {"X": x, "lens": lengths, "h0": h0, "c0": c0})
    ours = ecornn.onnx.compile(ecornn.onnx.read(model), batch=B, seq=T, target="cpu")(x, lengths, h0, c0)[1:]
    for found in (theirs, ours):
        assert relative(found[0][0], h) <= 1e-6 and relative(found[1][0], c) <= 1e-6
        assert relative(found[0][0], bounded) > 0.1


def test_gru_reset_forms_differ_as_the_text_says():
    for after in (0, 1):
        model, t = model_of("GRU", 3, 1, linear_before_reset=after)
        node = ecornn.onnx.read(model, "recurrent")
        assert node.cell.name == ("gru" if after else "gru_reset_before")
        x = np.random.default_rng(2).standard_normal((1, B, I)).astype(np.float32)
        h = np.random.default_rng(3).standard_normal((1, B, H)).astype(np.float32)
        y, y_h = ecornn.onnx.compile(node, batch=B, seq=1, target="cpu")(x, np.full(B, 1), h)
        (wz, wr, wh), (rz, rr, rh) = (np.split(t[n][0].astype(float), 3) for n in "WR")
        bz, br, bh, cz, cr, ch = np.split(t["B"][0].astype(float), 6)
        z = 1 / (1 + np.exp(-(x[0] @ wz.T + h[0] @ rz.T + bz + cz)))
        r = 1 / (1 + np.exp(-(x[0] @ wr.T + h[0] @ rr.T + br + cr)))
        inner = r * (h[0] @ rh.T + ch) if after else (r * h[0]) @ rh.T + ch
        wanted = (1 - z) * np.tanh(x[0] @ wh.T + inner + bh) + z * h[0]
        assert relative(y[0, 0], wanted) <= 1e-6 and relative(y_h[0], wanted) <= 1e-6


def test_what_cannot_be_compiled_is_named(tmp_path: Path):
    model, _ = model_of("RNN", 1, 1)
    del model.graph.initializer[0]
    (bad := tmp_path / "bad.onnx").write_bytes(b"not a model")
    two = model_of("RNN", 1, 2, direction="bidirectional", activations=["Tanh", "Relu"])[0]
    for kind, words, *given in ((ArgumentError, "one of recurrent", model_of("GRU", 3, 1)[0], "another"),
                                (ArgumentError, "both directions", two), (WeightsError, "W must be a constant", model),
                                (ArgumentError, "one of Relu, Tanh", model_of("RNN", 1, 1, activations=["Gelu"])[0]),
                                (ShapeError, r"recurrent\.W\.shape", model_of("GRU", 4, 1)[0]),
                                (ModuleError, r"bad\.onnx", bad)):
        refused(kind, words, ecornn.onnx.read, *given)


def dynamic() -> dict[str, np.ndarray]:
    h0, c0 = np.random.default_rng(4).uniform(-1, 1, (2, 1, B, H)).astype(np.float32)
    return {"lens": np.array([2, 4, 3], np.int32), "h0": h0, "c0": c0}


@pytest.mark.parametrize("kind", ["initializer", "constant node", "sparse"])
def test_constants_of_a_node_are_its_own(kind: str):
    rng, inputs = np.random.default_rng(5), dynamic()
    inputs["h0"] *= rng.random(inputs["h0"].shape) < 0.5
    x = rng.standard_normal((T, B, I)).astype(np.float32)
    given = ecornn.onnx.read(model_of("LSTM", 4, 1)[0])
    assert given.inputs == {"sequence_lens": None, "initial_h": None, "initial_c": None}
    layer = ecornn.onnx.compile(given, batch=B, seq=T, target="cpu")
    wanted = layer(x, *inputs.values())
    model, _ = model_of("LSTM", 4, 1, constants=inputs)
    moved = {"initializer": {}, "constant node": inputs, "sparse": {"h0"}}[kind]
    for tensor in [t for t in model.graph.initializer if t.name in moved]:
        model.graph.initializer.remove(tensor)
        if kind == "constant node":
            model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
        else:
            h0 = inputs["h0"]
            model.graph.sparse_initializer.append(helper.make_sparse_tensor(
                numpy_helper.from_array(h0[h0 != 0], "h0"),
                numpy_helper.from_array(np.flatnonzero(h0).astype(np.int64)), h0.shape))
    own = ecornn.onnx.OnnxLayer(ecornn.onnx.read(model), layer.layer)
    for found, exact in zip(own(x), wanted, strict=True):
        np.testing.assert_array_equal(found, exact)
    np.testing.assert_array_equal(own(x, np.full(B, T), initial_c=0 * inputs["c0"])[0],
                                  layer(x, np.full(B, T), inputs["h0"], 0 * inputs["c0"])[0])
    refused(ShapeError, r"initial_h\.shape", own, x[:, 1:], np.full(B - 1, T))


def test_what_a_node_takes_from_the_model_must_be_given():
    node = ecornn.onnx.read(model_of("LSTM", 4, 1, constants={"lens": dynamic()["lens"]})[0])
    with pytest.raises(ArgumentError, match="initial_h=None"):
        ecornn.onnx.compile(node, batch=B, seq=T, target="cpu")(np.zeros((T, B, I), np.float32))


@pytest.mark.parametrize(("constants", "kind", "words"), [
    ({"h0": np.zeros((1, B, H + 1), np.float32)}, ShapeError, "(D, B, H) with D=1 H=6"),
    ({"h0": np.zeros(H, np.float32)}, ShapeError, "recurrent.initial_h.shape"),
    ({"c0": np.zeros((1, B, H), bool)}, DTypeError, "recurrent.initial_c.dtype"),
    ({"lens": np.zeros((B, 1), np.int32)}, ShapeError, "recurrent.sequence_lens.shape"),
    ({"lens": np.ones(B, np.float32)}, DTypeError, "recurrent.sequence_lens.dtype"),
    ({"W": np.zeros((1, 4 * H, I), np.complex64)}, DTypeError, "recurrent.W.dtype='complex64'"),
    ({"R": np.zeros((1, 4 * H, H), bool)}, DTypeError, "recurrent.R.dtype='bool'"),
    ({"B": np.zeros((1, 8 * H), np.int8)}, DTypeError, "recurrent.B.dtype='int8'"),
    ({"R": np.zeros(H, np.float32)}, ShapeError, "recurrent.R.shape")])
def test_constants_that_do_not_fit(constants: dict[str, np.ndarray], kind: Any, words: str):
    with pytest.raises(kind) as caught:
        ecornn.onnx.read(model_of("LSTM", 4, 1, constants=constants)[0])
    assert words in str(caught.value)


def typed(dtype: int) -> Any:
    model, tensors = model_of("GRU", 3, 1)
    for tensor in model.graph.initializer:
        values = np.round(8 * tensors[tensor.name]) / 8
        tensor.CopyFrom(helper.make_tensor(tensor.name, dtype, values.shape, values.ravel()))
    return model


def test_types_that_onnx_has_for_weights():
    """Each becomes float32, or stays float64; bfloat16 is not NumPy's own."""
    for dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE):
        weights = ecornn.onnx.read(typed(dtype)).weights
        assert weights["weight_ih_l0"].dtype == (np.float64 if dtype == TensorProto.DOUBLE else np.float32)
        gates = np.split(np.round(8 * model_of("GRU", 3, 1)[1]["W"][0]) / 8, 3)
        np.testing.assert_array_equal(weights["weight_ih_l0"], np.concatenate([gates[g] for g in (1, 0, 2)]))


def test_numbers_of_attributes_keep_their_digits():
    model, _ = model_of("RNN", 1, 1, activations=["Affine"], activation_alpha=[0.123456789], activation_beta=[1e-3],
                        clip=1.23456789)
    cell = ecornn.onnx.read(model).cell
    assert cell.identity() == "rnn_tanh(clip=1.2345679,new=affine:0.12345679:0.001)"
    assert ecornn.cells.get(cell.identity()).options == cell.options
    for number, text in ((3, "3"), (0.1, "0.1"), (1e-7, "1e-07"), (0.1234567, "0.1234567"), (2e10, "2e+10")):
        assert ecornn.cells.get(f"lstm(clip={text})").identity() == f"lstm(clip={text})"
        assert ecornn.cells.builtin.LSTM(clip=number).identity() == f"lstm(clip={text})"


def twins(name: str, outputs: str) -> Any:
    model, _ = model_of("LSTM", 4, 1)
    node = model.graph.node[0]
    model.graph.node.append(helper.make_node("LSTM", node.input, [f"{outputs}{o}" for o in node.output], name=name,
                                             hidden_size=H, clip=2.0))
    return model


def test_a_name_that_two_nodes_have():
    model = twins("recurrent", "other_")
    refused(ArgumentError, "name it by its output: Y, other_Y", ecornn.onnx.read, model, "recurrent")
    refused(ArgumentError, r"one of Y \(LSTM\), other_Y \(LSTM\)", ecornn.onnx.read, model)
    assert ecornn.onnx.read(model, "Y_h").cell.identity() == "lstm"
    assert ecornn.onnx.read(model, "other_Y").cell.identity() == "lstm(clip=2)"
    with pytest.raises(ArgumentError, match="the name of one node"):
        ecornn.onnx.read(twins("Y_h", "other_"), "Y_h")  # one node's name, an output of the other
    assert ecornn.onnx.read(twins("", "other_"), "other_Y").name == "other_Y"


def test_nodes_that_are_not_onnxs():
    model = twins("other", "other_")
    model.graph.node[0].domain = "com.example"
    assert ecornn.onnx.read(model).name == "other"
    refused(ArgumentError, r"one of other \(LSTM\)", ecornn.onnx.read, model, "recurrent")
    model.graph.node[0].domain = "ai.onnx"
    assert ecornn.onnx.read(model, "recurrent").name == "recurrent"
    model.functions.add(name="LSTM", domain="")
    refused(ArgumentError, "an LSTM, GRU or RNN node of ONNX", ecornn.onnx.read, model)


def test_a_model_that_contradicts_itself(tmp_path: Path):
    changes = (
        (lambda g: g.initializer.append(numpy_helper.from_array(np.zeros((1, 3 * H, H)), "R")), "two tensors named R"),
        (lambda g: g.node.insert(0, helper.make_node("Identity", ["X"], ["R"])), "two tensors named R"),
        (lambda g: setattr(g.initializer[0], "raw_data", b"1234"), "W cannot be read"),
        (lambda g: g.node[0].attribute.append(helper.make_attribute("linear_before_reset", 0)),
         "two attributes are named linear_before_reset"))
    for change, words in changes:
        model, _ = model_of("GRU", 3, 1, linear_before_reset=1)
        change(model.graph)
        refused(ModuleError, words, ecornn.onnx.read, model)
    for op, gates, key, number in (("GRU", 3, "linear_before_reset", 2), ("LSTM", 4, "input_forget", -1),
                                   ("RNN", 1, "layout", 3), ("RNN", 1, "clip", 0.0), ("RNN", 1, "clip", -1.0)):
        with pytest.raises(ArgumentError, match=rf"recurrent\.{key}="):
            ecornn.onnx.read(model_of(op, gates, 1, **{key: number})[0])
    model, _ = model_of("RNN", 1, 1)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="data", size_threshold=0)
    assert ecornn.onnx.read(tmp_path / "m.onnx").hidden == H
    with pytest.raises(ModuleError, match="has not been read"):
        ecornn.onnx.read(onnx.load(tmp_path / "m.onnx", load_external_data=False))
