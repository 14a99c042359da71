"""Reading recurrent nodes out of ONNX models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ecornn.errors import ArgumentError, ModuleError, WeightsError
from ecornn.onnx.node import GATES, Node, interpret

INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
DOMAINS = ("", "ai.onnx")


def read(model: Any, node: str | None = None) -> Node:
    """A recurrent node of a model, with its weights.

    ``model`` is a file's name or an ``onnx.ModelProto``; ``node`` the node's name, or the name of one of its
    outputs; it may be left out where the model has but one. W, R, B and P must be constants of the model.

    Raises :class:`ModuleError` where the file cannot be read or the model contradicts itself, :class:`ArgumentError`
    where onnx is not installed or not one node is of that name, and what :func:`ecornn.onnx.node.interpret` raises.
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
    found = choose(model, node)
    return from_proto(found, constants(model, set(found.input)))


def choose(model: Any, name: str | None) -> Any:
    """The one recurrent node of that name, or with an output of it; :class:`ArgumentError` where it is not one."""
    own = {f.name for f in model.functions if f.domain in DOMAINS}  # a model's functions go before ONNX's operators
    nodes = [n for n in model.graph.node if n.op_type in GATES and n.domain in DOMAINS and n.op_type not in own]
    named = [n for n in nodes if name is None or name == n.name or (name and name in n.output)]
    if len(named) == 1:
        return named[0]
    if len(named) > 1 and name is not None:
        outputs = ", ".join(title(n, by_output=True) for n in named)
        raise ArgumentError("node", name, f"a name that one node has; by their outputs these are {outputs}")
    names = [n.name for n in nodes]
    listed = ", ".join(f"{title(n, names.count(n.name) > 1)} ({n.op_type})" for n in nodes)
    raise ArgumentError("node", name, f"one of {listed}" if nodes else "a model with an LSTM, GRU or RNN of ONNX's")


def from_proto(node: Any, tensors: Mapping[str, Any]) -> Node:
    """The meaning of an ``onnx.NodeProto``, its weights and other constants among ``tensors`` by name."""
    from onnx import helper

    name = title(node)
    attributes: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.name in attributes:
            raise ModuleError(f"node {name}: two attributes are named {attribute.name}")
        attributes[attribute.name] = helper.get_attribute_value(attribute)
    for key, value in attributes.items():
        if isinstance(value, bytes):
            attributes[key] = value.decode(errors="replace")
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], bytes):
            attributes[key] = [v.decode(errors="replace") for v in value]
    given = {key: source for key, source in zip(INPUTS, node.input, strict=False) if source}
    for key in "WRBP":
        if key in given and tensors.get(given[key]) is None:
            raise WeightsError(f"node {name}: {given[key]} must be a constant of the model", [given[key]])
    weights = [tensors[given[key]] if key in given else None for key in "WRBP"]
    inputs = {key: tensors.get(given[key]) for key in INPUTS[4:7] if key in given}
    outputs = tuple(bool(o) for o in (*node.output, *("",) * 3)[:3 if node.op_type == "LSTM" else 2])
    return interpret(name, node.op_type, attributes, weights, outputs, inputs)


def title(node: Any, by_output: bool = False) -> str:
    """A node's name; without one, that of its first output."""
    first = next((o for o in node.output if o), node.op_type)
    return first if by_output or not node.name else node.name


def constants(model: Any, names: set[str]) -> dict[str, Any]:
    """Those of ``names`` that are initializers or the values of Constant nodes, as arrays.

    Raises :class:`ModuleError` where one is defined twice, or cannot be read.
    """
    from onnx import helper, numpy_helper
    from onnx.external_data_helper import uses_external_data

    sources = [(t.name, t) for t in model.graph.initializer]
    sources += [(t.values.name, t) for t in model.graph.sparse_initializer]
    for node in model.graph.node:
        value = None
        if node.op_type == "Constant" and node.domain in DOMAINS and len(node.attribute) == 1:
            value = helper.get_attribute_value(node.attribute[0])
        sources += [(output, value) for output in node.output]
    found: dict[str, Any] = {}
    for name, source in sources:
        if name not in names or not name:
            continue
        if name in found:
            raise ModuleError(f"the model has two tensors named {name}")
        if hasattr(source, "data_type") and uses_external_data(source):
            raise ModuleError(f"the data of {name} is in a file that has not been read: give the model's file name, or "
                              "onnx.load() it with its external data")
        try:
            if hasattr(source, "indices"):
                found[name] = dense(source)
            elif hasattr(source, "data_type"):
                found[name] = numpy_helper.to_array(source)
            else:  # numbers of a Constant node; None for what another node computes
                found[name] = None if source is None else np.asarray(source)
        except Exception as error:  # data elsewhere that is not there, fewer bytes than the shape says
            raise ModuleError(f"the model's {name} cannot be read: {error}") from error
    return {name: value for name, value in found.items() if value is not None}


def dense(tensor: Any) -> Any:
    """An ``onnx.SparseTensorProto`` as an array."""
    from onnx import numpy_helper

    values, indices = numpy_helper.to_array(tensor.values), numpy_helper.to_array(tensor.indices)
    made = np.zeros(tuple(tensor.dims), values.dtype)
    if indices.ndim == 1:
        made.reshape(-1)[indices] = values
    else:
        made[tuple(indices.T)] = values
    return made
