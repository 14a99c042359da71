"""How partial sums travel between the blocks of a set, which share K: words that announce themselves.

A block multiplies the rows of all units of its set by its part of K. The sums of units that another block
finishes go through global memory (L2) as float32, ordered by who finishes them, whose they are, batch row and
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

from ecornn.schedules.persistent.exchange import SENTINEL
from ecornn.schedules.persistent_wide.place import Place, named
from ecornn.schedules.persistent_wide.plan import HANDED, Plan


def slot_of(plan: Plan, place: Place, step: Any) -> Any:
    """First word of the sums of a set in a step."""
    return ((place.group * plan.sets + place.member) * HANDED + step % HANDED) * plan.handed_words


def word_of(plan: Plan, finisher: Any, other: Any, column: Any, row: Any) -> Any:
    """Place in it of one of the finisher's own rows of sums, from the block ``other`` + 1 behind it in the set, and a
    batch row of the group."""
    return ((finisher * (plan.parts - 1) + other) * plan.columns + column) * plan.handed_rows + row


def store(T: Any, handed: Any, place: Any, value: Any) -> None:
    """Writes one word (uint32) for another block."""
    T.evaluate(T.ptx["st.relaxed.gpu.global.b32"](handed.ptr_to([place]), value))


class Parcels:
    """Emits what a thread does to get its items' sums of the other parts."""

    def __init__(self, T: Any, plan: Plan, handed: Any, items: int) -> None:
        self.T, self.plan, self.handed = T, plan, handed
        self.pieces, self.width = plan.gates // plan.interleave, plan.interleave
        self.words = T.alloc_buffer((items, plan.parts - 1, plan.gates), "uint32", scope="local")

    def locate(self, place: Place, places: list[Any], owners: list[Any]) -> None:
        """The items' words in a slot of the set, and which items there are."""
        self.place, self.places, self.owners = place, places, owners

    def poll(self, t: Any) -> None:
        """Loads all words, again and again until none is missing."""
        T = self.T
        every = [(i, other, g) for i in range(len(self.places)) for other in range(self.plan.parts - 1)
                 for g in range(self.plan.gates)]
        self.firsts = [named(T, slot_of(self.plan, self.place, t) + place) for place in self.places]
        for word in every:
            T.buffer_store(self.words, T.uint32(0), list(word))
        missing = T.alloc_buffer((1,), "int32", scope="local")
        T.buffer_store(missing, T.int32(1), [0])
        with T.While(missing[0] != 0):
            for i, other, piece, at in self._each():
                into = [self.words[i, other, piece * self.width + k] for k in range(self.width)]
                with T.If(self.owners[i]), T.Then():
                    vector = f".v{self.width}" if self.width > 1 else ""
                    T.evaluate(T.ptx[f"ld.relaxed.gpu.global{vector}.b32"](*into, self.handed.ptr_to([at])))
            highest = [self.words[word] for word in every]
            while len(highest) > 1:
                maxima = [T.Bind(T.max(a, b)) for a, b in zip(highest[::2], highest[1::2], strict=False)]
                highest = maxima + highest[len(maxima) * 2:]
            T.buffer_store(missing, T.cast(highest[0] == T.uint32(SENTINEL), "int32"), [0])

    def sum(self, i: int, gate: int, own: Any) -> Any:
        """This block's own sum and those of the others, float32."""
        T = self.T
        for other in range(self.plan.parts - 1):
            own = own + T.reinterpret("float32", self.words[i, other, gate])
        return T.Bind(own)

    def wipe(self) -> None:
        """Makes ready for the step after the next three what was read."""
        T = self.T
        for i, _, _, at in self._each():
            with T.If(self.owners[i]), T.Then():
                if self.width == 4:
                    words = [T.uint32(SENTINEL)] * 4
                    T.evaluate(T.ptx["st.relaxed.gpu.global.v4.b32"](self.handed.ptr_to([at]), *words))
                else:
                    for k in range(self.width):
                        store(T, self.handed, at + k, T.uint32(SENTINEL))

    def _each(self) -> Iterable[tuple[int, int, int, Any]]:
        """(item, other part, piece, place of its first word)."""
        plan = self.plan
        for i, first in enumerate(self.firsts):
            for other in range(plan.parts - 1):
                for piece in range(self.pieces):
                    yield i, other, piece, first + word_of(plan, 0, other, 0, piece * plan.finished * self.width)
