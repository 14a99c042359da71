"""The product warps of the persistent kernel: exchanged state to partial sums."""

from __future__ import annotations

from typing import Any

from ecornn.schedules.persistent.cluster import Cluster
from ecornn.schedules.persistent.exchange import Ring, within
from ecornn.schedules.persistent.gates import FULL
from ecornn.schedules.persistent.plan import Plan
from ecornn.schedules.tensor_core import mma, per_word, split


def products(T: Any, plan: Plan, steps: Any, member: Any, warp: Any, lane: Any, weights: list[Any],
             carrier: Ring | Cluster, shared: Any) -> None:
    """A product warp's whole life."""
    words = shared.view("uint32")
    held, places, place = [], [], 2 * plan.sum_floats
    for phase, source in zip(plan.phases, weights, strict=True):
        octets, kept = phase.octets(plan.units), phase.register_pairs
        registers = T.alloc_buffer((max(1, kept * octets), 4), "uint32", scope="local")
        held.append(registers)
        places.append(place)
        for q in range(phase.pairs):
            for v in range(octets):
                address = _weights(T, plan, phase, source, member, warp, q, v, lane)
                if q >= kept + phase.shared_pairs:
                    continue
                if q < kept:
                    r = [registers[q * octets + v, i] for i in range(4)]
                    T.evaluate(T.ptx["ld.global.v4.b32"](*r, address))
                else:
                    r = [T.alloc_buffer((1,), "uint32", scope="local")[0] for _ in range(4)]
                    T.evaluate(T.ptx["ld.global.v4.b32"](*r, address))
                    T.evaluate(T.ptx["st.shared.v4.b32"](
                        words.ptr_to([_shared_place(plan, phase, place, warp, q, v, lane)]), *r))
        place += plan.shared_weight_words(phase)
    with T.serial(0, steps) as t:
        for index, phase in enumerate(plan.phases):
            use = T.Bind(t * len(plan.phases) + index)
            side = T.Bind(use % 2)
            stored = _Stored(T, plan, phase, held[index], words, places[index], weights[index], member, warp, lane)
            start = T.Bind(carrier.slot(index, t) + warp * phase.warp_pairs * plan.tiles * 128 + lane * 4)
            carrier.wait(index, t)
            acc = _multiply(T, plan, index, stored, carrier, start, lane)
            stride = plan.stride(phase)
            base = T.Bind(side * plan.sum_floats + (warp * plan.columns + lane % 4 * 2) * stride + lane // 4)
            for m in range(-(-phase.octets(plan.units) // 2)):
                for n in range(plan.tiles):
                    for i in range(4):
                        with within(T, plan, n, lane % 4 * 2 + i % 2):
                            T.buffer_store(shared, acc(m, n, i),
                                           [base + (n * 8 + i % 2) * stride + m * 16 + i // 2 * 8])
            T.evaluate(T.ptx["bar.sync"](T.cast(side + FULL, "uint32"), T.uint32(plan.threads)))
            carrier.done(index, t, warp, lane)


def _weights(T: Any, plan: Plan, phase: Any, source: Any, member: Any, warp: Any, q: int, v: int,
             lane: Any) -> Any:
    """Where the four words of a lane lie in the packed weights."""
    index = T.Bind((((member * plan.warps + warp) * phase.pairs + q) * phase.octets(plan.units) + v) * 32 + lane)
    return source.ptr_to([T.cast(index, "int64") * 4 * per_word(plan.dtype)])


def _shared_place(plan: Plan, phase: Any, place: int, warp: Any, q: int, v: int, lane: Any) -> Any:
    octets = phase.octets(plan.units)
    return place + (((warp * phase.shared_pairs + q - phase.register_pairs) * octets + v) * 32 + lane) * 4


class _Stored:
    """The weights of a phase that a warp multiplies with, wherever they are kept."""

    def __init__(self, T: Any, plan: Plan, phase: Any, held: Any, words: Any, place: int, source: Any, member: Any,
                 warp: Any, lane: Any) -> None:
        self.T, self.plan, self.phase, self.held, self.words, self.place = T, plan, phase, held, words, place
        self.source, self.member, self.warp, self.lane = source, member, warp, lane
        self.octets = phase.octets(plan.units)
        self.first = phase.register_pairs + phase.shared_pairs  # streamed pair
        if phase.register_pairs < phase.pairs:
            turns = 3 if phase.streamed_pairs else 1  # 0: of shared memory; 1, 2: of L2
            self.loaded = T.alloc_buffer((turns, self.octets, 4), "uint32", scope="local")
        self._stream(self.first)

    def load(self, q: int) -> None:
        """Loads pair q where it is not in registers; what comes from L2 was asked for a pair ago."""
        if self.phase.register_pairs <= q < self.first:
            for v in range(self.octets):
                at = _shared_place(self.plan, self.phase, self.place, self.warp, q, v, self.lane)
                self._into(0, v, "ld.shared.v4.b32", self.words.ptr_to([at]))
        elif q >= self.first:
            self._stream(q + 1)

    def _stream(self, q: int) -> None:
        for v in range(self.octets if q < self.phase.pairs else 0):
            address = _weights(self.T, self.plan, self.phase, self.source, self.member, self.warp, q, v, self.lane)
            self._into(1 + (q - self.first) % 2, v, "ld.global.v4.b32", address)

    def _into(self, turn: int, v: int, instruction: str, address: Any) -> None:
        self.T.evaluate(self.T.ptx[instruction](*(self.loaded[turn, v, i] for i in range(4)), address))

    def word(self, q: int, v: int, i: int) -> Any:
        """Word i of octet v of pair q, after ``load(q)``."""
        if q < self.phase.register_pairs:
            return self.held[q * self.octets + v, i]
        return self.loaded[1 + (q - self.first) % 2 if q >= self.first else 0, v, i]


def _multiply(T: Any, plan: Plan, index: int, stored: _Stored, carrier: Ring | Cluster, start: Any,
              lane: Any) -> Any:
    """This warp's part of the products of a phase, as its words of a slot, from ``start``, arrive."""
    phase = plan.phases[index]
    octets = phase.octets(plan.units)
    tiles = -(-octets // 2)
    chains = min(plan.chains, phase.pairs * 2)
    acc = T.alloc_buffer((chains, tiles, plan.tiles, 4), "float32", scope="local")
    for c in range(chains):
        for m in range(tiles):
            for n in range(plan.tiles):
                for i in range(4):
                    T.buffer_store(acc, T.float32(0), [c, m, n, i])
    state = T.alloc_buffer((phase.polled_pairs, plan.tiles, 4), "uint32", scope="local")
    if plan.rows % 8:
        for p in range(phase.polled_pairs):
            for i in range(4):  # lanes of the last tile that have no batch row never load
                T.buffer_store(state, T.uint32(0), [p, plan.tiles - 1, i])
    for q in range(phase.pairs):
        p = q % phase.polled_pairs
        if p == 0:
            carrier.read(index, state, start, range(q, min(q + phase.polled_pairs, phase.pairs)), lane)
        stored.load(q)
        for tile in range(2):
            columns = [[split(state[p, n, tile * 2 + half], plan.arithmetic) for half in range(2)]
                       for n in range(plan.tiles)]
            for m in range(tiles):
                rows = []
                for half in range(2):  # a0, a1: word 0 of the lower and upper octet; a2, a3: word 1
                    for v in (2 * m, 2 * m + 1):
                        rows.append(split(stored.word(q, v, tile * 2 + half), plan.arithmetic) if v < octets
                                    else tuple(T.uint32(0) for _ in range(2)))
                for n in range(plan.tiles):
                    chain = (2 * q + tile) % chains
                    mma([acc[chain, m, n, i] for i in range(4)], rows, columns[n], plan.arithmetic,
                        apart=False)  # the sums of a warp are short

    def total(m: int, n: int, i: int) -> Any:
        value = acc[0, m, n, i]
        for c in range(1, chains):
            value = value + acc[c, m, n, i]
        return value

    return total


