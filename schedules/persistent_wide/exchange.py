"""How state travels between blocks: chunks of operand B, counted as they are written.

A group's state lies in global memory (L2) as chunks of 64 values of K: a row of 128 bytes for each batch
row, whose 16-byte pieces are exchanged by row (wgmma's 128-byte swizzle). One bulk copy brings a chunk
where products read it. Where products have several operands, K is one behind the other, each of whole chunks. There
are two slots, and one counter for each chunk.

Step t reads slot t % 2 and writes slot (t + 1) % 2. A block has written its part of a chunk when all its
threads have: store; proxy fence; barrier of the block; add (release). A chunk of W writers is complete for step t
when its counter is at least W t. Who copies it: load (acquire) of the counter, proxy fence, bulk copy.

* The counter says what it should. A block adds for step t + 1 after it has read all of step t, to which
  every writer of every chunk has added. So all of them have added t times when one adds for the
  t + 1st time, and the counter is never above W (t + 1) before all have.
* The copy sees what was written: stores, barrier and release on one side, acquire and copy on the
  other are ordered by causality, with a fence between the generic and the asynchronous proxy on that path,
  on either side of it.
* Nobody overwrites what is still read. At step t a block writes slot (t + 1) % 2, which had the state of
  step t - 1. It has read all of step t, and each block of the group wrote a part of that after all its
  threads had passed a barrier behind their products of step t - 1; these had waited for the mbarriers
  which those copies complete. So all reads of step t - 1 were done.
* Where blocks share K (handover.py), "a block has read all of step t" is true of the blocks of its set together: it has
  their sums of step t before it goes on, and these are made of what they have read, as all is that follows.
* A stage of shared memory is written again when each multiplying warp has arrived at its ``empty``,
  after its products (wgmma) were waited for.
"""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.persistent_wide.plan import DEPTH, SLOTS, SPACING, WidePlan


def slot_base(plan: WidePlan, group: Expr, slot: Expr) -> Expr:
    """First word of a group's slot."""
    return (group * SLOTS + slot) * plan.slot_words


def word_of(plan: WidePlan, unit: Expr, column: Expr) -> Expr:
    """Place in a slot of the word that holds ``unit`` (of H, even) and the next one in batch row ``column``, of the
    first operand."""
    chunk, within = unit // DEPTH, unit % DEPTH
    return (chunk * plan.columns + column) * (DEPTH // 2) + (within // 8 ^ column % 8) * 4 + within % 8 // 2


def operand_words(plan: WidePlan) -> int:
    """Words from an operand to the next one in a slot."""
    return plan.reach * plan.columns * (DEPTH // 2)


def place_of(plan: WidePlan, word: Expr) -> tuple[Expr, Expr, Expr]:
    """The other way round: unit and column of a slot's word, and the number of its operand."""
    row, within = word // (DEPTH // 2), word % (DEPTH // 2)
    column, chunk, operand = row % plan.columns, row // plan.columns, 0
    if plan.operands > 1:
        chunk, operand = chunk % plan.reach, chunk // plan.reach
    return chunk * DEPTH + (within // 4 ^ column % 8) * 8 + within % 4 * 2, column, operand


def counter_of(plan: WidePlan, group: Expr, chunk: Expr) -> Expr:
    """Place of a chunk's counter."""
    return (group * plan.counters + chunk) * SPACING


def writers(plan: WidePlan, chunk: Expr) -> Expr:
    """Blocks of a group that finish units of a chunk; none where it only pads K."""
    def finisher(unit: Expr) -> Expr:
        if plan.parts == 1:
            return unit // plan.units
        return unit // plan.units * plan.finishers + unit % plan.units // plan.finished

    within = chunk if plan.operands == 1 else chunk % plan.reach
    first, end = within * DEPTH, T.min(within * DEPTH + DEPTH, plan.hidden)
    there = first < plan.hidden if plan.operands == 1 else chunk < plan.operands * plan.reach
    return T.Select(there, finisher(end - 1) - finisher(first) + 1, 0)
