"""Models for ONNX Runtime, and sessions of them before and after."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ecornn.onnxruntime

T, B, I, H = 7, 3, 5, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FLOATS = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "float16": TensorProto.FLOAT16}
LIMIT = 1e-5  # relative, of float32


def model_of(op: str, inputs: Sequence[str] = (), *, dtype: str = "float32", outputs: Sequence[bool] = (True,) * 3,
             seed: int = 0, **attributes: Any) -> Any:
    """A model of one node named `node` with random weights; T and B are open; ``outputs``: of Y, Y_h and Y_c."""
    both = 1 + (attributes.get("direction") == "bidirectional")
    rng, gates = np.random.default_rng(seed), GATES[op] * H
    weights = {"W": (both, gates, I), "R": (both, gates, H), "B": (both, 2 * gates), "P": (both, 3 * H)}
    tensors = [numpy_helper.from_array(rng.uniform(-0.5, 0.5, shape).astype(dtype), name)
               for name, shape in weights.items() if name != "P" or name in inputs]
    given = ["X", "W", "R", "B", *(name if name in inputs else "" for name in ("lens", "h0", "c0", "P"))]
    made = [name if there else "" for name, there in zip(("Y", "Y_h", "Y_c"), outputs, strict=True)]
    node = helper.make_node(op, given if op == "LSTM" else given[:6], made if op == "LSTM" else made[:2], name="node",
                            hidden_size=H, **attributes)
    layout = attributes.get("layout", 0)
    shapes = {"X": ["B", "T", I] if layout else ["T", "B", I], "lens": ["B"],
              **dict.fromkeys(("h0", "c0"), ["B", both, H] if layout else [both, "B", H])}
    inputs = [value(n, TensorProto.INT32 if n == "lens" else FLOATS[dtype], s) for n, s in shapes.items()
              if n in node.input]
    return whole(helper.make_graph([node], "g", inputs, [value(n, FLOATS[dtype]) for n in node.output if n], tensors))


def value(name: str, kind: int = TensorProto.FLOAT, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def whole(graph: Any, **more: Any) -> Any:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, **more)


def feeds_of(model: Any, seed: int = 1, rows: int = B, steps: int = T) -> dict[str, np.ndarray]:
    rng, sizes = np.random.default_rng(seed), {"T": steps, "B": rows}
    draws = {"i": lambda shape: rng.integers(1, steps + 1, shape), "b": lambda shape: rng.random(shape) < 0.7,
             "f": lambda shape: rng.uniform(-1, 1, shape)}
    feeds = {}
    for one in model.graph.input:
        kind = one.type.tensor_type
        shape = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[one.name] = np.asarray(draws[dtype.kind](shape), dtype)
    return feeds


def session(model: Any, options: Any = None) -> Any:
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def rewritten(model: Any, folder: Path, threads: int = 1, **more: Any) -> tuple[Any, Any]:
    out = folder / "fast.onnx"
    made = ecornn.onnxruntime.rewrite(model, out, target="cpu", **{"measure": False, **more})
    return made, session(out, ecornn.onnxruntime.session_options(out, threads=threads))


def alike(one: Any, other: Any, feeds: Mapping[str, np.ndarray], limit: float = LIMIT, least: float = 0.0) -> None:
    names = [o.name for o in one.get_outputs()]
    assert [o.name for o in other.get_outputs()] == names
    for name, found, wanted in zip(names, one.run(None, feeds), other.run(None, feeds), strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, name
        error = np.linalg.norm(found.astype(float) - wanted.astype(float))
        assert error <= limit * max(np.linalg.norm(wanted.astype(float)), least * wanted.size**0.5), f"{name}: {error}"


def speech(path: Path) -> None:
    import torch

    class Speech(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.LSTM(20, 32, 2, bidirectional=True)
            self.middle = torch.nn.GRU(64, 24)
            self.last = torch.nn.RNN(24, 16, batch_first=True)
            self.out = torch.nn.Linear(16, 29)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, _ = self.encoder(x)
            y, h = self.middle(y)
            y, _ = self.last(y.transpose(0, 1))
            return self.out(y).log_softmax(-1), h

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this exporter is old, and that batches are fixed, which they are not
        torch.onnx.export(Speech().eval(), (torch.randn(40, 3, 20),), str(path), dynamo=False, input_names=["x"],
                          output_names=["y", "h"], dynamic_axes={"x": {0: "T", 1: "B"}})


def same(model: Any, folder: Path, **more: Any) -> tuple[Any, Any, dict[str, np.ndarray]]:
    made, fast = rewritten(model, folder, **more)
    alike(fast, session(model), feeds := feeds_of(model))
    return made, fast, feeds


@pytest.fixture(scope="module")
def recognizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speech") / "speech.onnx"
    speech(path)
    return path


def operators(model: Path | Any) -> list[str]:
    return [n.op_type for n in (onnx.load(model) if isinstance(model, Path) else model).graph.node]
