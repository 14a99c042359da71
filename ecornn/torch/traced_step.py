"""``TracedCell``, the cell of a step that is written in PyTorch: its graph carried out on te tensors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import add, mul
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from ecornn.cells import Cell, product
from ecornn.cells.base import Shape, flat_shape
from ecornn.errors import CellError
from ecornn.torch.traced_arithmetic import Arithmetic
from ecornn.torch.traced_graph import Graph, Sizes, Traced, arguments, export, operator_name, pointed, shape_of
from ecornn.torch.traced_operators import POINTWISE, REFUSED, SAME, number_of
from ecornn.torch.traced_values import BATCH, COLUMNS, GATES, ONE, UNITS, Gate, Matrix, Source, Use, Value, Weights

# Arguments that name a place in memory or a layout, and shapes that nodes say themselves.
ANYWHERE = ("layout", "device", "pin_memory", "non_blocking", "memory_format", "implicit", "size", "dim",
            "half_to_float", "keepdim")


class Walk(Arithmetic):
    """One walk through the graph: products, shapes and all results."""

    def __init__(self, graph: Graph, x: Any, states: Sequence[Any], parameter: Callable[[Use], Any]) -> None:
        super().__init__(graph, x, states, parameter)
        for node in [n for n in graph.nodes if n in graph.data]:
            try:
                self.known[node] = self.of(node)
            except CellError as error:
                if error.at is not None:
                    raise
                raise pointed(f"{operator_name(node)}: {error}", node) from error

    def results(self, count: int) -> list[Any]:
        """The new states (B, H), ``count``, behind y if that is none of them. Raises :class:`CellError` if others."""
        nodes = list(self.graph.returned)
        if len(nodes) == count + 1 and nodes[0] is nodes[1]:
            nodes = nodes[1:]  # y is the first state
        if len(nodes) not in (count, count + 1):
            raise CellError(f"the step returns {len(nodes)} tensors for {count} state{'s' * (count > 1)}; expected the "
                            "new states, or y before them. If the step takes its states as a tuple, name them: "
                            "cell(..., states=('h', 'c'))")
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
                raise pointed(f"the step returns {value} with the shape (B, {', '.join(map(str, shape))}); "
                              f"expected (B, H), H = {self.sizes.hidden}", node)
            if value.gates[0].vector or len(value.gates[0].tensor.shape) == 1:
                value = self.scalars(lambda v: v, [value], "state")  # which has a place for each unit
            results.append(self.whole(value.gates[0], "state"))
        return results

    # -- nodes ----------------------------------------------------------------------------------
    def of(self, node: Node) -> Any:
        name = operator_name(node)
        if name == "getitem":
            return self.known[node.args[0]][node.args[1]]
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CellError("a step that draws random numbers cannot be a cell; call the module's eval() to turn off "
                            "Dropout")
        given = arguments(node)
        if name in POINTWISE:
            if "decimals" in given:
                raise CellError(f"the argument decimals={given['decimals']} is not supported")
            return self.pointwise(node, POINTWISE[name], list(given.values()))
        if name in SAME:
            return self.known[node.args[0]]
        if (method := getattr(self, f"op_{name.strip('_')}", None)) is None:
            raise CellError(REFUSED)
        known = inspect.signature(method).parameters
        if "value" in known:
            given["value"] = self.value(given.pop("input"))
        other = {key: v for key, v in given.items() if key not in (*known, *ANYWHERE) and v not in (
            None, torch.float32, torch.float64)}
        if other:
            raise CellError(f"the argument {', '.join(f'{key}={v}' for key, v in other.items())} is not supported")
        value = method(node, **{key: v for key, v in given.items() if key in known})
        if "keepdim" in given:
            several, how = isinstance(value, tuple), (given["keepdim"], given["dim"])
            value = tuple(self.reduced(v, *how) for v in value) if several else self.reduced(value, *how)
        if isinstance(value, Value) and value.shape(self.sizes) != shape_of(node):
            raise CellError(f"the cell has {value}, but PyTorch has the shape {shape_of(node)}")
        return value

    # -- products -------------------------------------------------------------------------------
    def product(self, name: str, rows: Value, weights: Node, stored: bool, index: int | None = None) -> Value:
        """The product of ``rows`` (B, K) by (K, N), or (N, K) if it is ``stored`` so, of several ``index``."""
        if rows.axes not in ((BATCH, UNITS), (BATCH, COLUMNS), (BATCH, ONE), (BATCH, GATES)):
            raise CellError(f"a product of {rows}; expected (B, K)")
        count, K = shape_of(weights)[-2:] if stored else shape_of(weights)[-2:][::-1]
        if (parts := self.sizes.parts(count)) is None:
            raise CellError(f"a product with {count} rows; expected a multiple of H = {self.sizes.hidden}, or fewer")
        gates, width = parts
        widths = tuple(gate.width for gate in rows.gates)
        if sum(map(self.sizes.width, widths)) != K:
            raise CellError(f"a product of a matrix with {K} columns and {rows}")
        total = None
        for n, gate in enumerate(rows.gates):
            use = Matrix(weights, index, stored, gates, width, n, widths)
            if gate.width == 1 and isinstance(gate.width, int):
                raise CellError(f"a product of {rows}; expected x, a state, or values of H or less")
            matrix, source = self.parameter(use), self.whole(gate, f"{name}_operand")
            tensor = product(source, matrix, 0 if gates == 1 else None, f"{name}_{n}")
            one = Value.of_tensor((BATCH, COLUMNS), tensor, gates, width)
            total = one if total is None else self.scalars(add, [total, one], f"{name}_sum")
        assert total is not None
        return Value.canonical(total.axes, [Gate(g.tensor, g.index, width) for g in total.gates])

    def op_mm(self, node: Node, input: Any, mat2: Any) -> Value:
        if input in self.graph.data and mat2 in self.graph.data:
            raise CellError("a product of two values of the step; expected one with a parameter")
        if input in self.graph.data:
            return self.product(node.name, self.value(input), mat2, False)
        rows = self.value(mat2)
        turned = self.product(node.name, Value(rows.axes[::-1], rows.gates), input, True)
        return Value(turned.axes[::-1], turned.gates)

    def op_addmm(self, node: Node, input: Any, mat1: Any, mat2: Any, beta: Any, alpha: Any) -> Value:
        rows = self.op_mm(node, input=mat1, mat2=mat2)
        axes, count, width = self.frame([rows], shape_of(node))
        bias = self.known[input] if input in self.graph.data else self.weights(input, axes, count, width)
        biased = self.scalars(lambda p, v: (p if alpha == 1 else p * float(alpha)) + (
            v if beta == 1 else v * float(beta)), [rows, bias], f"{node.name}_biased", axes)
        return Value.canonical(axes, biased.gates)

    def op_bmm(self, node: Node, input: Any, mat2: Any) -> Value:
        if input in self.graph.data and mat2 in self.graph.data:
            return self.of_rows(node, self.value(input), self.value(mat2))
        if mat2 in self.graph.data:
            rows = self.value(mat2)
            turned = self.batched(node, Value((rows.axes[0], *rows.axes[:0:-1]), rows.gates), input, True)
            return Value((turned.axes[0], *turned.axes[:0:-1]), turned.gates)
        return self.batched(node, self.value(input), mat2, False)

    def batched(self, node: Node, rows: Value, weights: Node, stored: bool) -> Value:
        """The products of rows (M, B, K) by M matrices; M is 1, or the number of gates."""
        if rows.axes[0] == ONE:
            one = self.product(node.name, Value(rows.axes[1:], rows.gates), weights, stored, 0)
            return Value((ONE, *one.axes), one.gates)
        if rows.axes != (GATES, BATCH, UNITS):
            raise CellError(f"a product of {rows} and several matrices; expected one matrix for each gate")
        each = [self.product(f"{node.name}_{n}", Value((BATCH, UNITS), (gate,)), weights, stored, n)
                 for n, gate in enumerate(rows.gates)]
        if any(len(one.gates) > 1 for one in each):
            raise CellError("a product of each gate and a matrix of more than H rows; expected H rows or fewer")
        return Value.canonical((GATES, BATCH, UNITS), [one.gates[0] for one in each])

    def of_rows(self, node: Node, a: Value, b: Value) -> Value:
        """The scalar product (B, 1, 1) of each row of (B, 1, K) by one of (B, K, 1)."""
        if a.axes not in ((BATCH, ONE, UNITS), (BATCH, ONE, COLUMNS)) or b.axes != (BATCH, a.axes[2], ONE):
            raise CellError("a product of two values of the step; expected one with a parameter")
        both = self.scalars(mul, [a, Value(a.axes, b.gates)], f"{node.name}_products")
        return Value((BATCH, ONE, ONE), self.summed(both, [2], node.name).gates)

    # -- shapes ---------------------------------------------------------------------------------
    def op_view(self, node: Node, value: Value) -> Value:
        return value.viewed(shape_of(node), self.sizes)

    op_unsafe_view = op_reshape = op_squeeze = op_unsqueeze = op_view

    def op_permute(self, node: Node, value: Value, dims: Sequence[int]) -> Value:
        return Value(tuple(value.axes[d] for d in dims), value.gates)

    def op_expand(self, node: Node, input: Any, size: Any) -> Value:
        return self.pointwise(node, lambda v: v, [input])

    def op_repeat(self, node: Node, value: Value, repeats: Sequence[int]) -> Value:
        axes = (ONE,) * (len(repeats) - len(value.axes)) + value.axes
        several = [n for n, count in enumerate(repeats) if count > 1]
        if all(axes[n] == ONE for n in several):
            return self.pointwise(node, lambda v: v, [node.args[0]])
        if len(several) > 1 or axes[several[0]] not in (UNITS, COLUMNS, GATES):
            raise CellError(f"repeat{tuple(repeats)} of {value}; expected repeats along one axis of units or gates")
        return Value.joined([Value(axes, value.gates)] * repeats[several[0]], several[0])

    def op_copy(self, node: Node, input: Any, src: Any) -> Any:
        if src in self.graph.data:
            return self.pointwise(node, lambda v: v, [src])
        return self.pointwise(node, lambda _, w: number_of(w), [input, src])

    def op_to_copy(self, node: Node, value: Value, dtype: Any = None) -> Value:
        if dtype is not None and not dtype.is_floating_point and dtype != torch.bool:
            raise CellError(f"{dtype}; values of a step must be floats or booleans")
        if dtype in (torch.float16, torch.bfloat16):
            raise CellError(f"{dtype}; set the layer's data type with compile(dtype=...)")
        return self.scalars(POINTWISE["ne"], [value, 0.0], node.name) if dtype == torch.bool else self.as_numbers(
            value, node.name)

    def op_slice(self, node: Node, value: Value, dim: int, start: Any, end: Any, step: int) -> Value:
        return value.cut(dim, start or 0, 2**62 if end is None else end, step, self.sizes)

    def op_select(self, node: Node, value: Value, dim: int, index: int) -> Value:
        return value.taken(dim % len(value.axes), index, self.sizes)

    def op_unbind(self, node: Node, value: Value, dim: int) -> tuple[Value, ...]:
        return tuple(value.taken(dim % len(value.axes), n, self.sizes) for n in range(value.shape(self.sizes)[dim]))

    def op_split_with_sizes(self, node: Node, value: Value, split_sizes: Any, dim: int = 0) -> tuple[Value, ...]:
        ends = accumulate(split_sizes, initial=0)
        return tuple(value.cut(dim, first, last, 1, self.sizes) for first, last in pairwise(ends))

    def op_cat(self, node: Node, tensors: Sequence[Any], dim: int = 0) -> Value:
        values = [self.known[t] for t in tensors if t in self.graph.data]
        dim %= len(values[0].axes)
        return Value.joined([self.side_by_side(t, values[0].axes, dim) for t in tensors], dim)

    def side_by_side(self, node: Node, axes: tuple[str, ...], dim: int) -> Value:
        """A value, or weights as a value, to be put side by side with values on ``axes`` along ``dim``."""
        if node in self.graph.data:
            return self.value(node)
        if (parts := self.sizes.parts(shape_of(node)[dim])) is None:
            raise CellError(f"{shape_of(node)[dim]} values of the module; expected a multiple of H = "
                            f"{self.sizes.hidden}")
        own = tuple((UNITS if parts[0] == 1 else COLUMNS) if n == dim else axis for n, axis in enumerate(axes))
        rows = Value(own, self.known[self.graph.given[1]].gates)
        return self.scalars(lambda _, v: number_of(v), [rows, self.weights(node, own, *parts)], node.name)

    def op_stack(self, node: Node, tensors: Sequence[Any], dim: int = 0) -> Value:
        values = [self.value(t) for t in tensors]
        dim %= len(values[0].axes) + 1
        return Value.joined([Value((*v.axes[:dim], ONE, *v.axes[dim:]), v.gates) for v in values], dim)

    def op_slice_scatter(self, node: Node, input: Any, src: Any, dim: int, start: Any, end: Any, step: int) -> Value:
        value = self.value(input) if input in self.graph.data else self.side_by_side(input, self.value(src).axes, dim)
        extent = value.shape(self.sizes)[dim]
        first, last, step = slice(start, end, step).indices(extent)
        if step != 1:
            raise CellError(f"a slice with step {step}; expected 1")
        new = self.side_by_side(src, value.axes, dim)
        parts = [value.cut(dim, 0, first, 1, self.sizes)] if first else []
        parts += [new, *([value.cut(dim, last, extent, 1, self.sizes)] if last < extent else [])]
        return Value.joined(parts, dim) if len(parts) > 1 else new

    def op_select_scatter(self, node: Node, value: Value, src: Any, dim: int, index: int) -> Value:
        new = self.value(src)
        dim, index = dim % len(value.axes), index % value.shape(self.sizes)[dim]
        if value.axes[dim] != GATES or len(new.gates) > 1:
            raise CellError(f"a write to index {index} of {value}; expected a whole gate")
        return Value(value.axes, (*value.gates[:index], *new.gates, *value.gates[index + 1:]))


class TracedCell(Cell):
    """A cell that :func:`ecornn.torch.cell` has made; ``traced`` is the step, ``read`` the weights that it reads."""

    def __init__(self, traced: Traced) -> None:
        from tvm import te

        self.traced, self.graph = traced, export(traced)
        self.own = self.graph.sizes
        uses: dict[Use, Any] = {}

        def parameter(use: Use) -> Any:
            shape = use.shape(traced.input, traced.hidden)
            return uses.setdefault(use, te.placeholder(shape, "float32", name="weights"))

        x = te.placeholder((3, traced.input), "float32", name="x")
        before = [te.placeholder((3, traced.hidden), "float32", name=n) for n in traced.states]
        results = Walk(self.graph, x, before, parameter).results(len(before))
        self.read = Weights(self.graph, list(uses))
        self.states, self.shown = traced.states, len(results) - len(before)  # 1: y is none of the states
        if self.shown:
            self.states, self.output = ("y", *traced.states), "y"
            if "y" in traced.states:
                raise CellError(f"cell {self.name!r}: a state has the name y, but the output before the states has "
                                "this name; rename the state")
        self.unread = tuple(self.read.names.values())  # a product may have gates that the step leaves out
        learned = {name: source.learned for name, source in self.read.direct.items()} | self.read.originals
        self.buffers = {name: one.value for name, one in learned.items() if one.kind == "buffer"}
        self.frozen = {name: one.value for name, one in learned.items() if one.kind == "parameter" and not (
            one.value.requires_grad)}

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has the step, which the process that reads it traces again: graphs of PyTorch have no pickles."""
        return named, (self.name, self.traced)

    def __deepcopy__(self, memo: Any) -> TracedCell:
        """The cell itself: it does not change, and tracing it again would take seconds."""
        return self

    def walk(self, x: Any, states: Sequence[Any], parameters: Mapping[str, Any]) -> Walk:
        """The step on te tensors, at any I and H."""
        return Walk(self.graph, x, states[self.shown:], lambda use: parameters[self.read.names[use]])

    def step(self, x: Any, states: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        """The module's step on te tensors; see :meth:`ecornn.Cell.step`."""
        return self.walk(x, states, parameters).results(len(self.traced.states))

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        """The shapes of the parameters that the step reads, by name."""
        return {name: use.shape(input, hidden) for use, name in self.read.names.items()}

    def learned(self, input: int, hidden: int) -> dict[str, Shape]:
        """Shapes of the module's weights by name, gates first; those that it computes weights of, as stored. Raises
        :class:`~ecornn.errors.CellError` if such tensors have the module's sizes alone."""
        shapes = {name: source.use.shape(input, hidden) for name, source in self.read.direct.items()}
        for name, original in self.read.originals.items():
            shape = tuple(original.value.shape)
            if (input, hidden) != (self.own.input, self.own.hidden) and not {*shape} <= {1}:
                raise CellError(f"cell {self.name!r}: {original.name} {shape} does not fit I = {input}, H = {hidden}. "
                                "The module computes weights from it, which have sizes for "
                                f"I = {self.own.input} and H = {self.own.hidden}")
            shapes[name] = _axes(shape)
        return shapes

    def derived(self, p: Mapping[str, Any], xp: Any) -> dict[str, Any]:
        """The weights that the module computes of its learned ones, ``p``, arrays of NumPy or PyTorch."""
        if not self.read.derived:
            return {}
        given = {name: torch.from_numpy(v) if xp is np else v for name, v in p.items()}
        if not all(isinstance(tensor, torch.Tensor) for tensor in given.values()):
            raise TypeError("PyTorch computes the weights of this cell; pass arrays of NumPy or PyTorch")
        like = next(iter(given.values()), torch.empty(0))
        values = {name: given[name].reshape(one.value.shape) for name, one in self.read.originals.items()}
        weights = self.read.computed(values, like)
        return {name: v.numpy() if xp is np else v for name, v in weights.items()}

    def sample(self, name: str, shape: Shape, rng: Any) -> Any:
        """The module's own values, repeated or cut for other sizes."""
        source = self.read.direct.get(name)
        value = (source.learned if source else self.read.originals[name]).value
        return np.resize(value.detach().double().cpu().numpy(), shape)

    def weights(self, module: Any = None, layer: int = 0, reverse: bool = False) -> dict[str, torch.Tensor]:
        """The weights of a module, by default the one that was traced, as those of a layer, by name: for
        ``load_state_dict`` of an :class:`ecornn.torch.Recurrent`, and through :func:`ecornn.derive` for
        :meth:`Module.bind`. They share the module's memory unless they are parts of a tensor, or vectors of less than H
        values."""
        known = {} if module is None else dict(module.named_parameters(remove_duplicate=False)) | dict(
            module.named_buffers(remove_duplicate=False))
        weights = {}
        for name, source in self.read.direct.items():
            value = source.learned.among(known)
            weights[name] = source.use.of(value, self._sizes(value, source))
        for name, original in self.read.originals.items():
            weights[name] = original.among(known).reshape(_axes(tuple(original.value.shape)))
        return {self.parameter_name(name, layer, reverse): weight.reshape(flat_shape(tuple(weight.shape)))
                for name, weight in weights.items()}

    def _sizes(self, value: torch.Tensor, source: Source) -> Sizes:
        """The sizes of the module that has this weight, which may be larger than the traced one."""
        hidden, rows = self.own.hidden, source.use.shape(self.own.input, self.own.hidden)
        if value.shape[0] != source.learned.value.shape[0] and rows[1] == hidden:
            hidden = value.shape[0] // rows[0]
        input = value.shape[1] if value.dim() == 2 and isinstance(source.use, Matrix) and source.use.widths == (
            "I",) else self.own.input
        return Sizes(self.own.batch, input, hidden)


def named(name: str, traced: Traced) -> TracedCell:
    """The cell of a step, of a class of its own with this name, which no other process can import."""
    kind: type[TracedCell] = type(name, (TracedCell,), {"__qualname__": f"cell.<locals>.{name}", "name": name})
    return kind(traced)


def _axes(shape: Shape) -> Shape:
    """The two or three axes of a learned tensor's shape."""
    return (1, shape[0], math.prod(shape[1:])) if len(shape) > 2 else (1, *shape) if shape else (1, 1)
