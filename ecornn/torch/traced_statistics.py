"""Sums, maxima and variances over units in a traced step, and what is made of them: softmax, norms, normalizations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ecornn.cells import largest, normalized, softmax
from ecornn.errors import CellError
from ecornn.torch.traced_arithmetic import Arithmetic
from ecornn.torch.traced_graph import shape_of
from ecornn.torch.traced_operators import POINTWISE, added, highest, softplus, square_root
from ecornn.torch.traced_values import (
    BATCH,
    COLUMNS,
    GATES,
    ONE,
    UNITS,
    Gate,
    Value,
    canonical,
    described,
    of_tensor,
    stacked,
    whole,
    width_of,
)


class Statistics(Arithmetic):
    """The operators of rows. A method ``op_NAME`` carries out the operator of that name."""

    def summed(self, value: Value, dims: Any, name: str, reduce: Callable[[Any, str], Any] | None = None,
               among: Callable[..., Any] = added) -> Value:
        """The sum over some axes, which become ONE; or what ``reduce`` of a te tensor and ``among`` of scalars make."""
        places = {d % len(value.axes) for d in (range(len(value.axes)) if dims is None or dims == [] else
                                                [dims] if isinstance(dims, int) else dims)}
        kinds = {value.axes[n] for n in places} - {ONE}
        if BATCH in kinds:
            raise CellError("over the batch, whose rows are apart in a cell")
        axes = tuple(ONE if n in places else axis for n, axis in enumerate(value.axes))
        if kinds & {UNITS, COLUMNS}:
            value = self.over_units(value, kinds != {UNITS}, name, reduce or row_sum)
        if kinds & {GATES, COLUMNS}:
            gates = [Value(axes, (gate,)) for gate in value.gates]
            return Value(axes, self.scalars(among, gates, axes, name).gates)
        return Value(axes, value.gates)

    def over_units(self, value: Value, together: bool, name: str, reduce: Callable[[Any, str], Any]) -> Value:
        """One value for each gate and batch row; for all gates where they are taken ``together``, and lie so."""
        tensor = stacked(value) if together else None
        if tensor is not None and width_of(value, self.sizes) != 1:
            return Value(value.axes, (Gate(reduce(tensor, name), 0, 1),))
        made = [gate if gate.width == 1 else Gate(reduce(whole(gate, f"{name}_row", self.like, self.sizes), name), 0, 1)
                for gate in value.gates]
        return Value(value.axes, tuple(made))

    def reduced(self, node: torch.fx.Node, found: Value, keepdim: bool, dims: Any) -> Value:
        """Without the axes that went, unless they are kept."""
        if keepdim:
            return canonical(found.axes, found.gates)
        rank = len(found.axes)
        places = {d % rank for d in (range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int)
                                     else dims)}
        return canonical([axis for n, axis in enumerate(found.axes) if n not in places], found.gates)

    def op_sum(self, node: torch.fx.Node, input: Any, dim: Any = None, keepdim: bool = False) -> Value:
        value = self.as_numbers(self.value(input), node.name)
        return self.reduced(node, self.summed(value, dim, node.name), keepdim, dim)

    def mean(self, value: Value, dims: Any, name: str, less: float = 0.0) -> Value:
        """The sum over some axes, divided by their number less ``less``."""
        extent = value.shape(self.sizes)
        places = {d % len(extent) for d in (range(len(extent)) if dims is None or dims == [] else
                                            [dims] if isinstance(dims, int) else dims)}
        units = any(value.axes[n] in (UNITS, COLUMNS) for n in places)
        gates = len(value.gates) if any(value.axes[n] in (GATES, COLUMNS) for n in places) else 1
        total, like, sizes, width = self.summed(value, dims, name), self.like, self.sizes, width_of(value, self.sizes)

        def count() -> float:  # at the size that the cell has now, not the module
            own = {"H": int(like.shape[1]), "I": sizes.input}[width] if isinstance(width, str) else width
            return gates * (own if units else 1) - less

        return self.scalars(lambda v: v * (1.0 / count()), [total], total.axes, f"{name}_mean")

    def op_mean(self, node: torch.fx.Node, input: Any, dim: Any = None, keepdim: bool = False) -> Value:
        value = self.as_numbers(self.value(input), node.name)
        return self.reduced(node, self.mean(value, dim, node.name), keepdim, dim)

    def op_amax(self, node: torch.fx.Node, input: Any, dim: Any = (), keepdim: bool = False) -> Value:
        found = self.summed(self.value(input), list(dim), node.name, largest, highest)
        return self.reduced(node, found, keepdim, list(dim))

    def op_amin(self, node: torch.fx.Node, input: Any, dim: Any = (), keepdim: bool = False) -> Value:
        value = self.value(input)
        negative = self.scalars(lambda v: 0.0 - v, [value], value.axes, f"{node.name}_negative")
        found = self.summed(negative, list(dim), node.name, largest, highest)
        found = self.scalars(lambda v: 0.0 - v, [found], found.axes, f"{node.name}_positive")
        return self.reduced(node, found, keepdim, list(dim))

    def op_log_sigmoid_forward(self, node: torch.fx.Node, input: Any) -> tuple[Value | None, ...]:
        return self.pointwise(node, lambda v: 0.0 - softplus(0.0 - v), [input], shape_of(input)), None

    def op_max(self, node: torch.fx.Node) -> Any:
        raise CellError("also the place of the extreme, which alone has its gradient; use amax or amin")

    op_min = op_max

    def variance(self, value: Value, dims: Any, correction: Any, name: str) -> tuple[Value, Value]:
        """And the mean."""
        middle = self.mean(value, dims, name)
        apart = self.scalars(lambda v, m: v - m, [value, middle], value.axes, f"{name}_apart")
        squares = self.scalars(lambda v: v * v, [apart], value.axes, f"{name}_squares")
        return self.mean(squares, dims, f"{name}_variance", float(correction)), middle

    def op_var(self, node: torch.fx.Node, input: Any, dim: Any = None, correction: Any = None, keepdim: bool = False,
               unbiased: bool = True) -> Value:
        found, _ = self.variance(self.value(input), dim, int(unbiased) if correction is None else correction, node.name)
        return self.reduced(node, found, keepdim, dim)

    def op_std(self, node: torch.fx.Node, input: Any, dim: Any = None, correction: Any = None, keepdim: bool = False,
               unbiased: bool = True) -> Value:
        found, _ = self.variance(self.value(input), dim, int(unbiased) if correction is None else correction, node.name)
        found = self.scalars(square_root, [found], found.axes, f"{node.name}_root")
        return self.reduced(node, found, keepdim, dim)

    def op_var_mean(self, node: torch.fx.Node, input: Any, dim: Any = None, correction: Any = None,
                    keepdim: bool = False, unbiased: bool = True) -> tuple[Value, ...]:
        found = self.variance(self.value(input), dim, int(unbiased) if correction is None else correction, node.name)
        return tuple(self.reduced(node, one, keepdim, dim) for one in found)

    def op_linalg_vector_norm(self, node: torch.fx.Node, input: Any, ord: Any = 2, dim: Any = None,
                              keepdim: bool = False,
                              dtype: Any = None) -> Value:
        value, name = self.value(input), node.name
        if ord == 2:
            squares = self.scalars(lambda v: v * v, [value], value.axes, f"{name}_squares")
            total = self.summed(squares, dim, name)
            found = self.scalars(square_root, [total], total.axes, f"{name}_root")
        elif ord in (1, float("inf")):
            sizes = self.scalars(POINTWISE["abs"], [value], value.axes, f"{name}_absolute")
            found = self.summed(sizes, dim, name) if ord == 1 else self.summed(sizes, dim, name, largest, highest)
        else:
            raise CellError(f"ord={ord}; there are 1, 2 and infinity")
        return self.reduced(node, found, keepdim, dim)

    def op_softmax(self, node: torch.fx.Node, input: Any, dim: int) -> Value:
        value = self.value(input)
        if value.axes[dim] == UNITS and len(value.gates) == 1 and not value.gates[0].vector:
            tensor = whole(value.gates[0], f"{node.name}_operand", self.like, self.sizes)
            return Value(value.axes, (Gate(softmax(tensor, node.name), 0, value.gates[0].width),))
        power, total, _ = self.exponentials(value, dim, node.name)
        return canonical(value.axes, self.scalars(lambda p, t: p / t, [power, total], value.axes, node.name).gates)

    def op_log_softmax(self, node: torch.fx.Node, input: Any, dim: int) -> Value:
        value = self.value(input)
        _, total, top = self.exponentials(value, dim, node.name)
        return canonical(value.axes, self.scalars(lambda v, m, t: v - m - POINTWISE["log"](t), [value, top, total],
                                                  value.axes, node.name).gates)

    def exponentials(self, value: Value, dim: int, name: str) -> tuple[Value, Value, Value]:
        """exp(v - max), its sum, and the maximum, along an axis."""
        top = self.summed(value, [dim], f"{name}_top", largest, highest)
        power = self.scalars(lambda v, m: POINTWISE["exp"](v - m), [value, top], value.axes, f"{name}_exp")
        return power, self.summed(power, [dim], f"{name}_sum"), top

    # -- normalization --------------------------------------------------------------------------
    def op_native_layer_norm(self, node: torch.fx.Node, input: Any, normalized_shape: Any, weight: Any, bias: Any,
                             eps: float) -> tuple[Value | None, ...]:
        value, count = self.value(input), len(normalized_shape)
        dims = list(range(len(value.axes) - count, len(value.axes)))
        whole_row = {value.axes[d] for d in dims} in ({UNITS}, {COLUMNS}, {GATES, UNITS})
        tensor = stacked(value) if whole_row and (len(value.gates) == 1 or value.axes[-count:] != (UNITS,)) else None
        width = width_of(value, self.sizes)
        if tensor is not None and width != 1:
            found = Value(value.axes, of_tensor(normalized(tensor, eps, node.name), len(value.gates), width))
        else:
            found = self.normal(value, dims, eps, node.name)
        return self.affine(node, found, weight, bias), None, None

    def normal(self, value: Value, dims: Sequence[int], eps: float, name: str) -> Value:
        """Less its mean, divided by its deviation."""
        variance, middle = self.variance(value, list(dims), 0, name)
        return self.scalars(lambda v, m, s: (v - m) * POINTWISE["rsqrt"](s + float(eps)), [value, middle, variance],
                            value.axes, f"{name}_normal")

    def op_native_group_norm(self, node: torch.fx.Node, input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int,
                             group: int, eps: float) -> tuple[Value | None, ...]:
        value = self.value(input)
        count = len(value.gates)
        if HxW != 1 or value.axes not in ((BATCH, UNITS), (BATCH, COLUMNS)):
            raise CellError(f"group_norm of {described(value)}; expected (B, C)")
        if group % count == 0 and width_of(value, self.sizes) == "H":
            rows = [whole(gate, f"{node.name}_row", self.like, self.sizes) for gate in value.gates]
            gates = [Gate(normalized(row, eps, f"{node.name}_{n}", group // count)) for n, row in enumerate(rows)]
        elif count % group == 0:
            size = count // group
            parts = [canonical(value.axes, value.gates[n:n + size]) for n in range(0, count, size)]
            gates = [g for n, part in enumerate(parts) for g in self.normal(part, [1], eps, f"{node.name}_{n}").gates]
        else:
            raise CellError(f"{group} groups of {described(value)}")
        return self.affine(node, Value(value.axes, tuple(gates)), weight, bias), None, None

    def op_native_batch_norm_legit_no_training(self, node: torch.fx.Node, input: Any, weight: Any, bias: Any,
                                               running_mean: Any, running_var: Any, momentum: float,
                                               eps: float) -> tuple[Value | None, ...]:
        value = self.value(input)
        axes, count, width = self.frame([value], value.shape(self.sizes))
        middle, variance = (self.weights(w, axes, count, width) for w in (running_mean, running_var))
        found = self.scalars(lambda v, m, s: (v - m) * POINTWISE["rsqrt"](s + float(eps)), [value, middle, variance],
                             axes, f"{node.name}_normal")
        return self.affine(node, found, weight, bias), None, None

    def affine(self, node: torch.fx.Node, value: Value, weight: Any, bias: Any) -> Value:
        """Times a gain and with a bias, where there are any."""
        axes, count, width = self.frame([value], value.shape(self.sizes))
        if weight is not None:
            value = self.scalars(lambda v, w: v * w, [value, self.weights(weight, axes, count, width)], axes,
                                 f"{node.name}_scaled")
        if bias is not None:
            value = self.scalars(lambda v, w: v + w, [value, self.weights(bias, axes, count, width)], axes,
                                 f"{node.name}_shifted")
        return value


def row_sum(tensor: Any, name: str) -> Any:
    """Of all values of each row of a te tensor (B, W) or (B, G, W), (B,)."""
    from tvm import te

    axes = [te.reduce_axis((0, int(extent)), "k") for extent in tensor.shape[1:]]
    return te.compute((tensor.shape[0],), lambda b: te.sum(tensor(b, *axes), axis=axes), name=f"{name}_total")
