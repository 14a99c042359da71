"""A product over all rows on Hopper, by warpgroup products (``wgmma_mainloop.py``).

One block a multiprocessor goes through tiles of 128 rows by the products of up to 32 octets of units. Its
K goes through a ring of stages in shared memory, 128 bytes of every row each, 64 values or 32 of TF32:

    x        rows of 128 bytes, whose 16-byte chunks are exchanged by row (wgmma's 128-byte swizzle): no bank conflicts
    weights  core matrices, 8 columns x 16 bytes in one piece, those of 16 bytes of K one behind the other:
             an order that ``bind`` packs, so that one bulk copy fetches a stage's weights

TF32's products leave out what is beyond 10 bits of mantissa. ``bind`` rounds the weights, adjoints' recurrences raise
what they write, so that to cut off is to round (keeping.py), x is cut off: of an LSTM's error of 3.4e-4 (both rounded)
that makes 4.5e-4, where 6.8e-4 would be of both cut off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ecornn.program import Packing
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda import isa
from ecornn.schedules.gemm.job import CHUNK, LINE, Epilogue, Job, Operand, Shape, write_tile
from ecornn.schedules.gemm.wgmma_mainloop import BARRIERS, GROUP, THREADS, Descriptors, WgmmaMainloop

ROWS = 128  # of a tile; 64 of each multiplying warpgroup
COLUMNS = 256  # of a tile at most, as of one wgmma
NARROWER = 4  # times as narrow tiles, at most, where there are few rows
STAGES = 6  # at most; fewer where shared memory is short
BAND = 16  # groups of rows that share the weights in L2: tiles go through a band column by column
LAG = 2  # stages that the second half of the rows is behind, at most


def shape_of(job: Job) -> Shape | None:
    """The tiles; None where this kernel does not serve the job."""
    rows, size = job.rows, job.itemsize
    if (not job.device.can.warpgroups or job.arithmetic == "float32" or not 0 < rows <= COLUMNS // 16
            or any(o.heads > 1 or o.columns.copied(CHUNK // size) * size % 4 for o in job.operands)):
        return None
    columns, parts = _columns(job), tuple(-(-o.columns.width * size // LINE) for o in job.operands)
    whole = Shape(rows, -(-job.units // (16 * columns)) * 2, ROWS, columns, parts, LINE, 0)  # whole pairs of octets
    vectors = 4 * 4 * job.vectors * whole.units  # float32, of two tiles for each multiplying warpgroup
    stages = min(STAGES, (job.device.shared - vectors) // (whole.stage_bytes + BARRIERS))
    return None if stages < 2 else replace(whole, stages=stages, beside=vectors + stages * BARRIERS)


def _columns(job: Job) -> int:
    """Tiles side by side over the units: as wide as they may be, or narrower where that fills the chip's turns."""
    pairs, most = -(-job.units // 16), COLUMNS // (16 * job.rows)
    least = -(-pairs // most)
    if job.expected is None:
        return least
    groups = -(-job.expected // ROWS)
    def expected(columns: int) -> int:
        octets = -(-pairs // columns) * 2
        turns = -(-groups * -(-pairs * 2 // octets) // job.device.cores)
        return turns * (ROWS + octets * 8 * job.rows)  # bytes that are copied, which multiplying does not outrun
    return min(range(least, min(pairs, NARROWER * least) + 1), key=expected)


def packing_of(job: Job, s: Shape, operand: Operand, span: int) -> Packing:
    """(column, slab) tiles of 16-byte chunks of K, n8 tiles, 8 columns, values. A thread has columns 2 i and
    2 i + 1 of each n8 tile; with a ``span`` of 4 two octets' are 4 neighbouring units (:func:`write_tile`)."""
    chunks = (s.parts[job.operands.index(operand)], LINE // CHUNK, CHUNK // job.itemsize)
    across, order = (((s.columns, s.octets, 8), (1, 4, 5, 2, 0, 3, 6)) if span == 2 else
                     ((s.columns, s.octets // 2, 4, 2, 2), (1, 6, 7, 2, 4, 0, 3, 5, 8)))
    return operand.packing(s.rows, across, chunks, order, job.arithmetic)


def wgmma_kernel(job: Job, shape: Shape, epilogue: Epilogue) -> PrimFunc:
    """``(T, B, operands, weights, vectors, what the epilogue needs)``: all rows, on ``job.device.cores`` blocks."""
    with T.kernel(job.name) as made:
        arguments, count = job.declare(epilogue)
        T.device_entry()
        block, thread = T.block(job.device.cores), T.thread(THREADS)
        if job.followed:
            isa.launch_dependents()
        # in order: stages (operands, then weights), vectors, barriers
        memory = T.shared(shape.shared // 4, 1024)
        _Rows(job, shape, epilogue, arguments, memory, thread, block, T.let("rows", count)).run()
    return made()


class _Rows(WgmmaMainloop):
    def __init__(self, job: Job, shape: Shape, epilogue: Epilogue, arguments: Mapping[str, TirBuffer],
                 memory: TirBuffer, thread: Expr, block: Expr, rows: Expr) -> None:
        self.job, self.shape, self.epilogue, self.arguments = job, shape, epilogue, arguments
        self.block, self.rows = block, rows
        self.groups = T.let("groups", (rows + (ROWS - 1)) // ROWS)
        self.vector_floats, self.first_vector = job.vectors * shape.units, shape.stages * shape.stage_bytes // 4
        super().__init__(memory, thread, shape.width, shape.stages, shape.stage_bytes,
                         self.first_vector + 4 * self.vector_floats, job.arithmetic, bulk=True)

    def _tiles(self, emit: Callable[[Expr, Expr], None]) -> None:
        """The tile scheduler: ``emit(group of rows, column)`` for each of this block's tiles."""
        columns = self.shape.columns
        T.buffer_store(self.turn, T.uint32(0), [0])
        tile, at = T.local("tile", (1,), "uint32"), T.local("at", (2,), "int32")  # at: group of rows, column
        T.buffer_store(tile, T.cast(self.block, "uint32"), [0])
        with T.While(tile[0] < T.cast(self.groups * columns, "uint32")):
            band, within = tile[0] // T.uint32(BAND * columns), tile[0] % T.uint32(BAND * columns)
            first = T.let("first", T.cast(band, "int32") * BAND)
            height = T.let("height", T.cast(T.min(BAND, self.groups - first), "uint32"))
            T.buffer_store(at, first + T.cast(within % height, "int32"), [0])
            T.buffer_store(at, T.cast(within // height, "int32"), [1])
            emit(at[0], at[1])
            T.buffer_store(tile, tile[0] + T.uint32(self.job.device.cores), [0])

    def copy(self) -> None:
        T.note("producer warpgroup: wait for an empty stage, copy weights (bulk) and rows (cp.async) into it")
        def tile(group: Expr, column: Expr) -> None:
            for operand, slabs in zip(self.job.operands, self.shape.parts, strict=True):
                self.fill(slabs, partial(self._copy_stage, operand, group, column * slabs))
        self._tiles(tile)

    def _copy_stage(self, operand: Operand, group: Expr, piece: Expr, stage: Expr, slab: Expr) -> None:
        """Weights by a bulk copy from ``piece`` on; a thread's eight chunks, of every 16th row; zeros where outside."""
        size, x, base = self.job.itemsize, operand.columns, stage * (self.stage_bytes // 4)
        with T.when(self.thread == 0):
            source = T.cast(T.let("piece", piece + slab), "int64") * (self.shape.weight_bytes // size)
            self.ring.copy(stage, self.memory.ptr_to([base + ROWS * LINE // 4]),
                           self.arguments[operand.weights].ptr_to([source]), self.shape.weight_bytes)
        first, chunk = T.let("first", self.thread // 8), T.let("chunk", self.thread % 8)
        row = T.let("row", group * ROWS + first)
        value = T.let("value", slab * (LINE // size) + chunk * (CHUNK // size))
        at = T.let("source", x.place(row, value))
        place = T.let("place", first * (LINE // 4) + T.bitwise_xor(chunk, first % 8) * 4)
        for r in range(0, ROWS, GROUP // 8):
            self.copy_chunk(x, self.arguments[x.name], at + r * x.stride, value, base + (place + r * LINE // 4),
                            row + r < self.rows, size)

    def multiply(self) -> None:
        T.note("MMA warpgroups: 64 rows of every tile each")
        s, span = self.shape, self.epilogue.span
        flip = T.local("flip", (1,), "int32")  # which of two copies of the vectors
        T.buffer_store(flip, T.int32(0), [0])
        def tile(group: Expr, column: Expr) -> None:
            unit0 = T.let("unit0", column * s.units)
            place = T.let("place", self.first_vector + (self.half * 2 + flip[0]) * self.vector_floats)
            self._copy_vectors(place, unit0)
            T.note("main loop: wait for a full stage, wgmma, then hand the stage before it back")
            self.products(s.slabs, self._operands, min(LAG, s.stages - 2, s.slabs - 1))
            isa.cp_async_wait(0)
            # also: nobody writes the vectors of the tile after next while others still read these
            isa.named_barrier_sync(self.half + 1, GROUP)
            T.note("epilogue: sums and vectors to hoisted values")
            row0 = T.let("row0", group * ROWS + self.half * 64 + self.member // 32 * 16 + self.lane // 4)
            write_tile(self.job, self.epilogue, self.arguments, self.acc,
                       lambda i, at: self.memory[place + i * s.units + (at - unit0)],
                       lambda n: unit0 + (n * 4 + self.lane % 4) * span,
                       lambda _, upper: row0 + upper * 8, self.rows, span)
            T.buffer_store(flip, 1 - flip[0], [0])
        self._tiles(tile)

    def _operands(self, start: Expr) -> Descriptors:
        width = self.shape.width
        mine = T.let("mine", start + T.cast(self.half * (64 * LINE), "uint32"))
        x = isa.descriptor(mine, 16, 8 * LINE, swizzled=True)
        weights = isa.descriptor(start + T.uint32(ROWS * LINE), width * 16, 128, swizzled=False)
        return T.let("x", x), T.let("weights", weights), 2, 2 * width

    def _copy_vectors(self, place: Expr, unit0: Expr) -> None:
        own, units = self.shape.units, self.job.units
        for turn in range(-(-self.vector_floats // GROUP)):
            index = T.let("index", turn * GROUP + self.member)
            with T.when(index < self.vector_floats):
                source = index // own * units + T.min(unit0 + index % own, units - 1)
                isa.cp_async(self.memory.ptr_to([place + index]), self.arguments["vectors"].ptr_to([source]), 4)
        isa.cp_async_commit()
