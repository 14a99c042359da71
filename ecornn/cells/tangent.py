"""The tangent of a cell: a cell whose states are values and, beside them, their derivatives in a direction.

The step is differentiated forward, operation by operation, so that the tangent of a cell is a cell like any other, and
has a tangent itself. Gradients of its tangents are the second derivatives of the cell's outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ecornn.analysis.declared import SHIFT
from ecornn.analysis.graph import analyse, placed
from ecornn.analysis.operators import CUSTOM, key_of, number, variable, where
from ecornn.analysis.scalar import children, is_constant, is_load, load_parts, multiplies, rebuild, reduces, transform
from ecornn.analysis.step import Assign
from ecornn.analysis.sweep import TIE, Factor, Partials, weighted
from ecornn.cells.base import Cell, Shape
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.te import Tensor
    from tvm.tirx import Reduce, Var

    Pair = tuple[Tensor, Tensor | None]  # a value and its tangent; None: it is zero
    Known = dict[Var, Callable[[Sequence[Any]], Any]]  # variable -> what it is at places of axes

VALUE = "x_value"  # a sequence: x as it is read at [b, j]


class Tangent(Cell):
    """The tangent of ``cell`` for x (B, I) and H = ``hidden``. Names of tangents are those of values and ``end``.

    ``x`` (B, 2 I) is x and its tangent side by side; where the cell reads x at [b, j], both come as ``inputs``, too.
    States and outputs are the cell's, and behind them their tangents. A matrix W (G, R, I) of ``of_x``, which
    multiplies x, is passed as ((W, 0), (dW, W)), (2 G, R, 2 I); others are passed beside their tangents."""

    order: int  # how often the innermost cell has been differentiated

    def __init__(self, cell: Cell, input: int, hidden: int) -> None:
        graph = analyse(cell, cell.row_width(input, hidden), hidden, sums=False)
        order = 1 + (cell.order if isinstance(cell, Tangent) else 0)
        self.cell, self.input, self.hidden, self.order, self.end = cell, input, hidden, order, f"_d{order}"
        self.name, self.reads_x = f"{cell.name}{self.end}", graph.x is not None
        self.states = self._both(cell.states)
        self.output = self._both(cell.output_names())
        self.nonnegative = tuple(cell.nonnegative)
        self.inputs = self._both((*cell.inputs, VALUE) if self.reads_x else cell.inputs)
        self.own = {name: tuple(shape) for name, shape in cell.parameters(input, hidden).items()}
        self.of_x = {p.term.parameter for p in graph.hoisted_products}
        beside = {v.parameter for v in graph.vectors} | {t.parameter for p in graph.every_product for t in p.terms
                                                         if t.operand is not None}
        self.shapes: dict[str, Shape] = {}
        for name, shape in self.own.items():
            if name in self.of_x:
                self.shapes[self.x_name(name)] = 2 * shape[0], shape[1], 2 * input
            if name in beside:
                self.shapes |= {name: shape, f"{name}{self.end}": shape}
        self.unread = tuple(self.shapes)
        self.says_derivatives = any(_says(a.value) for a in graph.every_assign)  # in place of those of its values

    def _both(self, names: Sequence[str]) -> tuple[str, ...]:
        return (*names, *(f"{name}{self.end}" for name in names))

    def x_name(self, name: str) -> str:
        """The name of a matrix of ``of_x`` as it is passed."""
        return f"{name}_x{self.order}"

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        return self.shapes

    def identity(self) -> str:
        text = f"{self.cell.identity()} {self.input} {self.hidden}"
        return f"{self.name}@{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        return _Forward(self, x, states, parameters).run()


def _says(e: Expr) -> bool:
    return key_of(e) == CUSTOM or any(map(_says, children(e)))


class _Sums(Partials):
    """Partial derivatives whose scalars have whole sums in one expression, so that the analysis can regroup these."""

    def named(self, e: Expr, name: str) -> Expr:
        if key_of(e) not in ("Add", "Sub"):
            return super().named(e, name)

        def inner(part: Expr) -> Expr:
            if key_of(part) not in ("Add", "Sub"):
                return super(_Sums, self).named(part, name)
            return rebuild(part, [inner(c) for c in children(part)])

        return self.kept(inner(e), name)


class _Forward:
    """Goes forward through the te graph of a step. ``pairs``: (operation, output) -> its value and tangent."""

    def __init__(self, tangent: Tangent, x: Tensor, states: Sequence[Tensor],
                 parameters: Mapping[str, Tensor]) -> None:
        from tvm import te

        cell, end, batch = tangent.cell, tangent.end, x.shape[0]
        self.tangent, self.x, self.given = tangent, x, parameters
        self.own_x = te.placeholder((batch, tangent.input), "float32", name="x")
        own_states = [te.placeholder(s.shape, "float32", name=n) for n, s in zip(cell.states, states, strict=False)]
        inputs = {n: te.placeholder(states[0].shape, "float32", name=n) for n in cell.inputs}
        self.own = {n: te.placeholder(shape, "float32", name=n) for n, shape in tangent.own.items()}
        self.states, count = states, len(own_states)
        self.pairs: dict[Any, Pair] = {
            (own.op, 0): (states[n], states[count + n]) for n, own in enumerate(own_states)}
        self.pairs |= {(t.op, 0): (parameters[n], parameters[f"{n}{end}"]) for n, t in (inputs | self.own).items()
                       if n in parameters}
        if tangent.reads_x:
            self.pairs[self.own_x.op, 0] = parameters[VALUE], parameters[f"{VALUE}{end}"]
        self.returned = cell.step(self.own_x, own_states, self.own | inputs)

    def run(self) -> list[Tensor]:
        returned = self.returned if isinstance(self.returned, (list, tuple)) else [self.returned]
        count = len(self.tangent.cell.states)
        pairs = [self.pair(tensor) for tensor in returned]
        values, tangents = [v for v, _ in pairs], [self.zero() if d is None else d for _, d in pairs]
        return [*values[:count], *tangents[:count], *values[count:], *tangents[count:]]

    def zero(self) -> Tensor:
        """Zeros, which no graph may return as constants."""
        state = self.states[-1]
        return self.compute(state.shape, lambda at: where(state(*at) > number(3.4e38), state(*at), 0.0), "zero")

    def fault(self, text: str) -> CellError:
        return CellError(f"cell {self.tangent.cell.name!r} has no forward derivative: {text}")

    def compute(self, shape: Any, value: Callable[[Sequence[Any]], Any], name: str, attributes: Any = None) -> Tensor:
        from tvm import te

        return te.compute(shape, lambda *at: value(at), name=name, attrs=dict(attributes or {}))

    def pair(self, tensor: Tensor) -> Pair:
        key = tensor.op, tensor.value_index
        if key not in self.pairs:
            if type(tensor.op).__name__ != "ComputeOp":
                raise self.fault(f"{tensor.op.name} is a {type(tensor.op).__name__}")
            body = tensor.op.body[tensor.value_index]
            if type(body).__name__ != "Reduce":
                self.pairs[key] = self.pointwise(tensor, body)
            elif multiplies(body):
                self.pairs[key] = self.product(tensor, body)
            elif reduces(body, "Add"):
                self.pairs[key] = self.sum(tensor, body)
            elif reduces(body, "Max"):
                self.pairs[key] = self.largest(tensor, body)
            else:
                raise self.fault(f"the reduction {tensor.op.name} is neither a sum nor a maximum")
        return self.pairs[key]

    # -- scalars --------------------------------------------------------------------------------
    def loads(self, e: Expr, axes: Sequence[Any]) -> tuple[Expr, Known, dict[Var, Var]]:
        """``e`` with variables for the elements that it reads; what these are at places of ``axes``; and the variables
        of tangents, by those of values."""
        found: dict[tuple, Var] = {}
        known: Known = {}
        tangents: dict[Var, Var] = {}

        def visit(part: Expr) -> Expr | None:
            if not is_load(part):
                return None
            source, indices = load_parts(part)
            key = source.op, source.value_index, tuple(map(str, indices))
            if key not in found:
                found[key] = var = variable(source.op.name, str(source.dtype))
                value, tangent = self.pair(source)
                known[var] = _element(value, indices, axes)
                if tangent is not None:
                    tangents[var] = own = variable(f"{var.name}_d")
                    known[own] = _element(tangent, indices, axes)
            return found[key]

        return transform(e, visit), known, tangents

    def pointwise(self, tensor: Tensor, body: Expr) -> Pair:
        name, shape, axes = tensor.op.name, tensor.shape, [axis.var for axis in tensor.op.axis]
        e, known, tangents = self.loads(body, axes)
        if is_constant(e):
            return self.compute(shape, lambda at: e, name), None
        partials = _Sums()
        found = Partials().of(Assign(variable(name), e)) if tangents else {}
        if not all(isinstance(factor, float) for factor in found.values()):
            whole, e = e, partials.named(e, name)
            found = partials.of(Assign(e, whole))
        for a in partials.assigns:
            known[a.var] = _element(self.compute(shape, _expression(a.value, known), a.var.name), axes, axes)
        value = self.compute(shape, _expression(e, known), name)
        alike: dict[Factor, list[Var]] = {}  # tangents with the same factor: a sum that the analysis can regroup
        for v, factor in found.items():
            if v in tangents:
                alike.setdefault(factor, []).append(tangents[v])
        parts = []
        for factor, those in alike.items():
            parts.append((factor, variable(f"{name}_d")))
            added = self.compute(shape, _expression(weighted([(1.0, v) for v in those]), known), f"{name}_d")
            known[parts[-1][1]] = _element(added, axes, axes)
        return value, self.compute(shape, _expression(weighted(parts), known), f"{name}_d") if parts else None

    # -- reductions -----------------------------------------------------------------------------
    def product(self, tensor: Tensor, body: Reduce) -> Pair:
        """A product of a matrix, which the analysis checks when it sees the result."""
        from tvm import te

        source, op = body.source[0], tensor.op
        if type(source).__name__ != "Mul" or not (is_load(source.a) and is_load(source.b)) or len(body.axis) != 1:
            raise self.fault(f"{op.name} is no product of a value and a parameter")
        (operand, at), (weight, weight_at) = sorted(map(load_parts, (source.a, source.b)), key=self._is_matrix)
        name = next(n for n, own in self.own.items() if own == weight)
        of_x = operand == self.own_x
        extent = 2 * self.tangent.input if of_x else body.axis[0].dom.extent
        axes = [*(axis.var for axis in op.axis), body.axis[0].var]

        def multiplied(x: Tensor, matrix: Tensor, first: int, end: str) -> Tensor:
            k = te.reduce_axis((0, extent), "k")

            def value(places: Sequence[Any]) -> Any:
                gate, *rest = _element_at(weight_at, axes, (*places, k.var))
                return te.sum(x(*_element_at(at, axes, (*places, k.var))) * matrix(gate + first, *rest), axis=k)

            return self.compute(tensor.shape, value, f"{op.name}{end}")

        if of_x:
            matrix = self.given[self.tangent.x_name(name)]
            gates = self.tangent.own[name][0]
            return multiplied(self.x, matrix, 0, ""), multiplied(self.x, matrix, gates, "_d")
        (value, tangent), (matrix, its) = self.pair(operand), self.pairs[weight.op, 0]
        parts = [multiplied(value, its, 0, "_dw")]
        parts += [multiplied(tangent, matrix, 0, "_dx")] if tangent is not None else []
        return multiplied(value, matrix, 0, ""), self.compute(
            tensor.shape, lambda at: parts[0](*at) + parts[1](*at) if parts[1:] else parts[0](*at), f"{op.name}_d")

    def _is_matrix(self, load: tuple[Tensor, list[Expr]]) -> bool:
        return any(own == load[0] for own in self.own.values())

    def reduced(self, tensor: Tensor, body: Reduce, kind: Any, value: Callable[[Sequence[Any]], Any], end: str,
                attributes: Any = None) -> Tensor:
        """A reduction over the axes of ``body`` of a value at places of all axes."""
        from tvm import te

        def at(places: Sequence[Any]) -> Any:
            own = [te.reduce_axis((0, axis.dom.extent), "k") for axis in body.axis]
            return kind(value((*places, *(axis.var for axis in own))), axis=own)

        return self.compute(tensor.shape, at, f"{tensor.op.name}{end}", attributes)

    def sum(self, tensor: Tensor, body: Reduce) -> Pair:
        from tvm import te

        e, known, tangents = self.loads(body.source[0], [axis.var for axis in (*tensor.op.axis, *body.axis)])
        value = self.reduced(tensor, body, te.sum, _expression(e, known), "")
        partials = Partials()
        found = partials.of(Assign(variable(tensor.op.name), e))
        for a in partials.assigns:
            known[a.var] = _expression(a.value, known)
        parts = [(factor, tangents[v]) for v, factor in found.items() if v in tangents]
        if not parts:
            return value, None
        return value, self.reduced(tensor, body, te.sum, _expression(weighted(parts), known), "_d")

    def largest(self, tensor: Tensor, body: Reduce) -> Pair:
        """A maximum, whose tangent is the mean of those of all values that are it, as of its gradient."""
        from tvm import te, tirx

        source, op = body.source[0], tensor.op
        if not is_load(source):
            raise self.fault(f"{op.name} is a maximum of an expression; give that a tensor of its own")
        of, indices = load_parts(source)
        values, tangents = self.pair(of)
        axes = [axis.var for axis in (*op.axis, *body.axis)]
        attributes = op.attrs or {}
        most = self.reduced(tensor, body, te.max, _element(values, indices, axes), "", attributes)
        if tangents is None or SHIFT in attributes:
            return most, None
        size = int(body.axis[-1].dom.extent)
        by_group = len(most.shape) == 2 and int(most.shape[1]) != int(of.shape[-1])

        def reached(at: Sequence[Any]) -> Any:
            own = most(*(at[:1] if len(most.shape) == 1 else (at[0], tirx.floordiv(at[-1], size) if by_group else
                                                             at[-1])))
            return where(values(*at) >= own - number(TIE) * tirx.max(own, number(0.0) - own), 1.0, 0.0)

        has = self.compute(of.shape, reached, f"{op.name}_has")
        share = self.compute(of.shape, lambda at: has(*at) * tangents(*at), f"{op.name}_share")
        total, count = (self.reduced(tensor, body, te.sum, _element(t, indices, axes), end)
                        for t, end in ((share, "_total"), (has, "_count")))
        return most, self.compute(tensor.shape, lambda at: total(*at) / tirx.max(count(*at), number(1.0)),
                                  f"{op.name}_d")


def _element_at(indices: Sequence[Any], axes: Sequence[Var], places: Sequence[Any]) -> list[Any]:
    own = dict(zip(axes, places, strict=True))
    return [placed(i, own) for i in indices]


def _element(tensor: Tensor, indices: Sequence[Any], axes: Sequence[Var]) -> Callable[[Sequence[Any]], Any]:
    """The element of ``tensor`` that ``indices`` name by ``axes``, as a function of places of these."""
    return lambda at: tensor(*_element_at(indices, axes, at))


def _expression(e: Expr, known: Known) -> Callable[[Sequence[Any]], Any]:
    """The value of ``e``, whose variables are ``known``, as a function of places."""
    def element(at: Sequence[Any], var: Expr) -> Expr:
        value = known[var](at)
        return value.asobject() if hasattr(value, "asobject") else value

    return lambda at: transform(e, lambda part: element(at, part) if type(part).__name__ == "Var" else None)
