"""A recurrent node of a graph as one of ours, with nodes of ONNX around it where layouts or types differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ecornn.errors import ArgumentError
from ecornn.onnx.constants import Scope
from ecornn.onnx.node import INPUTS, Node, title

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
        self.names = names
        self._known: dict[tuple[Any, ...], str] = {}  # by their content
        self._seen: dict[tuple[int, str], tuple[Any, str]] = {}  # by arrays, which live as long, and types

    def of(self, value: Any, dtype: str, *parts: str) -> str:
        """The name of the initializer with an array's value in that type; a new name is made of ``parts``."""
        from onnx import numpy_helper

        if (id(value), dtype) not in self._seen:
            own = np.ascontiguousarray(value, dtype)
            content = dtype, own.shape, hashlib.sha256(own.data).digest()
            if content not in self._known:
                self._known[content] = self.names.new(*parts)
                self.made.append(numpy_helper.from_array(own, self._known[content]))
            self._seen[id(value), dtype] = value, self._known[content]
        return self._seen[id(value), dtype][1]


@dataclass(frozen=True)
class Compiled:
    """A module in a rewritten model's folder: its file, kind of device, data type, digest, and parameters' names."""

    path: Path
    device: str
    dtype: str
    digest: str
    parameters: list[str]


def replacement(node: Any, meaning: Node, tensors: Tensors, compiled: Compiled) -> list[Any]:
    """The nodes that replace a recurrent one, in order, with its outputs; they need ``tensors``. Raises
    :class:`ArgumentError` for a node on a GPU that has but one of two states."""
    from onnx import TensorProto, helper

    nodes: list[Any] = []
    name, new = title(node), partial(tensors.names.new, title(node))
    swap: list[Step] = [("Transpose", {"perm": SWAPPED})] if meaning.batch_first else []  # layouts of X and states

    def cast(dtype: str, to: str) -> list[Step]:
        kind = {"float32": "FLOAT", "float64": "DOUBLE"}.get(to, to.upper())
        return [("Cast", {"to": int(TensorProto.DataType.Value(kind))})] if dtype != to else []

    def made(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
        return helper.make_node(operator, inputs, outputs, name=new(operator), **attributes)

    def inwards(one: str) -> str:
        """X or a state as our node takes it: (T, B, I) or (D, B, H), of the module's type."""
        for operator, attributes in [*swap, *cast(meaning.dtype, compiled.dtype)] if one else []:
            result = new(operator.lower())
            nodes.append(made(operator, [one], [result], **attributes))
            one = result
        return one

    def outwards(to: str, steps: Sequence[Step], what: str) -> str:
        """The name of our output, from which these steps make ``to``."""
        if not to:
            return new(what)
        results = [*(new(what) for _ in steps), to]
        for (operator, attributes), (one, result) in zip(steps, pairwise(results), strict=True):
            nodes.append(made(operator, [one], [result], **attributes))
        return results[0]

    given = {key: one for key, one in zip(INPUTS, node.input, strict=False) if one}
    kinds = ("h", "c")[:1 + (meaning.op == "LSTM")]
    before = [given.get(f"initial_{kind}", "") for kind in kinds]
    if compiled.device == "cuda" and any(before) and not all(before):
        raise ArgumentError(name, "one of initial_h and initial_c", "both or none on a GPU")
    x, *states = (inwards(one) for one in (given["X"], *before))
    wide = "float64" if compiled.dtype == "float64" else "float32"  # what weights are to our operators
    weights = [tensors.of(meaning.weights[one], wide, name, one) for one in compiled.parameters]
    to = [*node.output, *[""] * 3][:1 + len(kinds)]
    place, casts = len(nodes), cast(compiled.dtype, meaning.dtype)
    # to Y, (T, D, B, H) or (B, T, D, H), from (T, B, D, H), which with one direction is (T, 1, B, H)
    unfold: list[Step] = [("Transpose", {"perm": [2, 0, 1, 3]})] if meaning.batch_first else []
    if meaning.direction == "bidirectional":
        unfold = [("Transpose", {"perm": [1, 0, 2, 3] if meaning.batch_first else [0, 2, 1, 3]})]
    outputs = [outwards(to[0], [*casts, *unfold], "y"),
               *(outwards(one, [*casts, *swap], kind) for one, kind in zip(to[1:], kinds, strict=True))]
    inputs = [x, given.get("sequence_lens", ""), *states, *[""] * (2 - len(states)), *weights]
    nodes.insert(place, made(OPERATORS[compiled.device], inputs, outputs, domain=DOMAIN, module=compiled.path.name,
                             digest=compiled.digest))
    return nodes


Replaced = tuple[Scope, Any, list[Any]]  # where a node was, the node, and what takes its place


def apply(model: Any, replaced: Sequence[Replaced], tensors: Mapping[Scope, Tensors]) -> None:
    """Puts nodes where others were, in the model's order, with their scopes' tensors; removes what nothing needs."""
    of: dict[Scope, dict[int, list[Any]]] = {}
    for scope, node, nodes in replaced:
        of.setdefault(scope, {})[id(node)] = nodes
    for scope, own in reversed(of.items()):  # bodies before the graphs that hold their nodes
        made = [new for node in scope.nodes
                for new in own.get(id(node)) or [type(node).FromString(node.SerializeToString())]]
        del scope.graph.node[:]
        scope.graph.node.extend(made)
        scope.graph.initializer.extend(tensors[scope].made)
    _remove(model, {name for _, node, _ in replaced for name in (*node.input[1:4], *node.input[7:]) if name})


def _remove(model: Any, names: set[str]) -> None:
    """Removes initializers and makers of these names that nothing uses, and then those that these alone used."""
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
