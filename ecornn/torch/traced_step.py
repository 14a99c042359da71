"""The graph of a traced step carried out on te tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import add, mul
from typing import Any

import torch

from ecornn.cells import product
from ecornn.errors import CellError
from ecornn.torch.traced_arithmetic import Arithmetic
from ecornn.torch.traced_graph import Graph, arguments, lines_of, operator_name, pointed, shape_of
from ecornn.torch.traced_operators import POINTWISE, SAME, number_of, refused
from ecornn.torch.traced_values import BATCH, COLUMNS, GATES, ONE, UNITS, Gate, Value
from ecornn.torch.traced_weights import Matrix, Use

# Arguments that name a place in memory or a layout, and shapes that nodes say themselves.
ANYWHERE = ("layout", "device", "pin_memory", "non_blocking", "memory_format", "implicit", "size", "dim",
            "half_to_float", "keepdim")


class Walk(Arithmetic):
    """One walk through the graph: products, shapes and all results."""

    def __init__(self, graph: Graph, x: Any, states: Sequence[Any], parameter: Callable[[Use], Any]) -> None:
        super().__init__(graph, x, states, parameter)
        for node in graph.nodes:
            if node in graph.data:
                try:
                    self.known[node] = self.of(node)
                except CellError as error:
                    if error.at is not None:
                        raise
                    raise pointed(f"{operator_name(node)}: {error}", lines_of(node)) from error

    def results(self, count: int) -> list[Any]:
        """The new states, ``count`` te tensors (B, H), and before them y if that is none of them.

        Raises :class:`CellError` if the step returns anything else.
        """
        nodes = list(self.graph.returned)
        if len(nodes) == count + 1 and nodes[0] is nodes[1]:
            nodes = nodes[1:]  # y is the first state
        if len(nodes) not in (count, count + 1):
            raise CellError(f"the step returns {len(nodes)} tensors for {count} state{'s' * (count > 1)}; expected the "
                            "new states, or y before them. Name the states of a tuple: cell(..., states=('h', 'c'))")
        results = []
        for node in nodes:
            value = self.known.get(node)
            if value is None:
                value = self.weights(node, (BATCH, UNITS), 1, "H") if len(shape_of(node)) == 2 else None
            if isinstance(value, (int, float)):
                state = self.known[self.graph.given[1]]
                value = self.scalars(lambda _, v: number_of(v), [state, value], "constant")
            wanted = self.sizes.batch, self.sizes.hidden
            if value is None or value.shape(self.sizes) != wanted or len(value.gates) > 1:
                shape = tuple(shape_of(node)[1:])
                raise pointed(f"the step returns {value}, of the shape (B, {', '.join(map(str, shape))}); "
                              f"expected (B, H), H = {self.sizes.hidden}", lines_of(node))
            results.append(self.whole(self.at_units(value).gates[0], "state"))
        return results

    def at_units(self, value: Value) -> Value:
        """The value with a place for each unit, if it is one value a row or a vector."""
        gate = value.gates[0]
        return self.scalars(lambda v: v, [value], "state") if gate.vector or len(gate.tensor.shape) == 1 else value

    # -- nodes ----------------------------------------------------------------------------------
    def of(self, node: torch.fx.Node) -> Any:
        """The value of a node."""
        name = operator_name(node)
        if name == "getitem":
            return self.known[node.args[0]][node.args[1]]
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CellError("a step that draws at random is no cell; a Dropout is none after the module's eval()")
        given = arguments(node)
        if name in POINTWISE:
            if given.keys() & {"decimals"}:
                raise CellError(f"the argument decimals={given['decimals']}")
            return self.pointwise(node, POINTWISE[name], list(given.values()))
        if name in SAME:
            return self.known[node.args[0]]
        method = getattr(self, f"op_{name.strip('_')}", None)
        if method is None:
            raise refused()
        known = inspect.signature(method).parameters
        other = {key: v for key, v in given.items() if key not in (*known, *ANYWHERE) and v not in (
            None, torch.float32, torch.float64)}
        if other:
            raise CellError(f"the argument {', '.join(f'{key}={v}' for key, v in other.items())}")
        value = method(node, **{key: v for key, v in given.items() if key in known})
        if "keepdim" in given:
            several, how = isinstance(value, tuple), (given["keepdim"], given["dim"])
            value = tuple(self.reduced(v, *how) for v in value) if several else self.reduced(value, *how)
        if isinstance(value, Value) and value.shape(self.sizes) != shape_of(node):
            raise CellError(f"{value} where PyTorch has the shape {shape_of(node)}")
        return value

    # -- products -------------------------------------------------------------------------------
    def product(self, name: str, rows: Value, weights: torch.fx.Node, stored: bool, index: int | None = None) -> Value:
        """The product of ``rows`` (B, K) by a matrix (K, N), or (N, K) if it is ``stored`` so; of several that of
        ``index``."""
        if rows.axes not in ((BATCH, UNITS), (BATCH, COLUMNS), (BATCH, ONE), (BATCH, GATES)):
            raise CellError(f"a product of {rows}; expected (B, K)")
        count, K = shape_of(weights)[-2:] if stored else shape_of(weights)[-2:][::-1]
        parts = self.sizes.parts(count)
        if parts is None:
            raise CellError(f"a product with {count} rows, which is no multiple of H = {self.sizes.hidden}")
        gates, width = parts
        widths = tuple(gate.width for gate in rows.gates)
        if sum(map(self.sizes.width, widths)) != K:
            raise CellError(f"a product with {K} columns, of {rows}")
        total = None
        for n, gate in enumerate(rows.gates):
            use = Matrix(weights, index, stored, gates, width, n, widths)
            if gate.width == 1 and isinstance(gate.width, int):
                raise CellError(f"a product of {rows}; expected x, a state, or values of H or less")
            matrix = self.parameter(use)
            source = self.whole(gate, f"{name}_operand")
            tensor = product(source, matrix, 0 if gates == 1 else None, f"{name}_{n}")
            one = Value.of_tensor((BATCH, COLUMNS), tensor, gates, width)
            total = one if total is None else self.scalars(add, [total, one], f"{name}_sum")
        assert total is not None
        return Value.canonical(total.axes, [Gate(g.tensor, g.index, width) for g in total.gates])

    def op_mm(self, node: torch.fx.Node, input: Any, mat2: Any) -> Value:
        if input in self.graph.data and mat2 in self.graph.data:
            raise CellError("a product of two values of the step; expected one with a parameter")
        if input in self.graph.data:
            return self.product(node.name, self.value(input), mat2, False)
        rows = self.value(mat2)
        turned = self.product(node.name, Value(rows.axes[::-1], rows.gates), input, True)
        return Value(turned.axes[::-1], turned.gates)

    def op_addmm(self, node: torch.fx.Node, input: Any, mat1: Any, mat2: Any, beta: Any, alpha: Any) -> Value:
        rows = self.op_mm(node, input=mat1, mat2=mat2)
        axes, count, width = self.frame([rows], shape_of(node))
        bias = self.known[input] if input in self.graph.data else self.weights(input, axes, count, width)
        biased = self.scalars(lambda p, v: (p if alpha == 1 else p * float(alpha)) + (
            v if beta == 1 else v * float(beta)), [rows, bias], f"{node.name}_biased", axes)
        return Value.canonical(axes, biased.gates)

    def op_bmm(self, node: torch.fx.Node, input: Any, mat2: Any) -> Value:
        if input in self.graph.data and mat2 in self.graph.data:
            return self.of_rows(node, self.value(input), self.value(mat2))
        if mat2 in self.graph.data:
            rows = self.value(mat2)
            turned = self.batched(node, Value((rows.axes[0], *rows.axes[:0:-1]), rows.gates), input, True)
            return Value((turned.axes[0], *turned.axes[:0:-1]), turned.gates)
        return self.batched(node, self.value(input), mat2, False)

    def batched(self, node: torch.fx.Node, rows: Value, weights: torch.fx.Node, stored: bool) -> Value:
        """The products of rows (M, B, K) by M matrices; M is 1, or the number of gates."""
        if rows.axes[0] == ONE:
            one = self.product(node.name, Value(rows.axes[1:], rows.gates), weights, stored, 0)
            return Value((ONE, *one.axes), one.gates)
        if rows.axes != (GATES, BATCH, UNITS):
            raise CellError(f"a product of {rows} by several matrices; expected a matrix for each gate")
        each = [self.product(f"{node.name}_{n}", Value((BATCH, UNITS), (gate,)), weights, stored, n)
                 for n, gate in enumerate(rows.gates)]
        if any(len(one.gates) > 1 for one in each):
            raise CellError("a product of each gate by a matrix of more than H rows")
        return Value.canonical((GATES, BATCH, UNITS), [one.gates[0] for one in each])

    def of_rows(self, node: torch.fx.Node, a: Value, b: Value) -> Value:
        """The scalar product (B, 1, 1) of each row of (B, 1, K) by one of (B, K, 1)."""
        if a.axes not in ((BATCH, ONE, UNITS), (BATCH, ONE, COLUMNS)) or b.axes != (BATCH, a.axes[2], ONE):
            raise CellError("a product of two values of the step; expected one with a parameter")
        both = self.scalars(mul, [a, Value(a.axes, b.gates)], f"{node.name}_products")
        return Value((BATCH, ONE, ONE), self.summed(both, [2], node.name).gates)

    # -- shapes ---------------------------------------------------------------------------------
    def op_view(self, node: torch.fx.Node, input: Any) -> Value:
        return self.value(input).viewed(shape_of(node), self.sizes)

    op_unsafe_view = op_reshape = op_squeeze = op_unsqueeze = op_view

    def op_permute(self, node: torch.fx.Node, input: Any, dims: Sequence[int]) -> Value:
        value = self.value(input)
        return Value(tuple(value.axes[d] for d in dims), value.gates)

    def op_expand(self, node: torch.fx.Node, input: Any, size: Any) -> Value:
        return self.pointwise(node, lambda v: v, [input])

    def op_repeat(self, node: torch.fx.Node, input: Any, repeats: Sequence[int]) -> Value:
        value = self.value(input)
        axes = (ONE,) * (len(repeats) - len(value.axes)) + value.axes
        several = [n for n, count in enumerate(repeats) if count > 1]
        if all(axes[n] == ONE for n in several):
            return self.pointwise(node, lambda v: v, [input])
        if len(several) > 1 or axes[several[0]] not in (UNITS, COLUMNS, GATES):
            raise CellError(f"{tuple(repeats)} times {value}")
        return Value.joined([Value(axes, value.gates)] * repeats[several[0]], several[0])

    def op_copy(self, node: torch.fx.Node, input: Any, src: Any) -> Any:
        if src in self.graph.data:
            return self.pointwise(node, lambda v: v, [src])
        return self.pointwise(node, lambda _, w: number_of(w), [input, src])

    def op_to_copy(self, node: torch.fx.Node, input: Any, dtype: Any = None) -> Value:
        value = self.value(input)
        if dtype is not None and not dtype.is_floating_point and dtype != torch.bool:
            raise CellError(f"{dtype}; values of a step are floats and conditions")
        if dtype in (torch.float16, torch.bfloat16):
            raise CellError(f"{dtype}; a layer's type is that of compile(dtype=...)")
        return self.scalars(POINTWISE["ne"], [value, 0.0], node.name) if dtype == torch.bool else self.as_numbers(
            value, node.name)

    def op_slice(self, node: torch.fx.Node, input: Any, dim: int, start: Any, end: Any, step: int) -> Value:
        value = self.value(input)
        return value.cut(dim, start or 0, 2**62 if end is None else end, step, self.sizes)

    def op_select(self, node: torch.fx.Node, input: Any, dim: int, index: int) -> Value:
        return self.value(input).taken(dim % len(shape_of(node.args[0])), index, self.sizes)

    def op_unbind(self, node: torch.fx.Node, input: Any, dim: int) -> tuple[Value, ...]:
        value = self.value(input)
        return tuple(value.taken(dim % len(value.axes), n, self.sizes) for n in range(value.shape(self.sizes)[dim]))

    def op_split_with_sizes(self, node: torch.fx.Node, input: Any, split_sizes: Sequence[int],
                            dim: int = 0) -> tuple[Value, ...]:
        value, ends = self.value(input), [*accumulate(split_sizes, initial=0)]
        return tuple(value.cut(dim, first, last, 1, self.sizes) for first, last in pairwise(ends))

    def op_cat(self, node: torch.fx.Node, tensors: Sequence[Any], dim: int = 0) -> Value:
        values = [self.known[t] for t in tensors if t in self.graph.data]
        dim %= len(values[0].axes)
        return Value.joined([self.side_by_side(t, values[0].axes, dim) for t in tensors], dim)

    def side_by_side(self, node: torch.fx.Node, axes: tuple[str, ...], dim: int) -> Value:
        """A value, or weights as a value, to be put side by side with values on ``axes`` along ``dim``."""
        if node in self.graph.data:
            return self.value(node)
        parts = self.sizes.parts(shape_of(node)[dim])
        if parts is None:
            raise CellError(f"{shape_of(node)[dim]} values of the module, no multiple of H = {self.sizes.hidden}")
        own = tuple((UNITS if parts[0] == 1 else COLUMNS) if n == dim else axis for n, axis in enumerate(axes))
        rows = Value(own, self.known[self.graph.given[1]].gates)
        return self.scalars(lambda _, v: number_of(v), [rows, self.weights(node, own, *parts)], node.name)

    def op_stack(self, node: torch.fx.Node, tensors: Sequence[Any], dim: int = 0) -> Value:
        values = [self.value(t) for t in tensors]
        dim %= len(values[0].axes) + 1
        return Value.joined([Value((*v.axes[:dim], ONE, *v.axes[dim:]), v.gates) for v in values], dim)

    def op_slice_scatter(self, node: torch.fx.Node, input: Any, src: Any, dim: int, start: Any, end: Any,
                         step: int) -> Value:
        value = self.value(input) if input in self.graph.data else self.side_by_side(input, self.value(src).axes, dim)
        extent = value.shape(self.sizes)[dim]
        first, last, step = slice(start, end, step).indices(extent)
        if step != 1:
            raise CellError(f"places by {step}")
        new = self.side_by_side(src, value.axes, dim)
        parts = [value.cut(dim, 0, first, 1, self.sizes)] if first else []
        parts += [new, *([value.cut(dim, last, extent, 1, self.sizes)] if last < extent else [])]
        return Value.joined(parts, dim) if len(parts) > 1 else new

    def op_select_scatter(self, node: torch.fx.Node, input: Any, src: Any, dim: int, index: int) -> Value:
        value, new = self.value(input), self.value(src)
        dim, index = dim % len(value.axes), index % value.shape(self.sizes)[dim]
        if value.axes[dim] != GATES or len(new.gates) > 1:
            raise CellError(f"one place of {value}; expected a gate")
        return Value(value.axes, (*value.gates[:index], *new.gates, *value.gates[index + 1:]))
