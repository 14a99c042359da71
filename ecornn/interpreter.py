"""A cell's te graph carried out as it was written: a walk, whose back end is NumPy in float64. :func:`interpret` is the
reference of cells without a formula in NumPy; ``bench/step_loop.py`` is the other back end, Python that calls PyTorch.
Neither uses ``ecornn.analysis``, from which kernels are made: an error there must not be in both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ecornn.cells import Cell
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.te import ComputeOp, Operation, Tensor
    from tvm.tirx import Reduce, Var

Array = NDArray[Any]
Tangents = list[tuple[Array, list[tuple[Array, Array]]]]  # in order: a value, its operands and derivatives by these


class Operator(NamedTuple):
    """A scalar operator, on arrays of NumPy, and as PyTorch writes it in a line of Python."""

    numpy: Callable[..., Any]
    torch: str


BINARY = {
    "Add": Operator(np.add, "{0} + {1}"), "Sub": Operator(np.subtract, "{0} - {1}"),
    "Mul": Operator(np.multiply, "{0} * {1}"), "Div": Operator(np.divide, "{0} / {1}"),
    "FloorDiv": Operator(np.floor_divide, "{0} // {1}"), "FloorMod": Operator(np.mod, "{0} % {1}"),
    "Max": Operator(np.maximum, "torch.maximum({0}, {1})"), "Min": Operator(np.minimum, "torch.minimum({0}, {1})"),
    "LT": Operator(np.less, "{0} < {1}"), "LE": Operator(np.less_equal, "{0} <= {1}"),
    "GT": Operator(np.greater, "{0} > {1}"), "GE": Operator(np.greater_equal, "{0} >= {1}"),
    "EQ": Operator(np.equal, "{0} == {1}"), "NE": Operator(np.not_equal, "{0} != {1}"),
    "And": Operator(np.logical_and, "torch.logical_and({0}, {1})"),
    "Or": Operator(np.logical_or, "torch.logical_or({0}, {1})")}

ALIKE = ("exp", "exp2", "log", "log2", "log10", "log1p", "sqrt", "tanh", "sin", "cos", "tan", "sinh", "cosh", "floor",
         "ceil", "trunc", "round")  # in both libraries, by this name
FUNCTIONS = {name: Operator(getattr(np, name), f"torch.{name}({{0}})") for name in ALIKE} | {
    f"a{name}": Operator(getattr(np, f"arc{name}"), f"torch.a{name}({{0}})")
    for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")} | {
    "exp10": Operator(lambda z: np.power(10.0, z), "torch.pow(10.0, {0})"),
    "rsqrt": Operator(lambda z: 1.0 / np.sqrt(z), "torch.rsqrt({0})"),
    "pow": Operator(np.power, "torch.pow({0}, {1})"), "atan2": Operator(np.arctan2, "torch.atan2({0}, {1})"),
    "sigmoid": Operator(lambda z: 0.5 * (1.0 + np.tanh(0.5 * z)), "torch.sigmoid({0})"),
    "erf": Operator(np.vectorize(math.erf, otypes=[np.float64]), "torch.erf({0})"),
    "fabs": Operator(np.abs, "torch.abs({0})"), "nearbyint": Operator(np.round, "torch.round({0})"),
    "if_then_else": Operator(np.where, "torch.where({0}, {1}, {2})")}
OPERATORS = BINARY | FUNCTIONS | {"Not": Operator(np.logical_not, "torch.logical_not({0})")}


def interpret(cell: Cell, x: Any, parameters: Mapping[str, Any],
              states: Sequence[Any], tangents: Tangents | None = None) -> tuple[Array, tuple[Array, ...]]:
    """Runs one layer: x (T, B, I), ``parameters`` by name in te shape, states (B, H) each. Returns y (T, B, H), or (T,
    B, O H) of O outputs, and the final states; float64. ``tangents``: of values that say their own derivatives; an
    empty list gets them, and runs with a full one have these tangents instead of the values, so that differences of
    runs show the derivatives. Raises :class:`CellError` for an unknown operation."""
    now, rows = tuple(np.asarray(s, np.float64) for s in states), np.asarray(x, np.float64)
    given = {n: np.asarray(p, np.float64) for n, p in parameters.items()}
    step, y, outputs = Step(cell, rows.shape[1:], now[0].shape), [], output_numbers(cell)
    step.recorded, step.replayed = (tangents, None) if not tangents else (None, iter(tangents))
    for row in rows:
        returned = step(row, now, given)
        now = returned[:len(now)]
        y.append(np.concatenate([returned[n] for n in outputs], axis=1))
    return np.stack(y), now


def output_numbers(cell: Cell) -> tuple[int, ...]:
    returned = cell.returned_names()
    return tuple(returned.index(name) for name in cell.output_names())


class Step:
    """One step of a cell, for x (B, I), the cell's inputs behind it, and states (B, H): te tensors, and a walk through
    them. Values are NumPy arrays, of float64 but for indices and conditions. Other back ends override ``expanded``,
    ``largest``, ``plus``, ``product``, ``custom_gradient``, ``applied``, ``cast`` and ``load``."""

    def __init__(self, cell: Cell, x: tuple[int, ...], state: tuple[int, ...]) -> None:
        from tvm import te

        self.own = cell.own_input(x[1], state[1])  # behind these values rows have the cell's inputs
        self.x = te.placeholder((x[0], self.own), "float32", name="x")
        self.inputs = [te.placeholder(state, "float32", name=name) for name in cell.inputs]
        self.states = [te.placeholder(state, "float32", name=name) for name in cell.states]
        shapes = cell.parameters(self.own, state[1])
        self.parameters = {n: te.placeholder(s, "float32", name=n) for n, s in shapes.items()}
        returned = cell.step(self.x, self.states, self.parameters | dict(zip(cell.inputs, self.inputs, strict=True)))
        self.results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        self.known: dict[tuple[Operation, int], Any] = {}  # (operation, output) -> its values in this step
        self.recorded: Tangents | None = None
        self.replayed: Iterator[tuple[Array, list[tuple[Array, Array]]]] | None = None

    def __call__(self, x: Array, states: Sequence[Array], parameters: Mapping[str, Array]) -> tuple[Array, ...]:
        """The new states, and other outputs behind them; parameters by the cell's names, in te shape."""
        self.known = {(tensor.op, 0): parameters[name] for name, tensor in self.parameters.items()}
        given = np.split(x[:, self.own:], len(self.inputs), axis=1) if self.inputs else []
        for tensor, value in zip((self.x, *self.inputs, *self.states), (x[:, :self.own], *given, *states), strict=True):
            self.known[tensor.op, 0] = value
        return tuple(self.tensor(result) for result in self.results)

    # -- the walk -------------------------------------------------------------------------------
    def tensor(self, tensor: Tensor) -> Any:
        key = tensor.op, tensor.value_index
        if key not in self.known:
            if type(tensor.op).__name__ != "ComputeOp":
                raise CellError(f"{self.NOTHING} {tensor.op.name}, a {type(tensor.op).__name__}")
            self.known[key] = self.compute(tensor.op, tensor.op.body[tensor.value_index])
        return self.known[key]

    def compute(self, op: ComputeOp, body: Expr) -> Any:
        """``body`` at all places of the operation's axes. Values within it have a dimension for each axis, of one entry
        for those that they do not depend on."""
        reduction = type(body).__name__ == "Reduce"
        axes = [*op.axis, *(body.axis if reduction else ())]
        extents = tuple(int(axis.dom.extent) for axis in axes)
        places = {axis.var: int(axis.dom.min) + np.arange(extents[n]).reshape(
            [extents[n] if m == n else 1 for m in range(len(axes))]) for n, axis in enumerate(axes)}
        shape = extents[:len(op.axis)]
        if not reduction:
            return self.expanded(self.value(body, places), shape)
        start, combined = reduced(op.name, body)
        if type(body.combiner.result[body.value_index]).__name__ == "Max":
            return self.largest(self.value(combined, places), extents, len(shape))
        total = self.product(self.multiplied(factors(combined), places), extents, len(shape))
        return self.expanded(total if start is None else self.plus(total, self.value(start, places)), shape)

    def multiplied(self, parts: Sequence[Expr], places: Mapping[Var, Array]) -> list[Any]:
        return [self.value(part, places) for part in parts]

    def value(self, e: Expr, places: Mapping[Var, Array]) -> Any:
        kind = type(e).__name__
        if kind == "Var":
            return places[e]
        if kind in ("FloatImm", "IntImm"):
            return np.full((1,) * len(places), e.value)
        if kind == "Call" and e.op.name == "te.tensor_load":
            return self.load(self.tensor(e.args[0]), [self.value(i, places) for i in e.args[1:]], len(places))
        if kind == "Cast":
            return self.cast(self.value(e.value, places), str(e.ty))
        if kind == "Not":
            name, arguments = kind, [e.a]
        elif kind == "Select":
            name, arguments = "if_then_else", [e.condition, e.true_value, e.false_value]
        elif kind in BINARY:
            name, arguments = kind, [e.a, e.b]
        elif kind == "Call" and (name := e.op.name.rsplit(".", 1)[-1]) == "custom_gradient":
            first, *pairs = e.args
            return self.custom_gradient(self.value(first, places), pairs, places)
        elif kind == "Call" and name in FUNCTIONS:
            arguments = e.args
        else:
            raise CellError(f"the cell uses {e.op.name if kind == 'Call' else kind}, {self.UNKNOWN}")
        return self.applied(name, [self.value(argument, places) for argument in arguments])

    # -- values in NumPy ------------------------------------------------------------------------
    NOTHING = "NumPy has no reference for"
    UNKNOWN = "which NumPy has no reference for; name the schedule and configuration instead of tuning"

    def expanded(self, value: Any, shape: tuple[int, ...]) -> Any:
        """``value`` with as many entries along each axis as ``shape`` has."""
        return np.array(np.broadcast_to(value, shape))

    def largest(self, value: Any, extents: tuple[int, ...], kept: int) -> Any:
        """The maximum of ``value``, of shape ``extents``, over the axes behind the first ``kept``."""
        return np.broadcast_to(value, extents).max(axis=tuple(range(kept, len(extents))))

    def plus(self, total: Any, start: Any) -> Any:
        return total + start.item()

    def product(self, values: Sequence[Any], extents: tuple[int, ...], kept: int) -> Any:
        """The product of ``values`` at all places, of shape ``extents``, summed over the axes behind the first
        ``kept``; one entry for a kept axis on which no value depends."""
        shared = [any(v.shape[n] > 1 for v in values) for n in range(len(extents))]
        operands: list[Any] = []
        for v in values:
            own = [n for n, size in enumerate(v.shape) if size > 1]
            operands += [v.reshape([v.shape[n] for n in own]), own]
        out = [n for n in range(kept) if shared[n]]
        total = np.einsum(*operands, out, optimize=len(values) > 1)
        alike = math.prod(size for n, size in enumerate(extents) if n >= kept and not shared[n])
        return total.reshape([extents[n] if shared[n] else 1 for n in range(kept)]) * alike

    def custom_gradient(self, value: Any, pairs: Sequence[Expr], places: Mapping[Var, Array]) -> Any:
        """``value``, whose derivatives ``pairs`` say: an operand, the derivative by it, and so on; or its tangent."""
        if self.recorded is not None:
            of = [self.value(e, places) for e in pairs]
            self.recorded.append((value, [*zip(of[::2], of[1::2], strict=True)]))
        if self.replayed is None:
            return value
        value, before = next(self.replayed)
        now = (self.value(e, places) for e in pairs[::2])
        return value + sum(d * (x - at) for x, (at, d) in zip(now, before, strict=True))

    def applied(self, name: str, arguments: Sequence[Any]) -> Any:
        return np.asarray(OPERATORS[name].numpy(*arguments))

    def cast(self, value: Any, kind: str) -> Any:
        """``value`` as the type ``kind`` has it; float32 and float64 stay as exact as they are."""
        if kind in ("float32", "float64"):
            return value.astype(np.float64)
        return value.astype(np.float16).astype(np.float64) if kind == "float16" else value.astype(kind)

    def load(self, source: Any, indices: Sequence[Any], axes: int) -> Any:
        """``source`` at ``indices``, one for each of its dimensions; the result has ``axes`` dimensions."""
        along = [[n for n, size in enumerate(i.shape) if size > 1] for i in indices]
        moving = [own[0] for own in along if own]
        if any(len(own) > 1 for own in along) or len(set(moving)) < len(moving):
            return np.asarray(source[tuple(indices)])
        for dimension, i in enumerate(indices):  # each axis has a dimension of its own: mostly nothing is copied
            line = i.reshape(-1)
            low = int(line[0])
            if low >= 0 and int(line[-1]) < source.shape[dimension] and (np.diff(line) == 1).all():
                source = source[(slice(None),) * dimension + (slice(low, low + len(line)),)]
            else:
                source = np.take(source, line, axis=dimension)
        order = sorted(range(len(indices)), key=lambda d: along[d][0] if along[d] else -1)
        shape = [1] * axes
        for dimension, own in enumerate(along):
            if own:
                shape[own[0]] = source.shape[dimension]
        return source.transpose(order).reshape(shape)


def reduced(name: str, body: Reduce) -> tuple[Expr | None, Expr]:
    """The value that a reduction starts at, None for a sum that starts at 0, and the expression that it reduces. Raises
    :class:`CellError` for what is neither a sum nor a maximum, or has a condition."""
    n, combiner = body.value_index, body.combiner
    result = combiner.result[n]
    sides, known = (combiner.lhs[n], combiner.rhs[n]), type(result).__name__ in ("Add", "Max")
    if not known or not all(a.same_as(b) for a, b in zip((result.a, result.b), sides, strict=True)):
        raise CellError(f"NumPy has no reference for the reduction {name!r}, which is neither a sum nor a maximum")
    if type(body.condition).__name__ != "IntImm" or not int(body.condition):
        raise CellError(f"NumPy has no reference for the sum {name!r}, which has a condition")
    return (body.init[n] if len(body.init) else None), body.source[n]


def factors(e: Expr) -> list[Expr]:
    """The factors of a product; any other expression is its own only one."""
    return factors(e.a) + factors(e.b) if type(e).__name__ == "Mul" else [e]
