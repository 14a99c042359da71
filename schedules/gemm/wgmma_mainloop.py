"""The main loop on Hopper: one warpgroup copies to a ring of stages in shared memory, two multiply from there (wgmma).

The ring is a ``Pipeline`` (cuda/pipeline.py). Its ``full`` takes an arrival of each copying thread when its copies have
landed, and where one bulk copy fetches a part of the stage, one of the thread that announces its bytes; its ``empty``
8, of each multiplying warp when its products of the stage are done. All warps go through the same tiles and stages in
the same order, and copies run ahead into the next tile. cp.async writes through the generic proxy and wgmma reads
through the asynchronous one: the multiplying threads, which have seen the arrivals, put a proxy fence between. Products
of the stage before are still under way, so it delays nothing. Conversely, products are waited for before ``empty`` is
arrived at: what they read may be overwritten."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda import isa
from ecornn.schedules.cuda.pipeline import BARRIER_WORDS, Pipeline, Use
from ecornn.schedules.gemm.job import CHUNK, LINE, Columns

THREADS = 384
GROUP = 128  # threads of a warpgroup
WIDE = 128  # columns of a tile, beyond which the multiplying warps need more registers than an even share
COPY_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # of a thread; 168 at launch, of which the copying warps give
BARRIERS = 16  # bytes of a stage's two mbarriers
LAG_BARRIER = 3  # named barrier; 1 and 2 are those of the multiplying warpgroups

Descriptors = tuple[Expr, Expr, int, int]  # of both operands of a stage, and how far 32 bytes of K are apart in each


class WgmmaMainloop(ABC):
    """Emits both sides of the ring; a job says what tiles there are, what a stage holds, and what becomes of sums.
    ``memory``: dynamic shared memory, aligned to 1024 bytes, which begins with the stages; ``barriers``: word of it
    where the mbarriers begin, 4 words a stage; ``bulk``: whether one bulk copy fetches a part of each stage."""

    def __init__(self, memory: TirBuffer, thread: Expr, width: int, stages: int, stage_bytes: int, barriers: int,
                 arithmetic: str, bulk: bool = False) -> None:
        self.memory, self.thread, self.width, self.arithmetic, self.bulk = memory, thread, width, arithmetic, bulk
        self.stages, self.stage_bytes = stages, stage_bytes
        self.ring = Pipeline(memory, barriers, stages, barriers + BARRIER_WORDS, apart=2 * BARRIER_WORDS)
        self.base = T.let("base", isa.shared_address(memory.ptr_to([0])))
        self.turn = T.local("turn", (1,), "uint32")  # uses of stages so far

    @abstractmethod
    def copy(self) -> None:
        """The copying warpgroup: all stages of every tile."""

    @abstractmethod
    def multiply(self) -> None:
        """A multiplying warpgroup: products and outputs of its half of every tile."""

    def run(self) -> None:
        T.note("prologue: one thread initialises the mbarriers (full, empty) of all stages")
        with T.when(self.thread == 0):
            self.ring.init(GROUP + self.bulk, 2 * GROUP // 32)
            isa.fence_mbarrier_init()
            if self.bulk:
                isa.fence_async_shared()  # bulk copies arrive through this proxy
        isa.sync_block()
        with T.If(self.thread < GROUP):
            with T.Then():
                if self.width > WIDE:
                    isa.register_dealloc(COPY_REGISTERS)
                self.copy()
                isa.cp_async_wait_all()  # no thread leaves before its copies have landed
            with T.Else():
                if self.width > WIDE:
                    isa.register_alloc(MULTIPLY_REGISTERS)
                # (m64 tile, n8 tile, 4 of fragment C)
                self.acc = T.local("acc", (1, self.width // 8, 4), "float32")
                self.lane, self.member = T.let("lane", self.thread % 32), T.let("member", self.thread % GROUP)
                self.half = T.let("tile_half", self.thread // GROUP - 1)  # of the tile
                self.multiply()

    def fill(self, count: Expr | int, copies: Callable[[Expr, Expr], None]) -> None:
        """The copying warpgroup's ``count`` stages of a tile: ``copies(stage, number)`` of each."""
        with T.serial("slab", 0, count) as slab:
            use = self._use()
            self.ring.acquire(use)
            copies(use.stage, slab)
            isa.cp_async_mbarrier_arrive(self.ring.full_barrier(use.stage))
            T.buffer_store(self.turn, self.turn[0] + T.uint32(1), [0])

    def products(self, count: Expr | int, operands: Callable[[Expr], Descriptors], lag: int = 0,
                 across: bool = False) -> None:
        """The products of ``count`` stages, left in ``acc``; ``operands`` of the shared address of a stage. The first
        multiplying warpgroup stays ``lag`` stages ahead, which the ring holds, so that one of the two multiplies while
        the other writes."""
        every = [self.acc[0, n, i] for n in range(self.width // 8) for i in range(4)]
        def release() -> None:
            with T.when(self.lane == 0):
                before = T.let("before", T.cast((self.turn[0] - T.uint32(1)) % T.uint32(self.stages), "int32"))
                self.ring.release(before)
        if not isinstance(count, int):
            with T.when(count == 0):
                for value in every:
                    T.buffer_store(self.acc, T.float32(0), list(value.indices))
        with T.serial("slab", 0, count) as slab:
            if lag > 0:
                with T.when(T.And(self.half == 0, self.turn[0] == T.uint32(lag))):
                    isa.named_barrier_arrive(LAG_BARRIER, 2 * GROUP)
                with T.when(T.And(self.half == 1, self.turn[0] == T.uint32(0))):
                    isa.named_barrier_sync(LAG_BARRIER, 2 * GROUP)
            use = self._use()
            self.ring.wait(use)
            isa.fence_async_shared()
            a, b, a_step, b_step = operands(T.let("start", self.base + T.cast(use.stage * self.stage_bytes, "uint32")))
            isa.wgmma_fence()
            for k in range(LINE // 32):
                keep = T.uint32(1) if k else T.Select(slab > 0, T.uint32(1), T.uint32(0))
                isa.wgmma(every, [a + T.uint64(k * a_step)], b + T.uint64(k * b_step), keep, self.arithmetic, across)
            isa.wgmma_commit()
            with T.when(slab > 0):
                isa.wgmma_wait_pending(1)
                release()  # the stage before this one
            T.buffer_store(self.turn, self.turn[0] + T.uint32(1), [0])
        isa.wgmma_wait(every)
        with T.when(isinstance(count, int) or count > 0):
            release()

    def copy_chunk(self, x: Columns, source: TirBuffer, at: Expr, value: Expr, place: Expr, live: Expr, size: int,
                   exact: bool = True) -> None:
        """16 bytes of a row, ``value`` and those behind it, in as many copies as the alignment of rows takes; zeros
        where it is not ``live`` and, if ``exact``, behind the row's values."""
        values = x.copied(CHUNK // size)  # of a copy
        for v in range(0, CHUNK // size, values):
            there: Expr = T.uint32(size * values)
            if exact and (rest := x.width % values):
                there = T.Select(value + v == x.width - rest, T.uint32(size * rest), there)
            isa.cp_async(self.memory.ptr_to([place + v * size // 4]), source.ptr_to([at + v]), size * values,
                         T.Select(T.And(live, value + v < x.width), there, T.uint32(0)))

    def _use(self) -> Use:
        stages = T.uint32(self.stages)
        return Use(T.let("stage", T.cast(self.turn[0] % stages, "int32")),
                   T.let("parity", T.bitwise_and(self.turn[0] // stages, T.uint32(1))))
