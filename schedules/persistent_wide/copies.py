"""The warps that copy: a lane brings one chunk of state in as soon as it is complete, step after step.

Warp r fills ring r, or all four of them the only one, each some of its stages: while a warp waits for a counter, it
cannot fill a stage that another lane waits for. Lane p has the chunk that is multiplied at position p, or at the p-th
position whose chunk goes through the warp's stages. The chunks begin with another one in every set of blocks, so that
not all read the same part of L2 at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ecornn.schedules.mbarrier import mbarrier_test
from ecornn.schedules.persistent_wide.exchange import counter_of, slot_base, writers
from ecornn.schedules.persistent_wide.place import Place, named
from ecornn.schedules.persistent_wide.plan import DEPTH, SLOTS, Plan

_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


class Memory:
    """Where things lie in shared memory; ``ring`` is an expression (int32), or 0."""

    def __init__(self, T: Any, plan: Plan, words: Any) -> None:
        self.T, self.plan, self.words = T, plan, words

    def stage(self, ring: Any, stage: Any) -> Any:
        """Index of the first word of a stage."""
        return (ring * self.plan.stages + stage) * (self.plan.stage_bytes // 4)

    def weights(self, ring: Any, position: Any) -> Any:
        """Of the weights of the chunk at a position from ``kept`` on."""
        within = ring * (self.plan.chunks - self.plan.kept) + position - self.plan.kept
        return self.plan.first_weight // 4 + within * (self.plan.weight_bytes // 4)

    def sums(self, ring: Any) -> Any:
        return self.plan.first_sum // 4 + ring * (self.plan.columns * self.plan.stride)

    def full(self, ring: Any, stage: Any) -> Any:
        """A pointer: this stage has its chunk."""
        return self._barrier(ring, stage)

    def empty(self, ring: Any, stage: Any) -> Any:
        """A pointer: this stage has been multiplied."""
        return self._barrier(ring, self.plan.stages + stage)

    def stored(self, ring: Any) -> Any:
        """A pointer: weights are in shared memory."""
        return self._barrier(ring, 2 * self.plan.stages)

    def _barrier(self, ring: Any, index: Any) -> Any:
        place = self.plan.first_barrier // 4 + (ring * (2 * self.plan.stages + 1) + index) * 2
        return self.words.ptr_to([place])


def chunk_at(plan: Plan, place: Place, ring: Any, position: Any) -> Any:
    """The chunk that is multiplied at a position of a ring."""
    return (place.part if plan.parts > 1 else ring) * plan.chunks + (position + place.member) % plan.chunks


def copy(T: Any, plan: Plan, memory: Memory, steps: Any, place: Place, warp: Any, lane: Any,
         weights: Any, exchange: Any, counters: Any) -> None:
    """A copying warp's whole life."""
    C, S, each = plan.chunks, plan.stages, plan.copier_stages
    if plan.copiers == 1:
        ring, keep, chunk = warp, T.Bind, T.Bind(chunk_at(plan, place, warp, lane))
        _weights(T, plan, memory, place.member, ring, lane, chunk, weights)
        stage, turn = T.Bind(lane % S), T.Bind(lane // S)
        mine, every = lane < C, (1 << C) - 1
    else:
        ring, keep = 0, partial(named, T)
        with T.If(warp == 0), T.Then():
            _weights(T, plan, memory, place.member, ring, lane, T.Bind(chunk_at(plan, place, ring, lane)), weights)
        stage, turn = keep(warp + lane % each * plan.copiers), keep(lane // each)
        position = keep(turn * S + stage)
        mine, every = T.And(stage < S, position < C), (1 << 32) - 1  # a lane without a chunk never waits
        chunk = keep(chunk_at(plan, place, ring, position))
    uses = T.Bind((C - 1 - stage) // S + 1)  # of the stage, in a step
    counter = counters.ptr_to([keep(counter_of(plan, place.group, chunk))])
    needed = keep(writers(T, plan, chunk))
    count, waiting, issued = (T.alloc_buffer((1,), "uint32", scope="local") for _ in range(3))
    T.buffer_store(count, T.uint32(0), [0])
    with T.serial(0, steps) as t:
        T.buffer_store(waiting, T.cast(mine, "uint32"), [0])
        T.buffer_store(issued, T.uint32(0), [0])
        parity = T.Bind(T.cast(T.bitwise_and(t * uses + turn, 1), "uint32"))
        source = keep(slot_base(plan, place.group, t % SLOTS) + chunk * (plan.columns * DEPTH // 2))
        with T.While(issued[0] != T.uint32(every)):
            with T.If(waiting[0] != T.uint32(0)), T.Then():
                with T.If(T.cast(count[0], "int32") < t * needed), T.Then():
                    T.evaluate(T.ptx["ld.acquire.gpu.global.u32"](count[0], counter))
                # a parity says nothing about the use after next: the one before must have been issued
                before = T.bitwise_and(issued[0] >> T.cast(T.max(lane - each, 0), "uint32"), T.uint32(1))
                follows = T.Or(turn == 0, before != T.uint32(0))
                with T.If(T.And(follows, T.cast(count[0], "int32") >= t * needed)), T.Then():
                    free = T.Bind(mbarrier_test(memory.empty(ring, stage), T.bitwise_xor(parity, T.uint32(1))))
                    with T.If(free != T.uint32(0)), T.Then():
                        # The copies of several lanes issue as one instruction, which a race checker takes for the
                        # first lane's: that one must have seen what the others have waited for.
                        T.evaluate(T.cuda.func_call("ecornn_meet", source_code=_MEET))
                        _announce(T, memory.full(ring, stage), plan.stage_bytes)
                        T.evaluate(T.ptx["fence.proxy.async.global"]())
                        _bulk(T, memory.words.ptr_to([memory.stage(ring, stage)]), exchange.ptr_to([source]),
                              plan.stage_bytes, memory.full(ring, stage))
                        T.buffer_store(waiting, T.uint32(0), [0])
            done = waiting[0] == T.uint32(0)
            done = T.cast(T.And(done, mine) if plan.copiers == 1 else done, "int32")
            T.buffer_store(issued, T.cuda.func_call("ecornn_ballot", done, source_code=_BALLOT,
                                                    return_type="uint32"), [0])


def _weights(T: Any, plan: Plan, memory: Memory, member: Any, ring: Any, lane: Any, chunk: Any, weights: Any) -> None:
    """Weights that are kept in shared memory."""
    if plan.kept == plan.chunks:
        return
    with T.If(T.And(lane >= plan.kept, lane < plan.chunks)), T.Then():
        _announce(T, memory.stored(ring), plan.weight_bytes)
        piece = T.cast(member * plan.counters + chunk, "int64")
        _bulk(T, memory.words.ptr_to([memory.weights(ring, lane)]),
              weights.ptr_to([piece * (plan.weight_bytes // 4)]), plan.weight_bytes, memory.stored(ring))
    T.evaluate(T.cuda.warp_sync())


def _announce(T: Any, barrier: Any, count: int) -> None:
    """Arrives at a barrier whose phase ends when ``count`` bytes have come, too."""
    T.evaluate(T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](barrier, T.uint32(count)))


def _bulk(T: Any, to: Any, source: Any, count: int, barrier: Any) -> None:
    """Copies ``count`` bytes, and counts them at the barrier."""
    T.evaluate(T.ptx[_BULK](to, source, T.uint32(count), barrier))


_BALLOT = """
__device__ __forceinline__ unsigned ecornn_ballot(int value) {
  return __ballot_sync(0xffffffffu, value);
}"""

_MEET = """
__device__ __forceinline__ void ecornn_meet() {
  __syncwarp(__activemask());
}"""
