"""A cell's te graph carried out in NumPy float64: the reference of cells that have no formula in NumPy, for users, for
the tuner, and for ``ecornn check-cell``.

It knows nothing of ``ecornn.analysis``, from which kernels are made: an error there must not be in both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ecornn.cells import Cell
from ecornn.errors import ArgumentError, CellError
from ecornn.numpy_layers import Formula

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.te import ComputeOp, Operation, Tensor
    from tvm.tirx import Reduce, Var

Array = NDArray[Any]


def _erf(z: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(z)


BINARY: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "FloorDiv": np.floor_divide,
    "FloorMod": np.mod, "Max": np.maximum, "Min": np.minimum, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
    "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal, "And": np.logical_and, "Or": np.logical_or}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "tanh": np.tanh, "sigmoid": lambda z: 0.5 * (1.0 + np.tanh(0.5 * z)),
    "log": np.log, "log2": np.log2, "log1p": np.log1p, "exp2": np.exp2, "sqrt": np.sqrt,
    "rsqrt": lambda z: 1.0 / np.sqrt(z), "fabs": np.abs, "pow": np.power, "erf": _erf,
    "exp10": lambda z: np.power(10.0, z), "log10": np.log10,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "atan2": np.arctan2, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.round,
    "nearbyint": np.round, "if_then_else": np.where}


def interpret(cell: Cell, x: Any, parameters: Mapping[str, Any],
              states: Sequence[Any]) -> tuple[Array, tuple[Array, ...]]:
    """One layer: x (T, B, I), ``parameters`` by the cell's names in te shape, states (B, H) each,
    to y (T, B, H), or (T, B, O H) of O outputs side by side, and the final states; float64.
    :class:`CellError` for an operation that is not known here."""
    now = tuple(np.asarray(s, np.float64) for s in states)
    rows = np.asarray(x, np.float64)
    given = {n: np.asarray(p, np.float64) for n, p in parameters.items()}
    step, y, outputs = Step(cell, rows.shape[1:], now[0].shape), [], output_numbers(cell)
    for row in rows:
        made = step(row, now, given)
        now = made[:len(now)]
        y.append(np.concatenate([made[n] for n in outputs], axis=1))
    return np.stack(y), now


def output_numbers(cell: Cell) -> tuple[int, ...]:
    """Which of what a step returns the outputs are."""
    returned = cell.returned_names()
    return tuple(returned.index(name) for name in cell.output_names())


def formula_of_cell(cell: Cell, x: Any, weights: Mapping[str, Any], state: Sequence[Any] | None) -> Formula:
    """A cell's te step as :func:`~ecornn.numpy_reference.reference` runs it through sequences, whose arguments say how
    large the cell is."""
    if not isinstance(cell, Cell):
        raise ArgumentError("cell", cell, "an ecornn.Cell, or the name of one that has a formula in NumPy")
    hidden = hidden_size(cell, np.shape(x)[-1] if np.ndim(x) else 1, weights, state)
    steps: dict[tuple[tuple[int, ...], ...], Step] = {}  # by the shapes of x and a state

    def step(row: Array, states: tuple[Array, ...], weights: Sequence[Array]) -> tuple[Array, ...]:
        shapes = row.shape, states[0].shape
        if shapes not in steps:
            steps[shapes] = Step(cell, *shapes)
        te_shapes = cell.parameters(cell.own_input(row.shape[1], hidden), hidden)
        return steps[shapes](row, states, {n: w.reshape(s) for (n, s), w in zip(te_shapes.items(), weights,
                                                                               strict=True)})

    return Formula(cell.name, tuple(cell.parameters(hidden, hidden)), cell.parameter_name,
                   lambda inputs, hidden: list(flat_shapes(cell, inputs, hidden).values()), lambda *_: hidden,
                   len(cell.states), output_numbers(cell), step)


def flat_shapes(cell: Cell, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a cell's parameters as a user passes them, gates folded into the first axis, where rows of x have
    ``width`` values, the cell's inputs among them."""
    return {n: (s[0] * s[1], *s[2:]) for n, s in cell.parameters(cell.own_input(width, hidden), hidden).items()}


def hidden_size(cell: Cell, input: int, weights: Mapping[str, Any], state: Sequence[Any] | None) -> int:
    """H: that of a state, else the one with which most weights of the first layer have the shapes that the cell gives
    them; without parameters I."""
    if state is not None and len(state) and np.ndim(state[0]):
        return np.shape(state[0])[-1]
    given = {n: np.shape(w) for n, w in weights.items()}
    rows = {shape[0] for shape in given.values() if shape}
    found = {input: 0}
    for hidden in sorted({d for r in rows for d in range(1, r + 1) if r % d == 0}):
        with contextlib.suppress(Exception):  # a cell may refuse sizes
            shapes = flat_shapes(cell, input, hidden)
            found[hidden] = sum(given.get(cell.parameter_name(n)) == shape for n, shape in shapes.items())
    return max(found, key=lambda hidden: found[hidden])


class Step:
    """One step of a cell, for x (B, I), with the cell's inputs behind it, and states (B, H) of these shapes."""

    def __init__(self, cell: Cell, x: tuple[int, ...], state: tuple[int, ...]) -> None:
        from tvm import te

        self.own = cell.own_input(x[1], state[1])  # behind these values rows have the cell's inputs
        self.x = te.placeholder((x[0], self.own), "float32", name="x")
        self.inputs = [te.placeholder(state, "float32", name=name) for name in cell.inputs]
        self.states = [te.placeholder(state, "float32", name=name) for name in cell.states]
        shapes = cell.parameters(self.own, state[1])
        self.parameters = {n: te.placeholder(s, "float32", name=n) for n, s in shapes.items()}
        found = cell.step(self.x, self.states, {**self.parameters, **dict(zip(cell.inputs, self.inputs, strict=True))})
        self.results = list(found) if isinstance(found, (list, tuple)) else [found]
        self.known: dict[tuple[Operation, int], Array] = {}  # (operation, output) -> its values in this step

    def __call__(self, x: Array, states: Sequence[Array], parameters: Mapping[str, Array]) -> tuple[Array, ...]:
        """The new states, and other outputs behind them; parameters by the cell's names, in te shape."""
        self.known = {(tensor.op, 0): parameters[name] for name, tensor in self.parameters.items()}
        given = np.split(x[:, self.own:], len(self.inputs), axis=1) if self.inputs else []
        for tensor, value in zip((self.x, *self.inputs, *self.states), (x[:, :self.own], *given, *states), strict=True):
            self.known[tensor.op, 0] = value
        return tuple(self.tensor(result) for result in self.results)

    def tensor(self, tensor: Tensor) -> Array:
        """All values of a tensor."""
        key = tensor.op, tensor.value_index
        if key not in self.known:
            if type(tensor.op).__name__ != "ComputeOp":
                raise CellError(f"NumPy has no reference for {tensor.op.name}, a {type(tensor.op).__name__}")
            self.known[key] = self.compute(tensor.op, tensor.op.body[tensor.value_index])
        return self.known[key]

    def compute(self, op: ComputeOp, body: Expr) -> Array:
        """``body`` at all places of the operation's axes: in arrays with a dimension for each axis, of which those that
        a value does not depend on have one entry."""
        reduction = type(body).__name__ == "Reduce"
        axes = [*op.axis, *(body.axis if reduction else ())]
        extents = tuple(int(axis.dom.extent) for axis in axes)
        places = {}
        for n, axis in enumerate(axes):
            along = [extents[n] if m == n else 1 for m in range(len(axes))]
            places[axis.var] = int(axis.dom.min) + np.arange(extents[n]).reshape(along)
        shape = extents[:len(op.axis)]
        if not reduction:
            return np.array(np.broadcast_to(self.value(body, places), shape))
        if type(body.combiner.result[body.value_index]).__name__ == "Max":
            whole = np.broadcast_to(self.value(self.parts(op.name, body)[1], places), extents)
            return np.asarray(whole.max(axis=tuple(range(len(shape), len(extents)))))
        start, combined = self.parts(op.name, body)
        values = self.multiplied(factors(combined), places)
        return np.asarray(self.product(values, extents, len(shape))) + (
            0.0 if start is None else self.value(start, places).item())

    def multiplied(self, parts: Sequence[Expr], places: Mapping[Var, Array]) -> list[Array]:
        """The values of what a sum is a sum of products of."""
        return [self.value(part, places) for part in parts]

    def parts(self, name: str, body: Reduce) -> tuple[Expr | None, Expr]:
        """Where a sum starts, if not at 0, and what it is of."""
        n, combiner = body.value_index, body.combiner
        result = combiner.result[n]
        sides, known = (combiner.lhs[n], combiner.rhs[n]), type(result).__name__ in ("Add", "Max")
        if not known or not all(a.same_as(b) for a, b in zip((result.a, result.b), sides, strict=True)):
            raise CellError(f"NumPy has no reference for the reduction {name!r}, which is neither a sum "
                            "nor a maximum")
        if type(body.condition).__name__ != "IntImm" or not int(body.condition):
            raise CellError(f"NumPy has no reference for the sum {name!r}, which has a condition")
        return (body.init[n] if len(body.init) else None), body.source[n]

    def product(self, values: Sequence[Array], extents: tuple[int, ...], kept: int) -> Array:
        """The product of ``values`` at all places, of shape ``extents``, summed over the axes behind ``kept``."""
        shared = [any(v.shape[n] > 1 for v in values) for n in range(len(extents))]
        operands: list[Any] = []
        for v in values:
            own = [n for n, size in enumerate(v.shape) if size > 1]
            operands += [v.reshape([v.shape[n] for n in own]), own]
        out = [n for n in range(kept) if shared[n]]
        found = np.einsum(*operands, out, optimize=len(values) > 1)
        found = found.reshape([extents[n] if shared[n] else 1 for n in range(kept)])
        alike = math.prod(size for n, size in enumerate(extents) if n >= kept and not shared[n])
        return np.broadcast_to(found * alike, extents[:kept])

    def value(self, e: Expr, places: Mapping[Var, Array]) -> Array:
        """An expression at all ``places`` of its axes."""
        kind = type(e).__name__
        if kind == "Var":
            return places[e]
        if kind in ("FloatImm", "IntImm"):
            return np.full((1,) * len(places), e.value)
        if kind == "Call" and e.op.name == "te.tensor_load":
            return self.load(self.tensor(e.args[0]), [self.value(i, places) for i in e.args[1:]], len(places))
        if kind == "Cast":
            return cast(self.value(e.value, places), str(e.ty))
        if kind == "Not":
            return np.logical_not(self.value(e.a, places))
        if kind == "Select":
            return np.where(*(self.value(c, places) for c in (e.condition, e.true_value, e.false_value)))
        if kind in BINARY:
            return np.asarray(BINARY[kind](self.value(e.a, places), self.value(e.b, places)))
        name = e.op.name if kind == "Call" else kind
        if kind != "Call" or name.rsplit(".", 1)[-1] not in FUNCTIONS:
            raise CellError(f"the cell uses {name}, which NumPy has no reference for; name the "
                            "schedule and configuration instead of tuning")
        return np.asarray(FUNCTIONS[name.rsplit(".", 1)[-1]](*(self.value(a, places) for a in e.args)))

    def load(self, source: Array, indices: Sequence[Array], axes: int) -> Array:
        """``source`` at the places that ``indices`` are, one for each of its dimensions."""
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


def factors(e: Expr) -> list[Expr]:
    """What is multiplied."""
    return factors(e.a) + factors(e.b) if type(e).__name__ == "Mul" else [e]


def cast(value: Array, kind: str) -> Array:
    """``value`` as ``kind`` has it; float32 and float64 stay as exact as they are."""
    if kind in ("float32", "float64"):
        return value.astype(np.float64)
    return value.astype(np.float16).astype(np.float64) if kind == "float16" else value.astype(kind)
