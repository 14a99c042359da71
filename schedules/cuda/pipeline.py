"""Pipelines: stages of shared memory that producers fill and consumers read, handed over by mbarriers.

Use n = 0, 1, ... of a stage is phase n of its barriers, as in CUTLASS's PipelineAsync:

    full     its phase ends with the producers' arrivals, and the bytes that these announced. Consumers of use n
             wait for phase n.
    empty    its phase ends with the consumers' arrivals, behind their last reads. Producers of use n wait for phase
             n - 1, which a new barrier counts as complete for n = 0.

A wait names the parity of a phase, so nobody who waits may be two phases behind. Phase n of ``full`` needs phase n - 1
of ``empty``, which needs every consumer past phase n - 1 of ``full``: with both barriers nobody can be, if all go
through the stages in the same order. Without ``empty`` the kernel says why nobody is.

Threads and bulk copies go through different proxies: where a copy overwrites what threads have read, or a warpgroup
multiplies what they have written, a proxy fence lies between (``isa.fence_async_shared``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda import isa

BARRIER_WORDS = 2  # words of 32 bits of an mbarrier


class Use(NamedTuple):
    """One use of a stage."""

    stage: Expr  # int32
    parity: Expr  # of the phase that it is, uint32

    @property
    def parity_before(self) -> Expr:
        return T.bitwise_xor(self.parity, T.uint32(1))


@dataclass(frozen=True)
class Pipeline:
    """Emits both ends of a pipeline inside a block. ``full``, ``empty``: words where the barriers of the first stage
    lie, 8-byte aligned; None: no consumer hands stages back through barriers."""

    words: TirBuffer  # the block's shared memory, of a type of 32 bits
    full: Expr
    stages: int = 1  # how many there are
    empty: Expr | None = None
    apart: int = BARRIER_WORDS  # words from a stage's barriers to the next one's
    cluster: bool = False  # whether other blocks of the cluster fill stages, too

    def init(self, producers: int = 1, consumers: int = 0) -> None:
        """Makes the barriers, each phase of which takes so many arrivals. For one thread, before
        :func:`~.isa.fence_mbarrier_init` and a barrier of all who use them."""
        for stage in range(self.stages):
            isa.mbarrier_init(self.full_barrier(stage), T.uint32(producers))
            if self.empty is not None:
                isa.mbarrier_init(self.empty_barrier(stage), T.uint32(consumers))

    def full_barrier(self, stage: Expr) -> Expr:  # a pointer
        return self.words.ptr_to([self.full + stage * self.apart])

    def empty_barrier(self, stage: Expr) -> Expr:
        assert self.empty is not None, "nobody hands stages back"
        return self.words.ptr_to([self.empty + stage * self.apart])

    def uses(self, stage: Expr, count: int) -> Expr:
        """How many of the items 0 to ``count`` - 1 go through a stage, item n through stage n modulo ``stages``."""
        return (count - 1 - stage) // self.stages + 1

    def use(self, t: Expr, number: Expr, count: int) -> Use:
        """The use that item ``number`` of iteration t makes, where each has ``count`` items: an item has the same
        stage in all of them, whether or not ``count`` is a multiple of the stages."""
        stage = number % self.stages
        return Use(stage, parity_of(t * self.uses(stage, count) + number // self.stages))

    def acquire(self, use: Use) -> None:
        """Producers: waits until consumers have handed the stage back."""
        isa.mbarrier_wait(self.empty_barrier(use.stage), use.parity_before, self.cluster)

    def may_acquire(self, use: Use) -> Expr:
        """Producers: whether :meth:`acquire` would not have to wait (bool)."""
        return T.let("empty", isa.mbarrier_test(self.empty_barrier(use.stage), use.parity_before)) != T.uint32(0)

    def expect(self, stage: Expr, size: int) -> None:
        """Producers: an arrival that announces ``size`` bytes, some of which may have come before."""
        isa.mbarrier_expect(self.full_barrier(stage), T.uint32(size))

    def copy(self, stage: Expr, to: Expr, source: Expr, size: int, policy: Expr | None = None) -> None:
        """Producers: an arrival, and a bulk copy of ``size`` bytes that ends the phase; ``policy`` of L2."""
        self.expect(stage, size)
        isa.bulk_copy(to, source, T.uint32(size), self.full_barrier(stage), policy=policy)

    def wait(self, use: Use) -> None:
        """Consumers: waits until the stage is full."""
        isa.mbarrier_wait(self.full_barrier(use.stage), use.parity, self.cluster)

    def release(self, stage: Expr) -> None:
        """Consumers: an arrival that hands the stage back."""
        isa.mbarrier_arrive(self.empty_barrier(stage))


@dataclass(frozen=True)
class ClusterPipeline(Pipeline):
    """Emits both ends of the way to every block of a cluster, of what its blocks make in each step: two stages in the
    shared memory of each, which all blocks fill by st.async. What is for step t goes to stage t % 2. A phase has one
    arrival, by a thread of the block that says how many bytes come, and the bytes of one step; some of these may come
    before the arrival.

    * Nobody reads what is not there: the phase ends with its last byte, and a wait for it acquires, at the scope of
      the cluster, what the bytes' completion released.
    * No block ends while something is on its way to it: that is for a step that is computed, so it is waited for.

    Nobody overwrites what is still read, nor counts bytes too early, if who sends for step t + 2 has all of step t + 1,
    to which every block adds behind its reads of step t, and if a block arrives for step t + 2 after its wait for t."""

    stages: int = 2
    blocks: int = 1  # of the cluster
    size: int = 0  # bytes that a block gets in a step
    cluster: bool = True

    def wait_for(self, step: Expr) -> None:
        """Waits until all that is for a step is there."""
        self.wait(Use(step % 2, T.cast(step // 2 % 2, "uint32")))

    def announce(self, step: Expr) -> None:
        """The block's arrival in the phase of a step."""
        self.expect(step % 2, self.size)

    def send(self, step: Expr, place: Expr, words: list[Expr]) -> None:
        """Sends one, two or four words to all blocks, to word ``place`` of their shared memory."""
        to, barrier = T.let("to", isa.shared_address(self.words.ptr_to([place]))), self.address(step)
        for rank in range(self.blocks):
            isa.cluster_send(to, barrier, T.uint32(rank), words)

    def address(self, step: Expr) -> Expr:
        """The address in shared memory of a step's barrier, for :func:`~.isa.cluster_send`."""
        return T.let("barrier", isa.shared_address(self.full_barrier(step % 2)))


def parity_of(use: Expr) -> Expr:
    """The parity of a stage's n-th use, uint32."""
    return T.cast(T.bitwise_and(use, 1), "uint32")
