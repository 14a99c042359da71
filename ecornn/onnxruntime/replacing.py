"""A recurrent node of a graph as one of ours, with nodes of ONNX around it where layouts or types differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

Step = tuple[str, dict[str, Any]]  # an operator and its attributes


class Names:
    """Names that a model does not have yet."""

    def __init__(self, scopes: Iterable[Scope]) -> None:
        self._taken = {name for scope in scopes for name in _names(scope.graph)}
        self._made: Counter[str] = Counter()  # of each wanted name

    def new(self, *parts: str) -> str:
        """A new name, made of these parts."""
        name = wanted = "/".join(parts)
        while name in self._taken:
            self._made[wanted] += 1
            name = f"{wanted}_{self._made[wanted] + 1}"
        self._taken.add(name)
        return name


def _names(graph: Any) -> Iterator[str]:
    yield from (value.name for value in (*graph.input, *graph.output, *graph.initializer))
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)


class Tensors:
    """The initializers of a graph, each value once."""

    def __init__(self, names: Names) -> None:
        self.made: list[Any] = []
        self._names = names
        self._known: dict[tuple[Any, ...], str] = {}  # by their content
        self._seen: dict[tuple[int, str], tuple[Any, str]] = {}  # by arrays, which live as long, and types

    def of(self, value: Any, dtype: str, *parts: str) -> str:
        """The name of the initializer with an array's value in that type; a new name is made of ``parts``."""
        from onnx import numpy_helper

        if (id(value), dtype) not in self._seen:
            own = np.ascontiguousarray(value, dtype)
            content = dtype, own.shape, hashlib.sha256(own.data).digest()
            if content not in self._known:
                self._known[content] = self._names.new(*parts)
                self.made.append(numpy_helper.from_array(own, self._known[content]))
            self._seen[id(value), dtype] = value, self._known[content]
        return self._seen[id(value), dtype][1]


class Replacement:
    """The nodes that take the place of a recurrent one.

    Attributes
    ----------
    node : the recurrent node
    nodes : in their order, with the outputs that the node has; they need tensors of ``tensors``
    """

    def __init__(self, node: Any, meaning: Node, names: Names, tensors: Tensors) -> None:
        self.node, self._meaning, self._names, self._title = node, meaning, names, title(node)
        self.nodes: list[Any] = []
        self._tensors = tensors

    def make(self, device: str, dtype: str, module: str, digest: str, parameters: Sequence[str]) -> None:
        """Makes the nodes for a module of ``dtype`` and a kind of device, whose weights are ``parameters``.

        Raises :class:`ArgumentError` for a node on a GPU that has but one of two states.
        """
        given = {key: name for key, name in zip(INPUTS, self.node.input, strict=False) if name}
        kinds = ("h", "c")[:1 + (self._meaning.op == "LSTM")]
        before = [given.get(f"initial_{kind}", "") for kind in kinds]
        if device == "cuda" and any(before) and not all(before):
            raise ArgumentError(self._title, "one of initial_h and initial_c", "both or none on a GPU")
        x, *states = (self._inwards(name, dtype) for name in (given["X"], *before))
        wide = "float64" if dtype == "float64" else "float32"  # what weights are to our operators
        weights = [self._tensors.of(self._meaning.weights[name], wide, self._title, name) for name in parameters]
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

    def _node(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
        from onnx import helper

        return helper.make_node(operator, inputs, outputs, name=self._new(operator), **attributes)

    def _swap(self) -> list[Step]:
        """The steps between ONNX's layouts of X and states."""
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
        """The name of our output, from which these steps make ``to``."""
        if not to:
            return self._new(what)
        names = [*(self._new(what) for _ in steps), to]
        for (operator, attributes), (one, made) in zip(steps, pairwise(names), strict=True):
            self.nodes.append(self._node(operator, [one], [made], **attributes))
        return names[0]

    def _unfolded(self) -> list[Step]:
        """The steps to Y, (T, D, B, H) or (B, T, D, H), from (T, B, D, H), which with one direction is (T, 1, B, H)."""
        if self._meaning.direction != "bidirectional":
            return [("Transpose", {"perm": [2, 0, 1, 3]})] if self._meaning.batch_first else []
        return [("Transpose", {"perm": [1, 0, 2, 3] if self._meaning.batch_first else [0, 2, 1, 3]})]


def _type(dtype: str) -> int:
    from onnx import TensorProto

    return int(TensorProto.DataType.Value({"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper())))


def apply(model: Any, replacements: Sequence[tuple[Scope, Replacement]], tensors: Mapping[Scope, Tensors]) -> None:
    """Puts replacements where their nodes were, the scopes' order being that of the model, with the tensors that each
    scope's need, and takes out initializers and nodes that nothing needs any more."""
    of: dict[Scope, dict[int, Replacement]] = {}
    for scope, replacement in replacements:
        of.setdefault(scope, {})[id(replacement.node)] = replacement
    for scope, own in reversed(of.items()):  # bodies before the graphs that hold their nodes
        nodes: list[Any] = []
        for node in scope.nodes:
            nodes += own[id(node)].nodes if id(node) in own else [type(node).FromString(node.SerializeToString())]
        del scope.graph.node[:]
        scope.graph.node.extend(nodes)
        scope.graph.initializer.extend(tensors[scope].made)
    _remove(model, {name for _, r in replacements for name in (*r.node.input[1:4], *r.node.input[7:]) if name})


def _remove(model: Any, names: set[str]) -> None:
    """Takes initializers and nodes whose outputs are of these names out where nothing uses them, and then those that
    these alone used."""
    scopes = [*Scope(model.graph, model.opset_import).inner()]
    uses = Counter(name for scope in scopes for name in (
        *(value.name for value in scope.graph.output), *(name for node in scope.nodes for name in node.input)))
    uses.update(value.name for value in model.graph.input)  # which stay
    makers: dict[str, list[Any]] = {}
    for scope in scopes:
        for node in scope.nodes:
            for name in filter(None, node.output):
                makers.setdefault(name, []).append(node)
    dead, gone = [name for name in names if not uses[name]], set()
    while dead:
        for node in makers.get(dead.pop(), ()):
            if id(node) not in gone and not any(uses[name] for name in node.output):
                gone.add(id(node))
                uses.subtract(node.input)
                dead += {name for name in node.input if name and not uses[name]}
                names |= {*node.input}
    names = {name for name in names if not uses[name]}
    for scope in scopes:
        for at in reversed([n for n, node in enumerate(scope.nodes) if id(node) in gone]):
            del scope.graph.node[at]
        for tensors in (scope.graph.initializer, scope.graph.sparse_initializer):
            for at in reversed([n for n, t in enumerate(tensors) if getattr(t, "values", t).name in names]):
                del tensors[at]
