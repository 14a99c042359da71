"""The statistics of a step as the walk finds them, and sums of squares among them.

Mean and variance, written as they are defined, are two sums of which the second waits for the first. A sum of
squares of deviations from the mean is recognised here, so that schedules make both in one exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecornn.analysis.scalar import is_constant
from ecornn.analysis.step import Statistic

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var

CLOSE = 1e-6  # relative: a mean is a total times 1 / N in float32


class Statistics:
    """Collects sums by level."""

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden
        self.found: dict[Var, tuple[int, tuple[Var, ...]]] = {}  # total -> level and operands
        self.units: dict[Var, tuple[int, int]] = {}  # total -> (first unit, count), where it is not of all units
        self.maxima: dict[Var, bool] = {}  # total that is a maximum -> True where it is a shift
        self.definition: dict[Var, Expr] = {}
        self.own: dict[Var, tuple[Var, ...]] = {}  # what a unit reads of several totals -> these: of its own group

    def define(self, var: Var, value: Expr) -> None:
        """Notes the value of a variable."""
        self.definition[var] = value

    def add(self, level: int, total: Var, operands: tuple[Var, ...], units: tuple[int, int] | None = None) -> None:
        """Adds a sum of ``operands`` that is known at ``level``; ``units``: as a :class:`Statistic` has them."""
        self.found[total] = level, operands
        if units is not None:
            self.units[total] = units

    def since(self, level: int) -> list[tuple[Var, ...]]:
        """Operands of the sums of ``level`` and later."""
        return [operands for at, operands in self.found.values() if at >= level]

    def at(self, level: int, leaves: dict[tuple, Var]) -> tuple[Statistic, ...]:
        """The statistics of a level; ``leaves`` has the sums of squares that were asked for."""
        most = self.maxima
        return tuple(Statistic(total, leaves.get(("squares", total)), operands, total in most, most.get(total, False),
                               self.units.get(total))
                     for total, (at, operands) in self.found.items() if at == level)

    def squares(self, terms: list[Expr]) -> Var | None:
        """The total from whose mean ``terms``, one for each of its operands, are squared deviations; or None."""
        parts = [p for p in map(self._deviation, terms) if p is not None]
        if len(parts) < len(terms):
            return None
        return next((total for total in self.found if total not in self.units and self._all_from(
            parts, total, total, self.hidden)), None)

    def squares_of_own(self, terms: list[Expr], size: int) -> tuple[Var, ...] | None:
        """The totals, of ``size`` units each, of which ``terms`` in each unit are the squared deviations from the mean
        of its own; or None."""
        parts = [p for p in map(self._deviation, terms) if p is not None]
        if len(parts) < len(terms):
            return None
        return next((totals for read, totals in self.own.items() if self.units[totals[0]][1] == size and self._all_from(
            parts, totals[0], read, size)), None)

    def _all_from(self, parts: list[tuple[Var, Var]], total: Var, read: Var, units: int) -> bool:
        """True where ``parts``, pairs of a value and a mean, are the operands of the sum ``total`` of so many units and
        its mean; ``read``: the variable by which a unit reads the sum."""
        operands = self.found[total][1]
        return (total not in self.maxima and len(operands) == len(parts)
                and all(v.same_as(o) for (v, _), o in zip(parts, operands, strict=True))
                and all(self._is_mean(m, read, len(operands) * units) for _, m in parts))

    def _deviation(self, term: Expr) -> tuple[Var, Var] | None:
        """(value, mean) of (value - mean) * (value - mean), both variables."""
        term = self._resolved(term)
        if type(term).__name__ != "Mul":
            return None
        a, b = self._resolved(term.a), self._resolved(term.b)
        if type(a).__name__ != "Sub" or type(b).__name__ != "Sub":
            return None
        if not all(type(e).__name__ == "Var" for e in (a.a, a.b, b.a, b.b)):
            return None
        return (a.a, a.b) if a.a.same_as(b.a) and a.b.same_as(b.b) else None

    def _is_mean(self, value: Var, total: Var, count: int) -> bool:
        value = self._resolved(value, total)
        if type(value).__name__ not in ("Mul", "Div"):
            return value.same_as(total) and count == 1
        sides = (value.a, value.b) if type(value).__name__ == "Div" or is_constant(value.b) else (value.b, value.a)
        if not is_constant(sides[1]) or not self._resolved(sides[0], total).same_as(total):
            return False
        number = float(sides[1].value) if type(value).__name__ == "Div" else 1.0 / (float(sides[1].value) or 1e-30)
        return abs(number - count) <= CLOSE * count

    def _resolved(self, e: Expr, end: Var | None = None) -> Expr:
        """The value that a variable was assigned, through other variables, as far as ``end``."""
        while type(e).__name__ == "Var" and e in self.definition and not e.same_as(end):
            e = self.definition[e]
        return e
