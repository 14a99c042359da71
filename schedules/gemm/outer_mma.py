"""Outer products over all rows by ``mma``: a block a tile of one part of the rows (``mma_mainloop.py``).

Fragments are read across by ``ldmatrix.trans``, or 32-bit words one by one."""

from __future__ import annotations

from dataclasses import replace

from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa import sync_block
from ecornn.schedules.cuda.isa.tensor_core import ldmatrix, per_word
from ecornn.schedules.gemm.job import SLOWER
from ecornn.schedules.gemm.mma_mainloop import COLUMN_WARPS, ROW_WARPS, THREADS, MmaMainloop, Staged
from ecornn.schedules.gemm.outer import Arguments, Into, OuterJob, OuterShape, best_parts
from ecornn.schedules.rates import gpu_rates

STAGES = 4
PAD = 8  # values behind a row of a stage, which keep reads across it free of bank conflicts
LEAST_HEIGHT, LEAST_WIDTH = ROW_WARPS * 16, COLUMN_WARPS * 8  # of a tile


def outer_shape(job: OuterJob) -> OuterShape:
    """The tiles of 256 threads, of which a multiprocessor holds two."""
    most = 2 if per_word(job.dtype) == 1 else 4
    m_tiles = next(n for n in (1, 2, 4) if n == most or LEAST_HEIGHT * n >= job.values.width)
    if job.heads > 1:  # a tile's values are of one head
        m_tiles = max(n for n in (1, 2, 4) if n <= m_tiles and job.operand.width % (LEAST_HEIGHT * n) == 0)
    n_tiles = next(n for n in (2, 4) if n == 4 or LEAST_WIDTH * n >= job.operand.width)
    height, width, depth = LEAST_HEIGHT * m_tiles, LEAST_WIDTH * n_tiles, 64 // job.itemsize
    shape = OuterShape(height, width, -(-job.values.width // height), -(-job.operand.width // width),
                       depth, depth * (height + width + 2 * PAD) * job.itemsize, STAGES)
    rate = gpu_rates(job.device).mma_gemm / SLOWER.get(job.arithmetic, 1) / 2
    return replace(shape, parts=best_parts(job, shape.tiles, height * width / rate, 2 * job.device.cores))


def outer_kernel(job: OuterJob, shape: OuterShape, into: Into) -> PrimFunc:
    """``(T, B, add, values, operand, mask, into)``: sums over all rows, to ``into``; of parts, ``into[p, m, n]``."""
    with T.kernel(job.name) as made:
        arguments = job.declare(into, shape.parts)
        T.device_entry()
        block, thread = T.block(shape.tiles * shape.parts), T.thread(THREADS)
        _Outer(job, shape, arguments, T.shared(shape.shared // 4), block, thread).run()
    return made()


class _Outer(MmaMainloop):
    """Emits one block's tile of one part."""

    def __init__(self, job: OuterJob, shape: OuterShape, arguments: Arguments, memory: TirBuffer, block: Expr,
                 thread: Expr) -> None:
        self.job, self.shape, self.arguments = job, shape, arguments
        self.part, tile = T.let("part", block // shape.tiles), T.let("tile", block % shape.tiles)
        self.m0 = T.let("m0", tile // shape.across * shape.height)
        self.n0 = T.let("n0", tile % shape.across * shape.width)
        own = job.operand.width
        self.head = T.let("head", self.m0 % (job.heads * own) // own * own) if job.heads > 1 else None
        self.rows = T.let("rows", arguments.steps * arguments.batch)
        stages = T.let("stages", (self.rows + (shape.depth - 1)) // shape.depth)
        each = T.let("each", (stages + (shape.parts - 1)) // shape.parts)  # stages of a part
        self.first = T.let("first", self.part * each)
        self.count = T.let("count", T.max(0, T.min(each, stages - self.first)))
        super().__init__(job.dtype, job.arithmetic, memory, shape.height // LEAST_HEIGHT, shape.width // LEAST_WIDTH,
                         STAGES, shape.stage_bytes // job.itemsize, thread, sync_block)
        self.m_warp = T.let("m_warp", self.warp_row * (16 * self.tiles))
        self.n_warp = T.let("n_warp", self.warp_column * (8 * self.products))

    def run(self) -> None:
        T.note("prologue: the first stages of values and operand to shared memory (cp.async)")
        self.clear()
        self.begin(self.count, self._load)
        T.note("main loop over rows: wait for a stage, copy one ahead, multiply (mma)")
        self.products_of(self.count, self._load, self._add)
        T.note("epilogue: sums to the gradient, or to a part of it")
        with T.unroll("m", self.tiles) as m, T.unroll("upper", 2) as half:
            row = T.let("row", self.m0 + self.m_warp + m * 16 + half * 8 + self.lane // 4)
            first = T.let("column", self.n0 + self.n_warp + self.lane % 4 * 2)
            pairs = [(self.acc[m, n, half * 2], self.acc[m, n, half * 2 + 1]) for n in range(self.products)]
            self.arguments.store(self.part, row, first, pairs)

    def _staged(self, base: Expr) -> tuple[Staged, Staged]:
        """Values and operand of a stage."""
        s = self.shape
        pitch = s.height + PAD
        return (Staged(self.values, base, s.depth, s.height, pitch),
                Staged(self.values, base + s.depth * pitch, s.depth, s.width, s.width + PAD))

    def _load(self, number: Expr, stage: Expr) -> None:
        """Stage ``number`` of this part."""
        job, arguments = self.job, self.arguments
        values, operand = self._staged(T.let("base", stage * self.stage_size))
        row0 = T.let("row0", (self.first + number) * self.shape.depth)
        live = arguments.live if job.mask else None
        for name, x, to, first, head in (("values", job.values, values, self.m0, None),
                                         ("operand", job.operand, operand, self.n0, self.head)):
            self.copy(x, arguments.buffers[name], to, x.together(16 // job.itemsize), row0, self.rows, first, head,
                      live, unrolled=16)

    def _add(self, _: Expr, base: Expr) -> None:
        """The products of a stage."""
        values, operand = self._staged(base)
        operand = replace(operand, base=T.let("across", operand.base))
        halves = per_word(self.job.dtype) == 2
        for k in range(0, self.shape.depth, 16 if halves else 8):
            (self._read_halves if halves else self._read_words)(values, operand, k)
            self.multiply(cut_a=self.job.values.raised, cut_b=self.job.operand.raised)

    def _read_halves(self, values: Staged, operand: Staged, k: int) -> None:
        """Both operands lie as (k, column): matrices of 8 x 8 values come transposed."""
        lane = self.lane
        with T.unroll("m", self.tiles) as m:
            place = (values.base + (k + lane % 8 + lane // 16 * 8) * values.pitch
                     + self.m_warp + m * 16 + lane // 8 % 2 * 8)
            ldmatrix([self.a[m, i] for i in range(4)], self.values.ptr_to([place]), transposed=True)
        with T.unroll("n", self.products // 2) as n:
            place = operand.base + (k + lane % 16) * operand.pitch + self.n_warp + n * 16 + lane // 16 * 8
            ldmatrix([self.b[n * 2 + i // 2, i % 2] for i in range(4)], self.values.ptr_to([place]), transposed=True)

    def _read_words(self, values: Staged, operand: Staged, k: int) -> None:
        lane = self.lane
        with T.unroll("m", self.tiles) as m:
            for i in range(4):
                place = (values.base + (k + lane % 4 + i // 2 * 4) * values.pitch
                         + self.m_warp + m * 16 + lane // 4 + i % 2 * 8)
                T.buffer_store(self.a, self.words[place], [m, i])
        with T.unroll("n", self.products) as n:
            for i in range(2):
                place = operand.base + (k + lane % 4 + i * 4) * operand.pitch + self.n_warp + n * 8 + lane // 4
                T.buffer_store(self.b, self.words[place], [n, i])
