"""Reading recurrent nodes out of ONNX models."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ecornn.boundary import public
from ecornn.errors import ArgumentError, ModuleError, WeightsError
from ecornn.onnx.constants import DOMAINS, Scope
from ecornn.onnx.node import GATES, Node, Shared, interpret

INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
MOST = {"LSTM": (8, 3), "GRU": (6, 2), "RNN": (6, 2)}  # inputs and outputs
TYPES = {"activation_alpha": "FLOATS", "activation_beta": "FLOATS", "activations": "STRINGS", "clip": "FLOAT",
         "direction": "STRING", "hidden_size": "INT", "input_forget": "INT", "layout": "INT",
         "linear_before_reset": "INT"}


@public
def read(model: Any, node: str | None = None) -> Node:
    """A recurrent node of a model, with its weights.

    ``model`` is a file's name or an ``onnx.ModelProto``; ``node`` the node's name, or the name of one of its
    outputs; it may be left out where the model has but one. Nodes in the bodies of ``If``, ``Loop`` and ``Scan`` are
    found, too. W, R, B and P must be constants of the model, or what its nodes compute from constants.

    Raises :class:`ModuleError` where the file cannot be read or the model contradicts itself, :class:`ArgumentError`
    where onnx is not installed or not one node is of that name, and what :func:`ecornn.onnx.node.interpret` raises.
    """
    scope, chosen = choose(load(model), node)
    return from_proto(chosen, {name: scope.constant(name) for name in chosen.input[1:] if name})


def load(model: Any) -> Any:
    """The model of a file, or an ``onnx.ModelProto`` as it is. Raises the errors of :func:`read`."""
    try:
        import onnx
    except ImportError as error:
        raise ArgumentError("model", str(model), "the package onnx installed: pip install onnx") from error
    if isinstance(model, (str, os.PathLike)):
        if Path(model).exists() and not Path(model).is_file():
            raise ModuleError(f"{model} cannot be read as an ONNX model: it is no regular file")
        try:
            model = onnx.load(model)
        except Exception as error:  # protobuf raises types of its own
            raise ModuleError(f"{model} cannot be read as an ONNX model: {error}") from error
    if not isinstance(model, onnx.ModelProto):
        raise ArgumentError("model", type(model), "a file's name or an onnx.ModelProto")
    return model


def recurrent(model: Any, variable: Collection[str] = ()) -> tuple[list[tuple[Scope, Any]], list[tuple[str, Any]]]:
    """The recurrent nodes of a model's graphs, each with its scope, and those of its functions, each with the
    function's name. ``variable``: tensors of the model's that are no constants though it holds a value of them."""
    own = {f.name for f in model.functions if f.domain in DOMAINS}  # a model's functions go before ONNX's operators
    known = GATES.keys() - own

    def are(nodes: Any) -> list[Any]:
        return [n for n in nodes if n.op_type in known and n.domain in DOMAINS]

    graphs = Scope(model.graph, model.opset_import, variable=variable).inner()
    return ([(scope, n) for scope in graphs for n in are(scope.nodes)],
            [(f.name, n) for f in model.functions for n in are(f.node)])


def choose(model: Any, name: str | None) -> tuple[Scope, Any]:
    """The one recurrent node of that name, or with an output of it, and where it is; :class:`ArgumentError` where it is
    not one."""
    nodes, inside = recurrent(model)
    named = [(s, n) for s, n in nodes if name is None or name == n.name or (name and name in n.output)]
    if len(named) == 1:
        return named[0]
    if len(named) > 1 and name is not None:
        outputs = ", ".join(title(n, by_output=True) for _, n in named)
        raise ArgumentError("node", name, f"a name that one node has; by their outputs these are {outputs}")
    names = [n.name for _, n in nodes]
    listed = [f"{title(n, names.count(n.name) > 1)} ({n.op_type})" for _, n in nodes]
    hidden = [f"{title(n)} ({n.op_type}) of the function {function}" for function, n in inside]
    allowed = f"one of {', '.join(listed)}" if nodes else "a model with an LSTM, GRU or RNN of ONNX's"
    if hidden:
        allowed += f"; inline the model's functions (onnx.inliner) for {', '.join(hidden)}"
    raise ArgumentError("node", name, allowed)


def from_proto(node: Any, tensors: Mapping[str, Any], shared: Shared | None = None) -> Node:
    """The meaning of an ``onnx.NodeProto``, its weights and other constants among ``tensors`` by name; ``shared`` as
    :func:`ecornn.onnx.node.interpret` has it."""
    from onnx import helper

    name = title(node)
    for kind, there, most in zip(("inputs", "outputs"), (node.input, node.output), MOST.get(node.op_type, ()),
                                 strict=False):
        if len(there) > most:
            raise ModuleError(f"node {name}: it has {len(there)} {kind}; {node.op_type} has at most {most}")
    attributes: dict[str, Any] = {}
    for attribute in node.attribute:
        key = attribute.name
        if key in attributes:
            raise ModuleError(f"node {name}: two attributes are named {key}")
        kind = attribute.AttributeType.Name(attribute.type)
        if attribute.ref_attr_name or kind != TYPES.get(key, kind):
            has = f"of the function's {attribute.ref_attr_name}" if attribute.ref_attr_name else f"of type {kind}"
            raise ArgumentError(f"{name}.{key}", has, f"a value of type {TYPES.get(key, kind)}")
        attributes[key] = helper.get_attribute_value(attribute)
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
    return interpret(name, node.op_type, attributes, weights, outputs, inputs, shared)


def title(node: Any, by_output: bool = False) -> str:
    """A node's name; without one, that of its first output."""
    first = next((o for o in node.output if o), node.op_type)
    return first if by_output or not node.name else node.name
