"""Weights that do not fit on the chip: read from L2 in every step, by bulk copies into a ring of each product warp.

A warp multiplies with its streamed pairs in the same order in every step, so what comes next is known, and is under way
while the warp waits for state or multiplies with what it keeps: L2 is at work all the time. A slot of the ring has the
octets of one pair, which lie in memory one after the other: one copy, and an mbarrier that counts its bytes.

Nobody but the warp touches its ring. A lane reads after the wait for the slot's mbarrier; all lanes have read when they
meet, behind which the first lane asks for what the slot holds next. Bulk copies are of another proxy than reads, so a
fence stands between the two: without it what came next was sometimes read instead (30 of 30 runs of a vanilla layer,
H=2560 B=32). Which slot a pair has does not depend on the step, so that a ring may be shorter than the pairs by any
number; how often a slot has been filled says which parity to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa.mbarrier import fence_mbarrier_init
from ecornn.schedules.cuda.isa.memory import fence_async_shared, ld_shared
from ecornn.schedules.cuda.isa.threads import sync_warp
from ecornn.schedules.cuda.pipeline import BARRIER_WORDS, Pipeline, Use, parity_of
from ecornn.schedules.persistent.plan import PersistentPlan


@dataclass(frozen=True)
class Position:
    """A lane's place: the block in its group, the warp among those that multiply, and the lane in it."""

    member: Expr
    warp: Expr
    lane: Expr


class Stream:
    """Emits the ring of one phase; ``first`` is its place in shared memory, in words."""

    def __init__(self, plan: PersistentPlan, index: int, words: TirBuffer, first: int, source: TirBuffer, at: Position,
                 steps: Expr) -> None:
        self.plan, self.phase = plan, plan.phases[index]
        self.words, self.source, self.lane, self.steps = words, source, at.lane, steps
        octets, slots = self.phase.octets(plan.units), self.phase.slots
        self.size = octets * plan.octet_words  # words of a pair
        self.ring = T.let("ring", first + at.warp * (slots * self.size))
        barriers = first + plan.warps * slots * self.size + at.warp * (slots * BARRIER_WORDS)
        self.slots = Pipeline(words, T.let("barriers", barriers), slots)
        self.pairs = T.let("pairs", (at.member * plan.warps + at.warp) * self.phase.pairs)

    def begin(self) -> None:
        """Makes the barriers, and asks for the first pairs."""
        T.note("weight stream, prologue: mbarriers of the ring, and its first bulk copies from L2")
        with T.when(self.lane == 0):
            self.slots.init()
            fence_mbarrier_init()
            for slot in range(self.phase.slots):
                self._copy(slot)
        sync_warp()

    def read(self, q: Expr, t: Expr, into: TirBuffer) -> None:
        """Waits for streamed pair ``q`` in step t, reads this lane's words, and asks for what the slot holds next."""
        slots, count = self.phase.slots, self.phase.streamed_pairs
        slot, turn = q % slots, q // slots
        if not isinstance(q, int):
            slot, turn = T.let("slot", slot), T.let("turn_of_slot", turn)
        every = (count - slot + slots - 1) // slots  # pairs of the slot in a step: ``uses``, an addition less
        self.slots.wait(Use(slot, parity_of(t * every + turn)))
        plan, n = self.plan, self.plan.lane_words
        for v in range(self.phase.octets(plan.units)):
            at = self.words.ptr_to([self.ring + (slot * self.size + v * plan.octet_words) + self.lane * n])
            ld_shared([into[0, v, i] for i in range(n)], at)
        fence_async_shared()
        sync_warp()
        follows = q + slots < count  # in this step
        if not isinstance(q, int):
            with T.when(T.And(self.lane == 0, T.Or(follows, t + 1 < self.steps))):
                self._copy(T.let("next", T.Select(follows, q + slots, slot)))
            return
        wanted = self.lane == 0 if follows else T.And(self.lane == 0, t + 1 < self.steps)
        with T.when(wanted):
            self._copy(q + slots if follows else slot)

    def _copy(self, q: Expr) -> None:
        slot = q % self.phase.slots
        place = T.cast((self.pairs + q) * self.size, "int64") * self.plan.per_word
        self.slots.copy(slot, self.words.ptr_to([self.ring + slot * self.size]), self.source.ptr_to([place]),
                        self.size * 4)
