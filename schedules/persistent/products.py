"""The product warps of the persistent kernel: exchanged state to partial sums."""

from __future__ import annotations

from typing import Any

from ecornn.schedules.persistent.cluster import Cluster
from ecornn.schedules.persistent.exchange import Ring, within
from ecornn.schedules.persistent.gates import FULL, SENT
from ecornn.schedules.persistent.plan import Plan
from ecornn.schedules.persistent.stream import Stream
from ecornn.schedules.tensor_core import mma, per_word, split


def products(T: Any, plan: Plan, steps: Any, member: Any, warp: Any, lane: Any, weights: list[Any],
             carrier: Ring | Cluster, shared: Any) -> None:
    """A product warp's whole life."""
    words = shared.view("uint32")
    held, places, streams, place = [], [], [], 2 * plan.sum_floats
    for index, (phase, source) in enumerate(zip(plan.phases, weights, strict=True)):
        octets, kept, streamed = phase.octets(plan.units), phase.register_pairs, phase.streamed_pairs
        registers = T.alloc_buffer((max(1, kept * octets), 4), "uint32", scope="local")
        held.append(registers)
        places.append(place)
        for q in range(streamed, phase.pairs):
            for v in range(octets):
                address = _weights(T, plan, phase, source, member, warp, q, v, lane)
                if q < streamed + kept:
                    r = [registers[(q - streamed) * octets + v, i] for i in range(4)]
                    T.evaluate(T.ptx["ld.global.v4.b32"](*r, address))
                else:
                    r = [T.alloc_buffer((1,), "uint32", scope="local")[0] for _ in range(4)]
                    T.evaluate(T.ptx["ld.global.v4.b32"](*r, address))
                    T.evaluate(T.ptx["st.shared.v4.b32"](
                        words.ptr_to([_shared_place(plan, phase, place, warp, q, v, lane)]), *r))
        place += plan.shared_weight_words(phase)
        streams.append(Stream(T, plan, index, words, place, source, member, warp, lane, steps) if phase.slots else None)
        if streams[-1] is not None:
            streams[-1].begin()
        place += plan.stream_words(phase)
    with T.serial(0, steps) as t:
        for index, phase in enumerate(plan.phases):
            use = T.Bind(t * len(plan.phases) + index)
            side = T.Bind(use % 2)
            stored = _Stored(T, plan, phase, held[index], words, places[index], weights[index], streams[index], member,
                             warp, lane, t)
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
            if plan.held:
                T.evaluate(T.ptx["bar.sync"](T.uint32(SENT), T.uint32(plan.threads)))


def _weights(T: Any, plan: Plan, phase: Any, source: Any, member: Any, warp: Any, q: int, v: int,
             lane: Any) -> Any:
    """Where the four words of a lane lie in the packed weights."""
    index = T.Bind((((member * plan.warps + warp) * phase.pairs + q) * phase.octets(plan.units) + v) * 32 + lane)
    return source.ptr_to([T.cast(index, "int64") * 4 * per_word(plan.dtype)])


def _shared_place(plan: Plan, phase: Any, place: int, warp: Any, q: int, v: int, lane: Any) -> Any:
    octets = phase.octets(plan.units)
    shared = q - phase.streamed_pairs - phase.register_pairs
    return place + (((warp * phase.shared_pairs + shared) * octets + v) * 32 + lane) * 4


class _Stored:
    """The weights of a phase that a warp multiplies with, wherever they are kept."""

    def __init__(self, T: Any, plan: Plan, phase: Any, held: Any, words: Any, place: int, source: Any,
                 stream: Stream | None, member: Any, warp: Any, lane: Any, t: Any) -> None:
        self.T, self.plan, self.phase, self.held, self.words, self.place = T, plan, phase, held, words, place
        self.source, self.stream, self.member, self.warp, self.lane, self.t = source, stream, member, warp, lane, t
        self.octets = phase.octets(plan.units)
        self.ahead = phase.streamed_pairs > 0 and stream is None  # whether a pair is loaded while another is multiplied
        if phase.register_pairs < phase.pairs:
            self.loaded = T.alloc_buffer((3 if self.ahead else 1, self.octets, 4), "uint32", scope="local")
        if self.ahead:
            self._from_l2(0)

    def load(self, q: int) -> None:
        """Loads pair q where it is not in registers; what comes from L2 was asked for earlier."""
        streamed = self.phase.streamed_pairs
        if q >= streamed + self.phase.register_pairs:
            for v in range(self.octets):
                at = _shared_place(self.plan, self.phase, self.place, self.warp, q, v, self.lane)
                self._into(0, v, "ld.shared.v4.b32", self.words.ptr_to([at]))
        elif q < streamed and self.stream is not None:
            self.stream.read(q, self.t, self.loaded)
        elif q + 1 < streamed:
            self._from_l2(q + 1)

    def _from_l2(self, q: int) -> None:
        for v in range(self.octets):
            address = _weights(self.T, self.plan, self.phase, self.source, self.member, self.warp, q, v, self.lane)
            self._into(self._turn(q), v, "ld.global.v4.b32", address)

    def _turn(self, q: int) -> int:
        """Which of the loaded pairs q is: of what is loaded ahead, the second and third in turns."""
        return 1 + q % 2 if self.ahead and q < self.phase.streamed_pairs else 0

    def _into(self, turn: int, v: int, instruction: str, address: Any) -> None:
        self.T.evaluate(self.T.ptx[instruction](*(self.loaded[turn, v, i] for i in range(4)), address))

    def word(self, q: int, v: int, i: int) -> Any:
        """Word i of octet v of pair q, after ``load(q)``."""
        held = q - self.phase.streamed_pairs
        if 0 <= held < self.phase.register_pairs:
            return self.held[held * self.octets + v, i]
        return self.loaded[self._turn(q), v, i]


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


