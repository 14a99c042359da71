"""Recurrent nodes of ONNX models, and their meaning: a cell with options, a direction, and weights by PyTorch's names.

Sources: https://onnx.ai/onnx/operators/onnx__LSTM.html, onnx__GRU.html and onnx__RNN.html."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.boundary import public
from ecornn.cells import BUILTIN
from ecornn.cells.options import DEFAULTS, Optioned, number
from ecornn.errors import ArgumentError, DTypeError, ModuleError, ShapeError, WeightsError
from ecornn.onnx.constants import DOMAINS, Scope

Array = NDArray[Any]

GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}  # ours among theirs: iofc, zrh
PEEPHOLES = (0, 2, 1)  # theirs: i, o, f
NAMES = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Affine": "affine", "LeakyRelu": "leaky_relu",
         "ThresholdedRelu": "thresholded_relu", "ScaledTanh": "scaled_tanh", "HardSigmoid": "hard_sigmoid",
         "Elu": "elu", "Softsign": "softsign", "Softplus": "softplus"}
ROLES = {"LSTM": ("gate", "new", "out"), "GRU": ("gate", "new"), "RNN": ("new",)}
DIRECTIONS = ("forward", "reverse", "bidirectional")
TYPES = {"activation_alpha": "FLOATS", "activation_beta": "FLOATS", "activations": "STRINGS", "clip": "FLOAT",
         "direction": "STRING", "hidden_size": "INT", "input_forget": "INT", "layout": "INT",
         "linear_before_reset": "INT"}  # of attributes
OWN = {"input_forget": "LSTM", "linear_before_reset": "GRU"}  # attributes of one operator
FLOATS = ("float16", "bfloat16", "float32", "float64")  # the operators' types
LENGTHS = "sequence_lens"

# by operator and the tensors' identities, with the tensors, which live as long
Shared = dict[tuple[Any, ...], tuple[dict[str, Array], tuple[Array | None, ...]]]


@dataclass(frozen=True)
class Node:
    """A recurrent node.

    Attributes
    ----------
    name, op : the node's name; ``LSTM``, ``GRU`` or ``RNN``
    cell : the cell that computes one step
    input, hidden : I and H
    direction : ``forward``, ``reverse`` or ``bidirectional``
    batch_first : ONNX's layout 1
    weights : by PyTorch's names, float32, or float64 as the node's tensors
    outputs : True for each of Y, Y_h and Y_c that the node has
    dtype : of the node's tensors: ``float16``, ``bfloat16``, ``float32`` or ``float64``
    inputs : those of ``sequence_lens``, ``initial_h`` and ``initial_c`` that the node has: its constant, or None
        where each call must bring it. In ONNX's shapes; states as the weights, lengths int32"""

    name: str
    op: str
    cell: Optioned
    input: int
    hidden: int
    direction: str
    batch_first: bool
    weights: dict[str, Array]
    outputs: tuple[bool, ...]
    inputs: dict[str, Array | None] = field(default_factory=dict)
    dtype: str = "float32"


def interpret(name: str, op: str, attributes: Mapping[str, Any], tensors: Sequence[Array | None],
              outputs: tuple[bool, ...], inputs: Mapping[str, Array | None], shared: Shared) -> Node:
    """The meaning of a node with these attributes and the tensors W, R, B and P. ``inputs``: as :class:`Node` has them,
    of any type that ONNX has. ``shared``: the weights of all nodes of the model, to which those of new tensors are
    added.

    Raises :class:`ArgumentError` for an operator or attribute that is none of ONNX's or is not supported,
    :class:`WeightsError` without W or R, :class:`ShapeError` and :class:`DTypeError` for tensors that do not fit."""
    if op not in GATES:
        raise ArgumentError("node", f"{name} ({op})", f"a node of {', '.join(GATES)}")
    for key in attributes:
        if key not in TYPES or OWN.get(key, op) != op:
            raise ArgumentError(f"{name}.{key}", attributes[key], f"an attribute of {op}")
    for key in (*OWN, "layout"):
        if attributes.get(key, 0) not in (0, 1):
            raise ArgumentError(f"{name}.{key}", attributes[key], "0 or 1")
    direction = attributes.get("direction", "forward")
    if direction not in DIRECTIONS:
        raise ArgumentError(f"{name}.direction", direction, f"one of {', '.join(DIRECTIONS)}")
    count = 1 + (direction == "bidirectional")
    w, r, b, p = tensors
    if w is None or r is None:
        raise WeightsError(f"node {name}: W and R must be constants of the model", ["W", "R"])
    present = {key: value for key, value in (("W", w), ("R", r), ("B", b), ("P", p)) if value is not None}
    for key, value in present.items():
        if str(value.dtype) not in FLOATS:
            raise DTypeError(f"{name}.{key}.dtype", str(value.dtype), f"one of {', '.join(FLOATS)}")
    for key in "WR":
        if present[key].ndim != 3:
            raise ShapeError(f"{name}.{key}.shape", present[key].shape,
                             "3 axes: directions, gates * units, and inputs of a unit")
    gates, hidden = len(GATES[op]), int(r.shape[-1])
    wanted = {"W": (count, gates * hidden, int(w.shape[-1])), "R": (count, gates * hidden, hidden),
              "B": (count, 2 * gates * hidden), "P": (count, 3 * hidden)}
    for key, value in present.items():
        if value.shape != wanted[key]:
            raise ShapeError(f"{name}.{key}.shape", value.shape, str(wanted[key]))
    if attributes.get("hidden_size", hidden) != hidden:
        raise ShapeError(f"{name}.hidden_size", attributes["hidden_size"], f"{hidden}, as in the shape of R")
    options = _options(name, op, attributes, count)
    if op == "LSTM" and p is not None and p.any():
        options["peepholes"] = True
    kind = {"LSTM": "lstm", "RNN": "rnn_tanh"}.get(op) or (
        "gru" if attributes.get("linear_before_reset", 0) else "gru_reset_before")
    cell = type(BUILTIN[kind])(**options)
    own = np.float64 if w.dtype == np.float64 else np.float32
    given = w, r, b, p if options.get("peepholes") else None
    same = op, *map(id, given)
    if same not in shared:
        shared[same] = _weights(op, given, own), given
    weights, _ = shared[same]
    layout = bool(attributes.get("layout", 0))
    known = {key: value if value is None else _constant(f"{name}.{key}", key, value, (count, hidden), layout, own)
             for key, value in inputs.items()}
    return Node(name, op, cell, int(w.shape[-1]), hidden, direction, layout, weights, outputs, known, str(w.dtype))


def _weights(op: str, tensors: Sequence[Array | None], own: Any) -> dict[str, Array]:
    """The weights by PyTorch's names, from W, R, B and P."""
    w, r, b, p = tensors
    weights: dict[str, Array] = {}

    def ordered(value: Array, order: Sequence[int] = GATES[op]) -> Array:
        parts = np.split(np.asarray(value, own), len(order))
        return np.concatenate([parts[g] for g in order])

    for d, (w_d, r_d) in enumerate(zip(w, r, strict=True)):  # type: ignore[arg-type]
        end = "_l0" + "_reverse" * d
        biases = np.split(np.zeros(2 * len(w_d), own) if b is None else b[d], 2)
        weights |= {f"weight_ih{end}": ordered(w_d), f"weight_hh{end}": ordered(r_d),
                    f"bias_ih{end}": ordered(biases[0]), f"bias_hh{end}": ordered(biases[1])}
        if p is not None:
            weights[f"weight_peephole{end}"] = ordered(p[d], PEEPHOLES)
    return weights


def _constant(where: str, key: str, value: Array, sizes: tuple[int, int], batch_first: bool, own: Any) -> Array:
    """A constant of lengths, or of states of ``sizes`` D and H and the type ``own``, checked."""
    if key == LENGTHS:
        if value.dtype.kind not in "iu":
            raise DTypeError(f"{where}.dtype", str(value.dtype), "an integer type")
        if value.ndim != 1:
            raise ShapeError(f"{where}.shape", value.shape, "(B,)")
        return value.astype(np.int32)
    if str(value.dtype) not in FLOATS:
        raise DTypeError(f"{where}.dtype", str(value.dtype), f"one of {', '.join(FLOATS)}")
    directions = value.shape[int(batch_first)] if value.ndim == 3 else 0
    if value.ndim != 3 or (directions, value.shape[2]) != sizes:
        shape = "(B, D, H)" if batch_first else "(D, B, H)"
        raise ShapeError(f"{where}.shape", value.shape, f"{shape} with D={sizes[0]} H={sizes[1]}")
    return value.astype(own)


def shortest(value: float) -> float:
    """The number of fewest digits that is ``value`` in float32, which an attribute of ONNX is."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def _options(name: str, op: str, attributes: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Options of the cell: those of the attributes that are not the operator's defaults."""
    roles = ROLES[op]
    defaults = ["sigmoid", "tanh", "tanh"] if len(roles) > 1 else ["tanh"]
    chosen = list(attributes.get("activations") or ())
    options: dict[str, Any] = {}
    if "clip" in attributes:
        options["clip"] = shortest(attributes["clip"])
        if not options["clip"] > 0:  # our cells have 0 for no bound; ONNX's text would have it make all zero
            raise ArgumentError(f"{name}.clip", attributes["clip"], "a number above 0, or no such attribute")
    if attributes.get("input_forget"):
        options["coupled"] = True
    if not chosen:
        return options
    if len(chosen) != len(roles) * count:
        raise ArgumentError(f"{name}.activations", chosen, f"{len(roles) * count} names")
    alpha, beta = list(attributes.get("activation_alpha") or ()), list(attributes.get("activation_beta") or ())
    texts = []
    for given in chosen:  # an activation takes the next alpha and the next beta, if it has such
        own = {n.lower(): v for n, v in NAMES.items()}.get(str(given).lower())
        if own is None:
            raise ArgumentError(f"{name}.activations", given, f"one of {', '.join(NAMES)}")
        numbers = list(DEFAULTS[own])
        for at, left in enumerate((alpha, beta)[:len(numbers)]):
            if left:
                numbers[at] = shortest(left.pop(0))
        texts.append(":".join((own, *map(number, numbers))) if tuple(numbers) != DEFAULTS[own] else own)
    if count == 2 and texts[:len(roles)] != texts[len(roles):]:
        raise ArgumentError(f"{name}.activations", chosen, "the same for both directions")
    return options | {role: text for role, text, usual in zip(roles, texts, defaults, strict=False) if text != usual}


INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
MOST = {"LSTM": (8, 3), "GRU": (6, 2), "RNN": (6, 2)}  # inputs and outputs


@public
def read(model: Any, node: str | None = None) -> Node:
    """A recurrent node of a model, with its weights.

    ``model`` is a file's name or an ``onnx.ModelProto``; ``node`` the node's name, or one of its outputs', not needed
    where the model has but one. Bodies of ``If``, ``Loop`` and ``Scan`` are searched, too. W, R, B and P must be
    constants, or computed from such. Raises :class:`ModuleError` where the file cannot be read or the model contradicts
    itself, :class:`ArgumentError` without onnx or for no one node of that name, and what :func:`interpret` raises."""
    nodes, inside = recurrent(load(model))
    named = [(s, n) for s, n in nodes if node is None or node == n.name or (node and node in n.output)]
    if len(named) == 1:
        scope, chosen = named[0]
        return from_proto(chosen, {name: scope.constant(name) for name in chosen.input[1:] if name})
    if len(named) > 1 and node is not None:
        outputs = ", ".join(title(n, by_output=True) for _, n in named)
        raise ArgumentError("node", node, "the name of one node; several have this one, so name it by its output: "
                            f"{outputs}")
    names = [n.name for _, n in nodes]
    listed = [f"{title(n, names.count(n.name) > 1)} ({n.op_type})" for _, n in nodes]
    hidden = [f"{title(n)} ({n.op_type}) of the function {function}" for function, n in inside]
    allowed = f"one of {', '.join(listed)}" if nodes else "a model with an LSTM, GRU or RNN node of ONNX"
    if hidden:
        allowed += f"; inline the model's functions (onnx.inliner) for {', '.join(hidden)}"
    raise ArgumentError("node", node, allowed)


def load(model: Any) -> Any:
    """The model of a file, or an ``onnx.ModelProto`` as it is. Raises the errors of :func:`read`."""
    try:
        import onnx
    except ImportError as error:
        raise ArgumentError("model", str(model), "the package onnx, which is not installed: pip install "
                            "onnx") from error
    if isinstance(model, (str, os.PathLike)):
        if Path(model).exists() and not Path(model).is_file():
            raise ModuleError(f"{model} cannot be read as an ONNX model: it is not a regular file")
        try:
            return onnx.load(model)
        except Exception as error:  # protobuf raises types of its own
            raise ModuleError(f"{model} cannot be read as an ONNX model: {error}") from error
    if not isinstance(model, onnx.ModelProto):
        raise ArgumentError("model", type(model), "a file's name or an onnx.ModelProto")
    return model


def recurrent(model: Any, variable: Collection[str] = ()) -> tuple[list[tuple[Scope, Any]], list[tuple[str, Any]]]:
    """A model's recurrent nodes, each with its scope, and those of its functions, with their names."""
    own = {f.name for f in model.functions if f.domain in DOMAINS}  # a model's functions go before ONNX's operators
    known = GATES.keys() - own

    def are(nodes: Any) -> list[Any]:
        return [n for n in nodes if n.op_type in known and n.domain in DOMAINS]

    graphs = Scope(model.graph, model.opset_import, variable=variable).inner()
    return ([(scope, n) for scope in graphs for n in are(scope.nodes)],
            [(f.name, n) for f in model.functions for n in are(f.node)])


def from_proto(node: Any, tensors: Mapping[str, Any], shared: Shared | None = None) -> Node:
    """The meaning of an ``onnx.NodeProto``, its constants among ``tensors``; ``shared`` as :func:`interpret` has it."""
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
        value = attributes[key] = helper.get_attribute_value(attribute)
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
    return interpret(name, node.op_type, attributes, weights, outputs, inputs, {} if shared is None else shared)


def title(node: Any, by_output: bool = False) -> str:
    """A node's name; without one, that of its first output."""
    first = next((o for o in node.output if o), node.op_type)
    return first if by_output or not node.name else node.name
