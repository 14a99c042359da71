"""How partial sums travel between the blocks of a set, which share K: words that say which step they are of.

A block multiplies the rows of all units of its set by its part of K. The sums of units that another block
finishes go through global memory (L2) as float32, ordered by who finishes them, whose they are, pair of batch rows
and weight row, so that both who stores (accumulators of wgmma) and who loads (items) move whole sectors, two words or
more at a time. The last bit of a word is a tag, which products of 16-bit values do not miss: a thread that needs a
word polls it until the tag is that of the step. One trip through L2, and no fence.

Step t uses slot t % 2 and the tag t // 2 % 2; all words begin with the tag 1. In a block, the order of a step is: sums
to other blocks, polls, barrier, barrier, state counted. Take a word of block W that thread A of block R polls:

* A never takes old data for new. In step t - 2 it has itself read this word with the other tag; what a thread reads
  of one word is never older than what it has read before.
* W does not overwrite what is unread. A had the value, with its tag, before it met all threads of R at a barrier of
  step t. All that R hands over in step t + 1 was computed behind that barrier, from what A had read there, and some of
  it is for W. A thread of W that has got that meets all threads of W at a barrier before any of them stores in step
  t + 2. What a read returns cannot depend on a write that depends on it.

Every block of a set finishes units, and polls words of every other one.
"""

from __future__ import annotations

from collections.abc import Iterable

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa.memory import ld_relaxed, st_relaxed
from ecornn.schedules.cuda.isa.registers import opaque
from ecornn.schedules.persistent_wide.block_role import BlockRole
from ecornn.schedules.persistent_wide.plan import HANDED, WidePlan

UNWRITTEN = 0xFF  # a byte of what words begin with


def slot_of(plan: WidePlan, role: BlockRole, step: Expr) -> Expr:
    """First word of the sums of a set in a step."""
    return ((role.group * plan.sets + role.member) * HANDED + step % HANDED) * plan.handed_words


def word_of(plan: WidePlan, finisher: Expr, other: Expr, column: Expr, row: Expr) -> Expr:
    """The place in it of two words: one of the finisher's own rows of sums, from the block ``other`` + 1 behind it in
    the set, of two batch rows of the group, the first of which is ``column`` (even)."""
    pair = (finisher * (plan.parts - 1) + other) * (plan.columns // 2) + column // 2
    return (pair * plan.handed_rows + row) * 2


def tag_of(step: Expr) -> Expr:
    """The tag of a step's words, uint32."""
    return T.let("tag", T.cast(T.bitwise_and(step >> 1, 1), "uint32"))


def store(handed: TirBuffer, place: Expr, values: list[Expr], tag: Expr) -> None:
    """Writes the sums of two batch rows for another block."""
    words = [T.bitwise_or(T.bitwise_and(T.reinterpret("uint32", value), T.uint32(0xFFFFFFFE)), tag) for value in values]
    st_relaxed(handed.ptr_to([place]), words)


class Parcels:
    """Emits what a thread does to get its items' sums of the other parts; items are in pairs of batch rows."""

    def __init__(self, plan: WidePlan, handed: TirBuffer, items: int) -> None:
        self.plan, self.handed = plan, handed
        self.pairs, self.pieces, self.width = items // 2, plan.gates // plan.interleave, 2 * plan.interleave
        # (pair of items, other part, gate and item of the pair)
        self.words = T.local("words", (self.pairs, plan.parts - 1, 2 * plan.gates), "uint32")

    def locate(self, role: BlockRole, places: list[Expr], owners: list[Expr]) -> None:
        """The pairs' words in a slot of the set, and which pairs there are."""
        self.role, self.places, self.owners = role, places, owners

    def poll(self, t: Expr) -> None:
        """Loads all words, again and again until all have the step's tag."""
        T.note("gates: poll L2 for the partial sums of CTAs that share K, until their tags are the step's")
        tag = tag_of(t)
        firsts = [opaque("sums_at", slot_of(self.plan, self.role, t) + place) for place in self.places]
        every = [(i, other, k) for i in range(self.pairs) for other in range(self.plan.parts - 1)
                 for k in range(2 * self.plan.gates)]
        for word in every:
            T.buffer_store(self.words, tag, list(word))
        missing = T.local("missing", (1,), "uint32")
        T.buffer_store(missing, T.uint32(1), [0])
        with T.While(missing[0] != T.uint32(0)):
            for i, other, k, count, at in self._each(firsts):
                into = [self.words[i, other, k + n] for n in range(count)]
                with T.when(self.owners[i]):
                    ld_relaxed(into, self.handed.ptr_to([at]))
            others = T.uint32(0)
            for word in every:
                others = T.bitwise_or(others, T.bitwise_xor(self.words[word], tag))
            T.buffer_store(missing, T.bitwise_and(others, T.uint32(1)), [0])

    def sum(self, i: int, gate: int, own: Expr) -> Expr:
        """This block's own sum of an item and those of the others, float32."""
        for other in range(self.plan.parts - 1):
            word = self.words[i // 2, other, gate * 2 + i % 2]
            own = own + T.reinterpret("float32", T.bitwise_and(word, T.uint32(0xFFFFFFFE)))  # infinite, if it was that
        return T.let("sum", own)

    def _each(self, firsts: list[Expr]) -> Iterable[tuple[int, int, int, int, Expr]]:
        """(pair, other part, first word of the pair's, words, place) of what one instruction loads."""
        plan, count = self.plan, min(self.width, 4)
        for i, first in enumerate(firsts):
            for other in range(plan.parts - 1):
                for piece in range(self.pieces):
                    at = first + word_of(plan, 0, other, 0, piece * plan.finished * plan.interleave)
                    for k in range(0, self.width, count):
                        yield i, other, piece * self.width + k, count, at + k
