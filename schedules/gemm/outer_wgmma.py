"""Outer products over all rows on Hopper, by warpgroup products of 16-bit types (``wgmma_mainloop.py``).

One block a multiprocessor goes through tiles of 128 columns of ``values`` by up to 256 of ``operand``, those of one
part of the rows after those of another, so that all blocks read much the same rows. Both operands go through a ring of
stages of 64 rows in shared memory, as panels of 64 columns: 128 bytes of each row, one row behind the other, whose
16-byte chunks are exchanged by row (wgmma's 128-byte swizzle). Products read panels across."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa import descriptor
from ecornn.schedules.gemm.job import CHUNK, LINE
from ecornn.schedules.gemm.outer import Arguments, Into, OuterJob, OuterShape, best_parts, expected
from ecornn.schedules.gemm.wgmma_mainloop import BARRIERS, GROUP, THREADS, Descriptors, WgmmaMainloop
from ecornn.schedules.rates import gpu_rates

DEPTH = 64  # rows of a stage
PANEL = 64  # columns, of 128 bytes in a row
PANEL_BYTES = DEPTH * PANEL * 2
HEIGHT = 2 * PANEL  # of a tile: a panel of values for each multiplying warpgroup
MOST_ACROSS, LEAST_ACROSS = 4, 2  # panels of the operand, where it has as many
STAGES = 6  # at most
ROWS = GROUP // 8  # of a panel that the copying threads have at once


def hopper_shape(job: OuterJob) -> OuterShape | None:
    """The tiles, narrower than necessary where that fills the chip's turns better; None where it does not serve."""
    if (not job.device.can.warpgroups or job.itemsize != 2 or job.heads > 1 or job.operand.width % 2
            or job.values.copied(8) < 2 or job.operand.copied(8) < 2):
        return None
    panels = -(-job.operand.width // PANEL)
    made = [_cut(job, panels, across) for across in range(-(-panels // MOST_ACROSS), -(-panels // LEAST_ACROSS) + 1)]
    return min(filter(None, made), key=lambda one: one[0], default=(0.0, None))[1]


def _cut(job: OuterJob, panels: int, across: int) -> tuple[float, OuterShape] | None:
    """Tiles of which so many lie side by side, and nanoseconds."""
    width = -(-panels // across) * PANEL
    stage = DEPTH * (HEIGHT + width) * 2
    stages = min(STAGES, job.device.shared // (stage + BARRIERS))
    if stages < 2:
        return None
    shape = OuterShape(HEIGHT, width, -(-job.values.width // HEIGHT), across, DEPTH, stage, stages, stages * BARRIERS)
    widest = MOST_ACROSS * PANEL
    reuse = width * (HEIGHT + widest) / (widest * (HEIGHT + width))  # of a byte that is copied, of the widest tile's
    row = HEIGHT * width / (gpu_rates(job.device).wgmma_gemm * reuse)
    parts = best_parts(job, shape.tiles, row, job.device.cores)
    return expected(job, shape.tiles, row, job.device.cores, parts), replace(shape, parts=parts)


def outer_wgmma_kernel(job: OuterJob, shape: OuterShape, into: Into) -> PrimFunc:
    """``(T, B, add, values, operand, mask, into)`` as of ``outer.outer_kernel``, on ``job.device.cores`` blocks."""
    with T.kernel(job.name) as made:
        arguments = job.declare(into, shape.parts)
        T.device_entry()
        block, thread = T.block(job.device.cores), T.thread(THREADS)
        _Outer(shape, arguments, T.shared(shape.shared // 4, 1024), thread, block).run()
    return made()


class _Outer(WgmmaMainloop):
    def __init__(self, shape: OuterShape, arguments: Arguments, memory: TirBuffer, thread: Expr, block: Expr) -> None:
        self.shape, self.arguments, self.block = shape, arguments, block
        self.rows = T.let("rows", arguments.steps * arguments.batch)
        self.every = T.let("every", (self.rows + (DEPTH - 1)) // DEPTH)  # stages of all rows
        self.each = T.let("each", (self.every + (shape.parts - 1)) // shape.parts)  # and of a part
        super().__init__(memory, thread, shape.width, shape.stages, shape.stage_bytes,
                         shape.stages * shape.stage_bytes // 4, arguments.job.arithmetic)

    def _tiles(self, emit: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """The tile scheduler: ``emit(part, its stages, first column of values, and of operand)`` for each tile."""
        s = self.shape
        T.buffer_store(self.turn, T.uint32(0), [0])
        item, at = T.local("item", (1,), "int32"), T.local("at", (3,), "int32")
        T.buffer_store(item, self.block, [0])
        with T.While(item[0] < s.tiles * s.parts):
            T.buffer_store(at, item[0] // s.tiles, [0])
            T.buffer_store(at, item[0] % s.tiles // s.across * s.height, [1])
            T.buffer_store(at, item[0] % s.across * s.width, [2])
            # the last parts may have none
            stages = T.let("stages", T.max(0, T.min(self.each, self.every - at[0] * self.each)))
            emit(at[0], stages, at[1], at[2])
            T.buffer_store(item, item[0] + self.arguments.job.device.cores, [0])

    def copy(self) -> None:
        T.note("producer warpgroup: wait for an empty stage, copy the rows' panels into it (cp.async)")
        self._tiles(lambda part, stages, m0, n0: self.fill(stages, lambda stage, number: self._copy_stage(
            stage, T.let("row0", (part * self.each + number) * DEPTH), m0, n0)))

    def multiply(self) -> None:
        T.note("MMA warpgroups: a panel of values by all of the operand's")
        def tile(part: Expr, stages: Expr, m0: Expr, n0: Expr) -> None:
            T.note("main loop over rows: wait for a full stage, wgmma, then hand the stage before it back")
            self.products(stages, self._operands, across=True)
            T.note("epilogue: sums to the gradient, or to a part of it")
            row0 = T.let("m", m0 + self.half * PANEL + self.member // 32 * 16 + self.lane // 4)
            first = T.let("n", n0 + self.lane % 4 * 2)
            for half in range(2):
                pairs = [(self.acc[0, n, half * 2], self.acc[0, n, half * 2 + 1]) for n in range(self.width // 8)]
                self.arguments.store(part, T.let("row", row0 + half * 8), first, pairs)
        self._tiles(tile)

    def _operands(self, start: Expr) -> Descriptors:
        """Panels, which are read across: 16 rows are ``LINE`` units of 16 bytes."""
        mine = T.let("mine", start + T.cast(self.half * PANEL_BYTES, "uint32"))
        firsts = {"values": mine, "operand": start + T.uint32(HEIGHT // PANEL * PANEL_BYTES)}
        values, operand = (T.let(name, descriptor(first, PANEL_BYTES, 8 * LINE, swizzled=True))
                           for name, first in firsts.items())
        return values, operand, LINE, LINE

    def _copy_stage(self, stage: Expr, row0: Expr, m0: Expr, n0: Expr) -> None:
        """A thread's chunks: the same one of every 16th row of each panel. What lies outside becomes zero; what comes
        from behind a row's values is multiplied for sums that nobody stores."""
        arguments, job = self.arguments, self.arguments.job
        first, chunk = T.let("first", self.thread // 8), T.let("chunk", self.thread % 8)
        row = T.let("row", row0 + first)
        rows = [(row + r, row + r < self.rows) for r in range(0, DEPTH, ROWS)]
        live = [T.let("live", T.And(inside, arguments.live(r)) if job.mask else inside) for r, inside in rows]
        line = first * (LINE // 4) + T.bitwise_xor(chunk, first % 8) * 4
        place = T.let("place", stage * (self.stage_bytes // 4) + line)
        for name, source, start, panels, before in (
                ("values", job.values, m0, HEIGHT // PANEL, 0),
                ("operand", job.operand, n0, self.width // PANEL, HEIGHT // PANEL)):
            column = T.let("column", start + chunk * (CHUNK // 2))
            at = T.let("at", source.place(row, column))
            for panel, (r, inside) in product(range(panels), enumerate(live)):
                self.copy_chunk(source, arguments.buffers[name], at + (r * ROWS * source.stride + panel * PANEL),
                                column + panel * PANEL,
                                place + ((before + panel) * (PANEL_BYTES // 4) + r * ROWS * LINE // 4), inside, 2,
                                exact=False)
