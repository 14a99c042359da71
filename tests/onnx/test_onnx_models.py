"""ONNX models around a recurrent node: constants that nodes compute, bodies and functions, data types, damage."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime_sample import value
from refusals import refused
from test_onnx import B, H, I, T, dynamic, model_of, relative, typed

import ecornn.onnx
from ecornn.errors import ArgumentError, DTypeError, EcornnError, ModuleError, WeightsError
from ecornn.onnx import constants


def behind(name: str, nodes: list[Any], tensors: dict[str, np.ndarray], model: Any = None) -> Any:
    model = model or model_of("LSTM", 4, 1)[0]
    kept = [t for t in model.graph.initializer if t.name != name]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, *(numpy_helper.from_array(t, n) for n, t in tensors.items())])
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    return model


def node(op: str, *inputs: str, out: str = "W", **attributes: Any) -> Any:
    return helper.make_node(op, list(inputs), [out], **attributes)


W, R = (model_of("LSTM", 4, 1)[1][name] for name in "WR")
SCALE = (np.abs(W[0]).max(1) / 127).astype(np.float32)
WHOLE = np.round(W / SCALE[None, :, None]).astype(np.int8)
FOLDED: dict[str, tuple[str, list[Any], dict[str, np.ndarray], np.ndarray]] = {
    "Identity twice": ("W", [node("Identity", "a", out="b"), node("Identity", "b")], {"a": W}, W),
    "Transpose": ("W", [node("Transpose", "a", perm=[0, 2, 1])], {"a": W.swapaxes(1, 2).copy()}, W),
    "Cast": ("W", [node("Cast", "a", to=TensorProto.FLOAT)], {"a": W.astype(np.float16)},
             W.astype(np.float16).astype(np.float32)),
    "Unsqueeze": ("R", [node("Unsqueeze", "a", "axes", out="R")], {"a": R[0], "axes": np.array([0])}, R),
    "ConstantOfShape": ("h0", [node("ConstantOfShape", "a", out="h0", value=numpy_helper.from_array(
        np.array([0.25], np.float32)))], {"a": np.array([1, B, H])}, np.full((1, B, H), 0.25, np.float32)),
    "DequantizeLinear": ("W", [node("DequantizeLinear", "a", "scale", axis=1)], {"a": WHOLE, "scale": SCALE},
                         WHOLE * SCALE[None, :, None]),
    "Concat": ("W", [node("Concat", "a", "b", axis=1)], {"a": W[:, :H], "b": W[:, H:]}, W),
}


@pytest.mark.parametrize("kind", FOLDED)
def test_constants_behind_nodes(kind: str):
    name, nodes, tensors, wanted = FOLDED[kind]
    found = ecornn.onnx.read(behind(name, nodes, tensors))
    if name == "h0":
        np.testing.assert_array_equal(found.inputs["initial_h"], wanted)
        return
    np.testing.assert_array_equal(found.weights["weight_ih_l0" if name == "W" else "weight_hh_l0"], ours(wanted[0]))
    assert found.inputs == {"sequence_lens": None, "initial_h": None, "initial_c": None}


def ours(value: np.ndarray) -> np.ndarray:
    return np.concatenate([np.split(value, 4)[gate] for gate in (0, 2, 3, 1)])


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_quantized_weights_of_each_version(opset: int):
    """Of which the evaluator has but the newer ones."""
    name, nodes, tensors, wanted = FOLDED["DequantizeLinear"]
    model = behind(name, nodes, tensors)
    model.opset_import[0].version = opset
    np.testing.assert_array_equal(ecornn.onnx.read(model).weights["weight_ih_l0"], ours(wanted[0]))


def test_what_depends_on_a_call_is_no_constant():
    """As exporters make states of zeros for the batch of x; and random numbers, which are new at each call."""
    shape = [node("Shape", "X", out="s"), node("ConstantOfShape", "s", out="h0")]
    assert ecornn.onnx.read(behind("h0", shape, {})).inputs["initial_h"] is None
    for made in (node("RandomNormal", shape=list(W.shape)), node("Identity", "X"),
                 helper.make_node("Identity", ["a"], ["W"], domain="com.example")):
        with pytest.raises(WeightsError, match="W must be a constant"):
            ecornn.onnx.read(behind("W", [made], {"a": W}))


def body(model: Any, kind: str) -> Any:
    inner = helper.make_graph(list(model.graph.node), "body", [], [value("Y")])
    del model.graph.node[:]
    other = helper.make_graph([node("Identity", "X", out="Z")], "other", [], [value("Z")])
    model.graph.node.append(node("If", "on", out="out", then_branch=inner, else_branch=other) if kind == "If" else
                            node("Loop", "", "on", out="out", body=inner))
    return model


@pytest.mark.parametrize("kind", ["If", "Loop"])
def test_nodes_in_bodies_are_found_with_the_constants_around_them(kind: str):
    name, nodes, tensors, _ = FOLDED["Transpose"]
    found = ecornn.onnx.read(body(behind(name, nodes, tensors), kind), "recurrent")
    np.testing.assert_array_equal(found.weights["weight_ih_l0"], ours(W[0]))


def test_nodes_in_functions_are_named():
    model, _ = model_of("GRU", 3, 1)
    model.functions.append(helper.make_function("pkg", "Encoder", ["X", "W", "R"], ["Y"], model.graph.node,
                                                model.opset_import))
    del model.graph.node[:]
    refused(ArgumentError, r"onnx.inliner\) for recurrent \(GRU\) of the function Encoder", ecornn.onnx.read, model)


def test_models_of_other_types_are_called_with_those():
    """On a CPU those of 16 bits compute in float32."""
    import ml_dtypes

    found = ecornn.onnx.read(typed(TensorProto.FLOAT16))
    assert found.dtype == "float16"
    layer = ecornn.onnx.compile(found, batch=B, seq=T, target="cpu")
    rng, lengths = np.random.default_rng(0), np.full(B, T)
    x = (np.round(8 * rng.standard_normal((T, B, I))) / 8).astype(np.float32)
    h = (np.round(8 * rng.uniform(-1, 1, (1, B, H))) / 8).astype(np.float32)
    exact = layer(x, lengths, h)
    assert all(value.dtype == np.float32 for value in exact)
    for kind, dtype in ((TensorProto.FLOAT16, np.float16), (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
                        (TensorProto.DOUBLE, np.float64)):
        layer.node = ecornn.onnx.read(typed(kind))
        for one, wanted in zip(layer(x.astype(dtype), lengths, h.astype(dtype)), exact, strict=True):
            assert one.dtype == dtype
            np.testing.assert_array_equal(one, wanted.astype(dtype))
    refused(DTypeError, r"X.dtype='float16': expected float64", layer, x.astype(np.float16), lengths, h)
    with pytest.raises(DTypeError, match=r"dtype='float64': expected .* else pass dtype='float32'"):
        ecornn.onnx.compile(layer.node, batch=B, seq=T, target="sm_90a")


def test_models_of_float64_compute_in_that():
    model, tensors = model_of("GRU", 3, 1)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.DOUBLE, tensors[tensor.name].shape,
                                           tensors[tensor.name].astype(np.float64).ravel() * (1 + 1e-9)))
    node = ecornn.onnx.read(model)
    rng, lengths = np.random.default_rng(0), np.array([T, 2, 1])
    x, h = rng.standard_normal((T, B, I)), rng.uniform(-1, 1, (1, B, H))
    y, last = ecornn.onnx.compile(node, batch=B, seq=T, target="cpu")(x, lengths, h)
    wanted, (after,) = ecornn.reference(node.cell.spec(), x, node.weights, (h[0],), lengths=lengths)
    assert node.weights["weight_hh_l0"].dtype == np.float64
    assert relative(y[:, 0], wanted) <= 1e-14 and relative(last[0], after) <= 1e-14


def test_a_node_behind_nodes_computes_as_the_model_does():
    model = behind(*FOLDED["DequantizeLinear"][:3])
    x = np.random.default_rng(3).standard_normal((T, B, I)).astype(np.float32)
    given = {"X": x, **dynamic(), "lens": np.full(B, T, np.int32)}
    y = ecornn.onnx.compile(ecornn.onnx.read(model), batch=B, seq=T, target="cpu")(*given.values())[0]
    assert relative(y, ReferenceEvaluator(model).run(["Y"], given)[0]) <= 1e-6


def attribute(key: str, value: Any) -> Callable[[Any], None]:
    return lambda model: model.graph.node[0].attribute.append(helper.make_attribute(key, value))


def without(**parts: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == "W")
        if "dims" in parts:
            del tensor.dims[:]
            tensor.dims.extend(parts["dims"])
        tensor.data_type = parts.get("data_type", tensor.data_type)
    return change


def sparse(indices: Any, dims: tuple[int, ...]) -> Callable[[Any], None]:
    tensor = helper.make_sparse_tensor(numpy_helper.from_array(np.ones(2, np.float32), "W"),
                                       numpy_helper.from_array(np.array(indices)), dims)
    return lambda model: behind("W", [], {}, model).graph.sparse_initializer.append(tensor)


def more(field: str, count: int) -> Callable[[Any], None]:
    return lambda model: getattr(model.graph.node[0], field).extend([""] * count)


def computed(*nodes: Any) -> Callable[[Any], None]:
    return lambda model: behind("W", list(nodes), {"a": W}, model)


DAMAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "clip of text": (attribute("clip", "x"), "recurrent.clip='of type STRING'"),
    "clip of a list": (attribute("clip", [1.0]), "recurrent.clip='of type FLOATS'"),
    "clip of a tensor": (attribute("clip", numpy_helper.from_array(np.ones(1))), "recurrent.clip='of type TENSOR'"),
    "clip of a graph": (attribute("clip", onnx.GraphProto()), "recurrent.clip='of type GRAPH'"),
    "clip of a function": (lambda model: model.graph.node[0].attribute.add(
        name="clip", ref_attr_name="of_a_function", type=onnx.AttributeProto.FLOAT),
        "recurrent.clip=\"of the function's of_a_function\""),
    "alpha of text": (attribute("activation_alpha", ["a"]), "recurrent.activation_alpha='of type STRINGS'"),
    "activations as one text": (attribute("activations", "Tanh"), "recurrent.activations='of type STRING'"),
    "inputs": (more("input", 5), "13 inputs; LSTM has at most 8"),
    "outputs": (more("output", 5), "8 outputs; LSTM has at most 3"),
    "negative size": (without(dims=[-1, 4 * H, I]), r"its shape is (-1, 24, 5)"),
    "type": (without(data_type=99), "the model's W cannot be read"),
    "negative index": (sparse([-1, 2], (1, 4 * H, I)), "an index is negative"),
    "huge": (sparse([0, 1], (1 << 30, 1 << 30)), "the model's W cannot be read"),
    "circle": (computed(node("Identity", "W", out="b"), node("Identity", "b")), "W is computed from itself"),
    "operator": (computed(node("NoSuchOperator", "a")), "W cannot be computed by NoSuchOperator"),
    "failing": (computed(node("Transpose", "a", perm=[0, 7, 1])), "W cannot be computed by Transpose"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str):
    change, words = DAMAGE[kind]
    model, _ = model_of("LSTM", 4, 1)
    change(model)
    with pytest.raises(EcornnError) as caught:
        ecornn.onnx.read(model)
    assert words in str(caught.value)


def test_constants_deeper_than_pythons_stack():
    """In time that grows with the model: a constant, a failure and a circle, each at the end of 3,000 nodes."""
    chain = [node("Identity", f"b{n}", out=f"b{n + 1}") for n in range(3000)]
    deep = ecornn.onnx.read(behind("W", [node("Identity", "a", out="b0"), *chain, node("Identity", "b3000")], {"a": W}))
    np.testing.assert_array_equal(deep.weights["weight_ih_l0"], ours(W[0]))
    assert ecornn.onnx.read(behind("h0", [node("Tanh", "X", out="b0"), *chain, node("Shape", "b3000", out="s"), node(
        "ConstantOfShape", "s", out="h0")], {})).inputs["initial_h"] is None
    for first, words in ((node("Transpose", "a", out="b0", perm=[0, 7, 1]), "b0 cannot be computed by Transpose"),
                         (node("Identity", "b3000", out="b0"), "is computed from itself")):
        with pytest.raises(ModuleError, match=words):
            ecornn.onnx.read(behind("W", [first, *chain, node("Identity", "b3000")], {"a": W}))
    doubled = [node("Concat", f"b{n}", f"b{n}", out=f"d{n}", axis=0) for n in range(200)]
    halved = [node("Slice", f"d{n}", "zero", "one", out=f"b{n + 1}") for n in range(200)]
    nodes = [part for pair in zip(doubled, halved, strict=True) for part in pair]
    found = ecornn.onnx.read(behind("W", [*nodes, node("Identity", "b200")], {
        "b0": W, "zero": np.array([0]), "one": np.array([1])}))
    np.testing.assert_array_equal(found.weights["weight_ih_l0"], ours(W[0]))


def test_only_constants_are_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "evaluated", None)
    nodes = [node("Transpose", "a", out="b"), node("MatMul", "X", "b", out="c"), node("Identity", "c", out="h0")]
    assert ecornn.onnx.read(behind("h0", nodes, {"a": W})).inputs["initial_h"] is None


def test_what_a_body_is_given_is_no_constant():
    """Though a tensor around it has the same name; nor what Dropout makes where it may train."""
    model = body(model_of("LSTM", 4, 1)[0], "Loop")
    loop = model.graph.node[0].attribute[0].g
    assert ecornn.onnx.read(model).hidden == H
    loop.input.extend(map(value, ("turn", "on", "R")))
    refused(WeightsError, "R must be a constant", ecornn.onnx.read, model)
    tensors = {"a": W, "ratio": np.array(0.5, np.float32), "yes": np.array(True)}
    assert ecornn.onnx.read(behind("W", [node("Dropout", "a", "ratio")], tensors)).hidden == H
    with pytest.raises(WeightsError, match="W must be a constant"):
        ecornn.onnx.read(behind("W", [node("Dropout", "a", "ratio", "yes")], tensors))


def test_what_is_no_model(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.onnx")
    for path in (tmp_path, tmp_path / "pipe.onnx"):
        refused(ModuleError, "not a regular file", ecornn.onnx.read, path)
    for other in (3, None, b"model", model_of("GRU", 3, 1)[0].graph):
        refused(ArgumentError, r"a file's name or an onnx\.ModelProto", ecornn.onnx.read, other)
        refused(ArgumentError, "a Node", ecornn.onnx.compile, other)


def test_what_a_call_does_not_take():
    node = dataclasses.replace(ecornn.onnx.read(model_of("LSTM", 4, 1)[0]), inputs={})
    layer = ecornn.onnx.compile(node, batch=B, seq=T, target="cpu")
    x, state = np.zeros((T, B, I), np.float32), np.zeros((1, B, H), np.float32)
    for arguments in ((None,), ("x",), ([[1], [2, 3]],), (x.astype(int),), (x[0],), (x, np.ones(B)), (x, "ab"),
                      (x, None, 3.0), (x, None, "h", "c"), (x, None, [[1], [2, 3]]), (x, None, state.astype(int))):
        with pytest.raises(ArgumentError):
            layer(*arguments)
