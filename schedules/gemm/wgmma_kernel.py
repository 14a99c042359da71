"""The code of a product over all rows on Hopper: one warpgroup copies, two multiply and write.

Two mbarriers a stage hand it over. Use n = 0, 1, ... of a stage is phase n of both:

    full     129 arrivals complete it: of each copying thread when its copies of x have landed
             (cp.async.mbarrier.arrive.noinc), of the first one when it announces the bytes of the
             weights; and these bytes. Products of use n wait for the parity of phase n.
    empty    8 arrivals, of each multiplying warp when its products of the stage are done. Copies of use n
             wait for the parity of phase n - 1, which a new barrier counts as complete for n = 0.

All warps go through the same tiles and stages in the same order. Phase n of ``full`` needs phase n - 1 of
``empty``, and that needs every multiplying warp past phase n - 1 of ``full``: nobody who waits for a parity
can be a whole turn behind, and nobody waits for what waits for him. The first multiplying warpgroup
starts ``LAG`` stages ahead, which the ring holds without any being given back; it stays so, and one of
the two multiplies while the other writes. Copies run ahead into the next tile.

cp.async writes through the generic proxy and wgmma reads through the asynchronous one: the multiplying
threads, which have observed the arrivals, put a proxy fence between the two. Products of the stage
before are still under way then, so that the fence delays nothing. The other way round, products are
waited for before ``empty`` is arrived at, and what they have read may be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa.copies import (
    bulk_copy,
    cp_async,
    cp_async_commit,
    cp_async_mbarrier_arrive,
    cp_async_wait,
    cp_async_wait_all,
)
from ecornn.schedules.cuda.isa.launch import launch_dependents
from ecornn.schedules.cuda.isa.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from ecornn.schedules.cuda.isa.memory import fence_async_shared, shared_address
from ecornn.schedules.cuda.isa.registers import register_alloc, register_dealloc
from ecornn.schedules.cuda.isa.threads import named_barrier_arrive, named_barrier_sync, sync_block
from ecornn.schedules.cuda.isa.wgmma import descriptor, wgmma, wgmma_commit, wgmma_fence, wgmma_wait, wgmma_wait_pending
from ecornn.schedules.gemm.job import Columns, Epilogue, Job, Operand
from ecornn.schedules.gemm.outputs import Outputs
from ecornn.schedules.gemm.wgmma import CHUNK, LINE, ROWS, THREADS, Shape

GROUP = 128  # threads of a warpgroup
BAND = 16  # groups of rows that share the weights in L2: tiles go through a band column by column
LAG = 2  # stages that the second half of the rows is behind, at most
COPY_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # of a thread; 168 at launch, of which the copying warps give
LAG_BARRIER = 3  # named barrier; 1 and 2 are those of the multiplying warpgroups


def wgmma_kernel(job: Job, shape: Shape, epilogue: Epilogue) -> PrimFunc:
    """``(T, B, operands, weights, vectors, what the epilogue needs)``: all rows, on ``job.device.cores`` blocks."""
    from tvm.script.ir_builder import IRBuilder

    with IRBuilder() as builder, T.prim_func():
        T.func_name(job.name)
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = job.declare(epilogue) | {"B": batch}
        T.device_entry()
        block, thread = T.block(job.device.cores), T.thread(THREADS)
        if job.followed:
            launch_dependents()
        memory = T.shared(shape.shared // 4, 1024)  # in order: stages (operands, then weights), vectors, barriers
        ring = _Ring(job, shape, arguments, memory, thread, block, T.let("rows", job.count(arguments, steps, batch)))
        T.note("prologue: one thread initialises the mbarriers (full, empty) of all stages")
        ring.begin()
        with T.If(thread < GROUP):
            with T.Then():
                if shape.moves_registers:
                    register_dealloc(COPY_REGISTERS)
                ring.copy()
            with T.Else():
                if shape.moves_registers:
                    register_alloc(MULTIPLY_REGISTERS)
                ring.multiply(epilogue)
    return builder.get()


class _Ring:
    """Emits both sides of the ring of stages."""

    def __init__(self, job: Job, shape: Shape, arguments: Mapping[str, TirBuffer], memory: TirBuffer, thread: Expr,
                 block: Expr, rows: Expr) -> None:
        self.job, self.shape, self.arguments, self.memory = job, shape, arguments, memory
        self.thread, self.block, self.rows = thread, block, rows
        self.groups = T.let("groups", (rows + (ROWS - 1)) // ROWS)
        self.first_vector = shape.stages * shape.stage_bytes // 4
        self.first_barrier = self.first_vector + 4 * shape.vector_floats
        self.base = T.let("base", shared_address(memory.ptr_to([0])))
        self.turn = T.local("turn", (1,), "uint32")  # uses of stages so far

    def begin(self) -> None:
        """Prepares the barriers, by the first thread, for all."""
        with T.If(self.thread == 0), T.Then():
            for stage in range(self.shape.stages):
                mbarrier_init(self._full(stage), GROUP + 1)
                mbarrier_init(self._empty(stage), 2 * GROUP // 32)
            fence_mbarrier_init()
            fence_async_shared()  # bulk copies arrive through this proxy
        sync_block()

    def copy(self) -> None:
        """The copying warpgroup: operands and weights of every tile, stage by stage."""
        T.note("producer warpgroup: wait for an empty stage, copy weights (bulk) and rows (cp.async) into it")
        def part(group: Expr, column: Expr, operand: Operand, slabs: int) -> None:
            with T.serial("slab", 0, slabs) as slab:
                stage, parity = self._use()
                mbarrier_wait(self._empty(stage), parity ^ T.uint32(1))
                with T.If(self.thread == 0), T.Then():
                    self._copy_weights(self.arguments[operand.weights], stage, T.let("piece", column * slabs + slab))
                self._copy_rows(operand.columns, stage, group, slab)
                cp_async_mbarrier_arrive(self._full(stage))
                T.buffer_store(self.turn, self.turn[0] + T.uint32(1), [0])

        def tile(group: Expr, column: Expr) -> None:
            for operand, slabs in zip(self.job.operands, self.shape.parts, strict=True):
                part(group, column, operand, slabs)

        self._tiles(tile)
        cp_async_wait_all()  # no thread leaves before its copies have landed

    def multiply(self, epilogue: Epilogue) -> None:
        """A multiplying warpgroup: products and outputs of its 64 rows of every tile."""
        T.note("MMA warpgroups: 64 rows of every tile each")
        s, span = self.shape, epilogue.span
        # (m64 tile of rows of x, n8 tile of an octet of units and a product, 4 of fragment C)
        acc = T.local("acc", (1, s.width // 8, 4), "float32")
        lane, member = T.let("lane", self.thread % 32), T.let("member", self.thread % GROUP)
        half = T.let("tile_half", self.thread // GROUP - 1)  # of the tile's rows
        flip = T.local("flip", (1,), "int32")  # which of two copies of the vectors
        T.buffer_store(flip, T.int32(0), [0])

        def tile(group: Expr, column: Expr) -> None:
            unit0 = T.let("unit0", column * s.units)
            place = T.let("place", self.first_vector + (half * 2 + flip[0]) * s.vector_floats)
            self._copy_vectors(place, unit0, member)
            T.note("main loop: wait for a full stage, wgmma, then hand the stage before it back")
            self._products(acc, half, lane)
            cp_async_wait(0)
            # also: nobody writes the vectors of the tile after next while others still read these
            named_barrier_sync(half + 1, GROUP)
            T.note("epilogue: sums and vectors to hoisted values")
            row0 = T.let("row0", group * ROWS + half * 64 + member // 32 * 16 + lane // 4)
            outputs = Outputs(epilogue, self.arguments, self.job.units, s.rows, acc, s.octets, 1,
                              lambda i, at: self.memory[place + i * s.units + (at - unit0)], span)
            outputs.write(lambda n: unit0 + (n * 4 + lane % 4) * span,
                          lambda _, upper: row0 + upper * 8, self.rows)
            T.buffer_store(flip, 1 - flip[0], [0])

        self._tiles(tile)

    def _tiles(self, emit: Callable[[Expr, Expr], None]) -> None:
        """``emit(group of rows, column)`` for each of this block's tiles."""
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

    def _products(self, acc: TirBuffer, half: Expr, lane: Expr) -> None:
        """All products of a tile, of 64 rows, left in ``acc``."""
        s, kind = self.shape, self.job.arithmetic
        every = [acc[0, n, i] for n in range(s.width // 8) for i in range(4)]

        def release() -> None:
            with T.If(lane == 0), T.Then():
                before = T.let("before", T.cast((self.turn[0] - T.uint32(1)) % T.uint32(s.stages), "int32"))
                mbarrier_arrive(self._empty(before))

        lag = min(LAG, s.stages - 2, s.slabs - 1)
        with T.serial("slab", 0, s.slabs) as slab:
            if lag > 0:
                with T.If(T.And(half == 0, self.turn[0] == T.uint32(lag))), T.Then():
                    named_barrier_arrive(LAG_BARRIER, 2 * GROUP)
                with T.If(T.And(half == 1, self.turn[0] == T.uint32(0))), T.Then():
                    named_barrier_sync(LAG_BARRIER, 2 * GROUP)
            stage, parity = self._use()
            mbarrier_wait(self._full(stage), parity)
            fence_async_shared()
            start = T.let("start", self.base + T.cast(stage * s.stage_bytes, "uint32"))
            mine = T.let("mine", start + T.cast(half * (64 * LINE * 4), "uint32"))
            x = T.let("x", descriptor(mine, 16, 8 * LINE * 4, swizzled=True))
            weights = T.let("weights", descriptor(start + T.uint32(ROWS * LINE * 4), s.width * 16, 128, swizzled=False))
            wgmma_fence()
            for k in range(LINE * 4 // (2 * CHUNK)):
                keep = T.uint32(1) if k else T.Select(slab > 0, T.uint32(1), T.uint32(0))
                wgmma(every, x + T.uint64(k * 2), weights + T.uint64(k * 2 * s.width), keep, kind)
            wgmma_commit()
            with T.If(slab > 0), T.Then():
                wgmma_wait_pending(1)
                release()  # the stage before this one
            T.buffer_store(self.turn, self.turn[0] + T.uint32(1), [0])
        wgmma_wait(every)
        release()

    def _copy_weights(self, weights: TirBuffer, stage: Expr, tile: Expr) -> None:
        s = self.shape
        mbarrier_expect(self._full(stage), s.weight_bytes)
        bulk_copy(self._at(stage, ROWS * LINE), weights.ptr_to([T.cast(tile, "int64") * (s.weight_bytes // s.size)]),
                  T.uint32(s.weight_bytes), self._full(stage))

    def _copy_rows(self, x: Columns, stage: Expr, group: Expr, slab: Expr) -> None:
        """A thread's eight chunks, one of every 16th row, in as many copies as the alignment of rows takes; what lies
        outside of the operand becomes zero."""
        size, chunked = self.shape.size, CHUNK // self.shape.size
        first, chunk = T.let("first", self.thread // 8), T.let("chunk", self.thread % 8)
        row, value = T.let("row", group * ROWS + first), T.let("value", slab * self.shape.depth + chunk * chunked)
        source = T.let("source", x.place(row, value))
        place = T.let("place", first * LINE + T.bitwise_xor(chunk, first % 8) * 4)
        values = x.copied(chunked)  # of a copy
        for r in range(0, ROWS, GROUP // 8):
            for v in range(0, chunked, values):
                inside = T.And(row + r < self.rows, value + v < x.width)
                there: Expr = T.uint32(size * values)
                if rest := x.width % values:
                    there = T.Select(value + v == x.width - rest, T.uint32(size * rest), there)
                cp_async(self._at(stage, place + (r * LINE + v * size // 4)),
                         self.arguments[x.name].ptr_to([source + (r * x.stride + v)]), size * values,
                         T.Select(inside, there, T.uint32(0)))

    def _copy_vectors(self, place: Expr, unit0: Expr, member: Expr) -> None:
        """The parameter vectors of a tile's units."""
        s, units = self.shape, self.job.units
        for turn in range(-(-s.vector_floats // GROUP)):
            index = T.let("index", turn * GROUP + member)
            with T.If(index < s.vector_floats), T.Then():
                source = index // s.units * units + T.min(unit0 + index % s.units, units - 1)
                cp_async(self.memory.ptr_to([place + index]), self.arguments["vectors"].ptr_to([source]), 4)
        cp_async_commit()

    def _use(self) -> tuple[Expr, Expr]:
        """Stage (int32) and parity of the phase (uint32) of the current use."""
        stages = T.uint32(self.shape.stages)
        return (T.let("stage", T.cast(self.turn[0] % stages, "int32")),
                T.let("parity", T.bitwise_and(self.turn[0] // stages, T.uint32(1))))

    def _at(self, stage: Expr, word: Expr) -> Expr:
        return self.memory.ptr_to([stage * (self.shape.stage_bytes // 4) + word])

    def _full(self, stage: Expr) -> Expr:
        return self.memory.ptr_to([self.first_barrier + stage * 4])

    def _empty(self, stage: Expr) -> Expr:
        return self.memory.ptr_to([self.first_barrier + stage * 4 + 2])
