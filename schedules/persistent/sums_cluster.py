"""Statistics inside a cluster: each part of a row's sums goes to every block, and every lane adds all parts itself.

They are sent to shared memory through a ``ClusterPipeline``, by lanes of a row that each have another block. What is
said there holds: sums of step t + 2 are sent by a warp that has all sums of step t + 1, which every warp of the cluster
sent some of, after it had read those of step t. A slot's next arrival is made by a thread that has waited for the phase
before, at the end of the step, where nothing waits for it.

Two statistics travel as 16 bytes, so a slot has first the pairs of statistics and then the one that is left, each
(row, part), four words or two.
"""

from __future__ import annotations

from ecornn.analysis import Statistic
from ecornn.schedules.builder import Expr, T, ceil_div
from ecornn.schedules.cuda.isa.cluster import cluster_send
from ecornn.schedules.cuda.isa.memory import ld_shared, shared_address
from ecornn.schedules.persistent.cluster import Cluster
from ecornn.schedules.persistent.plan import PersistentPlan
from ecornn.schedules.persistent.sums import LOWEST_BITS, Sums, added
from ecornn.schedules.scalars.row_sums import across_warp

LOADS = 16  # of 16 bytes a lane and row, at most; beyond, lanes share the parts and shuffle


class ClusterSums(Sums):
    """Emits both ends."""

    def __init__(self, plan: PersistentPlan, statistics: list[tuple[Statistic, ...]], carrier: Cluster,
                 group: Expr, member: Expr, thread: Expr, steps: Expr) -> None:
        super().__init__(plan, statistics, group, member, thread)
        self.carrier, self.steps = carrier, steps

    def slot(self, e: int, t: Expr) -> Expr:
        return self.carrier.first_sums[e] + t % 2 * self.plan.sum_words(e)

    def send(self, e: int, t: Expr, slot: Expr, i: int, sums: list[Expr]) -> None:
        plan = self.plan
        words = [T.let("word", T.reinterpret("uint32", v)) for v in sums]
        barrier = self.carrier.sums[e].address(t)
        for n in range(0, len(self.all[e]), 2):
            own = words[2 * n:2 * n + 4]
            to = T.let("to", shared_address(self.carrier.words.ptr_to(
                [slot + self._row(e, n, self.rows[i]) + self.part * len(own)])))
            for turn in range(ceil_div(plan.blocks, self.lanes)):  # each lane to a block of its own
                rank = T.let("rank", self.lane + turn * self.lanes)
                with T.when(T.And(self.mine[i], rank < plan.blocks)):
                    cluster_send(to, barrier, T.cast(rank, "uint32"), own)

    def receive(self, e: int, t: Expr, slot: Expr) -> list[Expr]:
        plan = self.plan
        self.carrier.sums[e].wait_for(t)
        lanes = 1  # that share the parts of a row
        while plan.sum_parts > LOADS * lanes and lanes < self.lanes:
            lanes *= 2
        totals, kinds = [], []
        for i in range(plan.items):
            for n in range(0, len(self.all[e]), 2):
                largest = [s.largest for s in self.all[e][n:n + 2] for _ in range(2)]
                totals += self._read(slot + self._row(e, n, self.rows[i]), largest, lanes)
                kinds += largest
        return across_warp(totals, lanes, kinds)

    def wipe(self, t: Expr) -> None:
        """Nothing needs to be taken back; the slots' next phases begin."""
        with T.when(T.And(self.thread == 0, t + 2 < self.steps)):
            for pipeline in self.carrier.sums:
                pipeline.announce(t)

    def _width(self, e: int, n: int) -> int:
        """Words of a part of statistic n and the next one, if there is another."""
        return 2 * min(2, len(self.all[e]) - n)

    def _row(self, e: int, n: int, row: Expr) -> Expr:
        """Place in a slot of a row's parts of statistic n, an even number."""
        plan = self.plan
        return n * 2 * plan.rows * plan.sum_padded + row * plan.sum_padded * self._width(e, n)

    def _read(self, first: Expr, largest: list[bool], lanes: int) -> list[Expr]:
        """Sums of the parts that this lane reads, of ``lanes`` that share them: one, or two neighbours, in 16 bytes.
        ``largest``: which of the part's words are of maxima."""
        plan, width = self.plan, len(largest)
        per = 4 // width
        nothing = [T.uint32(LOWEST_BITS if largest[k % width] else 0) for k in range(4)]
        turns = ceil_div(plan.sum_parts, per * lanes)
        words = T.local("words", (turns, 4), "uint32")  # each turn: two statistics of a part, or one of two parts
        at = T.let("at", first + self.lane % lanes * 4)
        for j in range(turns):
            left = plan.sum_parts - j * lanes * per  # parts from the first lane's on
            place = [words[j, k] for k in range(4)]
            if left >= lanes * per:
                self._load(place, at + j * lanes * 4)
                continue
            for k in range(4):
                T.buffer_store(words, nothing[k], [j, k])
            with T.when(self.lane % lanes * per < left):
                self._load(place, at + j * lanes * 4)
            if left % per:  # behind the last part is one that nobody sends
                with T.when(self.lane % lanes * per == left - 1):
                    for k in range(2, 4):
                        T.buffer_store(words, nothing[k], [j, k])
        values = [[T.let("value", T.reinterpret("float32", words[j, k])) for k in range(4)] for j in range(turns)]
        return [added([v[k] for v in values for k in range(f, 4, width)], largest[f]) for f in range(width)]

    def _load(self, into: list[Expr], place: Expr) -> None:
        ld_shared(into, self.carrier.words.ptr_to([place]))
