"""Partial derivatives of a step's assignments, as few scalars as possible that depend on the forward pass alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from ecornn.analysis.derivatives import number, smooth
from ecornn.analysis.operators import key_of, operator_of
from ecornn.analysis.scalar import children, is_constant, is_leaf, rebuild
from ecornn.analysis.step import Assign

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var

Factor: TypeAlias = "Var | float"  # a float where it is constant


class Partials:
    """Collects assignments, each value once, of operators on variables and constants."""

    def __init__(self) -> None:
        self.assigns: list[Assign] = []
        self._known: dict[tuple, Var] = {}
        self._magnitudes: set[Var] = set()  # variables whose magnitude the assignment at hand reads

    def of(self, a: Assign) -> dict[Var, Factor]:
        """The partial derivative of what is assigned by each variable that it reads."""
        found: dict[Var, Factor] = {}
        self._magnitudes = set(self._operands_of_fabs(a.value, a.var.name))
        self._walk(a.value, a.var, 1.0, found, a.var.name)
        return {var: factor for var, factor in found.items() if not isinstance(factor, float) or factor != 0.0}

    def named(self, e: Expr, name: str) -> Expr:
        """The variable that has the value of ``e``; constants, variables and conditions stay."""
        if is_leaf(e):
            return e
        operands = [self.named(c, name) for c in children(e)]
        e = rebuild(e, operands)
        if str(e.ty) != "float32":
            return e
        key = _key(e)
        if key not in self._known:
            from tvm import tirx

            self._known[key] = tirx.Var(f"{name}_{key_of(e).lower()}{len(self.assigns)}", "float32")
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
        inner = [v for c in children(e) for v in self._operands_of_fabs(c, name)]
        return [*inner, self.named(children(e)[0], name)] if key_of(e) == "fabs" else inner

    def times(self, a: Expr | float, b: Expr | float, name: str) -> Factor:
        """The product of two factors, expressions or numbers."""
        a, b = (v if isinstance(v, float) or type(v).__name__ != "FloatImm" else float(v.value) for v in (a, b))
        if isinstance(a, float) and isinstance(b, float):
            return a * b
        for one, other in ((a, b), (b, a)):
            if isinstance(one, float) and one in (0.0, 1.0):
                return self.named(other, name) if one else 0.0
        return self.named(_expr(a) * _expr(b), name)

    def _plus(self, a: Factor, b: Factor, name: str) -> Factor:
        if isinstance(a, float) and isinstance(b, float):
            return a + b
        for one, other in ((a, b), (b, a)):
            if isinstance(one, float) and one == 0.0:
                return other
        return self.named(_expr(a) + _expr(b), name)


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
    """The sum of factors times variables."""
    total = None
    for factor, var in parts:
        if total is not None and isinstance(factor, float) and factor == -1.0:
            total = total - var
            continue
        term = var if isinstance(factor, float) and factor == 1.0 else _expr(factor) * var
        total = term if total is None else total + term
    return total
