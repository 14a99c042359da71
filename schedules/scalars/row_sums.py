"""Statistics of batch rows: when they are due, and how the threads of a block sum them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ecornn.analysis import Statistic, StepGraph
from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.cuda.isa.threads import largest_xor, sum_xor, sync_block

Env = dict[Var, Expr]  # variable -> its value
Each = Callable[[Callable[[Env, Expr], None]], None]


def parts_of(graph: StepGraph) -> list[tuple[int, ...] | int]:
    """The parts of a step between which all units wait for each other: a phase with a product; or phases whose
    statistics, and what follows from them alone, can be computed row by row. Of these only the last one may have a
    product, which is then a part of its own."""
    found: list[tuple[int, ...] | int] = []
    together: tuple[int, ...] = ()
    for p, phase in enumerate(graph.phases):
        if phase.statistics:
            together += (p,)
        if phase.products:
            found += [together, p] if together else [p]
            together = ()
    return [*found, together] if together else found or [0]


Kind = Any  # whether a statistic is a maximum, not a sum: a bool, or an expression where only a thread knows
LOWEST = -3.4028234663852886e38  # below all numbers of float32 that there are


def among(s: Statistic, unit: Expr) -> Expr:
    """True if a unit is one of those that a statistic is of; for statistics of some units, not of all."""
    assert s.units is not None
    first, end = s.units[0], sum(s.units)
    return T.And(unit >= first, unit < end) if first else unit < end


def combine(a: Expr, b: Expr, largest: Kind) -> Expr:
    """The sum of two parts of a statistic, or the larger one."""
    if isinstance(largest, bool):
        return T.max(a, b) if largest else a + b
    return T.Select(largest, T.max(a, b), a + b)


def neutral(largest: Kind) -> Expr:
    """The value that :func:`combine` leaves out of account."""
    if isinstance(largest, bool):
        return T.float32(LOWEST if largest else 0)
    return T.Select(largest, T.float32(LOWEST), T.float32(0))


def across_warp(values: list[Expr], lanes: int = 32, largest: Sequence[Kind] = ()) -> list[Expr]:
    """The sums over ``lanes`` neighbouring lanes (a power of two), the same bits for each of them; of several values at
    a time, since a shuffle takes long and another one can follow at once. ``largest``: which of them are maxima."""
    while lanes > 1:
        lanes //= 2
        values = across_lanes(values, lanes, largest)
    return values


def across_lanes(values: list[Expr], lanes: int, largest: Sequence[Kind] = ()) -> list[Expr]:
    """The sums of each lane's value and that of the lane which is ``lanes`` (a power of two) away."""
    def across(value: Expr, largest: bool) -> Expr:
        return largest_xor(value, lanes) if largest else sum_xor(value, lanes)

    found = []
    for value, kind in zip(values, largest or [False] * len(values), strict=True):
        if isinstance(kind, bool):
            found.append(T.let("sum", across(value, kind)))
        else:  # all lanes shuffle
            added, most = T.let("sum", across(value, False)), T.let("largest", across(value, True))
            found.append(T.let("sum", T.Select(kind, most, added)))
    return found


class RowSums:
    """Emits sums over all ``threads`` of a block, in a fixed order.

    ``memory`` is shared memory, float32, from ``first`` on, of :meth:`words` values.
    """

    def __init__(self, threads: int, thread: Expr, memory: TirBuffer, first: int = 0) -> None:
        self.warps, self.thread, self.memory, self.first = threads // 32, thread, memory, first

    @staticmethod
    def words(threads: int, statistics: Sequence[Statistic]) -> int:
        """Floats of shared memory."""
        return max(1, len(statistics)) * threads // 32

    def statistics(self, statistics: Sequence[Statistic], hidden: int, each: Each) -> Env:
        """The variables of ``statistics``. ``each`` calls a function with the operands of each unit of this thread, and
        its number; twice where there are squares."""
        found = Env()
        for s, total in zip(statistics, self._over(statistics, each, lambda s, value: value), strict=True):
            found[s.total] = total
        about = [s for s in statistics if s.squares is not None]
        means = {s: T.let("mean", found[s.total] * T.float32(1.0 / s.count(hidden))) for s in about}

        def squared(s: Statistic, value: Expr) -> Expr:
            apart = T.let("apart", value - means[s])
            return apart * apart

        for s, total in zip(about, self._over(about, each, squared), strict=True):
            found[s.squares] = total
        return found

    def _over(self, statistics: Sequence[Statistic], each: Each,
              function: Callable[[Statistic, Expr], Expr]) -> list[Expr]:
        count = len(statistics)
        if not count:
            return []
        sums = T.local("sums", (count,), "float32")  # a statistic each
        kinds = [s.largest for s in statistics]
        for n in range(count):
            T.buffer_store(sums, neutral(kinds[n]), [n])

        def add(env: Env, unit: Expr) -> None:
            for n, s in enumerate(statistics):
                total = sums[n]
                for operand in s.operands:
                    total = combine(total, function(s, env[operand]), s.largest)
                T.buffer_store(sums, total if s.units is None else T.Select(among(s, unit), total, sums[n]), [n])

        each(add)
        sync_block()  # what was there before has been read
        for n, total in enumerate(across_warp([sums[n] for n in range(count)], largest=kinds)):
            with T.when(self.thread % 32 == 0):
                T.buffer_store(self.memory, total, [self.first + n * self.warps + self.thread // 32])
        sync_block()
        found = []
        for n in range(count):
            total = self.memory[self.first + n * self.warps]
            for warp in range(1, self.warps):
                total = combine(total, self.memory[self.first + n * self.warps + warp], kinds[n])
            found.append(T.let("sum", total))
        return found
