"""The place of a sequence's step in time, and the batch rows that take part in it: for CPU code.

The rules are those of :mod:`ecornn.schedules.timeline`; a vector is of one row, so a predicate is one scalar.
"""

from __future__ import annotations

from ecornn.schedules.builder import Expr, TirBuffer
from ecornn.schedules.cpu.emit import Emitter
from ecornn.workload import Traversal


class Timeline:
    """Writes the predicates of a traversal; where the traversal has none, nothing is written.

    ``data`` has the elements of ``lengths`` and ``resets`` where the traversal asks for them.
    """

    def __init__(self, e: Emitter, traversal: Traversal, data: dict[str, TirBuffer], steps: Expr, batch: Expr) -> None:
        self.e, self.traversal, self.data, self.steps, self.batch = e, traversal, data, steps, batch
        # The first step of x at which a layer may start anew; an adjoint goes the other way.
        self.first_start = int(traversal.reverse != traversal.backward)

    def at(self, t: Expr) -> Expr:
        """The step of x and y that the loop is at."""
        return self.steps - self.e.index(1) - t if self.traversal.reverse else t

    def limit(self, row: Expr) -> Expr:
        """The number of steps that a row takes part in; ``row`` may be padding."""
        e = self.e
        if not self.traversal.lengths:
            return self.steps
        last = e.tirx.Min(row, self.batch - e.index(1))
        return e.let("limit", e.tirx.Min(e.tirx.Cast("int64", e.load(self.data["lengths"], last)), self.steps))

    def live(self, t: Expr, row: Expr) -> Expr | None:
        """True if a row takes part in step ``t``; None: always."""
        return self.e.let("live", self.at(t) < self.limit(row)) if self.traversal.lengths else None

    def any_live(self, t: Expr, first: Expr, rows: int) -> Expr | None:
        """True if one of ``rows`` rows, from ``first`` on, takes part in step ``t``; None: always."""
        if not self.traversal.lengths:
            return None
        most = self.limit(first)
        for m in range(1, rows):
            most = self.e.tirx.Max(most, self.limit(first + self.e.index(m)))
        return self.at(t) < most

    def masked(self, live: Expr | None, value: Expr, otherwise: Expr) -> Expr:
        """The vector ``value`` where ``live`` holds."""
        e = self.e
        return value if live is None else e.let("masked", e.tirx.Select(e.splat_bool(live), value, otherwise))

    def started(self, t: Expr, row: Expr, values: dict[str, Expr]) -> dict[str, Expr]:
        """States before step ``t``, zero where a new sequence starts there; ``t`` may be T."""
        if not self.traversal.resets:
            return values
        e = self.e
        step = e.let("start", self.at(t) + e.index(1) if self.traversal.reverse else t)
        inside = e.let("inside", e.tirx.And(step >= e.index(self.first_start), step < self.limit(row)))
        last = e.tirx.Min(row, self.batch - e.index(1))
        mark = e.let("mark", e.tirx.Select(inside, step, e.index(0)) * self.batch + last)
        reset = e.load(self.data["resets"], mark) != e.tirx.const(0, "uint8")
        fresh = e.let("fresh", e.tirx.And(inside, reset))
        return {n: self.masked(fresh, e.splat(0.0), v) for n, v in values.items()}
