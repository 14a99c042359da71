"""The code of outer products over all rows: blocks of 8 warps, and what adds their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa.copies import cp_async, cp_async_commit, cp_async_wait
from ecornn.schedules.cuda.isa.tensor_core import ldmatrix, mma, per_word, split
from ecornn.schedules.cuda.isa.threads import sync_block
from ecornn.schedules.gemm.job import Columns
from ecornn.schedules.gemm.outer import COLUMN_WARPS, PAD, STAGES, THREADS, Into, OuterJob, OuterShape, part_of_sums
from ecornn.schedules.timeline import takes_part


def outer_kernel(job: OuterJob, shape: OuterShape, into: Into) -> PrimFunc:
    """``(T, B, add, values, operand, mask, into)``: the sums over all rows, to ``into``; of several parts the sums over
    each, ``into[p, m, n]``."""
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
        block, thread = T.block(shape.blocks), T.thread(THREADS)
        memory = T.shared(shape.shared // 4)
        _Block(job, shape, arguments, memory, block, thread, steps, batch).run(sums, into)
    return builder.get()


class _Block:
    """Emits one block's tile of one part."""

    def __init__(self, job: OuterJob, shape: OuterShape, arguments: Mapping[str, TirBuffer], memory: TirBuffer,
                 block: Expr, thread: Expr, steps: Expr, batch: Expr) -> None:
        self.job, self.shape, self.arguments, self.thread, self.batch = job, shape, arguments, thread, batch
        self.memory = memory.view(job.dtype) if per_word(job.dtype) == 2 else memory
        self.words = memory.view("uint32")
        tiles = shape.down * shape.across
        self.part, tile = T.let("part", block // tiles), T.let("tile", block % tiles)
        self.m0 = T.let("m0", tile // shape.across * shape.height)
        self.n0 = T.let("n0", tile % shape.across * shape.width)
        own = job.operand.width
        self.head = T.let("head", self.m0 % (job.heads * own) // own * own) if job.heads > 1 else None
        rows = T.let("rows", steps * batch)
        stages = T.let("stages", (rows + (shape.depth - 1)) // shape.depth)
        each = T.let("each", (stages + (shape.parts - 1)) // shape.parts)  # stages of a part
        self.first = T.let("first", self.part * each)
        self.count = T.let("count", T.max(0, T.min(each, stages - self.first)))
        self.rows = rows
        self.lane, warp = T.let("lane", thread % 32), T.let("warp", thread // 32)
        self.m_warp = T.let("m_warp", warp // COLUMN_WARPS * (16 * shape.m_tiles))
        self.n_warp = T.let("n_warp", warp % COLUMN_WARPS * (8 * shape.n_tiles))
        self.acc = T.local("acc", (shape.m_tiles, shape.n_tiles, 4), "float32")
        self.a = T.local("a", (shape.m_tiles, 4), "uint32")
        self.b = T.local("b", (shape.n_tiles, 2), "uint32")

    def run(self, sums: TirBuffer, into: Into) -> None:
        T.note("prologue: the first stages of values and operand to shared memory (cp.async)")
        s = self.shape
        with T.unroll("m", s.m_tiles) as m, T.unroll("n", s.n_tiles) as n, T.unroll("e", 4) as e:
            T.buffer_store(self.acc, T.float32(0), [m, n, e])
        for stage in range(STAGES - 1):
            with T.If(self.count > stage), T.Then():
                self._load(T.int32(stage), stage)
            cp_async_commit()
        T.note("main loop over rows: wait for a stage, copy one ahead, multiply (mma)")
        with T.serial("turn", 0, self.count) as turn:
            cp_async_wait(STAGES - 2)
            sync_block()
            ahead = T.let("ahead", turn + (STAGES - 1))
            with T.If(ahead < self.count), T.Then():
                self._load(ahead, ahead % STAGES)
            cp_async_commit()
            base = T.let("base", turn % STAGES * s.stage_values)
            across = T.let("across", base + s.depth * (s.height + PAD))
            step = 8 * per_word(self.job.dtype)
            for k in range(0, s.depth, step):
                self._multiply(base, across, k)
        T.note("epilogue: sums to the gradient, or to a part of it")
        self._write(sums, into if s.parts == 1 else part_of_sums(self.part, self.job.values.width,
                                                                 self.job.operand.width))

    # -- copies ---------------------------------------------------------------------------------
    def _load(self, number: Expr, stage: Expr) -> None:
        """Stage ``number`` of this part."""
        s = self.shape
        base = T.let("base", stage * s.stage_values)
        row0 = T.let("row0", (self.first + number) * s.depth)
        self._copy("values", self.job.values, base, s.height, self.m0, row0)
        self._copy("operand", self.job.operand, base + s.depth * (s.height + PAD), s.width, self.n0, row0, self.head)

    def _copy(self, name: str, source: Columns, base: Expr, width: int, first: Expr, row0: Expr,
              head: Expr | None = None) -> None:
        """``width`` columns of the stage's rows; what lies outside, or takes no part, becomes zero."""
        s, buffer, size = self.shape, self.arguments[name], self.job.itemsize
        together = source.together(16 // size)
        bytes_ = together * size
        chunks = width // together
        whole, mask = -(-s.depth * chunks // THREADS), self.job.mask

        def one(turn: Expr) -> None:
            index = T.let("index", turn * THREADS + self.thread)
            local, value = T.let("local", index // chunks), T.let("value", index % chunks * together)
            row, column = T.let("row", row0 + local), T.let("column", first + value)
            inside = T.let("inside", T.And(row < self.rows, column < source.width))
            if mask is not None:
                live = takes_part(mask, self.arguments[mask], row, self.batch, inside)
                inside = T.let("live", T.And(inside, live))
            place = T.let("place", base + local * (width + PAD) + value)
            column = column if head is None else head + column
            if bytes_ >= 4:
                at = T.Select(inside, source.place(row, column), T.int64(0))
                cp_async(self.memory.ptr_to([place]), buffer.ptr_to([at]), bytes_,
                         T.Select(inside, T.uint32(bytes_), T.uint32(0)))
                return
            T.buffer_store(self.memory, T.cast(T.float32(0), self.job.dtype), [place])
            with T.If(inside), T.Then():
                T.buffer_store(self.memory, buffer[source.place(row, column)], [place])

        guarded = s.depth * chunks % THREADS
        with (T.serial if bytes_ < 16 else T.unroll)("turn", *((0, whole) if bytes_ < 16 else (whole,))) as turn:
            if guarded:
                with T.If(turn * THREADS + self.thread < s.depth * chunks), T.Then():
                    one(turn)
            else:
                one(turn)

    # -- products -------------------------------------------------------------------------------
    def _multiply(self, base: Expr, across: Expr, k: int) -> None:
        """Multiplies one k-tile of a stage."""
        s, kind = self.shape, self.job.arithmetic
        read = self._read_halves if per_word(self.job.dtype) == 2 else self._read_words
        read(base, across, k)
        with T.unroll("m", s.m_tiles) as m:
            rows = [split(self.a[m, i], kind, self.job.values.raised) for i in range(4)]
            with T.unroll("n", s.n_tiles) as n:
                columns = [split(self.b[n, i], kind, self.job.operand.raised) for i in range(2)]
                mma([self.acc[m, n, i] for i in range(4)], rows, columns, kind, apart=True)

    def _read_halves(self, base: Expr, across: Expr, k: int) -> None:
        """Both operands lie as (k, column): matrices of 8 x 8 values come transposed."""
        s, lane = self.shape, self.lane
        with T.unroll("m", s.m_tiles) as m:
            place = (base + (k + lane % 8 + lane // 16 * 8) * (s.height + PAD)
                     + self.m_warp + m * 16 + lane // 8 % 2 * 8)
            ldmatrix([self.a[m, i] for i in range(4)], self.memory.ptr_to([place]), transposed=True)
        with T.unroll("n", s.n_tiles // 2) as n:
            place = across + (k + lane % 16) * (s.width + PAD) + self.n_warp + n * 16 + lane // 16 * 8
            ldmatrix([self.b[n * 2 + i // 2, i % 2] for i in range(4)], self.memory.ptr_to([place]), transposed=True)

    def _read_words(self, base: Expr, across: Expr, k: int) -> None:
        s, lane = self.shape, self.lane
        with T.unroll("m", s.m_tiles) as m:
            for i in range(4):
                place = (base + (k + lane % 4 + i // 2 * 4) * (s.height + PAD)
                         + self.m_warp + m * 16 + lane // 4 + i % 2 * 8)
                T.buffer_store(self.a, self.words[place], [m, i])
        with T.unroll("n", s.n_tiles) as n:
            for i in range(2):
                place = across + (k + lane % 4 + i * 4) * (s.width + PAD) + self.n_warp + n * 8 + lane // 4
                T.buffer_store(self.b, self.words[place], [n, i])

    def _write(self, sums: TirBuffer, into: Into) -> None:
        s, height, width = self.shape, self.job.values.width, self.job.operand.width
        with T.unroll("m", s.m_tiles) as m, T.unroll("upper", 2) as half:
            row = T.let("row", self.m0 + self.m_warp + m * 16 + half * 8 + self.lane // 4)
            first = T.let("column", self.n0 + self.n_warp + self.lane % 4 * 2)
            pairs = [(self.acc[m, n, half * 2], self.acc[m, n, half * 2 + 1]) for n in range(s.n_tiles)]
            with T.If(row < height), T.Then():
                if width % 2 == 0:
                    into.store_pairs(sums, row, first, width, pairs)
                else:
                    self._write_each(sums, into, row, first, pairs)

    def _write_each(self, sums: TirBuffer, into: Into, row: Expr, first: Expr,
                    pairs: Sequence[tuple[Expr, Expr]]) -> None:
        for n, pair in enumerate(pairs):
            for e, value in enumerate(pair):
                with T.If(first + (n * 8 + e) < self.job.operand.width), T.Then():
                    into.store(sums, row, first + (n * 8 + e), value)


def adding_kernel(name: str, height: int, width: int, parts: int, blocks: int, into: Into) -> PrimFunc:
    """``(add, parts, into)``: the sum of ``parts`` (parts, height, width), in order, to ``into``."""
    from tvm.script.ir_builder import IRBuilder

    with IRBuilder() as builder, T.prim_func():
        T.func_name(name)
        into, big = into.told(), (T.int64(1 << 40),)
        source, sums = (T.arg(n, T.buffer(big, "float32")) for n in ("parts", "into"))
        T.device_entry()
        thread = T.let("first_item", T.block(blocks) * THREADS + T.thread(THREADS))
        size = height * width
        T.note("a thread an element: the parts' sums, in order")
        with T.serial("turn", 0, -(-size // (blocks * THREADS))) as turn:
            item = T.let("item", T.cast(turn * (blocks * THREADS) + thread, "int64"))
            with T.If(item < size), T.Then():
                total = source[item]
                for part in range(1, parts):
                    total = total + source[item + part * size]
                into.store(sums, item // width, item % width, total)
    return builder.get()
