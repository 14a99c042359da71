"""How state travels between blocks through L2: words that announce themselves.

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
``PersistentPlan.released`` says so: in every step, or in one of R - 4. Behind the wipe of step t comes one at the end
of step f <= t + R - 5, behind that the write of step f + 1. Readers have theirs in every step, or where
``PersistentPlan.acquired`` says so: two steps after each of the owners'. So the one of step f + 2 <= t + R - 3 is
behind the read of what step f + 1 wrote, and before the poll of step t + R - 1. With fences in every step f = t, and
R = 4 leaves room for the readers'. Three slots would not.

A reader's fence also keeps it from polling at once, which disturbs what it waits for in some layers and is a
loss of time in others: hence a knob.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa.memory import fence_gpu, ld_relaxed, st_relaxed
from ecornn.schedules.cuda.isa.tensor_core import pack_pair, per_word
from ecornn.schedules.cuda.isa.threads import sync_warp
from ecornn.schedules.persistent.plan import PAIR, PersistentPlan, PhasePlan

SENTINEL = 0xFFFFFFFF


def pack(values: list[Expr], dtype: str) -> Expr:
    """One or two float32 values as a word that is never the sentinel."""
    if dtype == "float32":
        word, nan = T.let("word", T.reinterpret("uint32", values[0])), 0x7FFFFFFF
    else:
        word, nan = pack_pair(values[0], values[1], dtype), 0x7FFF7FFF
    return T.Select(word == T.uint32(SENTINEL), T.uint32(nan), word)


def word_of(plan: PersistentPlan, phase: PhasePlan, operand: int, unit: Expr, column: Expr) -> Expr:
    """Place in a slot of the word that holds ``unit`` (of the group's) in batch row ``column`` of the group."""
    k = unit // per_word(plan.dtype)
    pair, quarter, part = k // PAIR, k // 4 % 4, k % 4
    tiles = (operand * plan.warps * phase.warp_pairs + pair) * plan.tiles + column // 8
    return (tiles * 32 + column % 8 * 4 + quarter) * 4 + part


def pair_place(plan: PersistentPlan, phase: PhasePlan, q: int, tile: int) -> int:
    """Place, from a lane's first word in a slot, of its four words of pair ``q`` of its warp."""
    operand, pair = divmod(q, phase.warp_pairs)
    return ((operand * plan.warps * phase.warp_pairs + pair) * plan.tiles + tile) * 128


def within(plan: PersistentPlan, tile: int, column: Expr) -> ExitStack:
    """A context for code that only columns with a batch row need; the padding of a tile has none."""
    stack = ExitStack()
    if (tile + 1) * 8 > plan.rows:
        stack.enter_context(T.If(tile * 8 + column < plan.rows))
        stack.enter_context(T.Then())
    return stack


class Carrier(ABC):
    """Emits both ends of the way that state travels; ``phase`` is the number of one, ``slot`` a place from
    :meth:`slot`."""

    @abstractmethod
    def slot(self, phase: int, step: Expr) -> Expr:
        """First word of the slot of a step."""

    def wait(self, phase: int, t: Expr) -> None:  # noqa: B027  who waits for each word leaves it as it is
        """Before the first :meth:`read` in step t."""

    @abstractmethod
    def read(self, phase: int, state: TirBuffer, start: Expr, pairs: range, lane: Expr) -> None:
        """Reads these pairs of a slot into ``state``."""

    @abstractmethod
    def done(self, phase: int, t: Expr, warp: Expr, lane: Expr) -> None:
        """Behind a product warp's last read of a slot, and the barrier that hands its sums over."""

    @abstractmethod
    def word(self, value: Expr, neighbour: Expr | None) -> Expr:
        """The word that travels, of one value or of two neighbours."""

    @abstractmethod
    def write(self, phase: int, step: Expr, slot: Expr, place: Expr, word: Expr, mine: Expr) -> None:
        """Sends a word to all blocks of the group, from threads that it is a word of."""

    def wipe(self, phase: int, t: Expr, places: list[tuple[Expr, Expr]]) -> None:  # noqa: B027
        """Takes back what was sent: (place, whether it is this thread's word)."""

    def ended(self, t: Expr) -> None:  # noqa: B027
        """Behind a gate warp's last write and wipe of a step."""

    def acquired(self, t: Expr) -> None:  # noqa: B027
        """Behind a gate warp's reads of statistics in a step."""


class Ring(Carrier):
    """Carries it through L2."""

    def __init__(self, plan: PersistentPlan, rings: list[TirBuffer], group: Expr) -> None:
        self.plan, self.rings, self.group = plan, rings, group

    def slot(self, phase: int, step: Expr) -> Expr:
        return (self.group * self.plan.ring + step % self.plan.ring) * self.plan.slot_words(self.plan.phases[phase])

    def read(self, phase: int, state: TirBuffer, start: Expr, pairs: range, lane: Expr) -> None:
        plan, p, ring = self.plan, self.plan.phases[phase], self.rings[phase]
        T.note("consumer: poll the slot in L2 until no word is the sentinel")
        missing = T.local("missing", (1,), "int32")
        T.buffer_store(missing, T.int32(1), [0])
        with T.While(missing[0] != 0):
            T.buffer_store(missing, T.int32(0), [0])
            for place, q in enumerate(pairs):
                for n in range(plan.tiles):
                    with within(plan, n, lane // 4):
                        ld_relaxed([state[place, n, i] for i in range(4)],
                                   ring.ptr_to([start + pair_place(plan, p, q, n)]))
            # the sentinel is the largest word: a tree of maxima is short, a chain of comparisons is not
            highest = [state[p, n, i] for p in range(len(pairs)) for n in range(plan.tiles) for i in range(4)]
            found = T.tree("highest", highest, T.max) == T.uint32(SENTINEL)
            T.buffer_store(missing, T.cast(found, "int32"), [0])
        sync_warp()

    def done(self, phase: int, t: Expr, warp: Expr, lane: Expr) -> None:
        self._fence(self.plan.acquired(t))

    def word(self, value: Expr, neighbour: Expr | None) -> Expr:
        return T.let("word", pack([value] if neighbour is None else [value, neighbour], self.plan.dtype))

    def write(self, phase: int, step: Expr, slot: Expr, place: Expr, word: Expr, mine: Expr) -> None:
        self._store(phase, slot + place, word, mine)

    def wipe(self, phase: int, t: Expr, places: list[tuple[Expr, Expr]]) -> None:
        T.note("producer: the words of an earlier step become the sentinel again")
        slot = T.let("slot", self.slot(phase, t + (self.plan.ring - 1)))
        for place, mine in places:
            self._store(phase, slot + place, T.uint32(SENTINEL), mine)

    def ended(self, t: Expr) -> None:
        self._fence(self.plan.released(t))

    def _store(self, phase: int, place: Expr, word: Expr, mine: Expr) -> None:
        with T.when(mine):
            st_relaxed(self.rings[phase].ptr_to([place]), [word])

    def acquired(self, t: Expr) -> None:
        self._fence(self.plan.acquired(t))

    def _fence(self, where: Expr | bool) -> None:
        """Emits a release and acquire fence, in steps ``where`` (an expression; or True: in all)."""
        with ExitStack() as stack:
            if where is not True:
                stack.enter_context(T.If(where))
                stack.enter_context(T.Then())
            fence_gpu()
