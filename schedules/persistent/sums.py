"""How statistics travel: each block sends the sums over its units, and every block adds all of them, in one order.

A batch row has neighbouring lanes of gate warps, a power of two of them, or whole warps, which add what they have by
shuffles. What all blocks sent for a row is then read and added in the same order everywhere, so that every block has
the same bits: through L2 as in ``RingSums``, inside a cluster as in ``ClusterSums``.

Of a value v two sums are made, of v - s and of its square, where s is the row's mean in the step before: so a mean that
is large beside the deviations from it costs no accuracy. s is 0 in the first step, after one in which the row took no
part, whose values may be of any size, and where squares are not wanted: a sum alone gains nothing from s, and loses
digits if s is large beside it, as gradients of one step often are beside those of the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from itertools import product

from ecornn.analysis import Statistic
from ecornn.schedules.builder import Expr, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda import isa
from ecornn.schedules.persistent.exchange import SENTINEL, Cluster, pack
from ecornn.schedules.persistent.plan import PersistentPlan
from ecornn.schedules.scalars.row_sums import Kind, across_lanes, across_warp, among, combine, neutral

LOWEST_BITS = 0xFF7FFFFF  # the lowest float32
FINITE = 1e30  # a mean beyond is no good as the next step's s, nor is one that is no number


class Sums(ABC):
    """Emits the gate warps' part. ``statistics``: of each exchange. Of a maximum both sums are it."""

    def __init__(self, plan: PersistentPlan, statistics: list[tuple[Statistic, ...]], group: Expr, member: Expr,
                 thread: Expr) -> None:
        self.plan, self.all, self.group, self.thread = plan, statistics, group, thread
        self.lanes = min(32, plan.lanes)
        self.lane = T.let("lane", thread % self.lanes)
        warps = plan.lanes // self.lanes  # of a row
        self.part = T.let("part", member * warps + thread // 32 % warps)  # of the row's sums, which this warp makes
        rows = [T.let("row", (thread + i * plan.gate_warps * 32) // plan.lanes) for i in range(plan.items)]
        self.mine = [T.let("mine", r < plan.rows) for r in rows]
        self.rows = [T.let("row", T.min(r, plan.rows - 1)) for r in rows]
        count = sum(map(len, statistics))
        self.means = T.local("means", (plan.items, max(1, count)), "float32")  # (item, statistic), of the step before
        for place in product(range(plan.items), range(count)):
            T.buffer_store(self.means, T.float32(0), list(place))

    def exchange(self, e: int, t: Expr, envs: list[dict[Var, Expr]], owners: list[Expr], units: list[Expr],
                 lives: list[Expr | None]) -> list[dict[Var, Expr]]:
        """The variables of exchange ``e`` for each item, from the operands in ``envs``; ``owners``: whether an item is
        one of the layer's ``units``; ``lives``: whether its row takes part in the step, None where it does."""
        T.note("gate warps: statistics of batch rows, over the lanes of a warp and then over the CTAs of the group")
        plan, first, sums = self.plan, sum(map(len, self.all[:e])), list[Expr]()
        each = [(i, n, s) for i in range(plan.items) for n, s in enumerate(self.all[e])]
        for i, n, s in each:
            owner = owners[i] if s.units is None else T.And(owners[i], among(s, units[i]))
            if s.largest:  # in place of both sums
                value = added([envs[i][o] for o in s.operands], True)
                sums += [T.let("largest", T.Select(owner, value, neutral(True)))] * 2
                continue
            shift = None if s.squares is None else self.means[i, first + n]
            parts = [T.let("part", envs[i][o] if shift is None else envs[i][o] - shift) for o in s.operands]
            for value in (added(parts), added([T.let("square", p * p) for p in parts])):
                sums.append(T.let("sum", T.Select(owner, value, T.float32(0))))
        sums = across_warp(sums, self.lanes, [s.largest for _, _, s in each for _ in range(2)])
        size, slot = 2 * len(self.all[e]), T.let("slot", self.slot(e, t))
        for i in range(plan.items):
            self.send(e, t, slot, i, sums[i * size:(i + 1) * size])
        found: list[dict[Var, Expr]] = [{} for _ in envs]
        totals = self.receive(e, t, slot)
        for k, (i, n, s) in enumerate(each):
            total, squares = totals[2 * k:2 * k + 2]
            if s.squares is None:
                found[i][s.total] = total
                continue
            count, before = s.count(plan.hidden), self.means[i, first + n]
            found[i][s.total] = T.let(s.total.name, total + T.float32(count) * before)
            off = T.let("off", total * T.float32(1.0 / count))
            found[i][s.squares] = T.let(s.squares.name, T.max(squares - total * off, T.float32(0)))
            mean = T.let("mean", found[i][s.total] * T.float32(1.0 / count))
            usable = T.And(mean < T.float32(FINITE), mean > T.float32(-FINITE))
            usable = usable if lives[i] is None else T.And(lives[i], usable)
            T.buffer_store(self.means, T.Select(usable, mean, T.float32(0)), [i, first + n])
        return found

    @abstractmethod
    def slot(self, e: int, t: Expr) -> Expr:
        """First word of what exchange ``e`` of a step sends."""

    @abstractmethod
    def send(self, e: int, t: Expr, slot: Expr, i: int, sums: list[Expr]) -> None:
        """Hands on the sums of item i's row, both of each statistic in turn, which all lanes of the row have."""

    @abstractmethod
    def receive(self, e: int, t: Expr, slot: Expr) -> list[Expr]:
        """For each item and statistic both totals."""

    @abstractmethod
    def wipe(self, t: Expr) -> None:
        """Takes back what was sent in the step before."""


def added(values: list[Expr], largest: Kind = False) -> Expr:
    """The sum, or the largest one, as a tree."""
    return T.tree("pair", values, lambda a, b: combine(a, b, largest))


SUMMED = 3  # named barrier of gate warps
PAUSE = 300  # cycles before the first poll, which disturbs what is on its way and finds nothing yet


class RingSums(Sums):
    """Statistics through L2: lines of one writer, which the gate warps of a block share the reading of. The sums travel
    as state does (``exchange.py``): words that announce themselves in a ring of R slots, those of step t in slot t % R.
    A part of the sums has lines of its own, of 16 bytes for a row and every two statistics, which one store writes, if
    possible in whole sectors: a sector that is written in pieces takes longer. Each gate warp reads other parts of all
    rows, so that a block reads every line once; what the warps then hold is added through shared memory, with a barrier
    of theirs. What is said in ``exchange.py`` holds:

    * Nobody still needs what is wiped. In step t a warp wipes what its block sent in step t - 1 after that barrier, so
      the block has a word of step t of every other block, which sent it behind the barrier of step t - 1, when all of
      its warps had read their parts.
    * Nobody takes old data for new: a thread polls the same words in every step, with the fences of
      ``PersistentPlan.acquired``; their owner wipes them, with those of ``PersistentPlan.released`` before it writes.

    The memory between the warps is used in turns of two: who writes it again is behind the barrier of the exchange
    between, which its readers came to after they had read. ``shared``: the block's memory, float32."""

    def __init__(self, plan: PersistentPlan, statistics: list[tuple[Statistic, ...]], rings: list[TirBuffer],
                 shared: TirBuffer, group: Expr, member: Expr, thread: Expr) -> None:
        super().__init__(plan, statistics, group, member, thread)
        self.rings, self.words = rings, shared.view("uint32")

    def slot(self, e: int, t: Expr) -> Expr:
        return (self.group * self.plan.ring + t % self.plan.ring) * self.plan.sum_words(e)

    def send(self, e: int, t: Expr, slot: Expr, i: int, sums: list[Expr]) -> None:
        quads, words = self.plan.row_quads(e), [T.let("word", pack([v], "float32")) for v in sums]
        words += [T.uint32(0)] * (4 * quads - len(words))
        own = words[:4]
        for quad in range(1, quads):  # a lane for each
            own = [T.Select(self.lane == quad, a, b) for a, b in zip(words[4 * quad:4 * quad + 4], own, strict=True)]
        self._store(e, slot, i, [T.let("word", w) for w in own])

    def wipe(self, t: Expr) -> None:
        for e in range(len(self.all)):
            slot = T.let("slot", self.slot(e, t + (self.plan.ring - 1)))
            for i in range(self.plan.items):
                self._store(e, slot, i, [T.uint32(SENTINEL)] * 4)

    def _store(self, e: int, slot: Expr, i: int, words: list[Expr]) -> None:
        quads = self.plan.row_quads(e)
        with T.when(T.And(self.mine[i], self.lane < quads)):
            place = slot + self.part * self.plan.sum_stride(e) + (self.rows[i] * quads + self.lane) * 4
            isa.st_relaxed(self.rings[e].ptr_to([place]), words)

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
                lowest, zero = T.uint32(LOWEST_BITS), T.uint32(0)  # words of a part that there is not
                for k, of in enumerate(kinds[-1]):
                    nothing = T.Select(of, lowest, zero) if not isinstance(of, bool) else lowest if of else zero
                    T.buffer_store(words, nothing, [len(loads), k])
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
                isa.st_shared(self.words.ptr_to([at]), own)
        isa.named_barrier_sync(SUMMED, plan.gate_warps * 32)
        totals = []
        for i, n in product(range(plan.items), range(count)):
            place, pairs = (self.rows[i] * plan.row_quads(e) + n // 2) * 4 + n % 2 * 2, list[list[Expr]]()
            for w in range(plan.gate_warps):
                pair = T.local("found", (2,), "uint32")  # of values and of squares
                isa.ld_shared([pair[0], pair[1]], self.words.ptr_to([self._between(side, w) + place]))
                pairs.append([T.let("sum", T.reinterpret("float32", pair[k])) for k in range(2)])
            totals += [added([p[k] for p in pairs], self.all[e][n].largest) for k in range(2)]
        return totals

    def _kinds(self, e: int, quad: Expr) -> list[Kind]:
        """Tells which words of a quad are of a maximum: it has statistics 2 p and 2 p + 1, p its place in its row."""
        largest = [s.largest for s in self.all[e]]
        largest += [False] * (2 * self.plan.row_quads(e) - len(largest))
        found: list[Kind] = []
        for side in (largest[::2], largest[1::2]):
            if all(side) or not any(side):
                found += [side[0]] * 2
                continue
            place = T.let("place", quad % self.plan.row_quads(e))
            which = reduce(T.Or, [place == p for p, one in enumerate(side) if one])
            found += [T.let("is_largest", which)] * 2
        return found

    def _poll(self, e: int, words: TirBuffer, loads: list[tuple[Expr, Expr]]) -> None:
        missing = T.variable("missing", "int32", T.int32(1))
        isa.pause(PAUSE)
        with T.While(missing[0] != 0):
            for n, (at, inside) in enumerate(loads):
                with T.when(inside):
                    isa.ld_relaxed([words[n, k] for k in range(4)], self.rings[e].ptr_to([at]))
            highest = [words[n, k] for n in range(len(loads)) for k in range(4)]
            found = T.tree("highest", highest, T.max) == T.uint32(SENTINEL)
            T.buffer_store(missing, T.cast(found, "int32"), [0])
        isa.sync_warp()

    def _between(self, side: Expr, warp: Expr) -> Expr:
        """Place in shared memory of what a gate warp has read."""
        plan = self.plan
        return plan.exchange_words + (side * plan.gate_warps + warp) * plan.between_words


LOADS = 16  # of 16 bytes a lane and row, at most; beyond, lanes share the parts and shuffle


class ClusterSums(Sums):
    """Statistics inside a cluster: each part of a row's sums goes to every block, and every lane adds all parts itself.
    They are sent to shared memory through a ``ClusterPipeline``, by lanes of a row that each have another block. What
    is said there holds: sums of step t + 2 are sent by a warp that has all sums of step t + 1, which every warp of the
    cluster sent some of, after it had read those of step t. A slot's next arrival is made by a thread that has waited
    for the phase before, at the end of the step. Two statistics travel as 16 bytes, so a slot has first the pairs of
    statistics and then the one that is left, each (row, part), four words or two."""

    def __init__(self, plan: PersistentPlan, statistics: list[tuple[Statistic, ...]], carrier: Cluster,
                 group: Expr, member: Expr, thread: Expr, steps: Expr) -> None:
        super().__init__(plan, statistics, group, member, thread)
        self.carrier, self.steps = carrier, steps

    def slot(self, e: int, t: Expr) -> Expr:
        return self.carrier.first_sums[e] + t % 2 * self.plan.sum_words(e)

    def send(self, e: int, t: Expr, slot: Expr, i: int, sums: list[Expr]) -> None:
        plan = self.plan
        words = [T.let("word", T.reinterpret("uint32", v)) for v in sums]
        barrier = self.carrier.sums[e].address(t)
        for n in range(0, len(self.all[e]), 2):
            own = words[2 * n:2 * n + 4]
            to = T.let("to", isa.shared_address(self.carrier.words.ptr_to(
                [slot + self._row(e, n, self.rows[i]) + self.part * len(own)])))
            for turn in range(ceil_div(plan.blocks, self.lanes)):  # each lane to a block of its own
                rank = T.let("rank", self.lane + turn * self.lanes)
                with T.when(T.And(self.mine[i], rank < plan.blocks)):
                    isa.cluster_send(to, barrier, T.cast(rank, "uint32"), own)

    def receive(self, e: int, t: Expr, slot: Expr) -> list[Expr]:
        plan = self.plan
        self.carrier.sums[e].wait_for(t)
        lanes = 1  # that share the parts of a row
        while plan.sum_parts > LOADS * lanes and lanes < self.lanes:
            lanes *= 2
        totals, kinds = [], []
        for i, n in product(range(plan.items), range(0, len(self.all[e]), 2)):
            largest = [s.largest for s in self.all[e][n:n + 2] for _ in range(2)]
            totals += self._read(slot + self._row(e, n, self.rows[i]), largest, lanes)
            kinds += largest
        return across_warp(totals, lanes, kinds)

    def wipe(self, t: Expr) -> None:
        """Nothing needs to be taken back; the slots' next phases begin."""
        with T.when(T.And(self.thread == 0, t + 2 < self.steps)):
            for pipeline in self.carrier.sums:
                pipeline.announce(t)

    def _row(self, e: int, n: int, row: Expr) -> Expr:
        """Place in a slot of a row's parts of statistic n, an even number."""
        plan, width = self.plan, 2 * min(2, len(self.all[e]) - n)  # words of a part, also of the next statistic
        return n * 2 * plan.rows * plan.sum_padded + row * plan.sum_padded * width

    def _read(self, first: Expr, largest: list[bool], lanes: int) -> list[Expr]:
        """Sums of the parts that this lane reads, of ``lanes`` that share them: one, or two neighbours, in 16 bytes.
        ``largest``: which of the part's words are of maxima."""
        width, per = len(largest), 4 // len(largest)
        nothing = [T.uint32(LOWEST_BITS if largest[k % width] else 0) for k in range(4)]
        turns = ceil_div(self.plan.sum_parts, per * lanes)
        words = T.local("words", (turns, 4), "uint32")  # each turn: two statistics of a part, or one of two parts
        at = T.let("at", first + self.lane % lanes * 4)
        for j in range(turns):
            left = self.plan.sum_parts - j * lanes * per  # parts from the first lane's on
            whole = left >= lanes * per
            for k in range(0 if whole else 4):
                T.buffer_store(words, nothing[k], [j, k])
            with T.when(whole or self.lane % lanes * per < left):
                isa.ld_shared([words[j, k] for k in range(4)], self.carrier.words.ptr_to([at + j * lanes * 4]))
            if whole:
                continue
            if left % per:  # behind the last part is one that nobody sends
                with T.when(self.lane % lanes * per == left - 1):
                    for k in range(2, 4):
                        T.buffer_store(words, nothing[k], [j, k])
        values = [[T.let("value", T.reinterpret("float32", words[j, k])) for k in range(4)] for j in range(turns)]
        return [added([v[k] for v in values for k in range(f, 4, width)], largest[f]) for f in range(width)]
