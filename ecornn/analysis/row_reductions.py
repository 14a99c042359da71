"""Reductions over units in the walk of a step: to one value a batch row, or to one for each group of units.

    [b] = sum_k value[b, k]                    over all units, or those of what is narrower than H
    [b, g] = max_k value[b, g * K + k]         of each of n = H / K groups; read at [b, j // K], or at [b, number]
    [b, j] = max_k value[b, j // K * K + k]    the same, at every unit

Each group has a statistic of its own, of its units alone, in the same exchange as the others. A unit chooses that of
its own group by its number, a vector that no parameter has.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ecornn.analysis.declared import SHIFT, Source, fault
from ecornn.analysis.narrow import value_of_zeros
from ecornn.analysis.scalar import is_constant, variables
from ecornn.analysis.statistics import Statistics
from ecornn.analysis.step import Assign, Level, Vector
from ecornn.analysis.te_forms import every, extent_of, is_load, is_sum, load_parts, parts_of, reduces
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import IterVar, Reduce, Var

MOST_GROUPS = 64  # each is a statistic, in code that is written out


class RowReductions(ABC):
    """The part of the walk that finds reductions; members of the other part that it needs are declared here."""

    cell: Source
    hidden: int
    width: int
    b: Var
    j: Var
    level: dict[Var, int]
    leaves: dict[tuple, Var]
    assigns: list[tuple[int, Assign]]
    vectors: list[Vector]
    statistics: Statistics

    @abstractmethod
    def leaf(self, key: tuple, name: str, level: int) -> Var: ...
    @abstractmethod
    def same(self, e: Expr | int, var: Var) -> bool: ...
    @abstractmethod
    def inline(self, body: Expr, where: Mapping[Var, Expr]) -> Expr: ...
    @abstractmethod
    def name_of(self, e: Expr, name: str) -> Expr: ...
    @abstractmethod
    def level_by_level(self, e: Expr, name: str) -> Expr: ...

    def fault(self, text: str) -> CellError:
        """The error for a step that cannot be scheduled, which names the cell."""
        return fault(self.cell, text)

    @contextlib.contextmanager
    def of_width(self, width: int) -> Iterator[None]:
        """Within it tensors of that many values a row are read."""
        before, self.width = self.width, width
        try:
            yield
        finally:
            self.width = before

    @property
    def unit(self) -> Var:
        """The number of the unit, a vector that the cell need not pass."""
        fresh = ("unit",) not in self.leaves
        var = self.leaf(("unit",), "unit", Level.INVARIANT)
        if fresh:
            self.vectors.append(Vector(var, "", self.hidden))
        return var

    def reduced(self, op: Any, body: Reduce, where: dict[Var, Expr]) -> Expr | None:
        """The scalar that a reduction is at these places of its axes; None where it must be a product."""
        shift = SHIFT in (op.attrs or ())
        if len(op.axis) == 1:
            return self.statistic(op.name, body, where, shift)
        if len(op.axis) != 2 or not (is_sum(body) or reduces(body, "Max")) or multiplies(body):
            return None
        count, rows = int(op.axis[1].dom.extent), [a for a in body.axis if extent_of(a)]
        for axis in reversed(rows):
            size = extent_of(axis) or 0
            if self.hidden % size == 0 and (count == self.hidden // size or count == self.hidden > size):
                return self.of_groups(op, body, where, axis, count != self.hidden // size, shift)
        return None

    # -- one value a row ------------------------------------------------------------------------
    def statistic(self, name: str, body: Reduce, where: dict[Var, Expr], shift: bool) -> Expr:
        """A reduction to one value a batch row: a sum or maximum over the hidden axis, and over axes that are unrolled.
        """
        fault = self.fault(f"the reduction {name!r} is not a sum over the hidden axis, [b] = sum_k value[b, k], nor "
                           "one over gates too, sum_g sum_k value[b, g, k], nor a maximum over these")
        (index,) = where.values()
        largest = reduces(body, "Max")
        if not (is_sum(body) or largest) or not self.same(index, self.b):
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
                first, *others = [self.inline(body.source[0], where | at) for at in every(list(body.axis))]
        except CellError:  # it reads a single unit
            return None
        if not all(self.of_row(e) for e in (first, *others)):
            return None
        for other in others:
            first = tirx.Max(first, other) if largest else first + other
        return first

    def of_row(self, e: Expr) -> bool:
        """True where a value is the same in all units, since it is computed from statistics alone."""
        known = self.statistics
        return all(v in known.found or (v in known.definition and self.of_row(known.definition[v]))
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
        self.statistics.add(after, total, operands, units)
        if largest:
            self.statistics.maxima[total] = shift
        if units is not None:
            _ = self.unit  # the adjoint asks which units these are
        return total

    def squares_of(self, total: Var) -> Var:
        """The squares of deviations from its mean."""
        return self.leaf(("squares", total), f"{total.name}_squares", self.level[total])

    def beside_narrow(self, name: str, total: Var, of_zeros: float) -> Expr:
        """A statistic where it is read beside narrow values: in units that these do not have it is that of zeros, so
        that all that is computed from it is finite."""
        from tvm import tirx

        benign = tirx.const(of_zeros, "float32")
        inside = self.unit < tirx.const(float(self.width), "float32")
        return self.name_of(tirx.Select(inside, total, benign), name)

    def zeros(self) -> Mapping[Var, float]:
        """Each value as it is if all products are 0, in a unit that nothing narrow has."""
        return value_of_zeros((a for _, a in self.assigns), self.statistics, self.hidden,
                              self.leaves.get(("unit",)))

    # -- one value a group ----------------------------------------------------------------------
    def of_groups(self, op: Any, body: Reduce, where: dict[Var, Expr], axis: IterVar, at_units: bool,
                  shift: bool) -> Expr:
        """The reduction of each group of as many units as ``axis`` has; ``at_units``: it has H values, not one a
        group."""
        from tvm import sym, tirx

        size = extent_of(axis) or 0
        count, name = self.hidden // size, op.name
        fault = self.fault(f"the reduction {name!r} of groups of {size} units is read at "
                          f"[{', '.join(map(str, where.values()))}]; expected " + (
                              "[b, j]" if at_units else f"[b, j // {size}], or the number of a group"))
        if count > MOST_GROUPS:
            raise self.fault(f"the reduction {name!r} has {count} groups; {MOST_GROUPS} are the most. Sums of more are "
                             "a product with heads, of ones")
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
        from tvm import tirx

        choice: Expr = totals[-1]
        for g in range(len(totals) - 1, 0, -1):
            choice = tirx.Select(self.unit < tirx.const(float(g * size), "float32"), totals[g - 1], choice)
        return choice


def multiplies(body: Reduce) -> bool:
    """True where a reduction reads a matrix."""
    pending = [body.source[0]]
    while pending:
        e = pending.pop()
        if is_load(e):
            tensor, _ = load_parts(e)
            if type(tensor.op).__name__ == "PlaceholderOp" and len(tensor.shape) == 3:
                return True
        else:
            pending.extend(parts_of(e))
    return False
