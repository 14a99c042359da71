"""The product warps of the persistent kernel: exchanged state to partial sums."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from itertools import product
from typing import NamedTuple

from ecornn.schedules.builder import Expr, T, TirBuffer, ceil_div
from ecornn.schedules.cuda import isa
from ecornn.schedules.cuda.isa.tensor_core import multiply_pair, per_word, unpacked, zeros
from ecornn.schedules.cuda.pipeline import BARRIER_WORDS, Pipeline, Use, parity_of
from ecornn.schedules.persistent.exchange import Carrier, within
from ecornn.schedules.persistent.plan import PersistentPlan

FULL = 1  # named barriers of the two buffers of partial sums, FULL and FULL + 1
SENT = 4  # of a block's operands that are on their way; sums.py has 3


class Position(NamedTuple):
    member: Expr  # the block in its group
    warp: Expr  # among those that multiply
    lane: Expr


class Stream:
    """Weights that do not fit on the chip: read from L2 in every step, by bulk copies into a ring of each product warp.
    Emits the ring of one phase; ``first`` is its place in shared memory, in words. The order of a warp's streamed pairs
    never changes, so the next ones are under way while the warp waits for state or multiplies with what it keeps. A
    slot has the octets of one pair, neighbours in memory: one copy, and an mbarrier that counts its bytes. Nobody but
    the warp touches its ring. A lane reads after the wait for the slot's mbarrier; all lanes have read when they meet,
    behind which the first lane asks for what the slot holds next. Bulk copies are of another proxy than reads, so a
    fence stands between the two: without it what came next was sometimes read instead (30 of 30 runs of a vanilla
    layer, H=2560 B=32). Which slot a pair has does not depend on the step, so that a ring may be shorter than the pairs
    by any number; how often a slot has been filled says which parity to wait for."""

    def __init__(self, plan: PersistentPlan, index: int, words: TirBuffer, first: int, source: TirBuffer, at: Position,
                 steps: Expr) -> None:
        self.plan, self.phase = plan, plan.phases[index]
        self.words, self.source, self.lane, self.steps = words, source, at.lane, steps
        octets, slots = self.phase.octets(plan.units), self.phase.slots
        self.size = octets * plan.octet_words  # words of a pair
        self.ring = T.let("ring", first + at.warp * (slots * self.size))
        barriers = first + plan.warps * slots * self.size + at.warp * (slots * BARRIER_WORDS)
        self.slots = Pipeline(words, T.let("barriers", barriers), slots)
        self.pairs = T.let("pairs", (at.member * plan.warps + at.warp) * self.phase.pairs)

    def begin(self) -> None:
        """Makes the barriers, and asks for the first pairs."""
        T.note("weight stream, prologue: mbarriers of the ring, and its first bulk copies from L2")
        with T.when(self.lane == 0):
            self.slots.init()
            isa.fence_mbarrier_init()
            for slot in range(self.phase.slots):
                self._copy(slot)
        isa.sync_warp()

    def read(self, q: Expr, t: Expr, into: TirBuffer) -> None:
        """Waits for streamed pair ``q`` in step t, reads this lane's words, and asks for what the slot holds next."""
        slots, count = self.phase.slots, self.phase.streamed_pairs
        slot, turn = q % slots, q // slots
        if not isinstance(q, int):
            slot, turn = T.let("slot", slot), T.let("turn_of_slot", turn)
        every = (count - slot + slots - 1) // slots  # pairs of the slot in a step: ``uses``, an addition less
        self.slots.wait(Use(slot, parity_of(t * every + turn)))
        plan, n = self.plan, self.plan.lane_words
        for v in range(self.phase.octets(plan.units)):
            at = self.words.ptr_to([self.ring + (slot * self.size + v * plan.octet_words) + self.lane * n])
            isa.ld_shared([into[0, v, i] for i in range(n)], at)
        isa.fence_async_shared()
        isa.sync_warp()
        follows = q + slots < count  # in this step
        if isinstance(q, int):
            with T.when(self.lane == 0 if follows else T.And(self.lane == 0, t + 1 < self.steps)):
                self._copy(q + slots if follows else slot)
        else:
            with T.when(T.And(self.lane == 0, T.Or(follows, t + 1 < self.steps))):
                self._copy(T.let("next", T.Select(follows, q + slots, slot)))

    def _copy(self, q: Expr) -> None:
        slot = q % self.phase.slots
        place = T.cast((self.pairs + q) * self.size, "int64") * (4 if self.plan.scaled else per_word(self.plan.dtype))
        self.slots.copy(slot, self.words.ptr_to([self.ring + slot * self.size]), self.source.ptr_to([place]),
                        self.size * 4)


def products(plan: PersistentPlan, steps: Expr, at: Position, weights: list[TirBuffer], carrier: Carrier,
             shared: TirBuffer, early: bool) -> None:
    """Emits a product warp's whole life. ``weights``: of each phase, packed; ``shared``: the block's memory, float32;
    ``early``: the states before the first step may not be there yet."""
    T.note("MMA warps, prologue: recurrent weights to registers, and to shared memory where they do not fit")
    words, warp, lane, place, kept = shared.view("uint32"), at.warp, at.lane, 2 * plan.sum_floats, list[_Weights]()
    for index, (phase, source) in enumerate(zip(plan.phases, weights, strict=True)):
        kept.append(_Weights(plan, index, source, words, place, at, steps))
        place += plan.shared_weight_words(phase) + plan.stream_words(phase)
    if early:
        isa.wait_on_earlier()
    with T.serial("t", 0, steps) as t:
        for index, phase in enumerate(plan.phases):
            use = T.let("use", t * len(plan.phases) + index)
            side = T.let("side", use % 2)
            kept[index].begin(t)
            start = T.let("start", carrier.slot(index, t) + warp * phase.warp_pairs * plan.tiles * 128 + lane * 4)
            T.note("MMA warps: wait for the state of step t, multiply it with the weights (K is split among the warps)")
            carrier.wait(index, t)
            acc = _multiply(plan, index, kept[index], carrier, start, lane)
            T.note("MMA warps: partial sums to shared memory, then the named barrier at which gate warps wait for them")
            stride = plan.stride(phase)
            base = T.let("base", side * plan.sum_floats + (warp * plan.columns + lane % 4 * 2) * stride + lane // 4)
            for m, n, i in product(range(ceil_div(phase.octets(plan.units), 2)), range(plan.tiles), range(4)):
                with within(plan, n, lane % 4 * 2 + i % 2):
                    T.buffer_store(shared, acc(m, n, i), [base + (n * 8 + i % 2) * stride + m * 16 + i // 2 * 8])
            isa.named_barrier_sync(side + FULL, plan.threads)
            carrier.done(index, t, warp, lane)
            if plan.held:
                isa.named_barrier_sync(SENT, plan.threads)


class _Weights:
    """The weights of a phase that a warp multiplies with: in registers, in shared memory from word ``place`` on, and
    those that are streamed, which come through a ring behind these, or straight into registers."""

    def __init__(self, plan: PersistentPlan, index: int, source: TirBuffer, words: TirBuffer, place: int, at: Position,
                 steps: Expr) -> None:
        """Loads those that stay. ``source``: all, packed, in memory; ``words``: the block's shared memory, uint32."""
        self.plan, self.source, self.words, self.place, self.at = plan, source, words, place, at
        self.phase = phase = plan.phases[index]
        self.octets, n = phase.octets(plan.units), plan.lane_words
        kept, streamed = phase.register_pairs, phase.streamed_pairs
        self.held = T.local("weights", (max(1, kept * self.octets), n), "uint32")  # (pair, octet), word of the lane
        for q, v in product(range(streamed, phase.pairs), range(self.octets)):
            address = self._source(q, v)
            if q < streamed + kept:
                isa.ld_global([self.held[(q - streamed) * self.octets + v, i] for i in range(n)], address)
            else:
                r = [T.local("word", (1,), "uint32")[0] for _ in range(n)]  # of the lane
                isa.ld_global(r, address)
                isa.st_shared(self._shared(q, v), r)
        first = place + plan.shared_weight_words(phase)
        self.stream = Stream(plan, index, words, first, source, at, steps) if phase.slots else None
        if self.stream is not None:
            self.stream.begin()
        self.ahead = streamed > 0 and self.stream is None  # whether a pair is loaded while another is multiplied

    def begin(self, t: Expr) -> None:
        """Before the products of step t."""
        self.t = t
        if self.phase.register_pairs < self.phase.pairs:
            # (turn, octet, word of the lane)
            self.loaded = T.local("loaded", (3 if self.ahead else 1, self.octets, self.plan.lane_words), "uint32")
        if self.ahead:
            self._from_l2(0)

    def _source(self, q: int, v: int) -> Expr:
        """A pointer to the lane's words of octet v of pair q in the packed weights."""
        plan, at = self.plan, self.at
        octet = ((at.member * plan.warps + at.warp) * self.phase.pairs + q) * self.octets + v
        index = T.let("weight_at", octet * 32 + at.lane)
        return self.source.ptr_to([T.cast(index, "int64") * 4 * per_word(plan.dtype)])

    def _shared(self, q: Expr, v: int) -> Expr:
        """A pointer to the same in shared memory."""
        phase, at = self.phase, self.at
        pair = at.warp * phase.shared_pairs + (q - phase.streamed_pairs - phase.register_pairs)
        return self.words.ptr_to([self.place + ((pair * self.octets + v) * 32 + at.lane) * self.plan.lane_words])

    def load(self, q: Expr, like: int) -> None:
        """Loads pair q, if it is not in registers; L2's was asked for earlier. ``like``: a pair that is kept there."""
        streamed = self.phase.streamed_pairs
        if like >= streamed + self.phase.register_pairs:
            for v in range(self.octets):
                isa.ld_shared(self._loaded(0, v), self._shared(q, v))
        elif like < streamed and self.stream is not None:
            self.stream.read(q, self.t, self.loaded)
        elif like + 1 < streamed:
            self._from_l2(like + 1)

    def _from_l2(self, q: int) -> None:
        for v in range(self.octets):
            isa.ld_global(self._loaded(self._turn(q), v), self._source(q, v))

    def _turn(self, q: int) -> int:
        """The number of a pair among the loaded ones: of what is loaded ahead, 1 and 2 in turns."""
        return 1 + q % 2 if self.ahead and q < self.phase.streamed_pairs else 0

    def _loaded(self, turn: int, v: int) -> list[Expr]:
        return [self.loaded[turn, v, i] for i in range(self.plan.lane_words)]

    def word(self, q: int, v: int, i: int) -> Expr:
        """Word i of octet v of pair q, or of one like it, after :meth:`load`, as it is multiplied."""
        if self.plan.scaled:
            return unpacked(self._word(q, v, i // 2), i % 2 == 1, self.plan.dtype)
        return self._word(q, v, i)

    def _word(self, q: int, v: int, i: int) -> Expr:
        held = q - self.phase.streamed_pairs
        if 0 <= held < self.phase.register_pairs:
            return self.held[held * self.octets + v, i]
        return self.loaded[self._turn(q), v, i]


def _multiply(plan: PersistentPlan, index: int, stored: _Weights, carrier: Carrier, start: Expr,
              lane: Expr) -> Callable[[int, int, int], Expr]:
    """This warp's part of the products of a phase, as its words of a slot, from ``start``, arrive."""
    phase = plan.phases[index]
    octets, chains = phase.octets(plan.units), min(plan.chains, phase.pairs * 2)
    # (chain, m16 tile of weight rows, n8 tile of batch rows, 4 of fragment C)
    acc = zeros("acc", chains, ceil_div(octets, 2), plan.tiles, 4)
    # (pair, n8 tile, 2 words of fragment B of each k-tile)
    state = T.local("state", (phase.polled_pairs, plan.tiles, 4), "uint32")
    if plan.rows % 8:  # lanes of the last tile that have no batch row never load
        for p, i in product(range(phase.polled_pairs), range(4)):
            T.buffer_store(state, T.uint32(0), [p, plan.tiles - 1, i])
    def turn(first: Expr, like: int, count: int) -> None:
        """``count`` pairs from ``first`` on: waits for their words, then multiplies one after the other. ``like``: the
        first of as many that are kept where these are; the same in code that is no loop."""
        from_there, pairs = start, range(like, like + count)
        if first is not like:  # of one operand, whose pairs lie one after the other
            from_there, pairs = T.let("from", start + first * (plan.tiles * 128)), range(count)
        carrier.read(index, state, from_there, pairs, lane)
        for p in range(count):
            q = like + p
            stored.load(first + p, q)
            rows = [partial(stored.word, q, v) for v in range(octets)]
            columns = [[state[p, n, i] for i in range(4)] for n in range(plan.tiles)]
            multiply_pair(acc, q, rows, columns, plan.arithmetic)
    polled = phase.polled_pairs
    for first, end, rolled in plan.stretches(phase):
        turns = (end - first) // polled if rolled else 0
        if turns > 1:
            with T.serial("turn", 0, turns) as number:
                turn(T.let("first_pair", first + number * polled), first, polled)
            first += turns * polled
        for q in range(first, end, polled):
            turn(q, q, min(polled, end - q))
    return lambda m, n, i: reduce(operator.add, [acc[c, m, n, i] for c in range(chains)])
