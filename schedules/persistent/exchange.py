"""How state travels between blocks: words that announce themselves.

An exchanged vector lies in global memory (L2) in the order in which product warps need it as
operand B of mma, in a ring of R slots. The four words of a lane hold neighbouring units (K may be
permuted as long as the weights are permuted alike), so that a block writes whole sectors. A word
that has not been written holds a bit pattern that no value has (SENTINEL), so a reader polls the
words it needs until none holds it: one trip through L2, with no barrier between blocks and no copy
through shared memory.

Step t reads slot t % R and writes slot (t + 1) % R. In step t, after its block has read slot t % R
completely, the owner of a word wipes it in slot (t - 1) % R, to be written again in step t + R - 2:

* Nobody still needs what is wiped: the block has the words that every other block wrote after it
  had finished reading slot t - 1.
* Nobody takes old data for new. The reader of a word in step t + R - 1 has, in the same thread, read the
  same word in an earlier step, which its owner wrote after a fence behind the wipe of step t, and has had a fence
  itself since. Wipe, fence, write; read, fence, read: a release and an acquire pattern of the PTX memory
  model, so the wipe happens before the poll.

A fence waits for all that its thread has under way, a fifth of a step. Owners have one at the end of step t where
``Plan.released`` says so: in every step, or in one of R - 4. Behind the wipe of step t comes one at the end of
step f <= t + R - 5, behind that the write of step f + 1. Readers have theirs in every step, or where
``Plan.acquired`` says so: two steps after each of the owners'. So the one of step f + 2 <= t + R - 3 is behind
the read of what step f + 1 wrote, and before the poll of step t + R - 1. With fences in every step f = t, and R = 4
leaves room for the readers'. Three slots would not.

A reader's fence also keeps it from polling at once, which disturbs what it waits for in some layers and is a
loss of time in others: hence a knob.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ecornn.schedules.persistent.plan import PAIR, PhasePlan, Plan
from ecornn.schedules.tensor_core import pack_pair, per_word

SENTINEL = 0xFFFFFFFF


def pack(values: list[Any], dtype: str) -> Any:
    """One or two float32 values as a word that is never the sentinel."""
    from tvm.tirx.script.builder import ir as T

    if dtype == "float32":
        word, nan = T.Bind(T.reinterpret("uint32", values[0])), 0x7FFFFFFF
    else:
        word, nan = pack_pair(values[0], values[1], dtype), 0x7FFF7FFF
    return T.Select(word == T.uint32(SENTINEL), T.uint32(nan), word)


def fence(T: Any, where: Any) -> None:
    """Release and acquire, in steps ``where`` (an expression; or True: in all)."""
    with ExitStack() as stack:
        if where is not True:
            stack.enter_context(T.If(where))
            stack.enter_context(T.Then())
        T.evaluate(T.ptx["fence.acq_rel.gpu"]())


def slot_base(plan: Plan, phase: PhasePlan, group: Any, slot: Any) -> Any:
    """First word of a group's slot."""
    return (group * plan.ring + slot) * plan.slot_words(phase)


def word_of(plan: Plan, phase: PhasePlan, operand: int, unit: Any, column: Any) -> Any:
    """Place in a slot of the word that holds ``unit`` (of H) in batch row ``column`` of the group."""
    k = unit // per_word(plan.dtype)
    pair, quarter, part = k // PAIR, k // 4 % 4, k % 4
    tiles = (operand * plan.warps * phase.warp_pairs + pair) * plan.tiles + column // 8
    return (tiles * 32 + column % 8 * 4 + quarter) * 4 + part
