"""Constants of an ONNX model: what it holds, and what its nodes compute from that alone.

An exporter leaves weights behind nodes: transposed, cast, quantized, or as a shape to be filled. These nodes are
evaluated by the reference that the onnx package has for each operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from ecornn.errors import ModuleError

DOMAINS = ("", "ai.onnx")
UNKNOWN = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}


class Scope:
    """A graph of a model, and those around it, whose tensors its nodes see.

    Attributes
    ----------
    graph : an ``onnx.GraphProto``
    opsets : the versions of the operators that it uses
    outer : the scope of the node whose body this graph is; None of the model itself

    ``variable``: tensors that are no constants though the graph holds a value of them.
    """

    def __init__(self, graph: Any, opsets: Any, outer: Scope | None = None, variable: Collection[str] = ()) -> None:
        self.graph, self.opsets, self.outer = graph, opsets, outer
        self._sources: dict[str, list[Any]] = {}  # name -> the tensors that it holds, and the nodes that make it
        for tensor in graph.initializer:
            self._sources.setdefault(tensor.name, []).append(tensor)
        for tensor in graph.sparse_initializer:
            self._sources.setdefault(tensor.values.name, []).append(tensor)
        for node in graph.node:
            for output in filter(None, node.output):
                self._sources.setdefault(output, []).append(node)
        self._known: dict[str, Any] = dict.fromkeys(variable)

    def inner(self) -> Iterator[Scope]:
        """This scope, and those of the bodies of its nodes, such as of ``If`` and ``Loop``."""
        yield self
        for node in self.graph.node:
            for attribute in node.attribute:
                for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                    yield from Scope(graph, self.opsets, self).inner()

    def constant(self, name: str, within: tuple[str, ...] = ()) -> Any:
        """The value of a tensor as an array, or None where it depends on what a call brings. ``within``: the tensors
        that this one is computed for.

        Raises :class:`ModuleError` where it is defined twice, needs itself, or cannot be read or computed.
        """
        if name not in self._sources:
            return self.outer.constant(name, within) if self.outer is not None else None
        if name not in self._known:
            if name in within:
                raise ModuleError(f"the model's {name} is computed from itself")
            if len(self._sources[name]) > 1:
                raise ModuleError(f"the model has two tensors named {name}")
            (source,) = self._sources[name]
            if hasattr(source, "op_type"):
                self._known |= self._computed(source, (*within, name))
            else:
                self._known[name] = array_of(source, name)
        return self._known[name]

    def _computed(self, node: Any, within: tuple[str, ...]) -> dict[str, Any]:
        """The outputs of a node by name, each None where it is no constant."""
        unknown = dict.fromkeys(node.output)
        bodies = any(a.HasField("g") or a.graphs for a in node.attribute)
        if node.domain not in DOMAINS or node.op_type in UNKNOWN or bodies:
            return unknown
        inputs = {n: self.constant(n, within) for n in node.input if n}
        if any(value is None for value in inputs.values()):
            return unknown
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor"):
                return unknown | {node.output[0]: array_of(attribute.sparse_tensor, within[-1])}
            if attribute.HasField("t"):
                readable(attribute.t, within[-1])
        try:
            return dict(zip(node.output, evaluated(node, inputs, self.opsets), strict=False))
        except Exception as error:  # the evaluator raises whatever its operator does
            raise ModuleError(f"the model's {within[-1]} cannot be computed by {node.op_type}: {error}") from error


def evaluated(node: Any, inputs: dict[str, Any], opsets: Any) -> list[Any]:
    """The outputs of a node."""
    import onnx
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    given = [onnx.ValueInfoProto(name=name) for name in inputs]
    made = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    model = helper.make_model(helper.make_graph([node], "constant", given, made), opset_imports=opsets or None)
    values = iter(ReferenceEvaluator(model).run(None, inputs))
    found = [next(values) if name else None for name in node.output]
    if not all(value is None or isinstance(value, (np.ndarray, np.generic)) for value in found):
        raise TypeError("a sequence or a map")
    return [value if value is None else np.asarray(value) for value in found]


def readable(tensor: Any, name: str) -> None:
    """Raises :class:`ModuleError` where an ``onnx.TensorProto``'s data are not there, or its shape is none."""
    from onnx.external_data_helper import uses_external_data

    if uses_external_data(tensor):
        raise ModuleError(f"the data of {name} is in a file that has not been read: give the model's file name, or "
                          "onnx.load() it with its external data")
    if any(size < 0 for size in tensor.dims):
        raise ModuleError(f"the model's {name} cannot be read: its shape is {tuple(tensor.dims)}")


def array_of(tensor: Any, name: str) -> Any:
    """An ``onnx.TensorProto`` or ``SparseTensorProto`` as an array."""
    from onnx import numpy_helper

    parts = (tensor.values, tensor.indices) if hasattr(tensor, "indices") else (tensor,)
    for part in parts:
        readable(part, name)
    try:
        values, *indices = map(numpy_helper.to_array, parts)
        return dense(values, indices[0], tensor.dims) if indices else values
    except Exception as error:  # fewer bytes than the shape says, a type that NumPy lacks
        raise ModuleError(f"the model's {name} cannot be read: {error}") from error


def dense(values: Any, indices: Any, dims: Any) -> Any:
    """A sparse tensor's array."""
    if indices.size and indices.min() < 0:
        raise ValueError("an index is negative")
    made = np.zeros(tuple(dims), values.dtype)
    if indices.ndim == 1:
        made.reshape(-1)[indices] = values
    else:
        made[tuple(indices.T)] = values
    return made
