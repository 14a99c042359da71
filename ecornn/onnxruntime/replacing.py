"""A recurrent node of a graph as one of ours, with nodes of ONNX around it where layouts or types differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ecornn.errors import ArgumentError
from ecornn.onnx.constants import Scope
from ecornn.onnx.model import INPUTS, title
from ecornn.onnx.node import Node

DOMAIN = "ecornn"
OPERATORS = {"llvm": "CpuRecurrent", "cuda": "CudaRecurrent"}  # by kind of device
SWAPPED = [1, 0, 2]  # axes of X and states in ONNX's layout 1

Step = tuple[str, dict[str, Any]]  # an operator and its attributes; the `shape` of a Reshape is a tensor


class Names:
    """Names that a model does not have yet."""

    def __init__(self, scopes: Iterable[Scope]) -> None:
        self._taken = {name for scope in scopes for name in _names(scope.graph)}

    def new(self, *parts: str) -> str:
        """One that is made of these."""
        name = wanted = "/".join(parts)
        number = 1
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name


def _names(graph: Any) -> Iterator[str]:
    yield from (value.name for value in (*graph.input, *graph.output, *graph.initializer))
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)


class Replacement:
    """What takes a node's place.

    Attributes
    ----------
    node : that one
    nodes : in their order, with the outputs that the node has
    tensors : initializers that these need
    """

    def __init__(self, node: Any, meaning: Node, names: Names) -> None:
        self.node, self._meaning, self._names, self._title = node, meaning, names, title(node)
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []

    def make(self, device: str, dtype: str, module: str, digest: str, parameters: Sequence[str]) -> None:
        """For a module of ``dtype`` and a kind of device, whose weights are ``parameters``.

        Raises :class:`ArgumentError` for a node on a GPU that has but one of two states.
        """
        given = {key: name for key, name in zip(INPUTS, self.node.input, strict=False) if name}
        kinds = ("h", "c")[:1 + (self._meaning.op == "LSTM")]
        before = [given.get(f"initial_{kind}", "") for kind in kinds]
        if device == "cuda" and any(before) and not all(before):
            raise ArgumentError(self._title, "one of initial_h and initial_c", "both or none on a GPU")
        x, *states = (self._inwards(name, dtype) for name in (given["X"], *before))
        wide = np.float64 if dtype == "float64" else np.float32  # what weights are to our operators
        weights = [self._tensor(name, self._meaning.weights[name].astype(wide)) for name in parameters]
        to = [*self.node.output, *[""] * 3][:1 + len(kinds)]
        place = len(self.nodes)
        cast = self._cast(dtype, self._meaning.dtype)
        outputs = [self._outwards(to[0], [*cast, *self._unfolded()], "y"),
                   *(self._outwards(name, [*cast, *self._swap()], k) for name, k in zip(to[1:], kinds, strict=True))]
        inputs = [x, given.get("sequence_lens", ""), *states, *[""] * (2 - len(states)), *weights]
        self.nodes.insert(place, self._node(OPERATORS[device], inputs, outputs, domain=DOMAIN, module=module,
                                            digest=digest))

    def _new(self, what: str) -> str:
        return self._names.new(self._title, what)

    def _tensor(self, what: str, value: Any) -> str:
        from onnx import numpy_helper

        name = self._new(what)
        self.tensors.append(numpy_helper.from_array(value, name))
        return name

    def _node(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
        from onnx import helper

        return helper.make_node(operator, inputs, outputs, name=self._new(operator), **attributes)

    def _swap(self) -> list[Step]:
        """Of X and states, between ONNX's layouts."""
        return [("Transpose", {"perm": SWAPPED})] if self._meaning.batch_first else []

    def _cast(self, dtype: str, to: str) -> list[Step]:
        return [("Cast", {"to": _type(to)})] if dtype != to else []

    def _inwards(self, name: str, dtype: str) -> str:
        """X or a state as our node takes it: (T, B, I) or (D, B, H), of the module's type."""
        for operator, attributes in [*self._swap(), *self._cast(self._meaning.dtype, dtype)] if name else []:
            made = self._new(operator.lower())
            self.nodes.append(self._node(operator, [name], [made], **attributes))
            name = made
        return name

    def _outwards(self, to: str, steps: Sequence[Step], what: str) -> str:
        """What our output is called, of which these steps make ``to``."""
        if not to:
            return self._new(what)
        names = [*(self._new(what) for _ in steps), to]
        for (operator, attributes), (one, made) in zip(steps, pairwise(names), strict=True):
            more = {key: value for key, value in attributes.items() if key != "shape"}
            shape = [self._tensor("shape", attributes["shape"])] if "shape" in attributes else []
            self.nodes.append(self._node(operator, [one, *shape], [made], **more))
        return names[0]

    def _unfolded(self) -> list[Step]:
        """Y, (T, D, B, H) or (B, T, D, H), of (T, B, D*H)."""
        directions, hidden = 1 + (self._meaning.direction == "bidirectional"), self._meaning.hidden
        if directions == 1 and not self._meaning.batch_first:
            return [("Reshape", {"shape": np.array([0, 1, -1, hidden], np.int64)})]  # which copies nothing
        order = [1, 0, 2, 3] if self._meaning.batch_first else [0, 2, 1, 3]
        return [("Reshape", {"shape": np.array([0, 0, directions, hidden], np.int64)}), ("Transpose", {"perm": order})]


def _type(dtype: str) -> int:
    from onnx import TensorProto

    return int(TensorProto.DataType.Value({"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper())))


def apply(model: Any, replacements: Sequence[tuple[Scope, Replacement]]) -> None:
    """Puts them where their nodes were, the scopes' order being that of the model, and takes out what nothing needs
    any more."""
    of = {id(scope): (scope, [r for s, r in replacements if s is scope]) for scope, _ in replacements}
    for scope, own in reversed(of.values()):  # bodies before the graphs that hold their nodes
        nodes: list[Any] = []
        for node in scope.graph.node:
            replacement = next((r for r in own if r.node == node), None)
            nodes += replacement.nodes if replacement else [type(node).FromString(node.SerializeToString())]
        del scope.graph.node[:]
        scope.graph.node.extend(nodes)
        scope.graph.initializer.extend(tensor for r in own for tensor in r.tensors)
    _remove(model, {name for _, r in replacements for name in (*r.node.input[1:4], *r.node.input[7:]) if name})


def _remove(model: Any, names: set[str]) -> None:
    """Takes initializers and nodes of these names out where nothing uses them, and then what these alone used."""
    given = {value.name for value in model.graph.input}
    while names:
        graphs = [scope.graph for scope in Scope(model.graph, model.opset_import).inner()]
        dead = names - given - {name for graph in graphs for name in (
            *(value.name for value in graph.output), *(name for node in graph.node for name in node.input))}
        names = set()
        for graph in graphs:
            for tensors in (graph.initializer, graph.sparse_initializer):
                for tensor in [t for t in tensors if getattr(t, "values", t).name in dead]:
                    tensors.remove(tensor)
            for node in [n for n in graph.node if n.output and {*n.output} <= dead]:
                names |= {*filter(None, node.input)}
                graph.node.remove(node)
