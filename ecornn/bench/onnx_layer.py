"""ONNX Runtime's side: the operators LSTM, GRU or RNN of ONNX, one a layer, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ecornn.bench.sides import Side, Subject, Weights

OPERATORS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {  # with the gates in ONNX's order
    "lstm": ("LSTM", {}, (0, 3, 1, 2)), "gru": ("GRU", {"linear_before_reset": 1}, (1, 0, 2)),
    "gru_reset_before": ("GRU", {"linear_before_reset": 0}, (1, 0, 2)),
    "rnn_tanh": ("RNN", {"activations": ["Tanh"]}, (0,)), "rnn_relu": ("RNN", {"activations": ["Relu"]}, (0,))}


def onnx_side(subject: Subject, weights: Weights) -> Side | str:
    """The layer as a model; why there is none."""
    work, stack = subject.work, subject.stack
    if subject.kind != "llvm":
        return "ONNX Runtime is timed on CPUs alone"
    if subject.training:
        return "ONNX Runtime has no gradients"
    if work.cell not in OPERATORS or work.dtype != "float32" or stack.reverse:
        return f"ONNX has no operator for it: one of {', '.join(OPERATORS)} in float32, forward or both ways"
    run = session(work.cell, weights, work.hidden, stack.layers, stack.bidirectional, subject.threads or 0)
    return Side("onnxruntime", lambda: {"y": run(subject.inputs["x"])}, f"operator {OPERATORS[work.cell][0]}",
                subject.cell, weights)


def session(cell: str, weights: Weights, hidden: int, layers: int, bidirectional: bool,
            threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """y (T, B, D*H) of x (T, B, I) in float32, by ``weights`` as PyTorch names them; ``threads`` 0: as many as ONNX
    Runtime takes."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    kind, more, order = OPERATORS[cell]
    if bidirectional:
        more = {**more, "direction": "bidirectional", **{k: v * 2 for k, v in more.items() if k == "activations"}}
    nodes, initial = [], [numpy_helper.from_array(np.array([0, 0, -1] if bidirectional else [1], np.int64), "shape")]

    def sorted_gates(name: str) -> np.ndarray:
        value = np.asarray(weights[name])
        return np.concatenate([value[g * hidden:(g + 1) * hidden] for g in order])

    above = "x"
    for n in range(layers):
        ends = [f"_l{n}", f"_l{n}_reverse"][:1 + bidirectional]
        parts = {f"W{n}": [sorted_gates(f"weight_ih{e}") for e in ends],
                 f"R{n}": [sorted_gates(f"weight_hh{e}") for e in ends],
                 f"B{n}": [np.concatenate([sorted_gates(f"bias_ih{e}"), sorted_gates(f"bias_hh{e}")]) for e in ends]}
        initial += [numpy_helper.from_array(np.stack(value), name) for name, value in parts.items()]
        nodes.append(helper.make_node(kind, [above, *parts], [f"four{n}"], hidden_size=hidden, **more))
        if bidirectional:  # (T, 2, B, H) -> (T, B, 2 H)
            nodes.append(helper.make_node("Transpose", [f"four{n}"], [f"turned{n}"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", [f"turned{n}", "shape"], [f"y{n}"]) if bidirectional else
                     helper.make_node("Squeeze", [f"four{n}", "shape"], [f"y{n}"]))
        above = f"y{n}"
    width = np.shape(weights["weight_ih_l0"])[1]
    graph = helper.make_graph(
        nodes, "layer", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "B", width])],
        [helper.make_tensor_value_info(above, TensorProto.FLOAT, ["T", "B", (1 + bidirectional) * hidden])], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    made = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: made.run(None, {"x": x})[0]
