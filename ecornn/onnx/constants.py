"""Constants of an ONNX model: the tensors that it holds, and those that its nodes compute from these alone.

Exporters transpose, cast, quantize or fill weights by nodes, which the onnx package's reference evaluates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from ecornn.errors import ModuleError

DOMAINS = ("", "ai.onnx")
UNKNOWN = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
OLDEST = {"DequantizeLinear": 19}  # that the evaluator has; it computes the same of what older ones take

Known = dict[str, Any]  # by a tensor's name; of one that cannot be had a ModuleError that says why


class Scope:
    """A graph of a model, and those around it; ``variable``: tensors with values that a call may replace."""

    def __init__(self, graph: Any, opsets: Any, outer: Scope | None = None, variable: Collection[str] = ()) -> None:
        self.graph, self.opsets = graph, opsets  # an onnx.GraphProto, and the versions of the operators that it uses
        self.nodes = [*graph.node]  # each an object that stays the same
        self.outer = outer  # the scope of the node whose body this graph is; None of the model itself
        self.depth: int = outer.depth + 1 if outer is not None else 0  # how many graphs it is in
        self._sources: dict[str, list[Any]] = {}  # name -> the tensors that it holds, and the nodes that make it
        sources = [*((tensor.name, tensor) for tensor in graph.initializer),
                   *((tensor.values.name, tensor) for tensor in graph.sparse_initializer),
                   *((output, node) for node in self.nodes for output in node.output if output)]
        for name, source in sources:
            self._sources.setdefault(name, []).append(source)
        given = variable if outer is None else [value.name for value in graph.input]  # a body's come with each turn
        self._fixed: Known = dict.fromkeys(given, False)  # whether a tensor depends on no call
        self._values: Known = {}

    def inner(self) -> Iterator[Scope]:
        """This scope, and those of the bodies of its nodes, such as of ``If`` and ``Loop``."""
        waiting = [self]
        while waiting:
            scope = waiting.pop()
            yield scope
            waiting += reversed([Scope(graph, scope.opsets, scope) for node in scope.nodes for graph in bodies(node)])

    def constant(self, name: str) -> Any:
        """A tensor's value as an array, None where it depends on inputs of a call. Raises :class:`ModuleError` where it
        is defined twice, needs itself, or cannot be read or computed."""
        home = self._home(name)
        if home is None:
            return None
        value = settled(home, name, lambda scope: scope._fixed, Scope._is_fixed)
        if value is True:  # only then is anything computed
            value = settled(home, name, lambda scope: scope._values, Scope._value)
        if isinstance(value, ModuleError):
            raise ModuleError(str(value))
        return None if value is False else value

    def _home(self, name: str) -> Scope | None:
        """The scope that has a tensor; None: it is an input of the model's."""
        scope: Scope | None = self
        while scope is not None and name not in scope._sources and name not in scope._fixed:
            scope = scope.outer
        return scope

    def needs(self, name: str) -> list[tuple[Scope | None, str]]:
        source: Any = self._sources.get(name, [None])[0]
        return [(self._home(n), n) for n in source.input if n] if computable(source) else []

    def _is_fixed(self, name: str) -> bool | ModuleError:
        source, *more = self._sources[name]
        if more:
            return ModuleError(f"the model has two tensors named {name}")
        if not hasattr(source, "op_type"):
            return True
        inputs = [scope is not None and scope._fixed[n] for scope, n in self.needs(name)]
        if not computable(source) or False in inputs:
            return False
        return next((error for error in inputs if error is not True), True)

    def _value(self, name: str) -> Any:
        (source,) = self._sources[name]
        try:
            if not hasattr(source, "op_type"):
                return array_of(source, name)
            inputs = {n: scope._values[n] for scope, n in self.needs(name) if scope is not None}
            for value in inputs.values():
                if isinstance(value, ModuleError):
                    return value
            self._values |= self._computed(source, inputs, name)
            return self._values[name]
        except ModuleError as error:
            return error

    def _computed(self, node: Any, inputs: dict[str, Any], name: str) -> dict[str, Any]:
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor"):
                return {node.output[0]: array_of(attribute.sparse_tensor, name)}
            if attribute.HasField("t"):
                readable(attribute.t, name)
        try:
            return dict(zip(node.output, evaluated(node, inputs, self.opsets), strict=False))
        except Exception as error:  # the evaluator raises whatever its operator does
            raise ModuleError(f"the model's {name} cannot be computed by {node.op_type}: {error}") from error


def settled(scope: Scope, name: str, known_of: Callable[[Scope], Known], judge: Callable[[Scope, str], Any]) -> Any:
    """``judge`` of a tensor, after those of all that it needs: a graph may be deeper than Python's stack."""
    waiting, begun = [(scope, name)], set()
    while waiting:
        one = where, tensor = waiting[-1]
        known = known_of(where)
        if tensor in known:
            waiting.pop()
            continue
        first = [(s, n) for s, n in where.needs(tensor) if s is not None and n not in known_of(s)]
        if not first:
            known[tensor] = judge(where, tensor)
        elif one in begun:
            known[tensor] = ModuleError(f"the model's {tensor} is computed from itself")
        else:
            begun.add(one)
            waiting += first
    return known_of(scope)[name]


def bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        yield from ([attribute.g] if attribute.HasField("g") else [])
        yield from attribute.graphs


def computable(source: Any) -> bool:
    """True where the source of a tensor is a node that computes the same from the same inputs."""
    if not hasattr(source, "op_type") or source.domain not in DOMAINS or source.op_type in UNKNOWN:
        return False
    trains = source.op_type == "Dropout" and len(source.input) > 2  # perhaps, and drops others each time
    return not trains and next(bodies(source), None) is None


def evaluated(node: Any, inputs: dict[str, Any], opsets: Any) -> list[Any]:
    import onnx
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    given = [onnx.ValueInfoProto(name=name) for name in inputs]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    if oldest := OLDEST.get(node.op_type):
        opsets = [helper.make_opsetid(o.domain, max(o.version, oldest)) for o in opsets if o.domain in DOMAINS]
    model = helper.make_model(helper.make_graph([node], "constant", given, outputs), opset_imports=opsets or None)
    values = iter(ReferenceEvaluator(model).run(None, inputs))
    results = [next(values) if name else None for name in node.output]
    if not all(value is None or isinstance(value, (np.ndarray, np.generic)) for value in results):
        raise TypeError("a sequence or a map")
    return [value if value is None else np.asarray(value) for value in results]


def readable(tensor: Any, name: str) -> None:
    """Raises :class:`ModuleError` where an ``onnx.TensorProto``'s data are not there, or its shape is none."""
    from onnx.external_data_helper import uses_external_data

    if uses_external_data(tensor):
        raise ModuleError(f"the data of {name} is in another file, which has not been read: pass the model's file "
                          "name, or onnx.load() it with its external data")
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
    if indices.size and indices.min() < 0:
        raise ValueError("an index is negative")
    array = np.zeros(tuple(dims), values.dtype)
    if indices.ndim == 1:
        array.reshape(-1)[indices] = values
    else:
        array[tuple(indices.T)] = values
    return array
