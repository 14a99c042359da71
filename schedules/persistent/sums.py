"""How statistics travel: each block sends the sums over its units, and every block adds all of them, in one order.

A batch row has neighbouring lanes of gate warps, a power of two of them, or whole warps. They add what they have by
shuffles, and hand it on. What all blocks sent for a row is then read and added in the same order everywhere, so that
every block has the same bits: through L2 as in ``sums_ring.py``, inside a cluster as in ``sums_cluster.py``.

Of a value v two sums are made, of v - s and of its square, where s is the row's mean in the step before, which all
blocks know: so a mean that is large beside the deviations from it costs no accuracy. s is 0 in the first step, after
one in which the row took no part, whose values may be of any size, and where squares are not wanted: a sum alone gains
nothing from s, and loses digits if s is large beside it, as gradients of one step often are beside those of the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ecornn.analysis import Statistic
from ecornn.schedules.builder import Expr, T, Var
from ecornn.schedules.persistent.plan import PersistentPlan
from ecornn.schedules.scalars.row_sums import Kind, across_warp, among, combine, neutral

LOWEST_BITS = 0xFF7FFFFF  # the lowest float32
FINITE = 1e30  # a mean beyond is no good as the next step's s, nor is one that is no number


class Sums(ABC):
    """Emits the gate warps' part. ``statistics``: of each exchange. Of a maximum both sums are it, and what is said of
    sums here means the larger one."""

    def __init__(self, plan: PersistentPlan, statistics: list[tuple[Statistic, ...]], group: Expr, member: Expr,
                 thread: Expr) -> None:
        self.plan, self.all, self.group, self.thread = plan, statistics, group, thread
        self.lanes = min(32, plan.lanes)
        self.lane = T.let("lane", thread % self.lanes)
        warps = plan.lanes // self.lanes  # of a row
        self.part = T.let("part", member * warps + thread // 32 % warps)  # of the row's sums, which this warp makes
        rows = [T.let("row", (thread + i * plan.gate_warps * 32) // plan.lanes) for i in range(plan.items)]
        self.mine = [T.let("mine", r < plan.rows) for r in rows]
        self.rows = [T.let("row", T.min(r, plan.rows - 1)) for r in rows]
        count = sum(len(s) for s in statistics)
        self.means = T.local("means", (plan.items, max(1, count)), "float32")  # (item, statistic), of the step before
        for i in range(plan.items):
            for n in range(count):
                T.buffer_store(self.means, T.float32(0), [i, n])

    def exchange(self, e: int, t: Expr, envs: list[dict[Var, Expr]], owners: list[Expr], units: list[Expr],
                 lives: list[Expr | None]) -> list[dict[Var, Expr]]:
        """The variables of exchange ``e`` for each item, from the operands in ``envs``; ``owners``: whether an item is
        one of the layer's ``units``; ``lives``: whether its row takes part in the step, None where it does."""
        T.note("gate warps: statistics of batch rows, over the lanes of a warp and then over the CTAs of the group")
        plan, statistics = self.plan, self.all[e]
        first = sum(len(s) for s in self.all[:e])
        each = [(i, n, s) for i in range(plan.items) for n, s in enumerate(statistics)]
        sums = []
        for i, n, s in each:
            owner = owners[i] if s.units is None else T.And(owners[i], among(s, units[i]))
            if s.largest:  # in place of both sums
                value = added([envs[i][o] for o in s.operands], True)
                sums += [T.let("largest", T.Select(owner, value, neutral(True)))] * 2
                continue
            shift = None if s.squares is None else self.means[i, first + n]
            parts = [T.let("part", envs[i][o] if shift is None else envs[i][o] - shift) for o in s.operands]
            for value in (added(parts), added([T.let("square", p * p) for p in parts])):
                sums.append(T.let("sum", T.Select(owner, value, T.float32(0))))
        sums = across_warp(sums, self.lanes, [s.largest for _, _, s in each for _ in range(2)])
        size, slot = 2 * len(statistics), T.let("slot", self.slot(e, t))
        for i in range(plan.items):
            self.send(e, t, slot, i, sums[i * size:(i + 1) * size])
        found: list[dict[Var, Expr]] = [{} for _ in envs]
        totals = self.receive(e, t, slot)
        for k, (i, n, s) in enumerate(each):
            total, squares = totals[2 * k:2 * k + 2]
            if s.squares is None:
                found[i][s.total] = total
                continue
            count, before = s.count(plan.hidden), self.means[i, first + n]
            found[i][s.total] = T.let(s.total.name, total + T.float32(count) * before)
            off = T.let("off", total * T.float32(1.0 / count))
            found[i][s.squares] = T.let(s.squares.name, T.max(squares - total * off, T.float32(0)))
            mean = T.let("mean", found[i][s.total] * T.float32(1.0 / count))
            usable = T.And(mean < T.float32(FINITE), mean > T.float32(-FINITE))
            usable = usable if lives[i] is None else T.And(lives[i], usable)
            T.buffer_store(self.means, T.Select(usable, mean, T.float32(0)), [i, first + n])
        return found

    @abstractmethod
    def slot(self, e: int, t: Expr) -> Expr:
        """First word of what exchange ``e`` of a step sends."""

    @abstractmethod
    def send(self, e: int, t: Expr, slot: Expr, i: int, sums: list[Expr]) -> None:
        """Hands on the sums of item i's row, both of each statistic in turn, which all lanes of the row have."""

    @abstractmethod
    def receive(self, e: int, t: Expr, slot: Expr) -> list[Expr]:
        """For each item and statistic both totals."""

    @abstractmethod
    def wipe(self, t: Expr) -> None:
        """Takes back what was sent in the step before."""


def added(values: list[Expr], largest: Kind = False) -> Expr:
    """The sum, or the largest one, as a tree."""
    return T.tree("pair", values, lambda a, b: combine(a, b, largest))
