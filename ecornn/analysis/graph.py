"""Walks the te graph of a cell's step and sorts every operation by level.

Pointwise tensors are inlined into scalars of one (b, j); reductions are products with a weight, or statistics of a
batch row (``row_reductions.py``). Sums are regrouped by level, so that biases are added once, and input terms outside
the recurrence; within a level the cell's order stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ecornn.analysis.declared import Lines, Source, check_names, check_read, returned_tensors, shapes_of
from ecornn.analysis.heads import by_shape, heads_at
from ecornn.analysis.operators import operator_of
from ecornn.analysis.row_reductions import RowReductions
from ecornn.analysis.scalar import children, extent_of, is_constant, is_load, load_parts, reduces, transform, variables
from ecornn.analysis.step import Assign, Level, Phase, Product, StepGraph, Term
from ecornn.analysis.sums import summed
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.te import Tensor
    from tvm.tirx import Reduce, Var

ARITHMETIC = ("Add", "Sub", "Mul", "FloorDiv", "FloorMod")  # of indices
BATCH = 3  # any size unlike the others: te needs numbers, the graph does not keep it


def analyse(cell: Source, input: int, hidden: int, sums: bool = True) -> StepGraph:
    """The step graph of ``cell`` for H = ``hidden`` and rows of ``input`` values: the I of x, and H of each of the
    cell's inputs. ``sums``: True makes one of products that are only added up. Raises :class:`CellError`, naming the
    tensor, where an operation cannot be scheduled."""
    with stack_for(cell.name):
        graph = _Walk(cell, input, hidden).run()
        return summed(graph) if sums else graph


@contextmanager
def stack_for(cell: str) -> Iterator[None]:
    """Raises :class:`CellError` where work on a step takes more of Python's stack than there is."""
    try:
        yield
    except RecursionError as error:
        raise CellError(f"cell {cell!r}: its step is a longer chain of operators than Python's stack has room "
                        "for, which is about a hundred; increase it with sys.setrecursionlimit()") from error


class _Walk(RowReductions):
    def __init__(self, cell: Source, input: int, hidden: int) -> None:
        from tvm import te

        check_names(cell)
        super().__init__(cell, hidden)
        self.input = input = input - len(cell.inputs) * hidden
        if input < 1:
            raise self.fault(f"the input size must be larger: inputs {cell.inputs} leave no value for x in a row")
        self.lines = Lines()
        self.x_tensor = te.placeholder((BATCH, input), "float32", name="x")
        self.state_tensors = [te.placeholder((BATCH, hidden), "float32", name=n) for n in cell.states]
        self.input_tensors = {n: te.placeholder((BATCH, hidden), "float32", name=n) for n in cell.inputs}
        self.shapes = shapes_of(cell, input, hidden, self.lines)
        self.parameter_tensors = {n: te.placeholder(s, "float32", name=n) for n, s in self.shapes.items()}
        self.products: list[Product] = []
        self.x: Var | None = None
        self.scalars: dict[tuple, Expr] = {}  # (op, output, indices) -> scalar

    # -- leaves ---------------------------------------------------------------------------------
    def placeholder(self, tensor: Tensor, indices: list[Expr]) -> Var:
        parameter = next((n for n, p in self.parameter_tensors.items() if tensor == p), None)
        if parameter is not None:
            gate = self.gate(indices[0], parameter)
            if len(indices) != 2 or not self.same(indices[1], self.j):
                raise self.fault(f"{parameter}{indices} is neither part of a product nor a vector [gate, j]")
            return self.vector(("vector", parameter, gate), f"{parameter}_{gate}", parameter, gate)
        if self.width != self.hidden:
            raise self.fault(f"{tensor.op.name}{indices} is combined with {self.width} values per row; values narrower "
                             "than H can only be combined with products of the same width and with vectors")
        for kind, level, named in (("state", Level.STATE, zip(self.cell.states, self.state_tensors, strict=True)),
                                   ("input", Level.INPUT, self.input_tensors.items())):
            for name, given in named:
                if tensor == given:
                    self.at_own_unit(tensor, indices)
                    return self.leaf((kind, name), name, level)
        if tensor != self.x_tensor:
            raise self.fault(f"{tensor.op.name} is not an argument of step()")
        self.at_own_unit(tensor, indices)
        if self.input != self.hidden:  # also of a layer whose x is y of two directions
            raise self.fault(f"x{indices} outside a product needs I = H; here I = {self.input} and H = {self.hidden}")
        self.x = self.leaf(("x",), "x", Level.INPUT)
        return self.x

    def at_own_unit(self, tensor: Tensor, indices: list[Expr]) -> None:
        if len(indices) != 2 or not self.same(indices[0], self.b) or not self.same(indices[1], self.j):
            raise self.fault(f"{tensor.op.name}{indices} outside a product must be read at [b, j]")

    def gate(self, e: Expr | int, parameter: str) -> int:
        """The number of the parameter's gate that ``e`` is; negative ones count from the end, as in Python."""
        if not isinstance(e, int):
            from tvm import sym

            e = sym.Analyzer().simplify(e)
            if type(e).__name__ != "IntImm":
                raise self.fault(f"gate index {e} of {parameter} is not a constant")
        gate, count = int(e), self.shapes[parameter][0]
        if not -count <= gate < count:
            raise self.fault(f"there is no gate {gate} of {parameter}, which has {count}")
        return gate % count

    # -- tensors --------------------------------------------------------------------------------
    def scalar(self, tensor: Tensor, indices: list[Expr]) -> Expr:
        """The scalar that ``tensor[indices]`` is, for this (b, j)."""
        op = tensor.op
        if type(op).__name__ == "PlaceholderOp":
            return self.placeholder(tensor, indices)
        if type(op).__name__ != "ComputeOp":
            raise self.lines.located(self.fault(f"{op.name} is a {type(op).__name__}; only te.compute is "
                                                "supported"), op)
        # what is one value a row may be another one beside narrow values
        key = (op, tensor.value_index, tuple(str(i) for i in indices), self.width if len(op.axis) == 1 else 0)
        if key not in self.scalars:
            self.within(tensor, indices)
            where = {axis.var: i for axis, i in zip(op.axis, indices, strict=True)}
            body = op.body[tensor.value_index]
            try:
                if type(body).__name__ == "Reduce":
                    statistic = self.reduced(op, body, where)
                    self.scalars[key] = self.product(op.name, body, where) if statistic is None else statistic
                else:
                    value = self.inline(body, where)
                    self.check(op.name, value)
                    self.scalars[key] = self.name_of(value, op.name)
            except CellError as error:
                raise self.lines.located(error, op) from error.__cause__
        return self.scalars[key]

    def within(self, tensor: Tensor, indices: list[Expr]) -> None:
        """Raises :class:`CellError` where a tensor is read beyond its shape, or at [.., j] without having H values; of
        a product its parameter tells."""
        product = type(tensor.op.body[tensor.value_index]).__name__ == "Reduce"
        for extent, e in zip(map(int, tensor.shape), indices, strict=True):
            if self.same(e, self.j) and extent != self.width:
                raise self.fault(f"{tensor.op.name} has {extent} values per row; expected "
                                + (f"{self.width}, as the values beside it" if self.width != self.hidden else
                                   f"H = {self.hidden}, since it is read for each hidden unit"))
            if type(e).__name__ == "IntImm" and not 0 <= int(e) < extent and not product:
                at = ", ".join(map(str, indices))
                raise self.fault(f"there is no {tensor.op.name}[{at}]; its shape is {tuple(map(int, tensor.shape))}")

    def check(self, name: str, value: Expr) -> None:
        """Raises :class:`CellError` where a pointwise value is of another type, an index, or of an unknown operator."""
        if str(value.ty) not in ("float32", "bool"):
            raise self.fault(f"{name!r} is {value.ty}; the values of a step must be float32")
        index = next((v for v in variables(value) if self.same(v, self.b) or self.same(v, self.j)), None)
        if index is not None:
            raise self.fault(f"{name!r} computes with the index {index}; indices may only be used to read tensors. "
                             "Use a vector parameter for a value that differs between units")
        pending = [value]
        while pending:
            e = pending.pop()
            if type(e).__name__ != "Var" and not is_constant(e):
                operator_of(e)
                pending.extend(children(e))

    def inline(self, body: Expr, where: Mapping[Var, Expr]) -> Expr:
        def visit(e: Expr) -> Expr | None:
            if type(e).__name__ == "Var":
                return where.get(e, e)
            if is_load(e):
                tensor, indices = load_parts(e)
                return self.scalar(tensor, [placed(i, where) for i in indices])
            return None

        return transform(body, visit)

    def product(self, name: str, body: Reduce, where: dict[Var, Expr]) -> Var:
        """A reduction: must be sum over k of operand[b, k] * weight[gate, j, k]."""
        fault = self.fault(f"the reduction {name!r} is neither a product sum_k source[b, k] * weight[gate, j, k] nor a "
                           "sum of groups [b, g] = sum_k value[b, g * K + k] with H = n * K. The weight must be a "
                           "parameter itself; compute others in derived()")
        source = body.source[0]
        if len(body.axis) != 1 or type(source).__name__ != "Mul" or not reduces(body, "Add"):
            raise fault
        if not is_load(source.a) or not is_load(source.b):
            raise fault
        k, loads = body.axis[0].var, [load_parts(side) for side in (source.a, source.b)]
        names = [next((n for n, t in self.parameter_tensors.items() if t == tensor), None) for tensor, _ in loads]
        if names[0] is not None:
            loads.reverse()
            names.reverse()
        ((operand, at), (_, weight_at)), weight = loads, names[1]
        if names[0] is not None or weight is None or len(weight_at) != 3:
            raise fault
        place = [transform(i, lambda e: where.get(e, e) if type(e).__name__ == "Var" else None)
                 for i in (*at[:1], *weight_at)]
        if not (len(at) == 2 and self.same(place[0], self.b) and self.same(place[2], self.j)
                and self.same(place[3], k)):
            raise fault
        of_x, width, (_, made, own) = operand == self.x_tensor, int(operand.shape[1]), self.shapes[weight]
        heads = heads_at(at[1], next(v for v, e in where.items() if self.same(e, self.j)), k, width, own)
        if not heads:
            raise fault
        if heads > 1 and of_x:
            raise self.fault(f"product {name!r} of x has {heads} heads, which only products of H values can have: pass "
                             f"{weight} as a block matrix with zeros")
        extent = extent_of(body.axis[0])
        if not extent == width // heads == own:
            raise self.fault(f"product {name!r} sums {extent} terms of {operand.op.name}, which has {width // heads} "
                             f"values per row, with {weight}, whose rows have {own}")
        gate = self.gate(place[1], weight)
        if made != self.width:
            raise self.fault(f"product {name!r} has {self.width} values per row, but {weight} has {made} rows")
        if heads > 1 and (made, width) != (self.hidden, self.hidden):
            raise self.fault(f"product {name!r} has {heads} heads; only products of H values with H rows can have "
                             "heads")
        source_var, level = None, Level.INPUT
        if not of_x:
            source_var = self.operand(operand, width)
            if self.level[source_var] < Level.STATE:
                raise self.fault(f"product {name!r} reads {operand.op.name}, which depends on no state; such a "
                                 "product can only read x itself")
            level = self.level[source_var] + 1
        key = ("row", source_var, weight, gate)
        if key not in self.leaves:
            var = self.leaf(key, f"{'x' if source_var is None else source_var.name}_{weight}_{gate}", level)
            term = Term(source_var, weight, gate, heads=heads, rows=made % self.hidden,
                        columns=0 if of_x else width % self.hidden)
            self.products.append(Product(var, (term,)))
        return self.leaves[key]

    def operand(self, tensor: Tensor, width: int) -> Expr:
        """The scalar that a product multiplies, of a tensor with ``width`` values a row."""
        what = f"the factor {tensor.op.name} of a product"
        if width > self.hidden:
            raise self.fault(f"{what} has {width} values per row; only x can have more than H = {self.hidden}. "
                             "Add the products of its parts instead")
        with self.of_width(width):
            value = self.scalar(tensor, [self.b, self.j])
        if is_constant(value):
            raise self.fault(f"{what} is a constant")
        if width < self.hidden and not np.isfinite(self.zeros()[value]):
            raise self.fault(f"{what} is narrower than H, and it is not finite when the products that it is "
                             "computed from are 0")
        return value

    # -- result ---------------------------------------------------------------------------------
    def run(self) -> StepGraph:
        returned = self.returned()
        results = {name: returned[name] for name in self.cell.states}
        (output, *others) = self.cell.output_names()
        written = () if output in results and not others else tuple(returned[n] for n in (output, *others))
        check_read(self.cell, self.shapes, {(v.parameter, v.gate) for v in self.vectors}
                   | {p.term.source for p in self.products}, self.lines)
        inputs = {n: self.leaf(("input", n), n, Level.INPUT) for n in self.cell.inputs if ("input", n) in self.leaves}
        if missing := [n for n in self.cell.inputs if n not in inputs]:
            raise self.lines.declared(self.fault(f"step() does not read input {missing[0]!r}"),
                                      type(self.cell).step, missing[0])
        states = {n: self.leaf(("state", n), n, Level.STATE) for n in self.cell.states}
        self.products.sort(key=lambda p: (list(self.shapes).index(p.term.parameter), p.term.gate))
        phases = []
        for p in range(1, max(self.level.values(), default=0) + 1):
            phases += by_shape(Phase.of(self.products_at(p), self.at(p), self.statistics.at(p, self.leaves)))
        read = self.read_since(Level.STATE) | dict.fromkeys((*results.values(), *written))
        hoisted = [v for v in read if self.level[v] in (Level.INPUT, Level.NORMALIZED)]
        projected, normalizing = hoisted, self.statistics.at(Level.NORMALIZED, self.leaves)
        if normalizing:
            projected = [v for v in self.read_since(Level.NORMALIZED) | read if self.level[v] == Level.INPUT]
        most = max(len(projected), len(hoisted)) if hoisted else 0
        return StepGraph(
            cell=self.cell.name, parameters=self.shapes, states=states, results=results,
            output="" if written else output, outputs=written, x=self.x, vectors=tuple(self.vectors),
            invariants=self.at(Level.INVARIANT), hoisted_products=self.products_at(Level.INPUT),
            hoisted=self.at(Level.INPUT), inputs=inputs, prologue=self.at(Level.STATE), phases=tuple(phases),
            hoisted_outputs=repeated(hoisted, most), projected=repeated(projected, most),
            hoisted_statistics=normalizing, normalized=self.at(Level.NORMALIZED),
            invariant_outputs=tuple(v for v in read if self.level[v] == Level.INVARIANT))

    def returned(self) -> dict[str, Expr]:
        """The scalars that step() returns, by name."""
        with self.lines:
            try:
                outputs = self.cell.step(self.x_tensor, self.state_tensors,
                                         {**self.parameter_tensors, **self.input_tensors})
            except CellError as error:
                raise self.lines.running(error, error) from error.__cause__
            except Exception as error:  # TVM and the user's own code raise what they like
                raise self.lines.failed(self.cell.name, error) from error
        returned = {}
        for name, tensor in returned_tensors(self.cell, outputs, (BATCH, self.hidden), self.lines).items():
            returned[name] = self.scalar(tensor, [self.b, self.j])
            if is_constant(returned[name]):
                raise self.lines.located(self.fault(f"{name!r} is a constant"), tensor.op)
        return returned

    def at(self, level: int) -> tuple[Assign, ...]:
        return tuple(Assign(var, value) for var, value in self.values.items() if self.level[var] == level)

    def products_at(self, level: int) -> tuple[Product, ...]:
        return tuple(product for product in self.products if self.level[product.var] == level)

    def read_since(self, level: int) -> dict[Var, None]:
        """Variables that are read at ``level`` or later, in order."""
        read = [v for var, value in self.values.items() if self.level[var] >= level for v in variables(value)]
        read += [o for at, operands in self.statistics.found.values() if at >= level for o in operands]
        return dict.fromkeys(read)


def repeated(items: list[Var], count: int) -> tuple[Var, ...]:
    """``items``, the last one repeated until there are ``count``."""
    return (*items, *items[-1:] * (count - len(items)))


def placed(index: Expr, where: Mapping[Var, Expr]) -> Expr:
    """An index with the places ``where`` instead of its axes, simplified."""
    from tvm import sym

    if type(index).__name__ in ("Var", "IntImm"):
        return where.get(index, index)

    def put(e: Expr) -> Expr:
        kind = type(e).__name__
        if kind == "Var":
            return where.get(e, e)
        return type(e)(put(e.a), put(e.b)) if kind in ARITHMETIC else e

    return sym.Analyzer().simplify(put(index))
