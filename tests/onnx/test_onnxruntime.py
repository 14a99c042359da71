"""Models rewritten for ONNX Runtime: sessions before and after agree, and what cannot be taken stays."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime_sample as sample
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper
from onnxruntime_sample import B, H, I, T, alike, feeds_of, model_of, operators, rewritten, same, session
from onnxruntime_sample import recognizer as recognizer
from refusals import refused

import ecornn.onnx
import ecornn.onnxruntime
from ecornn.cli import main
from ecornn.errors import ArgumentError, ModuleError
from ecornn.onnxruntime import rewriting

ALL = ("lens", "h0", "c0")
ACTIVATIONS = {"activations": ["HardSigmoid", "LeakyRelu", "Softsign"], "activation_alpha": [0.3, 0.02],
               "activation_beta": [0.4]}


@pytest.fixture(scope="module")
def fast(recognizer: Path) -> Path:
    out = recognizer.with_name("speech.fast.onnx")
    result = CliRunner().invoke(main, ["onnx-rewrite", str(recognizer), "-o", str(out), "--batch", "4", "--seq", "40",
                                       "--target", "cpu", "--no-measure"])
    assert result.exit_code == 0, result.output
    for words in ("compiled", "(LSTM)", "(GRU)", "(RNN)", "speech.fast.modules", "register_custom_ops_library"):
        assert words in result.output
    return out


def test_a_speech_model(recognizer: Path, fast: Path):
    assert {"LSTM", "GRU", "RNN"} <= {*operators(recognizer)}
    assert operators(fast).count("CpuRecurrent") == 4 and not {"LSTM", "GRU", "RNN"} & {*operators(fast)}
    both = session(recognizer), session(fast, ecornn.onnxruntime.session_options(fast, threads=2))
    for steps, rows in ((40, 3), (11, 4), (1, 1)):
        x = np.random.default_rng(steps).standard_normal((steps, rows, 20)).astype(np.float32)
        alike(both[1], both[0], {"x": x})
    # the weights are there once
    assert fast.stat().st_size < 1.1 * recognizer.stat().st_size


@pytest.mark.parametrize(("op", "inputs", "attributes"), [
    ("LSTM", ALL, {"direction": "bidirectional"}),
    ("LSTM", ("h0", "P"), {"direction": "reverse", "clip": 0.7}),  # c begins with zeros
    ("LSTM", (), ACTIVATIONS),
    ("GRU", ("lens", "h0"), {"direction": "bidirectional"}),
    ("GRU", (), {"linear_before_reset": 1, "direction": "reverse"}),
    ("RNN", ("lens",), {"activations": ["Relu"]}),
    ("RNN", ("h0",), {"direction": "bidirectional"}),
    ("LSTM", (), {"outputs": (False, True, False)}),
])
def test_nodes(op: str, inputs: tuple[str, ...], attributes: dict[str, Any], tmp_path: Path):
    same(model_of(op, inputs, **attributes), tmp_path)


def test_rows_without_steps(tmp_path: Path):
    """Their last states are zeros, not the first ones, in ONNX Runtime's operators and in ecornn.onnx."""
    model = model_of("LSTM", ALL, direction="bidirectional")
    _, fast = rewritten(model, tmp_path)
    feeds = feeds_of(model)
    layer = ecornn.onnx.compile(ecornn.onnx.read(model), batch=B, seq=T, target="cpu")
    for lengths in ([0, T, 2], [3, 0, 0], [0, 0, 0]):
        feeds["lens"] = np.array(lengths, np.int32)
        alike(fast, session(model), feeds)
        found = layer(feeds["X"], lengths, feeds["h0"], feeds["c0"])
        for one, other in zip(found, session(model).run(None, feeds), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_batch_before_time(tmp_path: Path):
    """Layout 1, which ONNX Runtime itself has not: as the same with its axes in the other order."""
    before = session(model_of("GRU", ("h0",), direction="bidirectional"))
    made, fast = rewritten(model_of("GRU", ("h0",), direction="bidirectional", layout=1), tmp_path)
    feeds = feeds_of(model_of("GRU", ("h0",), direction="bidirectional"))
    y, y_h = fast.run(None, {name: value.swapaxes(0, 1) for name, value in feeds.items()})
    wanted, wanted_h = before.run(None, feeds)
    np.testing.assert_allclose(y, wanted.transpose(2, 0, 1, 3), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y_h, wanted_h.swapaxes(0, 1), rtol=1e-5, atol=1e-6)
    assert not made.left


@pytest.mark.parametrize(("dtype", "chosen", "limit"), [
    ("float64", None, 1e-6), ("float64", "float32", 1e-6), ("float32", "float64", 1e-6), ("float16", None, 2e-3)])
def test_other_types(dtype: str, chosen: str | None, limit: float, tmp_path: Path):
    """float64 in float64, which ONNX Runtime has not; 16 bits in float32, as it has them."""
    model = model_of("LSTM", ALL, dtype=dtype)
    _, fast = rewritten(model, tmp_path, dtype=chosen)
    feeds = feeds_of(model)
    wide = {name: v if name == "lens" else v.astype(np.float32) for name, v in feeds.items()}
    for found, one in zip(fast.run(None, feeds), session(model_of("LSTM", ALL)).run(None, wide), strict=True):
        assert found.dtype == dtype and np.linalg.norm(found.astype(float) - one) < limit * np.linalg.norm(one)


def test_weights_that_the_model_computes_go_with_the_nodes_that_compute_them(tmp_path: Path):
    model = model_of("GRU")
    w = next(t for t in model.graph.initializer if t.name == "W")
    w.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(w).swapaxes(1, 2).copy(), "W_turned"))
    model.graph.node.insert(0, helper.make_node("Transpose", ["W_turned"], ["W"], perm=[0, 2, 1]))
    made, *_ = same(model, tmp_path)
    assert "Transpose" not in operators(made.model)
    assert not {"W", "W_turned", "R", "B"} & {t.name for t in onnx.load(made.model).graph.initializer}


def in_a_body(old: bool) -> Any:
    """A model with its node in a branch of another; of an ``old`` one all initializers are inputs."""
    inner = model_of("RNN").graph
    body = helper.make_graph([*inner.node], "body", [], inner.output[:1])
    other = helper.make_graph([helper.make_node("Identity", ["X"], ["other"])], "other", [], [sample.value("other")])
    node = helper.make_node("If", ["yes"], ["Z"], then_branch=body, else_branch=other)
    model = sample.whole(helper.make_graph([node], "g", inner.input, [sample.value("Z")], inner.initializer))
    if old:
        model.ir_version = 3
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
        model.graph.input.extend(sample.value(t.name, t.data_type, t.dims) for t in model.graph.initializer)
    else:
        model.graph.input.append(sample.value("yes", TensorProto.BOOL, []))
    return model


@pytest.mark.parametrize("old", [False, True])
def test_a_node_in_the_body_of_another(old: bool, tmp_path: Path):
    """Also of models whose initializers are inputs, as all had to be before version 4 of the format."""
    model = in_a_body(old)
    made, fast = rewritten(model, tmp_path)
    assert len(made.taken) == 1 and {v.name for v in fast.get_inputs()} == ({"X"} if old else {"X", "yes"})
    feeds = feeds_of(model)
    alike(fast, session(model), {"X": feeds["X"]} if old else feeds | {"yes": np.array(True)})
    new = onnx.load(made.model).graph
    assert "CpuRecurrent" in [n.op_type for attribute in new.node[0].attribute for n in attribute.g.node]
    assert not {"W", "R", "B"} & {t.name for t in new.initializer}


ALONE = """
import sys, numpy, onnxruntime
def made():
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(sys.argv[2])
    before = int(open("/proc/self/statm").read().split()[1])
    session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
    return session, 4096 * (int(open("/proc/self/statm").read().split()[1]) - before)
session, _ = made()
if sys.argv[3:]:
    numpy.save(sys.argv[3], session.run(None, {"x": numpy.ones((9, 2, 20), numpy.float32)})[0])
more, grown = made()
print(grown)  # bytes that a second session takes
assert not {"ecornn", "tvm", "tvm_ffi"} & set(sys.modules)
"""


def decoder(steps: int, apart: bool = False) -> Any:
    model = model_of("GRU", ("h0",))
    (node,), tensors = model.graph.node, [*model.graph.initializer]
    nodes = [helper.make_node("Shape", ["X"], ["shape"])]
    for step in range(steps):
        one = type(node).FromString(node.SerializeToString())
        one.name, one.input[5], one.output[:] = f"node{step}", f"h{step}", [f"Y{step}", f"h{step + 1}"]
        for place, tensor in enumerate(tensors, 1) if apart else ():
            one.input[place] = f"{tensor.name}{step}"
            nodes.append(helper.make_node("Constant", [], [one.input[place]], value=tensor))
        nodes.append(one)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.output.extend(sample.value(f"{name}{steps - n}") for n, name in enumerate("hY"))
    del model.graph.output[:2]
    if apart:
        del model.graph.initializer[:]
    return model


@pytest.mark.parametrize("apart", [False, True])
def test_weights_that_nodes_share_are_there_once(apart: bool, tmp_path: Path):
    made, *_ = same(decoder(40, apart), tmp_path)
    assert len(made.taken) == 40
    weights = [t.name for t in onnx.load(made.model).graph.initializer]
    assert len(weights) == 4 and operators(made.model).count("Constant") == 0


def test_packed_weights_are_those_of_all_nodes_and_sessions(tmp_path: Path):
    model, rng = decoder(20), np.random.default_rng(0)
    for tensor, shape in zip(model.graph.initializer, ((1, 1536, I), (1, 1536, 512), (1, 3072)), strict=True):
        tensor.CopyFrom(onnx.numpy_helper.from_array(rng.uniform(-0.1, 0.1, shape).astype(np.float32), tensor.name))
    for node in model.graph.node[1:]:
        node.attribute[0].i = 512
    model.graph.input[1].type.tensor_type.shape.dim[2].dim_value = 512
    made, *_ = same(model, tmp_path)
    assert made.model.stat().st_size < 4 << 20
    said = subprocess.run([sys.executable, "-c", ALONE, str(made.model), str(made.library)], check=True, text=True,
                          capture_output=True)
    assert int(said.stdout) < 12 << 20  # ONNX Runtime's own copy


def test_weights_that_differ_by_one_value_are_not_shared(tmp_path: Path):
    """By a program that changes a rewritten model, while sessions of it as it was are alive."""
    model = model_of("RNN")
    made, fast = rewritten(model, tmp_path)
    new = onnx.load(made.model)
    (bias,) = (t for t in new.graph.initializer if t.name.endswith("bias_hh_l0"))
    changed = onnx.numpy_helper.to_array(bias).copy()
    changed[-1] += 1
    bias.CopyFrom(onnx.numpy_helper.from_array(changed, bias.name))
    feeds = feeds_of(model)
    y = fast.run(None, feeds)[0]
    other = session(new, ecornn.onnxruntime.session_options(made.model)).run(None, feeds)[0]
    assert np.array_equal(y, fast.run(None, feeds)[0]) and abs(other[0, ..., -1] - y[0, ..., -1]).min() > 0.05


@pytest.mark.parametrize("depth", [31, 32, 1000])
def test_bodies_in_bodies(depth: int, tmp_path: Path):
    """Protobuf reads some thirty."""
    model = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 20)])
    graph = model.graph
    for _ in range(depth):
        node = graph.node.add(op_type="If", input=["yes"], output=["Y"])
        graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    graph.CopyFrom(model_of("RNN").graph)
    assert ecornn.onnx.read(model).hidden == H
    if depth == 31:
        made = ecornn.onnxruntime.rewrite(model, tmp_path / "x.onnx", target="cpu", measure=False)
        assert onnx.ModelProto.FromString(made.model.read_bytes()).ir_version == 10
    else:
        with pytest.raises(ModuleError, match=f"nested {depth} deep: a file that can be read has at most 31"):
            ecornn.onnxruntime.rewrite(model, tmp_path / "x.onnx", target="cpu", measure=False)


def test_what_cannot_be_taken_stays(tmp_path: Path):
    """Activations that differ by direction, weights that a call may bring; beside one that is compiled."""
    nodes, tensors, feeds, outputs = [], [], [], []
    for number, (op, attributes) in enumerate([
            ("GRU", {}), ("GRU", {}), ("RNN", {"direction": "bidirectional", "activations": ["Tanh", "Relu"]})]):
        one = model_of(op, seed=number, **attributes).graph
        (node,) = one.node
        node.name = f"node{number}"
        node.input[:4] = ["X", *(f"{name}{number}" for name in node.input[1:4])]
        node.output[:] = [f"Y{number}"]
        for tensor in one.initializer:
            tensor.name += str(number)
        nodes.append(node)
        tensors += one.initializer
        feeds += [v for v in one.input if not number]
        outputs.append(sample.value(f"Y{number}"))
    feeds.append(sample.value("R1", shape=[1, 3 * H, H]))
    model = sample.whole(helper.make_graph(nodes, "g", feeds, outputs, tensors))
    made, fast = rewritten(model, tmp_path)
    assert [one.node for one in made.taken] == ["node0"]
    reasons = {one.node: one.reason for one in made.left}
    assert "must be a constant" in reasons["node1"] and "both directions" in reasons["node2"]
    before, given = session(model), feeds_of(model)
    alike(fast, before, given)
    del given["R1"]  # its value is the model's then
    alike(fast, before, given)
    assert operators(tmp_path / "fast.onnx").count("GRU") == 1


def test_a_node_in_a_function_stays(tmp_path: Path):
    inner = model_of("RNN").graph
    function = helper.make_function("mine", "Layer", ["X", "W", "R", "B"], ["Y"], [
        helper.make_node("RNN", ["X", "W", "R", "B"], ["Y"], name="inside", hidden_size=H)],
        [helper.make_opsetid("", 20)])
    model = sample.whole(helper.make_graph([helper.make_node("Layer", ["X", "W", "R", "B"], ["Y"], domain="mine")], "g",
                                    inner.input, inner.output[:1], inner.initializer), functions=[function])
    refused(ArgumentError, r"inside \(RNN\): it is in the function Layer", rewritten, model, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_weights_that_come_with_each_call(tmp_path: Path):
    model = model_of("LSTM")
    rewritten(model, tmp_path)
    new, feeds = onnx.load(tmp_path / "fast.onnx"), feeds_of(model)
    for tensor in [t for t in new.graph.initializer if "_l0" in t.name]:
        new.graph.input.append(sample.value(tensor.name, shape=tensor.dims))
        feeds[tensor.name] = onnx.numpy_helper.to_array(tensor)
        new.graph.initializer.remove(tensor)
    options = ecornn.onnxruntime.session_options(tmp_path / "fast.onnx")
    wanted, fast = session(model).run(None, {"X": feeds["X"]}), session(new, options)
    np.testing.assert_allclose(fast.run(None, feeds)[0], wanted[0], rtol=1e-5, atol=1e-6)
    assert not fast.run(None, {name: value * (name == "X") for name, value in feeds.items()})[0].any()


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_more_rows_than_the_module_has(tmp_path: Path, direction: str):
    model = model_of("LSTM", ALL, direction=direction)
    made, fast = rewritten(model, tmp_path, batch=4)
    assert made.taken[0].layer.batch == 4
    for rows in (4, 5, 8, 11):
        alike(fast, session(model), feeds_of(model, rows=rows))
    with pytest.raises(Exception, match="other rows than X, which has 5"):
        fast.run(None, feeds_of(model, rows=4) | {"X": np.zeros((T, 5, feeds_of(model)["X"].shape[2]), np.float32)})


def test_arrays_that_begin_anywhere(tmp_path: Path):
    model = model_of("LSTM", ALL)
    _, fast = rewritten(model, tmp_path)
    feeds = feeds_of(model)
    wanted = session(model).run(None, feeds)
    def moved(array: np.ndarray) -> np.ndarray:
        room = np.zeros(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64 + 4
        there = room[start:start + array.nbytes].view(array.dtype).reshape(array.shape)
        there[...] = array
        return there

    binding, outputs = fast.io_binding(), [moved(np.zeros_like(w)) for w in wanted]
    feeds = {name: moved(array) for name, array in feeds.items()}  # which must live as long as the binding
    for name, given in feeds.items():
        binding.bind_input(name, "cpu", 0, given.dtype, given.shape, given.ctypes.data)
    for output, array in zip(fast.get_outputs(), outputs, strict=True):
        binding.bind_output(output.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    fast.run_with_iobinding(binding)
    for found, one in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-6)


def test_threads_share_a_session(fast: Path):
    running = session(fast, ecornn.onnxruntime.session_options(fast, threads=2))
    x = np.random.default_rng(0).standard_normal((20, 4, 20)).astype(np.float32)
    wanted = running.run(None, {"x": x})[0]
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: running.run(None, {"x": x})[0], range(40))]
    assert all(np.array_equal(one, wanted) for one in found)


def test_without_ecornn(fast: Path, recognizer: Path, tmp_path: Path):
    folder = tmp_path / "moved"
    fast.with_suffix(".modules").rename(folder)
    try:
        subprocess.run([sys.executable, "-c", ALONE, str(fast), str(folder / "libecornn_onnxruntime.so"),
                        str(tmp_path / "y.npy")], check=True, cwd="/", env={})
    finally:
        folder.rename(fast.with_suffix(".modules"))
    wanted = session(recognizer).run(None, {"x": np.ones((9, 2, 20), np.float32)})[0]
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), wanted, rtol=1e-5, atol=1e-6)


def test_files_that_are_not_what_they_were(fast: Path, tmp_path: Path):
    made, _ = rewritten(model_of("RNN"), tmp_path)
    (module,) = (one.module for one in made.taken)
    content = module.read_bytes()
    another = next(fast.with_suffix(".modules").glob("gru-*")).read_bytes()
    for damaged, words in ((content[:3000] + bytes([content[3000] ^ 1]) + content[3001:], "has changed since"),
                           (content[:2000], "no module file, or a damaged one"),
                           (another, "is another module than the one that the model was rewritten for"),
                           (None, "is missing: it belongs beside the library")):
        module.unlink()  # the file that this process has loaded stays as it is
        if damaged is not None:
            module.write_bytes(damaged)
        with pytest.raises(Exception, match=words) as error:
            session(made.model, ecornn.onnxruntime.session_options(made.model))
        assert "onnxruntime" in type(error.value).__module__ and "node/CpuRecurrent" in str(error.value)
    made.library.unlink()
    refused(ModuleError, "onnx-rewrite` writes it", ecornn.onnxruntime.session_options, made.model)


def test_calls_that_do_not_fit(tmp_path: Path):
    model = model_of("LSTM", ALL)
    _, fast = rewritten(model, tmp_path)
    feeds = feeds_of(model, rows=2)
    for wrong, words in ((feeds | {"lens": np.array([1, T + 1], np.int32)}, f"lengths.*{T + 1}"),
                         (feeds | {"h0": np.zeros((1, 1, H), np.float32)}, r"state_in\[0\] has shape")):
        with pytest.raises(Exception, match=words) as error:
            fast.run(None, wrong)
        assert "node/CpuRecurrent" in str(error.value)


def test_arguments(fast: Path, recognizer: Path, tmp_path: Path):
    rewrite = ecornn.onnxruntime.rewrite
    for out in (recognizer, tmp_path / "fast.so"):
        refused(ArgumentError, "and not the model itself", rewrite, recognizer, out)
    with pytest.raises(ArgumentError, match="this model has none"):
        rewrite(onnx.load(fast), tmp_path / "again.onnx", target="cpu")
    old = model_of("RNN")
    old.opset_import[0].version = 6
    refused(ArgumentError, "7 or newer", rewrite, old, tmp_path / "old.onnx", target="cpu")
    for wrong in (0, 1025, True):
        refused(ArgumentError, "from 1 to 1024", ecornn.onnxruntime.session_options, fast, threads=wrong)
    for wrong in ("0", "two", "", "1025"):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("ecornn.threads", wrong)
        refused(Exception, "expected an integer from 1 to 1024", ecornn.onnxruntime.session_options, fast, options)
    missing = CliRunner().invoke(main, ["onnx-rewrite", str(tmp_path / "none.onnx"), "-o", str(tmp_path / "x.onnx")])
    assert missing.exit_code == 2 and "cannot be read as an ONNX model" in missing.output


def test_threads_of_the_session_do_not_spin_unless_the_user_says_so(tmp_path: Path):
    (made, _), entry = rewritten(model_of("RNN"), tmp_path), "session.intra_op.allow_spinning"
    assert ecornn.onnxruntime.session_options(made.model).get_session_config_entry(entry) == "0"
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(entry, "1")
    assert ecornn.onnxruntime.session_options(made.model, options).get_session_config_entry(entry) == "1"


def test_large_weights_are_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rewriting, "EXTERNAL", 1000)
    model = model_of("RNN")
    more = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((H, 100)).astype(np.float32), "more")
    model.graph.initializer.append(more)
    model.graph.node.append(helper.make_node("MatMul", ["Y", "more"], ["Z"]))
    model.graph.output.append(sample.value("Z"))
    for _ in range(2):  # and take an older one's place
        same(model, tmp_path)
        small, large = ((tmp_path / name).stat().st_size for name in ("fast.onnx", "fast.onnx.data"))
        assert small < len(more.raw_data) <= large < 10_000
