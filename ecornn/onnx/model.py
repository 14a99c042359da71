"""Reading recurrent nodes out of ONNX models."""

from __future__ import annotations

import os
from typing import Any

from ecornn.errors import ArgumentError, ModuleError, WeightsError
from ecornn.onnx.node import GATES, Node, interpret


def read(model: Any, node: str | None = None) -> Node:
    """A recurrent node of a model, with its weights.

    ``model`` is a file's name or an ``onnx.ModelProto``; ``node`` the node's name, or the name of one of its
    outputs; it may be left out where the model has but one. W, R, B and P must be constants of the model.

    Raises :class:`ModuleError` where the file cannot be read, :class:`ArgumentError` where onnx is not installed, and
    what :func:`ecornn.onnx.node.interpret` raises.
    """
    try:
        import onnx
    except ImportError as error:
        raise ArgumentError("model", str(model), "the package onnx installed: pip install onnx") from error
    if isinstance(model, (str, os.PathLike)):
        try:
            model = onnx.load(model)
        except Exception as error:  # protobuf raises types of its own
            raise ModuleError(f"{model} cannot be read as an ONNX model: {error}") from error
    nodes = {title(n): n for n in model.graph.node if n.op_type in GATES}
    names = {**nodes, **{o: n for n in nodes.values() for o in n.output if o}}
    if node is None and len(nodes) == 1:
        (found,) = nodes.values()
    elif node is None or node not in names:
        listed = ", ".join(f"{name} ({n.op_type})" for name, n in nodes.items())
        raise ArgumentError("node", node, f"one of {listed}" if nodes else "a model with an LSTM, GRU or RNN node")
    else:
        found = names[node]
    return from_proto(found, constants(model))


def from_proto(node: Any, tensors: dict[str, Any]) -> Node:
    """The meaning of an ``onnx.NodeProto``, its weights among ``tensors`` by name."""
    from onnx import helper

    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    for key, value in attributes.items():
        if isinstance(value, bytes):
            attributes[key] = value.decode()
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], bytes):
            attributes[key] = [v.decode() for v in value]
    given = [tensors.get(name) if name else None for name in node.input]
    given += [None] * (8 - len(given))
    for at in (1, 2, 3, 7):
        if given[at] is None and at < len(node.input) and node.input[at]:
            raise WeightsError(f"node {title(node)}: {node.input[at]} must be a constant of the model",
                               [node.input[at]])
    weights = [*given[1:4], given[7]]
    outputs = tuple(bool(o) for o in (*node.output, *("",) * 3)[:3 if node.op_type == "LSTM" else 2])
    return interpret(title(node), node.op_type, attributes, weights, outputs)


def title(node: Any) -> str:
    """A node's name; without one, that of its first output."""
    return node.name or next((o for o in node.output if o), node.op_type)


def constants(model: Any) -> dict[str, Any]:
    """Initializers and the values of Constant nodes, by name."""
    from onnx import helper, numpy_helper

    found = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    found[node.output[0]] = numpy_helper.to_array(helper.get_attribute_value(attribute))
    return found
