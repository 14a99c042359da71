"""Arithmetic of a traced step, broadcast as PyTorch does; sums, maxima, variances over units, softmax and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add, mul
from typing import Any, cast

from torch.fx import Node

from ecornn.cells import largest, normalized, pointwise, softmax
from ecornn.errors import CellError
from ecornn.torch.traced_graph import Graph, Sizes, Width, operator_name, shape_of
from ecornn.torch.traced_operators import POINTWISE, added, highest, own_gradient, select, softplus, square_root
from ecornn.torch.traced_values import BATCH, COLUMNS, GATES, ONE, UNITS, Gate, Use, Value, Vector


class Arithmetic:
    """Values of a graph's nodes: ``op_NAME`` carries out an operator; ``known``: those that depend on x or a state."""

    def __init__(self, graph: Graph, x: Any, states: Sequence[Any], parameter: Callable[[Use], Any]) -> None:
        self.graph, self.sizes, self.parameter, self.like = graph, graph.sizes, parameter, states[0]
        self.known: dict[Node, Any] = {
            node: Value((BATCH, UNITS), (Gate(tensor, 0, width),)) for node, tensor, width in zip(
                graph.given, (x, *states), ("I", *["H"] * len(states)), strict=True)}

    def value(self, node: Any) -> Value:
        """The value of an argument that depends on x or a state. Raises :class:`CellError` for any other."""
        if node not in self.graph.data:
            raise CellError("an operand depends on weights alone; this operator needs values of the step")
        return cast(Value, self.known[node])

    def scalars(self, function: Callable[..., Any], operands: Sequence[Any], name: str,
                axes: tuple[str, ...] | None = None, width: Width = 1) -> Value:
        """The value of a ``function`` of scalars at every gate and unit of ``operands``: values, each of one gate or of
        all, and anything else that it takes. ``axes``: the result's, None: the first operand's; ``width``: the result's
        if operands have one value a row. Raises :class:`CellError` if gates or widths differ."""
        axes = operands[0].axes if axes is None else axes
        values = [o for o in operands if isinstance(o, Value)]
        count = max(len(v.gates) for v in values)
        several = [v for v in values if len(v.gates) > 1]
        if any(len(v.gates) != count for v in several):
            raise CellError(f"arithmetic on {' and '.join(map(str, several))}; expected equal numbers of gates")

        def computed(gates: Sequence[Gate | None], per_gate: bool) -> Any:
            wide = {width, *(g.width for g in gates if g is not None)} - {1}
            own = self.sizes.common(wide)
            if own is None:
                words = " and ".join(sorted(map(Sizes.in_words, wide)))
                raise CellError(f"arithmetic on rows of {words}; expected rows of one width")

            def value(b: Any, j: Any, n: Any = 0) -> Any:
                return function(*(o if g is None else g.at(b, j, n if len(o.gates) > 1 else 0)
                                  for o, g in zip(operands, gates, strict=True)))

            scalar = all(g is None or (not g.vector and len(g.tensor.shape) == 1) for g in gates)
            return self.computed(value, own, scalar, count if per_gate else 0, name), own

        def picked(n: int) -> list[Gate | None]:
            return [o.gates[n if len(o.gates) > 1 else 0] if isinstance(o, Value) else None for o in operands]

        widths = {v.gates[0].width for v in several}
        if all(v.block for v in several) and len(widths) == 1 and widths != {1}:
            tensor, own = computed(picked(0), True)
            return Value.of_tensor(axes, tensor, count, own)
        return Value(axes, tuple(Gate(tensor, 0, own) for tensor, own in (
            computed(picked(n), False) for n in range(count))))

    def computed(self, value: Callable[..., Any], width: Width, scalar: bool, count: int, name: str) -> Any:
        """The te tensor of a scalar expression: (B, W), with a ``count`` (B, G, W), or (B,) for one value a row."""
        from tvm import te

        batch, hidden = self.like.shape
        if width == 1 and scalar:
            return te.compute((batch,), lambda b: value(b, None), name=name)
        if not count and width in (1, "H"):
            return pointwise(lambda b, j: value(b, j), self.like, name)
        across = hidden if width in (1, "H") else self.sizes.width(width)
        if not count:
            return te.compute((batch, across), lambda b, j: value(b, j), name=name)
        return te.compute((batch, count, across), lambda b, g, j: value(b, j, g), name=name)

    def whole(self, gate: Gate, name: str) -> Any:
        if not gate.vector and len(gate.tensor.shape) == 2:
            return gate.tensor
        return self.computed(lambda b, j: gate.at(b, j), gate.width, False, 0, name)

    def as_numbers(self, value: Value, name: str) -> Value:
        """The value, conditions as 1 and 0."""
        if not any(str(gate.tensor.dtype) == "bool" for gate in value.gates):
            return value
        return self.scalars(lambda v: select(v, 1.0, 0.0), [value], f"{name}_number")

    def pointwise(self, node: Node, function: Callable[..., Any], operands: Sequence[Any],
                  shape: tuple[int, ...] | None = None) -> Value:
        """``function`` of values, weights and numbers, broadcast as PyTorch does; ``shape``: of the node's tensor."""
        values = [self.known[o] for o in operands if isinstance(o, Node) and o in self.graph.data]
        axes, count, width = self.frame(values, shape or shape_of(node))
        if width == "I" and self.sizes.input != self.sizes.hidden:
            raise CellError("it depends on x alone, and in a step only products may read x. Compute it for all steps "
                            "at once, in a module before the layer")

        def given(operand: Any) -> Any:
            if not isinstance(operand, Node):
                return operand
            return self.known[operand] if operand in self.graph.data else self.weights(operand, axes, count, width)

        gates = self.scalars(function, [*map(given, operands)], node.name, axes, width or 1).gates
        return Value.canonical(axes, gates * count if len(gates) < count else gates)

    def frame(self, values: Sequence[Value], shape: Sequence[int]) -> tuple[tuple[str, ...], int, Width | None]:
        """Axes, gates and width of what is made of ``values``, of this shape in PyTorch; None: widths differ."""
        axes: list[str] = []
        count = max(len(v.gates) for v in values)
        widths = {g.width for v in values for g in v.gates if g.width != 1}
        for n, size in enumerate(shape):
            place = n - len(shape)
            kinds = {v.axes[place] for v in values if -place <= len(v.axes)} - {ONE}
            if len(kinds) > 1:
                raise CellError(f"arithmetic on {' and '.join(map(str, values))}; expected axes that match")
            axes.append(next(iter(kinds), "" if size > 1 else ONE))
        if axes.count(BATCH) != 1:
            raise CellError(f"arithmetic on {' and '.join(map(str, values))}; a cell computes each row separately")
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
                raise CellError(f"arithmetic with {shape[n]} values; expected a multiple of H = {self.sizes.hidden}")
        return tuple(axes), count, self.sizes.common(widths)

    def weights(self, node: Node, axes: tuple[str, ...], count: int, width: Width | None) -> Any:
        """A node of weights as an operand beside values on these axes: a number, or vectors."""
        one = self.graph.number(node)
        if one is not None:
            return one
        shape = shape_of(node)
        own = axes[len(axes) - len(shape):]
        if BATCH in own and shape[own.index(BATCH)] > 1 and not self.graph.alike_in_rows(node, own.index(BATCH)):
            raise CellError(f"a tensor {shape} of the module differs between rows of the batch")
        wide = {axis for axis, size in zip(own, shape, strict=True) if size > 1}
        gates = count if wide & {GATES, COLUMNS} else 1
        units = bool(wide & {UNITS, COLUMNS})
        if width is None:
            raise CellError("a vector of weights with values of several widths; expected values of one width")
        use = Vector(node, tuple(ONE if gates == 1 and axis == GATES else axis for axis in own), gates,
                     width if units else 1)
        tensor = self.parameter(use)
        return Value(axes, tuple(Gate(tensor, n, use.width, vector=True) for n in range(gates)))

    def op_custom_gradient(self, node: Node, input: Any, operands: Sequence[Any], derivatives: Sequence[Any]) -> Value:
        return self.pointwise(node, own_gradient, [input, *operands, *derivatives])

    # -- sums, maxima, variances ----------------------------------------------------------------
    def summed(self, value: Value, dims: Any, name: str, reduce: Callable[[Any, str], Any] | None = None,
               among: Callable[..., Any] = added) -> Value:
        """The sum over axes, which become ONE; or another reduction, ``reduce`` of a te tensor, ``among`` scalars."""
        places = _places(dims, len(value.axes))
        kinds = {value.axes[n] for n in places} - {ONE}
        if BATCH in kinds:
            raise CellError("a reduction over the batch; a cell computes each row of the batch separately")
        axes = tuple(ONE if n in places else axis for n, axis in enumerate(value.axes))
        if kinds & {UNITS, COLUMNS}:
            reduce = reduce or row_sum
            tensor = value.stacked() if kinds != {UNITS} else None
            if tensor is not None and value.width(self.sizes) != 1:  # all gates at once
                value = Value(value.axes, (Gate(reduce(tensor, name), 0, 1),))
            else:
                value = Value(value.axes, tuple(gate if gate.width == 1 else Gate(
                    reduce(self.whole(gate, f"{name}_row"), name), 0, 1) for gate in value.gates))
        if kinds & {GATES, COLUMNS}:
            return self.scalars(among, [Value(axes, (gate,)) for gate in value.gates], name)
        return Value(axes, value.gates)

    def reduced(self, value: Value, keepdim: bool, dims: Any) -> Value:
        """The value without the axes that were reduced, unless they are kept."""
        gone = () if keepdim else _places(dims, len(value.axes))
        return Value.canonical([axis for n, axis in enumerate(value.axes) if n not in gone], value.gates)

    def op_sum(self, node: Node, value: Value, dim: Any = None) -> Value:
        return self.summed(self.as_numbers(value, node.name), dim, node.name)

    def mean(self, value: Value, dims: Any, name: str, less: float = 0.0) -> Value:
        """The sum over some axes, divided by their number less ``less``."""
        places = _places(dims, len(value.axes))
        units = any(value.axes[n] in (UNITS, COLUMNS) for n in places)
        gates = len(value.gates) if any(value.axes[n] in (GATES, COLUMNS) for n in places) else 1
        total, like, sizes, width = self.summed(value, dims, name), self.like, self.sizes, value.width(self.sizes)

        def count() -> float:  # for the H that the cell has now, not the module's
            own = {"H": int(like.shape[1]), "I": sizes.input}[width] if isinstance(width, str) else width
            return gates * (own if units else 1) - less

        return self.scalars(lambda v: v * (1.0 / count()), [total], f"{name}_mean")

    def op_mean(self, node: Node, value: Value, dim: Any = None) -> Value:
        return self.mean(self.as_numbers(value, node.name), dim, node.name)

    def op_amax(self, node: Node, value: Value, dim: Any = None) -> Value:
        return self.summed(value, dim, node.name, largest, highest)

    def op_amin(self, node: Node, value: Value, dim: Any = None) -> Value:
        negative = self.scalars(lambda v: 0.0 - v, [value], f"{node.name}_negative")
        top = self.summed(negative, dim, node.name, largest, highest)
        return self.scalars(lambda v: 0.0 - v, [top], f"{node.name}_positive")

    def op_log_sigmoid_forward(self, node: Node, input: Any) -> tuple[Value | None, ...]:
        return self.pointwise(node, lambda v: 0.0 - softplus(0.0 - v), [input], shape_of(input)), None

    def op_max(self, node: Node) -> Any:
        raise CellError("a cell has no indices of maxima; use amax or amin")

    op_min = op_max

    def variance(self, value: Value, dims: Any, correction: Any, name: str) -> tuple[Value, Value]:
        """The variance over some axes, and the mean."""
        middle = self.mean(value, dims, name)
        apart = self.scalars(lambda v, m: v - m, [value, middle], f"{name}_apart")
        squares = self.scalars(lambda v: v * v, [apart], f"{name}_squares")
        return self.mean(squares, dims, f"{name}_variance", float(correction)), middle

    def op_var_mean(self, node: Node, value: Value, dim: Any = None, correction: Any = None, unbiased: Any = 1) -> Any:
        both = self.variance(value, dim, int(unbiased) if correction is None else correction, node.name)
        return both if operator_name(node) == "var_mean" else both[0]

    op_var = op_var_mean

    def op_std(self, node: Node, value: Value, dim: Any = None, correction: Any = None, unbiased: Any = 1) -> Value:
        variance = self.op_var(node, value, dim, correction, unbiased)
        return self.scalars(square_root, [variance], f"{node.name}_root")

    def op_linalg_vector_norm(self, node: Node, value: Value, ord: Any = 2, dim: Any = None, dtype: Any = None) -> Any:
        name = node.name
        if ord == 2:
            squares = self.scalars(lambda v: v * v, [value], f"{name}_squares")
            return self.scalars(square_root, [self.summed(squares, dim, name)], f"{name}_root")
        if ord not in (1, float("inf")):
            raise CellError(f"ord={ord}; expected 1, 2 or infinity")
        sizes = self.scalars(POINTWISE["abs"], [value], f"{name}_absolute")
        return self.summed(sizes, dim, name) if ord == 1 else self.summed(sizes, dim, name, largest, highest)

    def op_softmax(self, node: Node, value: Value, dim: int) -> Value:
        if value.axes[dim] == UNITS and len(value.gates) == 1 and not value.gates[0].vector:
            tensor = self.whole(value.gates[0], f"{node.name}_operand")
            return Value(value.axes, (Gate(softmax(tensor, node.name), 0, value.gates[0].width),))
        power, total, _ = self.exponentials(value, dim, node.name)
        return Value.canonical(value.axes, self.scalars(lambda p, t: p / t, [power, total], node.name).gates)

    def op_log_softmax(self, node: Node, value: Value, dim: int) -> Value:
        _, total, top = self.exponentials(value, dim, node.name)
        logs = self.scalars(lambda v, m, t: v - m - POINTWISE["log"](t), [value, top, total], node.name)
        return Value.canonical(value.axes, logs.gates)

    def exponentials(self, value: Value, dim: int, name: str) -> tuple[Value, Value, Value]:
        """exp(v - max), its sum and the maximum along an axis."""
        top = self.summed(value, [dim], f"{name}_top", largest, highest)
        power = self.scalars(lambda v, m: POINTWISE["exp"](v - m), [value, top], f"{name}_exp")
        return power, self.summed(power, [dim], f"{name}_sum"), top

    # -- normalization --------------------------------------------------------------------------
    def op_native_layer_norm(self, node: Node, value: Value, normalized_shape: Any, weight: Any, bias: Any,
                             eps: float) -> tuple[Value | None, ...]:
        count = len(normalized_shape)
        dims = [*range(len(value.axes) - count, len(value.axes))]
        whole_row = {value.axes[d] for d in dims} in ({UNITS}, {COLUMNS}, {GATES, UNITS})
        tensor = value.stacked() if whole_row and (len(value.gates) == 1 or value.axes[-count:] != (UNITS,)) else None
        width = value.width(self.sizes)
        if tensor is not None and width != 1:
            normal = Value.of_tensor(value.axes, normalized(tensor, eps, node.name), len(value.gates), width)
        else:
            normal = self.normalized(value, *self.variance(value, dims, 0, node.name), eps, node.name)
        return self.affine(node, normal, weight, bias), None, None

    def normalized(self, value: Value, variance: Any, middle: Any, eps: float, name: str) -> Value:
        """The value less ``middle``, divided by the root of ``variance``."""
        return self.scalars(lambda v, m, s: (v - m) * POINTWISE["rsqrt"](s + float(eps)), [value, middle, variance],
                            f"{name}_normal")

    def op_native_group_norm(self, node: Node, value: Value, weight: Any, bias: Any, N: int, C: int, HxW: int,
                             group: int, eps: float) -> tuple[Value | None, ...]:
        count = len(value.gates)
        if HxW != 1 or value.axes not in ((BATCH, UNITS), (BATCH, COLUMNS)):
            raise CellError(f"group_norm of {value}; expected (B, C)")
        if group % count == 0 and value.width(self.sizes) == "H":
            rows = [self.whole(gate, f"{node.name}_row") for gate in value.gates]
            gates = [Gate(normalized(row, eps, f"{node.name}_{n}", group // count)) for n, row in enumerate(rows)]
        elif count % group == 0:
            size = count // group
            parts = {f"{node.name}_{n // size}": Value.canonical(value.axes, value.gates[n:n + size])
                     for n in range(0, count, size)}
            gates = [gate for name, part in parts.items() for gate in self.normalized(
                part, *self.variance(part, [1], 0, name), eps, name).gates]
        else:
            raise CellError(f"{group} groups do not divide {value}")
        return self.affine(node, Value(value.axes, tuple(gates)), weight, bias), None, None

    def op_native_batch_norm_legit_no_training(self, node: Node, value: Value, weight: Any, bias: Any,
                                               running_mean: Any, running_var: Any, momentum: float,
                                               eps: float) -> tuple[Value | None, ...]:
        axes, count, width = self.frame([value], value.shape(self.sizes))
        middle, variance = (self.weights(w, axes, count, width) for w in (running_mean, running_var))
        normal = self.normalized(value, variance, middle, eps, node.name)
        return self.affine(node, normal, weight, bias), None, None

    def affine(self, node: Node, value: Value, weight: Any, bias: Any) -> Value:
        """The value times a gain and plus a bias, if there are any."""
        axes, count, width = self.frame([value], value.shape(self.sizes))
        for operand, function, name in ((weight, mul, "scaled"), (bias, add, "shifted")):
            if operand is not None:
                operands = [value, self.weights(operand, axes, count, width)]
                value = self.scalars(function, operands, f"{node.name}_{name}", axes)
        return value


def row_sum(tensor: Any, name: str) -> Any:
    """The te tensor (B,) of the sums of all values in each row of a te tensor (B, W) or (B, G, W)."""
    from tvm import te

    axes = [te.reduce_axis((0, int(extent)), "k") for extent in tensor.shape[1:]]
    return te.compute((tensor.shape[0],), lambda b: te.sum(tensor(b, *axes), axis=axes), name=f"{name}_total")


def _places(dims: Any, rank: int) -> set[int]:
    """The axes that an operator's argument ``dims`` names of ``rank`` axes: all for None or none."""
    named = [dims] if isinstance(dims, int) else dims or range(rank)
    return {d % rank for d in named}
