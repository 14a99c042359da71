"""Statistics through L2: lines of one writer, which the gate warps of a block share the reading of.

The sums travel as state does (``exchange.py``): words that announce themselves in a ring of R slots, here those of
step t in slot t % R, polled and wiped by gate warps. A part of the sums has lines of its own, of 16 bytes for a row and
every two statistics, which one store writes, if possible in whole sectors: a sector that is written in pieces takes
longer. Each gate warp reads other parts of all rows, so that a block reads every line once; what the warps then hold
is added through shared memory, with a barrier of theirs. What is said in ``exchange.py`` holds:

* Nobody still needs what is wiped. In step t a warp wipes what its block sent in step t - 1 after that barrier, so
  the block has a word of step t of every other block, which sent it behind the barrier of step t - 1, when all of its
  warps had read their parts.
* Nobody takes old data for new: a thread polls the same words in every step, has the fences of
  ``PersistentPlan.acquired``, and
  a word's owner wipes it, and has those of ``PersistentPlan.released`` before it writes again.

The memory between the warps is used in turns of two: who writes it again is behind the barrier of the exchange
between, which its readers came to after they had read.
"""

from __future__ import annotations

from ecornn.analysis import Statistic
from ecornn.schedules.builder import Expr, T, TirBuffer, ceil_div
from ecornn.schedules.cuda.isa.memory import ld_relaxed, ld_shared, st_relaxed, st_shared
from ecornn.schedules.cuda.isa.threads import named_barrier_sync, pause, sync_warp
from ecornn.schedules.persistent.exchange import SENTINEL, pack
from ecornn.schedules.persistent.plan import PersistentPlan
from ecornn.schedules.persistent.sums import LOWEST_BITS, Sums, added
from ecornn.schedules.scalars.row_sums import Kind, across_lanes

SUMMED = 3  # named barrier of gate warps
PAUSE = 300  # cycles before the first poll, which disturbs what is on its way and finds nothing yet


class RingSums(Sums):
    """Emits both ends. ``rings``: workspaces of the exchanges; ``shared``: the block's memory, float32."""

    def __init__(self, plan: PersistentPlan, statistics: list[tuple[Statistic, ...]], rings: list[TirBuffer],
                 shared: TirBuffer, group: Expr, member: Expr, thread: Expr) -> None:
        super().__init__(plan, statistics, group, member, thread)
        self.rings, self.words = rings, shared.view("uint32")

    def slot(self, e: int, t: Expr) -> Expr:
        return (self.group * self.plan.ring + t % self.plan.ring) * self.plan.sum_words(e)

    def send(self, e: int, t: Expr, slot: Expr, i: int, sums: list[Expr]) -> None:
        words = [T.let("word", pack([v], "float32")) for v in sums]
        words += [T.uint32(0)] * (4 * self.plan.row_quads(e) - len(words))
        own = words[:4]
        for quad in range(1, self.plan.row_quads(e)):  # a lane for each
            own = [T.Select(self.lane == quad, a, b) for a, b in zip(words[4 * quad:4 * quad + 4], own, strict=True)]
        self._store(e, slot, i, [T.let("word", w) for w in own])

    def wipe(self, t: Expr) -> None:
        for e in range(len(self.all)):
            slot = T.let("slot", self.slot(e, t + (self.plan.ring - 1)))
            for i in range(self.plan.items):
                self._store(e, slot, i, [T.uint32(SENTINEL)] * 4)

    def _store(self, e: int, slot: Expr, i: int, words: list[Expr]) -> None:
        plan = self.plan
        with T.when(T.And(self.mine[i], self.lane < plan.row_quads(e))):
            place = slot + self.part * plan.sum_stride(e) + (self.rows[i] * plan.row_quads(e) + self.lane) * 4
            st_relaxed(self.rings[e].ptr_to([place]), words)

    def receive(self, e: int, t: Expr, slot: Expr) -> list[Expr]:
        plan, count = self.plan, len(self.all[e])
        quads, entries = plan.sum_quads(e), plan.rows * plan.row_quads(e)
        across = min(32, quads)
        beside = plan.gate_warps * 32 // across  # threads that read the same quad, of other parts
        turns = ceil_div(plan.sum_parts, beside)
        words = T.local("words", (quads // across * turns, 4), "uint32")  # (outer, turn), word of a quad
        loads: list[tuple[Expr, Expr]] = []
        kinds: list[list[Kind]] = []  # of the words of each quad
        for outer in range(quads // across):
            quad = T.let("quad", self.thread % across + outer * across)
            kinds.append(self._kinds(e, quad))
            for j in range(turns):
                part = T.let("part", self.thread // across + j * beside)
                inside = T.let("inside", T.And(quad < entries, part < plan.sum_parts))
                for k in range(4):
                    T.buffer_store(words, _nothing(kinds[-1][k]), [len(loads), k])
                loads.append((T.let("at", slot + part * plan.sum_stride(e) + quad * 4), inside))
        self._poll(e, words, loads)
        side, used = T.let("side", (t * len(self.all) + e) % 2), min(4, 2 * count)
        for outer in range(quads // across):
            sums = [added([T.let("sum", T.reinterpret("float32", words[n, k]))
                           for n in range(outer * turns, (outer + 1) * turns)], kinds[outer][k]) for k in range(used)]
            lanes = 32
            while lanes > across:
                lanes //= 2
                sums = across_lanes(sums, lanes, kinds[outer][:used])
            own = [T.reinterpret("uint32", v) for v in sums] + [T.uint32(0)] * (4 - used)
            with T.when(self.thread % 32 < across):
                at = self._between(side, self.thread // 32) + (self.thread % 32 + outer * across) * 4
                st_shared(self.words.ptr_to([at]), own)
        named_barrier_sync(SUMMED, plan.gate_warps * 32)
        totals = []
        for i in range(plan.items):
            for n in range(count):
                pairs = [self._pair(side, w, (self.rows[i] * plan.row_quads(e) + n // 2) * 4 + n % 2 * 2)
                         for w in range(plan.gate_warps)]
                totals += [added([p[k] for p in pairs], self.all[e][n].largest) for k in range(2)]
        return totals

    def _kinds(self, e: int, quad: Expr) -> list[Kind]:
        """True for each word of a quad that is of a maximum: the quad has those of statistics 2 p and 2 p + 1, p its
        place in its row."""
        largest = [s.largest for s in self.all[e]]
        largest += [False] * (2 * self.plan.row_quads(e) - len(largest))
        found: list[Kind] = []
        for side in (largest[::2], largest[1::2]):
            places = [p for p, one in enumerate(side) if one]
            if len(places) in (0, len(side)):
                found += [bool(places)] * 2
                continue
            place = T.let("place", quad % self.plan.row_quads(e))
            which = place == places[0]
            for p in places[1:]:
                which = T.Or(which, place == p)
            found += [T.let("is_largest", which)] * 2
        return found

    def _poll(self, e: int, words: TirBuffer, loads: list[tuple[Expr, Expr]]) -> None:
        missing = T.local("missing", (1,), "int32")
        T.buffer_store(missing, T.int32(1), [0])
        pause(PAUSE)
        with T.While(missing[0] != 0):
            for n, (at, inside) in enumerate(loads):
                with T.when(inside):
                    ld_relaxed([words[n, k] for k in range(4)], self.rings[e].ptr_to([at]))
            highest = [words[n, k] for n in range(len(loads)) for k in range(4)]
            found = T.tree("highest", highest, T.max) == T.uint32(SENTINEL)
            T.buffer_store(missing, T.cast(found, "int32"), [0])
        sync_warp()

    def _between(self, side: Expr, warp: Expr) -> Expr:
        """Place in shared memory of what a gate warp has read."""
        plan = self.plan
        return plan.exchange_words + (side * plan.gate_warps + warp) * plan.between_words

    def _pair(self, side: Expr, warp: int, place: Expr) -> list[Expr]:
        found = T.local("found", (2,), "uint32")  # of values and of squares
        ld_shared([found[0], found[1]], self.words.ptr_to([self._between(side, warp) + place]))
        return [T.let("sum", T.reinterpret("float32", found[k])) for k in range(2)]


def _nothing(largest: Kind) -> Expr:
    """The word of a part that there is not."""
    if isinstance(largest, bool):
        return T.uint32(LOWEST_BITS if largest else 0)
    return T.Select(largest, T.uint32(LOWEST_BITS), T.uint32(0))
