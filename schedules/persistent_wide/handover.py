"""How partial sums travel between the blocks of a set, which share K: words that announce themselves.

A block multiplies the rows of all units of its set by its part of K. The sums of units that another block
finishes go through global memory (L2) as float32, ordered by who finishes them, whose they are, pair of batch rows and
weight row, so that both who stores (accumulators of wgmma) and who loads (items) move whole sectors. A word
that has not been written holds a bit pattern that no sum has (SENTINEL), so the thread that needs a word
polls it, and wipes it later: one trip through L2.

Step t uses slot t % 4. In a block, the order of a step is: sums to other blocks, barrier, polls, barrier, state
counted, fence, wipes. Take a word of W's that thread A of block R polls and wipes:

* W does not overwrite what is unread, and no wipe comes after what W writes in step t + 4. After its wipe in step t,
  A meets all threads of R at a barrier of step t + 1; each passes the fence of step t + 1 and stores sums in
  step t + 2, some of them for W. A thread of W that polls these passes the fence of step t + 2 and meets all
  threads of W at a barrier of step t + 3, before any of them stores in step t + 4. Barrier, fence, store; load,
  fence, barrier: a release and an acquire pattern of the PTX memory model, so the wipe happens before. With
  three slots one of these fences would be on the critical path.
* A never takes old data for new: it has itself written the sentinel since it read the word.

Every block of a set finishes units, and polls words of every other one; only words that are polled are written,
but for padding of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ecornn.schedules.persistent.exchange import SENTINEL, pack
from ecornn.schedules.persistent_wide.place import Place, named
from ecornn.schedules.persistent_wide.plan import HANDED, Plan


def slot_of(plan: Plan, place: Place, step: Any) -> Any:
    """First word of the sums of a set in a step."""
    return ((place.group * plan.sets + place.member) * HANDED + step % HANDED) * plan.handed_words


def word_of(plan: Plan, finisher: Any, other: Any, column: Any, row: Any) -> Any:
    """Where in it the words begin of one of the finisher's own rows of sums, from the block ``other`` + 1 behind it in
    the set, and two batch rows of the group, the first of which is ``column`` (even)."""
    pair = (finisher * (plan.parts - 1) + other) * (plan.columns // 2) + column // 2
    return (pair * plan.handed_rows + row) * plan.pair_words


def pack_sums(plan: Plan, first: Any, second: Any) -> list[Any]:
    """The sums of two batch rows as words that are never the sentinel."""
    if plan.halves:
        return [pack([first, second], "float16")]
    return [pack([value], "float32") for value in (first, second)]


def store(T: Any, handed: Any, place: Any, words: list[Any]) -> None:
    """Writes 1, 2 or 4 words (uint32) for another block."""
    vector = f".v{len(words)}" if len(words) > 1 else ""
    T.evaluate(T.ptx[f"st.relaxed.gpu.global{vector}.b32"](handed.ptr_to([place]), *words))


class Parcels:
    """Emits what a thread does to get its items' sums of the other parts; items are in pairs of batch rows."""

    def __init__(self, T: Any, plan: Plan, handed: Any, items: int) -> None:
        self.T, self.plan, self.handed = T, plan, handed
        self.pairs, self.pieces, self.width = items // 2, plan.gates // plan.interleave, plan.interleave * plan.pair_words
        self.words = T.alloc_buffer((self.pairs, plan.parts - 1, self.pieces * self.width), "uint32", scope="local")

    def locate(self, place: Place, places: list[Any], owners: list[Any]) -> None:
        """The pairs' words in a slot of the set, and which pairs there are."""
        self.place, self.places, self.owners = place, places, owners

    def poll(self, t: Any) -> None:
        """Loads all words, again and again until none is missing."""
        T = self.T
        self.firsts = [named(T, slot_of(self.plan, self.place, t) + place) for place in self.places]
        every = [(i, other, k) for i in range(self.pairs) for other in range(self.plan.parts - 1)
                 for k in range(self.pieces * self.width)]
        for word in every:
            T.buffer_store(self.words, T.uint32(0), list(word))
        missing = T.alloc_buffer((1,), "int32", scope="local")
        T.buffer_store(missing, T.int32(1), [0])
        with T.While(missing[0] != 0):
            for i, other, k, count, at in self._each():
                into = [self.words[i, other, k + n] for n in range(count)]
                with T.If(self.owners[i]), T.Then():
                    vector = f".v{count}" if count > 1 else ""
                    T.evaluate(T.ptx[f"ld.relaxed.gpu.global{vector}.b32"](*into, self.handed.ptr_to([at])))
            highest = [self.words[word] for word in every]
            while len(highest) > 1:
                maxima = [T.Bind(T.max(a, b)) for a, b in zip(highest[::2], highest[1::2], strict=False)]
                highest = maxima + highest[len(maxima) * 2:]
            T.buffer_store(missing, T.cast(highest[0] == T.uint32(SENTINEL), "int32"), [0])

    def sum(self, i: int, gate: int, own: Any) -> Any:
        """This block's own sum of an item and those of the others, float32."""
        T, pair, second = self.T, i // 2, i % 2
        for other in range(self.plan.parts - 1):
            if self.plan.halves:
                word = self.words[pair, other, gate]
                own = own + T.cuda.func_call("ecornn_half", T.bitwise_and(word >> T.uint32(16 * second), T.uint32(0xffff)),
                                             source_code=_HALF, return_type="float32")
            else:
                own = own + T.reinterpret("float32", self.words[pair, other, gate * 2 + second])
        return T.Bind(own)

    def wipe(self) -> None:
        """Makes ready for the step after the next three what was read."""
        T = self.T
        for i, _, _, count, at in self._each():
            with T.If(self.owners[i]), T.Then():
                store(T, self.handed, at, [T.uint32(SENTINEL)] * count)

    def _each(self) -> Iterable[tuple[int, int, int, int, Any]]:
        """(pair, other part, first word of the pair's, words, place) of what one instruction moves."""
        plan, count = self.plan, min(self.width, 4)
        for i, first in enumerate(self.firsts):
            for other in range(plan.parts - 1):
                for piece in range(self.pieces):
                    at = first + word_of(plan, 0, other, 0, piece * plan.finished * plan.interleave)
                    for k in range(0, self.width, count):
                        yield i, other, piece * self.width + k, count, at + k


_HALF = """
__device__ __forceinline__ float ecornn_half(unsigned half) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((unsigned short)half));
  return r;
}"""
