"""Arithmetic of a traced step: values, weights and numbers, broadcast as PyTorch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ecornn.errors import CellError
from ecornn.torch.traced_graph import Graph, Traced, shape_of
from ecornn.torch.traced_operators import select
from ecornn.torch.traced_values import (
    BATCH,
    COLUMNS,
    GATES,
    ONE,
    UNITS,
    Gate,
    Sizes,
    Value,
    Width,
    canonical,
    combined,
    described,
)
from ecornn.torch.traced_weights import Use, Vector, alike_in_rows, number


class Arithmetic:
    """The values of a graph's nodes. ``parameter(use)`` is the te tensor of what the step reads of its module's
    weights; ``known`` has the value of each node that depends on x or a state."""

    def __init__(self, traced: Traced, graph: Graph, x: Any, states: Sequence[Any],
                 parameter: Callable[[Use], Any]) -> None:
        self.graph, self.parameter, self.like = graph, parameter, states[0]
        self.sizes = Sizes(graph.batch, traced.input, traced.hidden)
        self.known: dict[torch.fx.Node, Any] = {
            node: Value((BATCH, UNITS), (Gate(tensor, 0, width),)) for node, tensor, width in zip(
                graph.given, (x, *states), ("I", *["H"] * len(states)), strict=True)}

    def value(self, node: Any) -> Value:
        """Of an argument that depends on x or a state."""
        if node not in self.graph.data:
            raise CellError("this operator of the module's weights alone, beside values of the step")
        found = self.known[node]
        return found  # type: ignore[no-any-return]

    def scalars(self, function: Callable[..., Any], operands: Sequence[Any], axes: tuple[str, ...], name: str,
                width: Width = 1) -> Value:
        """``function`` at each value."""
        return combined(function, operands, axes, self.sizes, self.like, name, width)

    def as_numbers(self, value: Value, name: str) -> Value:
        """Conditions as 1 and 0."""
        if not any(str(gate.tensor.dtype) == "bool" for gate in value.gates):
            return value
        return self.scalars(lambda v: select(v, 1.0, 0.0), [value], value.axes, f"{name}_number")

    def pointwise(self, node: torch.fx.Node, function: Callable[..., Any], operands: Sequence[Any],
                  shape: tuple[int, ...] | None = None) -> Value:
        """``function`` of values, weights and numbers, broadcast as PyTorch does; ``shape``: of the node's tensor."""
        values = [self.known[o] for o in operands if isinstance(o, torch.fx.Node) and o in self.graph.data]
        axes, count, width = self.frame(values, shape or shape_of(node))
        if width == "I" and self.sizes.input != self.sizes.hidden:
            raise CellError("of x alone, which products alone read in a step: a module of its own before the layer "
                            "computes it for all steps at once")
        given = []
        for operand in operands:
            if not isinstance(operand, torch.fx.Node):
                given.append(operand)
            elif operand in self.graph.data:
                given.append(self.known[operand])
            else:
                given.append(self.weights(operand, axes, count, width))
        found = self.scalars(function, given, axes, node.name, width or 1)
        found = Value(axes, found.gates * count) if len(found.gates) < count else found
        return canonical(axes, found.gates)

    def frame(self, values: Sequence[Value], shape: Sequence[int]) -> tuple[tuple[str, ...], int, Width]:
        """Axes, gates and width of what is made of ``values``, of this shape in PyTorch."""
        axes: list[str] = []
        count = max(len(v.gates) for v in values)
        widths = {g.width for v in values for g in v.gates if g.width != 1}
        for n, size in enumerate(shape):
            place = n - len(shape)
            kinds = {v.axes[place] for v in values if -place <= len(v.axes)} - {ONE}
            if len(kinds) > 1:
                raise CellError(f"arithmetic on {' and '.join(map(described, values))}, whose axes do not match")
            axes.append(next(iter(kinds), "" if size > 1 else ONE))
        if axes.count(BATCH) != 1:
            raise CellError(f"arithmetic on {' and '.join(map(described, values))}, which pairs rows of the batch")
        for n, axis in enumerate(axes):
            if axis:
                continue
            parts = self.sizes.parts(shape[n])
            if UNITS in axes or COLUMNS in axes or (n < len(axes) - 1 and shape[n] != self.sizes.hidden):
                axes[n], count = GATES, shape[n] if count == 1 else 0
            elif parts is not None:
                axes[n] = UNITS if parts[0] == 1 else COLUMNS
                count, widths = (parts[0] if count == 1 else count if parts[0] == 1 else 0), {parts[1]}
            if not axes[n] or not count:
                raise CellError(f"arithmetic with {shape[n]} values, which is no multiple of H = {self.sizes.hidden}")
        if len(widths) > 1 and {self.sizes.width(w) for w in widths} == {self.sizes.hidden}:
            widths = {"H"}
        return tuple(axes), count, widths.pop() if len(widths) == 1 else "" if widths else 1

    def weights(self, node: torch.fx.Node, axes: tuple[str, ...], count: int, width: Width) -> Any:
        """What a node of weights is beside values on these axes: a number, or vectors."""
        one = number(self.graph, node)
        if one is not None:
            return one
        shape = shape_of(node)
        own = axes[len(axes) - len(shape):]
        if BATCH in own and shape[own.index(BATCH)] > 1 and not alike_in_rows(self.graph, node, own.index(BATCH)):
            raise CellError(f"a tensor {shape} of the module that differs between rows of the batch")
        wide = {axis for axis, size in zip(own, shape, strict=True) if size > 1}
        gates = count if wide & {GATES, COLUMNS} else 1
        units = bool(wide & {UNITS, COLUMNS})
        if width == "":
            raise CellError("a vector beside values of several widths")
        use = Vector(node, tuple(ONE if gates == 1 and axis == GATES else axis for axis in own), gates,
                     width if units else 1)
        tensor = self.parameter(use)
        return Value(axes, tuple(Gate(tensor, n, use.width, vector=True) for n in range(gates)))
