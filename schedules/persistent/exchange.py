"""How state travels between blocks: words that announce themselves.

An exchanged vector lies in global memory (L2) in the order in which product warps need it as
operand B of mma, in a ring of four slots. The four words of a lane hold neighbouring units (K may be
permuted as long as the weights are permuted alike), so that a block writes whole sectors. A word
that has not been written holds a bit pattern that no value has (SENTINEL), so a reader polls the
words it needs until none holds it: one trip through L2, with no barrier between blocks and no copy
through shared memory.

Step t reads slot t % 4 and writes slot (t + 1) % 4. In step t, after its block has read slot t % 4
completely, the owner of a word wipes it in slot (t - 1) % 4, to be written again in step t + 2:

* Nobody still needs what is wiped: the block has the words that every other block wrote after it
  had finished reading slot t - 1.
* Nobody takes old data for new. The reader of a word in step t + 3 has, in the same thread, read the
  same word in step t + 2, which its owner wrote in step t + 1, after the fence that follows the wipe
  of step t. Wipe, fence, write; read, fence, read: a release and an acquire pattern of the PTX memory
  model, so the wipe happens before the poll. Three slots would leave no room for the fence but the
  critical path; both fences stand where their threads would wait anyway.
"""

from __future__ import annotations

from typing import Any

from ecornn.schedules.persistent.plan import PAIR, RING, PhasePlan, Plan
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


def slot_base(plan: Plan, phase: PhasePlan, group: Any, slot: Any) -> Any:
    """First word of a group's slot."""
    return (group * RING + slot) * plan.slot_words(phase)


def word_of(plan: Plan, phase: PhasePlan, operand: int, unit: Any, column: Any) -> Any:
    """Place in a slot of the word that holds ``unit`` (of H) in batch row ``column`` of the group."""
    k = unit // per_word(plan.dtype)
    pair, quarter, part = k // PAIR, k // 4 % 4, k % 4
    tiles = (operand * plan.warps * phase.warp_pairs + pair) * plan.tiles + column // 8
    return (tiles * 32 + column % 8 * 4 + quarter) * 4 + part
