"""Going backwards through assignments: the gradient of each variable as a weighted sum of gradients of later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ecornn.analysis.operators import CUSTOM, key_of, number, operator_of, smooth, variable, where
from ecornn.analysis.scalar import children, is_constant, is_leaf, rebuild
from ecornn.analysis.step import Assign, Product, Statistic, Term

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var

TIE = 4e-7  # relative: values that are this near to a maximum are one
Factor: TypeAlias = "Var | float"  # a float where it is constant


class Partials:
    """Partial derivatives of a step's assignments. ``assigns``: their scalars, each value once, as few as possible that
    depend on the forward pass alone."""

    def __init__(self) -> None:
        self.assigns: list[Assign] = []
        self._known: dict[tuple, Var] = {}
        self._magnitudes: set[Var] = set()  # variables whose magnitude the assignment at hand reads

    def of(self, a: Assign) -> dict[Var, Factor]:
        """The partial derivatives of an assigned value by each variable that it reads."""
        partials: dict[Var, Factor] = {}
        self._magnitudes = set(self._operands_of_fabs(a.value, a.var.name))
        self._walk(a.value, a.var, 1.0, partials, a.var.name)
        return {var: factor for var, factor in partials.items() if not isinstance(factor, float) or factor != 0.0}

    def named(self, e: Expr, name: str) -> Expr:
        """The variable that has the value of ``e``; constants, variables and conditions stay."""
        return e if is_leaf(e) else self.kept(rebuild(e, [self.named(c, name) for c in children(e)]), name)

    def kept(self, e: Expr, name: str) -> Expr:
        """The variable that has the value of ``e``, an operator on variables; a condition stays."""
        if str(e.ty) != "float32":
            return e
        key = _key(e)
        if key not in self._known:
            self._known[key] = variable(f"{name}_{key_of(e).lower()}{len(self.assigns)}")
            self.assigns.append(Assign(self._known[key], e))
        return self._known[key]

    def _walk(self, e: Expr, result: Expr, factor: Factor, found: dict[Var, Factor], name: str) -> None:
        if type(e).__name__ == "Var":
            found[e] = self._plus(found.get(e, 0.0), factor, name)
            return
        if is_constant(e):
            return
        operands = [self.named(c, name) for c in children(e)]
        partials = operator_of(e).derivative(e, operands, result)
        if key_of(e) in ("Max", "Min") and not self._magnitudes.isdisjoint(o for o in operands if not is_constant(o)):
            partials = smooth(e, operands)
        for child, operand, partial in zip(children(e), operands, partials, strict=True):
            if not isinstance(partial, float) or partial != 0.0:
                self._walk(child, operand, self.times(factor, partial, name), found, name)

    def _operands_of_fabs(self, e: Expr, name: str) -> list[Var]:
        through = children(e)[1::2] if key_of(e) == CUSTOM else children(e)
        inner = [v for c in through for v in self._operands_of_fabs(c, name)]
        return [*inner, self.named(children(e)[0], name)] if key_of(e) == "fabs" else inner

    def times(self, a: Expr | float, b: Expr | float, name: str) -> Factor:
        a, b = (v if isinstance(v, float) or type(v).__name__ != "FloatImm" else float(v.value) for v in (a, b))
        if isinstance(a, float) and isinstance(b, float):
            return a * b
        for one, other in ((a, b), (b, a)):
            if isinstance(one, float) and one in (0.0, 1.0):
                return self.named(other, name) if one else 0.0
        return self.named(_expr(a) * _expr(b), name)

    def _plus(self, a: Factor, b: Factor, name: str) -> Factor:
        if isinstance(a, float) and (isinstance(b, float) or a == 0.0):
            return a + b if isinstance(b, float) else b
        return a if isinstance(b, float) and b == 0.0 else self.named(_expr(a) + _expr(b), name)


def _expr(factor: Factor) -> Expr:
    return number(factor) if isinstance(factor, float) else factor


def _key(e: Expr) -> tuple:
    """Equal for equal values."""
    if type(e).__name__ == "Var":
        return ("variable", hash(e))
    if is_constant(e):
        return (float(e.value), str(e.ty))
    return (key_of(e), str(e.ty), *(_key(c) for c in children(e)))


def weighted(parts: Sequence[tuple[Factor, Var]]) -> Expr:
    total = None
    for factor, var in parts:
        if total is not None and isinstance(factor, float) and factor == -1.0:
            total = total - var
        else:
            term = var if isinstance(factor, float) and factor == 1.0 else _expr(factor) * var
            total = term if total is None else total + term
    return total


class Sweep:
    """Gradients, as assignments in order, each with a level as in :mod:`ecornn.analysis.step`. ``factor`` is applied to
    what multiplies gradients; a rotated step has some from the step before. ``unit``: the number of the unit, for
    statistics not of all units."""

    def __init__(self, partials: Partials, hidden: int, factor: Callable[[Factor], Factor] = lambda f: f,
                 unit: Var | None = None) -> None:
        self.partials, self.hidden, self.factor, self.unit = partials, hidden, factor, unit
        self.parts: dict[Var, list[tuple[Factor, Var]]] = {}
        self.level: dict[Var, int] = {}
        self.assigns: list[Assign] = []
        self._totals: dict[Var, Var] = {}
        self._named: dict[tuple[tuple[Factor, Var], ...], Var] = {}  # weighted sums that have a variable

    def add(self, var: Var, factor: Factor, gradient: Var, level: int | None = None) -> None:
        """A part of the gradient of ``var``; ``level`` is that of ``gradient``, where it is new."""
        if level is not None:
            self.level[gradient] = level
        self.parts.setdefault(var, []).append((factor, gradient))

    def total(self, var: Var) -> Var | None:
        """The gradient of ``var``, once all parts are known; None where nothing depends on it."""
        if var in self.parts and var not in self._totals:
            self._totals[var] = self.named(self.parts[var], f"d_{var.name}")
        return self._totals.get(var)

    def totals(self, variables: Iterable[Var]) -> dict[Var, Var]:
        """The gradients of those of ``variables`` that something depends on."""
        return {v: d for v in variables if (d := self.total(v)) is not None}

    def named(self, parts: list[tuple[Factor, Var]], name: str) -> Var:
        """A variable for a weighted sum, parts that are known first first; the same variable for the same sum."""
        (factor, gradient), *others = parts = sorted(parts, key=lambda part: self.level[part[1]])
        if not others and isinstance(factor, float) and factor == 1.0:
            return gradient
        if (key := tuple(parts)) in self._named:
            return self._named[key]
        var = self._named[key] = variable(name)
        self.assigns.append(Assign(var, weighted(parts)))
        self.level[var] = max(self.level[g] for _, g in parts)
        return var

    def reverse(self, assigns: Iterable[Assign]) -> None:
        """Goes from the gradients of variables that ``assigns`` made to those of variables that they read."""
        for a in reversed(tuple(assigns)):
            gradient = self.total(a.var)
            if gradient is not None:
                for var, factor in self.partials.of(a).items():
                    self.add(var, self.factor(factor), gradient)

    def products(self, products: Iterable[Product], gradients: dict[Var, Var], level: int) -> tuple[Product, ...]:
        """The products that give gradients of operands. Each is added to its operand's gradient, but for those of x."""
        by_operand: dict[Var | None, list[Term]] = {}
        for product in products:
            for term in product.terms if product.var in gradients else ():
                by_operand.setdefault(term.operand, []).append(Term(
                    gradients[product.var], term.parameter, term.gate, not term.transposed, term.heads, term.columns,
                    term.rows))
        result = []
        for operand, terms in by_operand.items():
            var = variable(f"d_{'x' if operand is None else operand.name}_product")
            result.append(Product(var, tuple(terms)))
            self.level[var] = level
            if operand is not None:
                self.add(operand, 1.0, var)
        return tuple(result)

    def statistics(self, statistics: Iterable[Statistic], gradients: dict[Var, Var],
                   level: int) -> tuple[Statistic, ...]:
        """The sums that give gradients of operands: they add up the gradients, at each unit, of totals and squares."""
        sums = []
        for s, var in ((one, v) for one in statistics for v in one.made if v in gradients):
            total = variable(f"d_{var.name}_sum")
            self.level[total] = level
            sums.append(Statistic(total, None, (gradients[var],)))
            if s.largest:
                sums.append(self._maximum(s, total, level))
                continue
            for operand in s.operands:
                factor: Factor = self._inside(s)
                if var.same_as(s.squares):
                    count = number(1.0 / s.count(self.hidden))
                    apart = self.partials.named(number(2.0) * (operand - s.total * count), operand.name)
                    factor = self.factor(self.partials.times(apart, factor, operand.name))
                self.add(operand, factor, total)
        return tuple(sums)

    def _inside(self, s: Statistic) -> Factor:
        """1 in the units that a statistic is of, 0 in the others."""
        if s.units is None or self.unit is None:
            return 1.0
        from tvm import tirx

        first, end = s.units[0], sum(s.units)
        inside = self.unit < number(float(end))
        if first:
            inside = tirx.And(self.unit >= number(float(first)), inside)
        return self.partials.named(where(inside, 1.0, 0.0), "inside")

    def _maximum(self, s: Statistic, gradient: Var, level: int) -> Statistic:
        """Shares the gradient of a maximum among the operands that have it, alike; returns their number as a statistic.
        An operand that is a little less counts, too: it may be the same value, rounded in another way."""
        from tvm import tirx

        m = s.total
        lowest = m - number(TIE) * tirx.max(m, number(0.0) - m)
        has = [self.factor(self.partials.times(self.partials.named(where(o >= lowest, 1.0, 0.0), o.name),
                                               self._inside(s), o.name)) for o in s.operands]
        count, share = (variable(f"d_{m.name}_{end}") for end in ("count", "share"))
        self.level.update({count: level, share: level})
        # before the first step of a rotated adjoint there are none
        self.assigns.append(Assign(share, gradient / tirx.max(count, number(1.0))))
        for operand, factor in zip(s.operands, has, strict=True):
            self.add(operand, factor, share)
        return Statistic(count, None, tuple(v for v in has if not isinstance(v, float)))


def unique(variables: Iterable[Var]) -> tuple[Var, ...]:
    return tuple(dict.fromkeys(variables))
