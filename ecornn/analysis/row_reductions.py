"""Reductions over units in the walk of a step: to one value a batch row, or to one for each group of units.

    [b] = sum_k value[b, k]                    over all units, or those of what is narrower than H
    [b, g] = max_k value[b, g * K + k]         of each of n = H / K groups; read at [b, j // K], or at [b, number]
    [b, j] = max_k value[b, j // K * K + k]    the same, at every unit

Each group has a statistic of its own, of its units alone, in the same exchange as the others. A unit chooses that of
its own group by its number, a vector that no parameter has.

Mean and variance, written as they are defined, are two sums of which the second waits for the first. A sum of squares
of deviations from the mean is recognised here, so that schedules make both in one exchange."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from math import prod
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from ecornn.analysis import scalar
from ecornn.analysis.declared import SHIFT, Source, fault
from ecornn.analysis.operators import number, variable
from ecornn.analysis.operators import where as select
from ecornn.analysis.scalar import children, extent_of, is_constant, rebuild, reduces, terms, variables
from ecornn.analysis.step import Level, Statistic, Vector
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import IterVar, Reduce, Var

MOST_GROUPS = 64  # each is a statistic, in code that is written out
CLOSE = 1e-6  # relative: a mean is a total times 1 / N in float32


class Statistics:
    """Sums and maxima as they are found; ``values``: those of all variables that the walk has assigned."""

    def __init__(self, hidden: int, values: Mapping[Var, Expr]) -> None:
        self.hidden, self.values = hidden, values
        self.found: dict[Var, tuple[int, tuple[Var, ...]]] = {}  # total -> level and operands
        self.units: dict[Var, tuple[int, int]] = {}  # total -> (first unit, count), where it is not of all units
        self.maxima: dict[Var, bool] = {}  # total that is a maximum -> True where it is a shift
        self.own: dict[Var, tuple[Var, ...]] = {}  # what a unit reads of several totals -> these: of its own group

    def at(self, level: int, leaves: dict[tuple, Var]) -> tuple[Statistic, ...]:
        """The statistics of a level; ``leaves`` has the sums of squares that were asked for."""
        most = self.maxima
        return tuple(Statistic(total, leaves.get(("squares", total)), operands, total in most, most.get(total, False),
                               self.units.get(total))
                     for total, (at, operands) in self.found.items() if at == level)

    def squares(self, terms: list[Expr]) -> Var | None:
        """The total from whose mean ``terms``, one for each of its operands, are squared deviations; or None."""
        return next((total for total in self.found if total not in self.units
                     and self._all_from(terms, total, total, self.hidden)), None)

    def squares_of_own(self, terms: list[Expr], size: int) -> tuple[Var, ...] | None:
        """The totals, of ``size`` units, from whose mean ``terms`` are squared deviations in each unit; or None."""
        return next((totals for read, totals in self.own.items() if self.units[totals[0]][1] == size
                     and self._all_from(terms, totals[0], read, size)), None)

    def _all_from(self, terms: list[Expr], total: Var, read: Var, units: int) -> bool:
        """True where ``terms`` are squared deviations of the operands of the sum ``total`` of so many units from its
        mean; ``read``: the variable by which a unit reads the sum."""
        parts, operands = [*map(self._deviation, terms)], self.found[total][1]
        return total not in self.maxima and len(operands) == len(parts) and all(
            p is not None and p[0].same_as(o) and self._is_mean(p[1], read, len(operands) * units)
            for p, o in zip(parts, operands, strict=True))

    def _deviation(self, term: Expr) -> tuple[Var, Var] | None:
        """(value, mean) of (value - mean) * (value - mean), both variables."""
        term = self._resolved(term)
        if type(term).__name__ != "Mul":
            return None
        a, b = self._resolved(term.a), self._resolved(term.b)
        if not all(type(e).__name__ == "Sub" and type(e.a).__name__ == type(e.b).__name__ == "Var" for e in (a, b)):
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
        while type(e).__name__ == "Var" and e in self.values and not e.same_as(end):
            e = self.values[e]
        return e


class RowReductions(ABC):
    """The part of the walk that finds reductions, and the variables that it shares with the other part."""

    def __init__(self, cell: Source, hidden: int) -> None:
        from tvm import tirx

        self.cell, self.hidden = cell, hidden
        self.width = hidden  # values a row of what is walked: H, less where it is multiplied by a narrow matrix
        self.b, self.j = tirx.Var("b", "int32"), tirx.Var("j", "int32")
        self.level: dict[Var, int] = {}
        self.leaves: dict[tuple, Var] = {}  # what a leaf stands for -> its variable
        self.values: dict[Var, Expr] = {}  # of the variables that are assigned, in order
        self.known: dict[str, Var] = {}  # text of a value -> the variable that has it
        self.vectors: list[Vector] = []
        self.statistics = Statistics(hidden, self.values)

    @abstractmethod
    def inline(self, body: Expr, where: Mapping[Var, Expr]) -> Expr: ...

    def fault(self, text: str) -> CellError:
        return fault(self.cell, text)

    def same(self, e: Expr | int, var: Var) -> bool:
        return hasattr(e, "same_as") and e.same_as(var)

    # -- scalars --------------------------------------------------------------------------------
    def leaf(self, key: tuple, name: str, level: int) -> Var:
        if key not in self.leaves:
            self.leaves[key] = variable(name)
            self.level[self.leaves[key]] = level
        return self.leaves[key]

    def vector(self, key: tuple, name: str, parameter: str, gate: int) -> Var:
        """A leaf that is a vector, as :class:`Vector` has them."""
        if key not in self.leaves:
            self.vectors.append(Vector(self.leaf(key, name, Level.INVARIANT), parameter, gate))
        return self.leaves[key]

    @property
    def unit(self) -> Var:
        """The number of the unit, a vector that the cell need not pass."""
        return self.vector(("unit",), "unit", "", self.hidden)

    def level_of(self, e: Expr) -> int:
        if type(e).__name__ == "Var":
            return self.level[e]
        return max((self.level_of(c) for c in children(e)), default=Level.INVARIANT)

    def name_of(self, e: Expr, name: str) -> Expr:
        """The variable that holds ``e``, assigned now unless it is known; constants stay."""
        if type(e).__name__ == "Var" or is_constant(e):
            return e
        e = self.level_by_level(e, name)
        if type(e).__name__ == "Var":
            return e
        if str(e.ty) != "float32":  # variables are float32; a condition stays where it is read
            return rebuild(e, [self.name_of(c, name) for c in children(e)])
        text = str(e)
        if text not in self.known:
            taken = sum(1 for v in self.values if v.name.rsplit("__", 1)[0] == name)
            var = self.known[text] = variable(f"{name}__{taken}")
            self.level[var], self.values[var] = self.level_of(e), e
        return self.known[text]

    def level_by_level(self, e: Expr, name: str) -> Expr:
        """Rewrites ``e`` so that parts that can be known earlier have variables of their own."""
        parts = terms(e)
        if len(parts) < 2:
            new = [self.level_by_level(c, name) for c in children(e)]
            level = max(map(self.level_of, new), default=Level.INVARIANT)
            return rebuild(e, [self.name_of(c, name) if self.level_of(c) < level else c for c in new]) if new else e
        parts = [(n, self.level_by_level(t, name)) for n, t in parts]
        parts.sort(key=lambda p: self.level_of(p[1]))  # stable: the cell's order within a level
        if parts[0][0]:  # a sum must not start with a negation
            first = next((i for i, p in enumerate(parts) if not p[0]), None)
            parts.insert(0, (False, number(0.0)) if first is None else parts.pop(first))
        total, level = parts[0][1], self.level_of(parts[0][1])
        for negated, term in parts[1:]:
            higher = max(level, self.level_of(term))
            if higher > level:
                total = self.name_of(total, name)
            if higher > self.level_of(term):
                term = self.name_of(term, name)
            total, level = (total - term if negated else total + term), higher
        return total

    @contextlib.contextmanager
    def of_width(self, width: int) -> Iterator[None]:
        """Within it tensors of that many values a row are read."""
        before, self.width = self.width, width
        try:
            yield
        finally:
            self.width = before

    def zeros(self) -> dict[Expr, Any]:
        """Each value, and statistics of these, where all products are 0, in a unit that no narrow value has."""
        unit, known = self.leaves.get(("unit",)), self.statistics
        values: defaultdict[Expr, Any] = defaultdict(float, {} if unit is None else {unit: float(self.hidden)})
        with np.errstate(all="ignore"):
            for var, e in self.values.items():
                values[var] = scalar.evaluate(e, values)
            for total, (_, operands) in known.found.items():
                _, count = known.units.get(total) or (0, self.hidden)
                those = [values[o] for o in operands]
                values[total] = max(those) if total in known.maxima else sum(those) * count
        return values

    def reduced(self, op: Any, body: Reduce, where: dict[Var, Expr]) -> Expr | None:
        """The scalar that a reduction is at these places of its axes; None where it must be a product."""
        shift = SHIFT in (op.attrs or ())
        if len(op.axis) == 1:
            return self.statistic(op.name, body, where, shift)
        if len(op.axis) != 2 or not (reduces(body, "Add") or reduces(body, "Max")) or scalar.multiplies(body):
            return None
        count, rows = int(op.axis[1].dom.extent), [a for a in body.axis if extent_of(a)]
        for axis in reversed(rows):
            size = extent_of(axis) or 0
            if self.hidden % size == 0 and (count == self.hidden // size or count == self.hidden > size):
                return self.of_groups(op, body, where, axis, count != self.hidden // size, shift)
        return None

    # -- one value a row ------------------------------------------------------------------------
    def statistic(self, name: str, body: Reduce, where: dict[Var, Expr], shift: bool) -> Expr:
        """A reduction to one value a batch row, over the hidden axis, and over axes that are unrolled."""
        fault = self.fault(f"the reduction {name!r} is neither a sum over the hidden axis, [b] = sum_k value[b, k], "
                           "nor one that includes gates, sum_g sum_k value[b, g, k], nor such a maximum")
        (index,) = where.values()
        largest = reduces(body, "Max")
        if not (reduces(body, "Add") or largest) or not self.same(index, self.b):
            raise fault
        if (rows := self.over_rows(body, where, largest)) is not None:
            return self.name_of(rows, name)
        error: CellError | None = None
        # where several axes have H values, that which is read as the hidden one; or one of what is narrower
        for axis in sorted(reversed(body.axis), key=lambda axis: extent_of(axis) != self.hidden):
            width = extent_of(axis) or 0
            if not 0 < width <= self.hidden:
                continue
            try:
                with self.of_width(width):
                    terms = self.terms_of(body, where | {axis.var: self.j}, axis)
                break
            except CellError as found:
                error = error or found
        else:
            raise error if error is not None and any(extent_of(a) == self.hidden for a in body.axis) else fault
        if not largest and width == self.hidden and (squared := self.statistics.squares(terms)) is not None:
            return self.squares_of(squared)
        narrow = (0, width) if width < self.hidden else None
        if narrow and not largest and (own := self.statistics.squares_of_own(terms, width)) is not None:
            squared = self.squares_of(own[0])
            return squared if self.width == self.hidden else self.beside_narrow(name, squared, 0.0)
        total = self.total(name, terms, largest, shift, narrow)
        if narrow is None or self.width == self.hidden:
            return total
        read = self.beside_narrow(name, total, self.zeros()[total])
        self.statistics.own[read] = (total,)
        return read

    def over_rows(self, body: Reduce, where: dict[Var, Expr], largest: bool) -> Expr | None:
        """A reduction of values that are one a row, such as statistics of groups, as arithmetic; None for others."""
        from tvm import tirx

        places = [extent_of(axis) or 0 for axis in body.axis]
        if self.hidden in places or not 0 < prod(places) <= MOST_GROUPS:
            return None
        try:
            with self.of_width(self.hidden):
                values = [self.inline(body.source[0], where | at) for at in every(list(body.axis))]
        except CellError:  # it reads a single unit
            return None
        return reduce(tirx.Max if largest else add, values) if all(map(self.of_row, values)) else None

    def of_row(self, e: Expr) -> bool:
        """True where a value is the same in all units, since it is computed from statistics alone."""
        return all(v in self.statistics.found or (v in self.values and self.of_row(self.values[v]))
                   for v in variables(e))

    def terms_of(self, body: Reduce, where: dict[Var, Expr], hidden: IterVar) -> list[Expr]:
        """The values that are added up, or compared, at a unit: one for each place on the other axes."""
        return [self.inline(body.source[0], where | at)
                for at in every([a for a in body.axis if not a.same_as(hidden)])]

    def total(self, name: str, terms: Sequence[Expr], largest: bool, shift: bool,
              units: tuple[int, int] | None) -> Var:
        """The statistic of these terms over ``units``."""
        kind = "maximum" if largest else "sum"
        operands = tuple(self.name_of(self.level_by_level(t, name), name) for t in terms)
        if any(is_constant(o) for o in operands):
            raise self.fault(f"the {kind} {name!r} has a term that is a constant")
        level = max(self.level[o] for o in operands)
        if level < Level.INPUT:
            raise self.fault(f"the sum {name!r} depends on neither x nor a state")
        # a statistic of what needed one of x before is left to the step
        after = Level.NORMALIZED if level == Level.INPUT else max(Level.STATE, level) + 1
        key = ("largest", shift, operands, units) if largest else ("total", operands, units)
        total = self.leaf(key, f"{name}_{len(self.statistics.found)}", after)
        self.statistics.found[total] = after, operands
        if largest:
            self.statistics.maxima[total] = shift
        if units is not None:
            self.statistics.units[total] = units
            _ = self.unit  # the adjoint asks which units these are
        return total

    def squares_of(self, total: Var) -> Var:
        return self.leaf(("squares", total), f"{total.name}_squares", self.level[total])

    def beside_narrow(self, name: str, total: Var, of_zeros: float) -> Expr:
        """A statistic beside narrow values: that of zeros in units that these lack, so that all remains finite."""
        return self.name_of(select(self.unit < number(float(self.width)), total, of_zeros), name)

    # -- one value a group ----------------------------------------------------------------------
    def of_groups(self, op: Any, body: Reduce, where: dict[Var, Expr], axis: IterVar, at_units: bool,
                  shift: bool) -> Expr:
        """The reduction of groups of as many units as ``axis`` has; ``at_units``: it has H values, not one a group."""
        from tvm import sym, tirx

        size = extent_of(axis) or 0
        count, name = self.hidden // size, op.name
        fault = self.fault(f"the reduction {name!r} of groups of {size} units is read at "
                          f"[{', '.join(map(str, where.values()))}]; expected " + (
                              "[b, j]" if at_units else f"[b, j // {size}], or the number of a group"))
        if count > MOST_GROUPS:
            raise self.fault(f"the reduction {name!r} has {count} groups; at most {MOST_GROUPS} are possible. For "
                             "more, use a product with heads whose weights are ones")
        (row, index), own = where.items(), tirx.floordiv(self.j, tirx.const(size, "int32"))
        if not self.same(row[1], self.b):
            raise fault
        # a member's place is the same expression at each unit: of its own group the unit itself
        inner = {row[0]: self.b, index[0]: own * size if at_units else own, axis.var: self.j - own * size}
        with self.of_width(self.hidden):
            terms = self.terms_of(body, inner, axis)
        largest = reduces(body, "Max")
        known = None if largest or count == 1 else self.statistics.squares_of_own(terms, size)
        totals = [self.total(name, terms, largest, shift, (g * size, size) if count > 1 else None)
                  for g in range(count)] if known is None else [self.squares_of(total) for total in known]
        group, prove = index[1] // size if at_units else index[1], sym.Analyzer().can_prove_equal
        if type(group).__name__ == "IntImm" and not at_units and 0 <= int(group) < count:
            return totals[int(group)]
        if self.same(group, self.j) and self.width == count:  # as many narrow values
            return self.name_of(self.chosen(totals, 1), name)
        if not prove(group, own):
            raise fault
        read = self.name_of(self.chosen(totals, size), name)
        if count > 1 and known is None:
            self.statistics.own[read] = tuple(totals)
        return read

    def chosen(self, totals: Sequence[Var], size: int) -> Expr:
        """The total of a unit's own group of ``size`` units; beyond the last group that of the last."""
        choice: Expr = totals[-1]
        for g in range(len(totals) - 1, 0, -1):
            choice = select(self.unit < number(float(g * size)), totals[g - 1], choice)
        return choice


def every(axes: list[IterVar]) -> list[dict[Var, Expr]]:
    """All places on reduction axes: axis variable -> constant."""
    from tvm import tirx

    return [{axis.var: tirx.const(n, "int32") for axis, n in zip(axes, place, strict=True)}
            for place in product(*(range(extent_of(axis) or 0) for axis in axes))]
