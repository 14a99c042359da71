"""How statistics travel: each block sends the sums over its units, and every block adds all of them, in one order.

A batch row has neighbouring lanes of gate warps, a power of two of them, or whole warps. They add what they have by
shuffles, and hand it on. What all blocks sent for a row is then read and added in the same order everywhere, so that
every block has the same bits: through L2 as in ``sums_ring.py``, inside a cluster as in ``sums_cluster.py``.

Of a value v two sums are made, of v - s and of its square, where s is the row's mean in the step before (0 in the first
one), which all blocks know: so a mean that is large beside the deviations from it costs no accuracy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ecornn.analysis import Statistic
from ecornn.schedules.persistent.plan import Plan
from ecornn.schedules.row_sums import across_warp

FINITE = 1e30  # a mean beyond is no good as the next step's s, nor is one that is no number


class Sums(ABC):
    """Emits the gate warps' part. ``statistics``: of each exchange."""

    def __init__(self, T: Any, plan: Plan, statistics: list[tuple[Statistic, ...]], group: Any, member: Any,
                 thread: Any) -> None:
        self.T, self.plan, self.all, self.group, self.thread = T, plan, statistics, group, thread
        self.lanes = min(32, plan.lanes)
        self.lane = T.Bind(thread % self.lanes)
        warps = plan.lanes // self.lanes  # of a row
        self.part = T.Bind(member * warps + thread // 32 % warps)  # of the row's sums, which this warp makes
        rows = [T.Bind((thread + i * plan.gate_warps * 32) // plan.lanes) for i in range(plan.items)]
        self.mine = [T.Bind(r < plan.rows) for r in rows]
        self.rows = [T.Bind(T.min(r, plan.rows - 1)) for r in rows]
        count = sum(len(s) for s in statistics)
        self.means = T.alloc_buffer((plan.items, max(1, count)), "float32", scope="local")  # of the step before
        for i in range(plan.items):
            for n in range(count):
                T.buffer_store(self.means, T.float32(0), [i, n])

    def exchange(self, e: int, t: Any, envs: list[dict[Any, Any]], owners: list[Any]) -> list[dict[Any, Any]]:
        """The variables of exchange ``e`` for each item, from the operands in ``envs``; ``owners``: whether an item is
        one of the layer's units."""
        T, plan, statistics = self.T, self.plan, self.all[e]
        first = sum(len(s) for s in self.all[:e])
        each = [(i, n, s) for i in range(plan.items) for n, s in enumerate(statistics)]
        sums = []
        for i, n, s in each:
            parts = [T.Bind(envs[i][o] - self.means[i, first + n]) for o in s.operands]
            for value in (added(T, parts), added(T, [T.Bind(p * p) for p in parts])):
                sums.append(T.Bind(T.Select(owners[i], value, T.float32(0))))
        sums = across_warp(T, sums, self.lanes)
        size, slot = 2 * len(statistics), T.Bind(self.slot(e, t))
        for i in range(plan.items):
            self.send(e, t, slot, i, sums[i * size:(i + 1) * size])
        found: list[dict[Any, Any]] = [{} for _ in envs]
        totals = self.receive(e, t, slot)
        for k, (i, n, s) in enumerate(each):
            total, squares = totals[2 * k:2 * k + 2]
            count, before = len(s.operands) * plan.hidden, self.means[i, first + n]
            found[i][s.total] = T.Bind(total + T.float32(count) * before)
            if s.squares is not None:
                off = T.Bind(total * T.float32(1.0 / count))
                found[i][s.squares] = T.Bind(T.max(squares - total * off, T.float32(0)))
            mean = T.Bind(found[i][s.total] * T.float32(1.0 / count))
            usable = T.And(mean < T.float32(FINITE), mean > T.float32(-FINITE))
            T.buffer_store(self.means, T.Select(usable, mean, T.float32(0)), [i, first + n])
        return found

    @abstractmethod
    def slot(self, e: int, t: Any) -> Any:
        """First word of what exchange ``e`` of a step sends."""

    @abstractmethod
    def send(self, e: int, t: Any, slot: Any, i: int, sums: list[Any]) -> None:
        """Hands on the sums of item i's row, both of each statistic in turn, which all lanes of the row have."""

    @abstractmethod
    def receive(self, e: int, t: Any, slot: Any) -> list[Any]:
        """For each item and statistic both totals."""

    @abstractmethod
    def wipe(self, t: Any) -> None:
        """Takes back what was sent in the step before."""


def added(T: Any, values: list[Any]) -> Any:
    """The sum, as a tree."""
    while len(values) > 1:
        pairs = [T.Bind(a + b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2:]
    return values[0]
