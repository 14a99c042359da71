"""How state travels between blocks: chunks of operand B, counted as they are written.

A group's state lies in global memory (L2) as chunks of 64 values of K: a row of 128 bytes for each batch row, whose
16-byte pieces are exchanged by row (wgmma's 128-byte swizzle). One bulk copy brings a chunk where products read it. Of
several operands K is one behind the other, each of whole chunks. There are two slots, and a counter for each chunk.

Step t reads slot t % 2 and writes slot (t + 1) % 2. A block has written its part of a chunk when all its threads have:
store; proxy fence; barrier of the block; add (release). A chunk of W writers is complete for step t when its counter is
at least W t. Who copies it: load (acquire) of the counter, proxy fence, bulk copy.

* The counter says what it should. A block adds for step t + 1 after it has read all of step t, to which every writer of
  every chunk has added. So all have added t times when one adds again: the counter is below W (t + 1) until all have.
* The copy sees what was written: stores, barrier and release on one side, acquire and copy on the other are ordered by
  causality, with a fence between the generic and the asynchronous proxy on either side.
* Nobody overwrites what is still read. At step t a block writes slot (t + 1) % 2, which had the state of step t - 1. It
  has read all of step t, and each block of the group wrote a part of that once all its threads had passed a barrier
  behind their products of step t - 1, which had waited for the mbarriers that those copies complete.
* Where blocks share K (``Parcels``), "a block has read all of step t" is true of the blocks of its set together: it has
  their sums of step t before it goes on, and these are made of what they have read.
* A stage of shared memory is written again when each multiplying warp has arrived at its ``empty``, after it waited for
  its products (wgmma)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa import ld_relaxed, opaque, special_register, st_relaxed
from ecornn.schedules.persistent_wide.plan import DEPTH, HANDED, SLOTS, SPACING, TEAM, WidePlan


@dataclass(frozen=True)
class BlockRole:
    """A block's role: expressions, int32."""

    plan: WidePlan
    group: Expr
    member: Expr  # its set in the group
    part: Expr  # of K in the set; 0 where blocks do not share K

    @classmethod
    def of(cls, plan: WidePlan, block: Expr) -> BlockRole:
        group, within = T.let("group", block // plan.blocks), T.let("within", block % plan.blocks)
        if plan.parts == 1:
            return cls(plan, group, within, 0)
        return cls(plan, group, opaque("member", within // plan.parts), opaque("part", within % plan.parts))

    def slot(self, number: Expr) -> Expr:
        """First word of a slot of its group's exchange."""
        return (self.group * SLOTS + number) * self.plan.slot_words

    def counter(self, chunk: Expr) -> Expr:
        """Place of the counter of a chunk of its group."""
        return (self.group * self.plan.counters + chunk) * SPACING

    def handed(self, step: Expr) -> Expr:
        """First word of the sums of its set in a step."""
        return ((self.group * self.plan.sets + self.member) * HANDED + step % HANDED) * self.plan.handed_words

    @property
    def first(self) -> Expr:  # the first unit that it finishes
        first = self.member * self.plan.units
        return first if self.plan.parts == 1 else first + self.part * self.plan.finished

    @property
    def count(self) -> Expr | None:  # units that it finishes, none or less if it has none; None: all finish as many
        units, finished = self.plan.units, self.plan.finished
        return None if finished * self.plan.parts == units else T.min(units - self.part * finished, finished)


def multiplier() -> Expr:
    """The number of this thread among those that multiply, read anew: no register keeps it, or what follows from it."""
    return T.let("multiplier", T.bitwise_and(special_register("tid") - TEAM, 511))


def word_of(plan: WidePlan, unit: Expr, column: Expr) -> Expr:
    """Place in a slot of the word of ``unit`` (of H, even) and the next one in row ``column``: of the first operand."""
    chunk, within = unit // DEPTH, unit % DEPTH
    return (chunk * plan.columns + column) * (DEPTH // 2) + (within // 8 ^ column % 8) * 4 + within % 8 // 2


def place_of(plan: WidePlan, word: Expr) -> tuple[Expr, Expr, Expr]:
    """The other way round: unit and column of a slot's word, and the number of its operand."""
    row, within = word // (DEPTH // 2), word % (DEPTH // 2)
    column, chunk, operand = row % plan.columns, row // plan.columns, 0
    if plan.operands > 1:
        chunk, operand = chunk % plan.reach, chunk // plan.reach
    return chunk * DEPTH + (within // 4 ^ column % 8) * 8 + within % 4 * 2, column, operand


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


UNWRITTEN = 0xFF  # a byte of what words begin with


def handed_word(plan: WidePlan, finisher: Expr, other: Expr, column: Expr, row: Expr) -> Expr:
    """The place in it of two words: one of the finisher's own rows of sums, from the block ``other`` + 1 behind it in
    the set, of two batch rows of the group, the first of which is ``column`` (even)."""
    pair = (finisher * (plan.parts - 1) + other) * (plan.columns // 2) + column // 2
    return (pair * plan.handed_rows + row) * 2


def handed_tag(step: Expr) -> Expr:
    """The tag of a step's words, uint32."""
    return T.let("tag", T.cast(T.bitwise_and(step >> 1, 1), "uint32"))


def hand_over(handed: TirBuffer, place: Expr, values: list[Expr], tag: Expr) -> None:
    """Writes the sums of two batch rows for another block."""
    words = [T.bitwise_or(T.bitwise_and(T.reinterpret("uint32", value), T.uint32(0xFFFFFFFE)), tag) for value in values]
    st_relaxed(handed.ptr_to([place]), words)


class Parcels:
    """How partial sums travel between the blocks of a set, which share K: words that say which step they are of. A
    block multiplies the rows of all units of its set by its part of K. The sums of units that another block finishes go
    through global memory (L2) as float32, ordered by who finishes them, whose they are, pair of batch rows and weight
    row, so that both who stores (accumulators of wgmma) and who loads (items) move whole sectors, two words or more at
    a time. The last bit of a word is a tag, which products of 16-bit values do not miss: a thread that needs a word
    polls it until the tag is that of the step. One trip through L2, and no fence.

    Step t uses slot t % 2 and the tag t // 2 % 2; all words begin with the tag 1. In a block, the order of a step is:
    sums to other blocks, polls, barrier, barrier, state counted. Take a word of block W that thread A of block R polls:

    * A never takes old data for new. In step t - 2 it has itself read this word with the other tag; what a thread reads
      of one word is never older than what it has read before.
    * W does not overwrite what is unread. A had the value, with its tag, before it met all threads of R at a barrier of
      step t. All that R hands over in step t + 1 was computed behind that barrier, from what A had read there, and some
      of it is for W. A thread of W that has got that meets all threads of W at a barrier before any of them stores in
      step t + 2. What a read returns cannot depend on a write that depends on it.

    Every block of a set finishes units, and polls words of every other one. Items are in pairs of batch rows."""

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
        tag = handed_tag(t)
        firsts = [opaque("sums_at", self.role.handed(t) + place) for place in self.places]
        every = [*product(*map(range, (self.pairs, self.plan.parts - 1, 2 * self.plan.gates)))]
        for word in every:
            T.buffer_store(self.words, tag, list(word))
        missing = T.variable("missing", "uint32", T.uint32(1))
        with T.While(missing[0] != T.uint32(0)):
            for i, other, k, count, at in self._each(firsts):
                with T.when(self.owners[i]):
                    ld_relaxed([self.words[i, other, k + n] for n in range(count)], self.handed.ptr_to([at]))
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
        for (i, first), other, piece in product(enumerate(firsts), range(plan.parts - 1), range(self.pieces)):
            at = first + handed_word(plan, 0, other, 0, piece * plan.finished * plan.interleave)
            for k in range(0, self.width, count):
                yield i, other, piece * self.width + k, count, at + k
