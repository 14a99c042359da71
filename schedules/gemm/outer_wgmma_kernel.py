"""The code of outer products over all rows on Hopper: one warpgroup copies, two multiply and write.

Stages are handed over as in ``wgmma_kernel.py``, which says why nobody waits forever and which fences there are; all
that is copied comes by ``cp.async`` here, so that the 128 arrivals of the copying threads complete a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa.copies import cp_async, cp_async_mbarrier_arrive, cp_async_wait_all
from ecornn.schedules.cuda.isa.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait
from ecornn.schedules.cuda.isa.memory import fence_async_shared, shared_address
from ecornn.schedules.cuda.isa.registers import register_alloc, register_dealloc
from ecornn.schedules.cuda.isa.threads import sync_block
from ecornn.schedules.cuda.isa.wgmma import descriptor, wgmma, wgmma_commit, wgmma_fence, wgmma_wait, wgmma_wait_pending
from ecornn.schedules.gemm.job import Columns
from ecornn.schedules.gemm.outer import Into, OuterJob, part_of_sums
from ecornn.schedules.gemm.outer_wgmma import DEPTH, DOWN, PANEL, PANEL_BYTES, THREADS, OuterHopper
from ecornn.schedules.timeline import takes_part

GROUP = 128  # threads of a warpgroup
ROWS = GROUP // 8  # of a panel that the copying threads have at once
CHUNK = 8  # values of 16 bytes
COPY_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # of a thread; 168 at launch, of which the copying warps give


def outer_wgmma_kernel(job: OuterJob, shape: OuterHopper, into: Into) -> PrimFunc:
    """``(T, B, add, values, operand, mask, into)``: the sums over all rows, to ``into``; of several parts the sums over
    each, ``into[p, m, n]``. On ``job.device.cores`` blocks."""
    from tvm.script.ir_builder import IRBuilder

    with IRBuilder() as builder, T.prim_func():
        T.func_name(job.name)
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        into = into.told() if shape.parts == 1 else into
        big = (T.int64(1 << 40),)
        arguments = {n: T.arg(n, T.buffer(big, job.dtype)) for n in ("values", "operand")}
        if job.mask:
            arguments[job.mask] = T.arg(job.mask, T.buffer(big, "int32"))
        sums = T.arg("into", T.buffer(big, "float32"))
        T.device_entry()
        block, thread = T.block(job.device.cores), T.thread(THREADS)
        memory = T.shared(shape.shared // 4, 1024)
        ring = _Ring(job, shape, arguments, memory, thread, block, batch, T.let("rows", steps * batch))
        T.note("prologue: one thread initialises the mbarriers (full, empty) of all stages")
        ring.begin()
        moves = shape.panels > 2  # the multiplying warps need more registers than an even share
        with T.If(thread < GROUP):
            with T.Then():
                if moves:
                    register_dealloc(COPY_REGISTERS)
                ring.copy()
            with T.Else():
                if moves:
                    register_alloc(MULTIPLY_REGISTERS)
                ring.multiply(sums, into)
    return builder.get()


class _Ring:
    """Emits both sides of the ring of stages."""

    def __init__(self, job: OuterJob, shape: OuterHopper, arguments: Mapping[str, TirBuffer], memory: TirBuffer,
                 thread: Expr, block: Expr, batch: Expr, rows: Expr) -> None:
        self.job, self.shape, self.arguments, self.memory = job, shape, arguments, memory
        self.thread, self.block, self.batch, self.rows = thread, block, batch, rows
        self.every = T.let("every", (rows + (DEPTH - 1)) // DEPTH)  # stages of all rows
        self.each = T.let("each", (self.every + (shape.parts - 1)) // shape.parts)  # and of a part
        self.first_barrier = shape.stages * shape.stage_bytes // 4
        self.base = T.let("base", shared_address(memory.ptr_to([0])))
        self.turn = T.local("turn", (1,), "uint32")  # uses of stages so far

    def begin(self) -> None:
        """Prepares the barriers, by the first thread, for all."""
        with T.If(self.thread == 0), T.Then():
            for stage in range(self.shape.stages):
                mbarrier_init(self._full(stage), GROUP)
                mbarrier_init(self._empty(stage), 2 * GROUP // 32)
            fence_mbarrier_init()
        sync_block()

    def copy(self) -> None:
        """The copying warpgroup: the panels of every tile, stage by stage."""
        T.note("producer warpgroup: wait for an empty stage, copy the rows' panels into it (cp.async)")
        def tile(part: Expr, m0: Expr, n0: Expr) -> None:
            with T.serial("number", 0, self._stages(part)) as number:
                stage, parity = self._use()
                mbarrier_wait(self._empty(stage), parity ^ T.uint32(1))
                self._copy_stage(stage, T.let("row0", (part * self.each + number) * DEPTH), m0, n0)
                cp_async_mbarrier_arrive(self._full(stage))
                T.buffer_store(self.turn, self.turn[0] + T.uint32(1), [0])

        self._tiles(tile)
        cp_async_wait_all()  # no thread leaves before its copies have landed

    def multiply(self, sums: TirBuffer, into: Into) -> None:
        """A multiplying warpgroup: its panel of values by all of the operand's."""
        s = self.shape
        T.note("MMA warpgroups: a panel of values by all of the operand's")
        acc = T.local("acc", (s.width // 8, 4), "float32")
        lane, warp = T.let("lane", self.thread % 32), T.let("warp", self.thread % GROUP // 32)
        panel = T.let("panel", self.thread // GROUP - 1)

        def tile(part: Expr, m0: Expr, n0: Expr) -> None:
            T.note("main loop over rows: wait for a full stage, wgmma, then hand the stage before it back")
            self._products(acc, panel, lane, self._stages(part))
            T.note("epilogue: sums to the gradient, or to a part of it")
            row0 = T.let("m", m0 + panel * PANEL + warp * 16 + lane // 4)
            to = into if s.parts == 1 else part_of_sums(part, self.job.values.width, self.job.operand.width)
            self._write(sums, to, acc, row0, T.let("n", n0 + lane % 4 * 2))

        self._tiles(tile)

    def _tiles(self, emit: Callable[[Expr, Expr, Expr], None]) -> None:
        """``emit(part, first column of values, and of the operand)`` for each of this block's tiles."""
        s = self.shape
        tiles = s.down * s.across
        T.buffer_store(self.turn, T.uint32(0), [0])
        item, at = T.local("item", (1,), "int32"), T.local("at", (3,), "int32")
        T.buffer_store(item, self.block, [0])
        with T.While(item[0] < tiles * s.parts):
            T.buffer_store(at, item[0] // tiles, [0])
            T.buffer_store(at, item[0] % tiles // s.across * s.height, [1])
            T.buffer_store(at, item[0] % s.across * s.width, [2])
            emit(at[0], at[1], at[2])
            T.buffer_store(item, item[0] + self.job.device.cores, [0])

    def _stages(self, part: Expr) -> Expr:
        """The stages of a part; the last parts may have none."""
        return T.let("stages", T.max(0, T.min(self.each, self.every - part * self.each)))

    def _products(self, acc: TirBuffer, panel: Expr, lane: Expr, stages: Expr) -> None:
        s = self.shape
        every = [acc[n, i] for n in range(s.width // 8) for i in range(4)]

        def release() -> None:
            with T.If(lane == 0), T.Then():
                before = T.let("before", T.cast((self.turn[0] - T.uint32(1)) % T.uint32(s.stages), "int32"))
                mbarrier_arrive(self._empty(before))

        with T.If(stages == 0), T.Then():
            for value in every:
                T.buffer_store(acc, T.float32(0), list(value.indices))
        with T.serial("number", 0, stages) as number:
            stage, parity = self._use()
            mbarrier_wait(self._full(stage), parity)
            fence_async_shared()
            start = T.let("start", self.base + T.cast(stage * s.stage_bytes, "uint32"))
            mine = T.let("mine", start + T.cast(panel * PANEL_BYTES, "uint32"))
            values = T.let("values", descriptor(mine, PANEL_BYTES, 8 * PANEL * 2, swizzled=True))
            operand = T.let("operand", descriptor(start + T.uint32(DOWN * PANEL_BYTES), PANEL_BYTES, 8 * PANEL * 2,
                                                  swizzled=True))
            wgmma_fence()
            for k in range(DEPTH // 16):
                keep = T.uint32(1) if k else T.Select(number > 0, T.uint32(1), T.uint32(0))
                ahead = T.uint64(k * 16 * PANEL * 2 // 16)
                wgmma(every, values + ahead, operand + ahead, keep, self.job.arithmetic, across=True)
            wgmma_commit()
            with T.If(number > 0), T.Then():
                wgmma_wait_pending(1)
                release()  # the stage before this one
            T.buffer_store(self.turn, self.turn[0] + T.uint32(1), [0])
        wgmma_wait(every)
        with T.If(stages > 0), T.Then():
            release()

    def _write(self, sums: TirBuffer, into: Into, acc: TirBuffer, row0: Expr, column0: Expr) -> None:
        s, height, width = self.shape, self.job.values.width, self.job.operand.width
        for half in range(2):
            row = T.let("row", row0 + half * 8)
            with T.If(row < height), T.Then():
                pairs = [(acc[n, half * 2], acc[n, half * 2 + 1]) for n in range(s.width // 8)]
                into.store_pairs(sums, row, column0, width, pairs)  # the width is even

    # -- copies ---------------------------------------------------------------------------------
    def _copy_stage(self, stage: Expr, row0: Expr, m0: Expr, n0: Expr) -> None:
        """A thread's chunks: the same one of every 16th row of each panel. What lies outside becomes zero."""
        first, chunk = T.let("first", self.thread // 8), T.let("chunk", self.thread % 8)
        row = T.let("row", row0 + first)
        live = [self._live(row + r) for r in range(0, DEPTH, ROWS)]
        place = T.let("place", stage * (self.shape.stage_bytes // 4) + first * (PANEL // 2)
                      + T.bitwise_xor(chunk, first % 8) * 4)
        for name, source, start, panels, before in (
                ("values", self.job.values, m0, DOWN, 0), ("operand", self.job.operand, n0, self.shape.panels, DOWN)):
            column = T.let("column", start + chunk * CHUNK)
            at = T.let("at", source.place(row, column))
            for panel in range(panels):
                for r, inside in enumerate(live):
                    to = place + ((before + panel) * (PANEL_BYTES // 4) + r * ROWS * (PANEL // 2))
                    self._copy(name, source, to, at + (r * ROWS * source.stride + panel * PANEL),
                               column + panel * PANEL, inside)

    def _live(self, row: Expr) -> Expr:
        """True if there is such a row, and it takes part."""
        inside = row < self.rows
        if self.job.mask:
            inside = T.And(inside, takes_part(self.job.mask, self.arguments[self.job.mask], row, self.batch))
        return T.let("live", inside)

    def _copy(self, name: str, source: Columns, to: Expr, at: Expr, column: Expr, live: Expr) -> None:
        """16 bytes, in as many copies as the alignment of rows takes; of none of them nothing is read. What comes from
        behind a row's values is multiplied for sums that nobody stores."""
        values = source.copied(CHUNK)
        for v in range(0, CHUNK, values):
            there = T.And(live, column + v < source.width)
            cp_async(self.memory.ptr_to([to + v // 2]), self.arguments[name].ptr_to([at + v]), 2 * values,
                     T.Select(there, T.uint32(2 * values), T.uint32(0)))

    def _use(self) -> tuple[Expr, Expr]:
        """Stage (int32) and parity of the phase (uint32) of the current use."""
        stages = T.uint32(self.shape.stages)
        return (T.let("stage", T.cast(self.turn[0] % stages, "int32")),
                T.let("parity", T.bitwise_and(self.turn[0] // stages, T.uint32(1))))

    def _full(self, stage: Expr) -> Expr:
        return self.memory.ptr_to([self.first_barrier + stage * 4])

    def _empty(self, stage: Expr) -> Expr:
        return self.memory.ptr_to([self.first_barrier + stage * 4 + 2])
