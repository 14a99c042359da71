"""Where a step of a sequence is in time, and which batch rows take part in it: for CUDA kernels.

The loop counts t = 0 .. T-1; a reverse sequence is at step T-1-t of x and y then. A row that takes
no part in a step keeps its state, and its y is zero. What a row computes there is thrown away by a
select, never multiplied by zero: x beyond a row's length may hold anything.
"""

from __future__ import annotations

from typing import Any

from ecornn.program import Buffer
from ecornn.workload import Place

Expr = Any  # tvm.ir.PrimExpr


def row_arguments(T: Any, place: Place) -> dict[str, Any]:
    """Kernel parameters for them."""
    return {b.name: T.arg(b.name, T.buffer((T.int64(1 << 40),), b.dtype)) for b in row_buffers(place)}


def row_buffers(place: Place) -> list[Buffer]:
    """The buffers that a place adds to a program."""
    found = [Buffer("lengths", "lengths", "int32")] if place.lengths else []
    return found + ([Buffer("resets", "resets", "uint8")] if place.resets else [])


class Timeline:
    """Emits the predicates of a place; where the place has none, nothing is emitted.

    ``arguments`` has ``lengths`` and ``resets`` where the place asks for them; rows must be below B.
    """

    def __init__(self, T: Any, place: Place, arguments: dict[str, Any], steps: Expr, batch: Expr) -> None:
        self.T, self.place, self.arguments, self.steps, self.batch = T, place, arguments, steps, batch

    def at(self, t: Expr) -> Expr:
        """The step of x and y that the loop is at."""
        return self.steps - 1 - t if self.place.reverse else t

    def limit(self, row: Expr) -> Expr:
        """Steps that a row takes part in."""
        return self.T.min(self.arguments["lengths"][row], self.steps) if self.place.lengths else self.steps

    def live(self, t: Expr, limit: Expr) -> Expr | None:
        """Whether a row takes part in step ``t``; None: always."""
        return self.T.Bind(self.at(t) < limit) if self.place.lengths else None

    def masked(self, live: Expr | None, value: Expr, otherwise: Expr) -> Expr:
        """``value`` where ``live`` holds."""
        return value if live is None else self.T.Bind(self.T.Select(live, value, otherwise))

    def fresh(self, t: Expr, row: Expr, limit: Expr) -> Expr | None:
        """Whether a row's new sequence starts before step ``t``, which may be T; None: never."""
        if not self.place.resets:
            return None
        T = self.T
        step = T.Bind(self.at(t) + 1 if self.place.reverse else t)
        inside = T.Bind(T.And(step >= int(self.place.reverse), step < limit))
        mark = T.cast(T.Select(inside, step, 0) * self.batch + row, "int64")
        return T.Bind(T.And(inside, self.arguments["resets"][mark] != T.uint8(0)))

    def started(self, fresh: Expr | None, values: list[Expr]) -> list[Expr]:
        """States before a step, zero where a new sequence starts there."""
        T = self.T
        return values if fresh is None else [T.Bind(T.Select(fresh, T.float32(0), value)) for value in values]
