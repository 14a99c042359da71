"""The code of a product over all rows: tiles of rows and units, by teams of 256 threads.

A team of 8 warps computes ``block_rows`` rows x 4 groups of units at a time; the columns are ordered
so that one thread holds every product of a unit, and what is made of them is computed on the
accumulators. Tiles of the operands and of the packed weights come through shared memory in a pipeline of
``cp.async`` copies. Rows may be of any width: those that are not 16-byte aligned are copied word by word, or
value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce

from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa.copies import cp_async, cp_async_commit, cp_async_wait
from ecornn.schedules.cuda.isa.launch import launch_dependents
from ecornn.schedules.cuda.isa.memory import ld_shared
from ecornn.schedules.cuda.isa.tensor_core import WORDS, ldmatrix, mma, per_word, split, words
from ecornn.schedules.cuda.isa.threads import sync_block
from ecornn.schedules.gemm.job import Columns, Epilogue, Job, Operand
from ecornn.schedules.gemm.mma import ROW, SPAN, THREADS, WARP_COLUMNS, Shape, rows_ahead, spares_warps
from ecornn.schedules.gemm.outputs import Outputs


def mma_kernel(job: Job, shape: Shape, epilogue: Epilogue, blocks: int, ahead: int = 100) -> PrimFunc:
    """``(T, B, operands, weights, vectors, what the epilogue needs)``: the first ``ahead`` percent of the rows."""
    from tvm.script.ir_builder import IRBuilder

    with IRBuilder() as builder, T.prim_func():
        T.func_name(job.name)
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = job.declare(epilogue) | {"B": batch}
        T.device_entry()
        block, thread = T.block(blocks), T.thread(THREADS)
        if job.followed:
            launch_dependents()
        # float32 in every kernel: CUDA wants one type for all dynamic shared memory of a file
        memory = T.shared(shape.shared // 4)  # (stage, rows of operands and then weights)
        rows = T.let("rows", job.count(arguments, steps, batch))
        team = Team(job, shape, epilogue, arguments, memory, thread, sync_block)
        team.run(T.int32(0), T.let("rows_ahead", rows_ahead(rows, ahead)), block, blocks)
    return builder.get()


class Team:
    """Emits the code of 256 threads that compute tiles.

    Parameters
    ----------
    arguments : buffers by name
    memory : dynamic shared memory, float32, at least ``shape.shared`` bytes
    thread : 0 to 255
    barrier : emits a barrier of these threads
    """

    def __init__(self, job: Job, shape: Shape, epilogue: Epilogue, arguments: Mapping[str, TirBuffer],
                 memory: TirBuffer, thread: Expr, barrier: Callable[[], Expr]) -> None:
        self.job, self.shape, self.epilogue = job, shape, epilogue
        self.arguments, self.thread, self.barrier = arguments, thread, barrier
        self.alone = True  # nobody waits for its tiles
        self.shared = memory.view("uint32")
        self.halves = memory.view("float16" if per_word(job.dtype) == 2 else "uint32")
        self.lane, warp = T.let("lane", thread % 32), T.let("warp", thread // 32)
        self.warp_row = T.let("warp_row", warp // WARP_COLUMNS)
        self.warp_column = T.let("warp_column", warp % WARP_COLUMNS)
        self.acc = T.local("acc", (shape.tiles, shape.products, 4), "float32")  # (m16 tile, n8 tile, 4 of fragment C)
        self.a = T.local("a", (shape.tiles, 4), "uint32")  # (m16 tile of rows of x, 4 of fragment A)
        self.b = T.local("b", (shape.products, 4), "uint32")  # (n8 tile, 2 of fragment B of each k-tile)

    def run(self, first: Expr, end: Expr, member: Expr, members: int,
            done: Callable[[Expr], None] | None = None) -> None:
        """Tiles ``member``, ``member + members``, ... of rows ``first`` to ``end``, in the order of rows.

        ``done(n)`` is emitted for thread 0, when a tile of the n-th group of ``block_rows`` rows is
        written by all threads. Where somebody waits for that, copies begin with their tile, and padding is multiplied:
        blocks beside a recurrence have its registers, too few for what spares that.
        """
        T.note("tiles of rows by units, in turn")
        s, self.alone = self.shape, done is None
        tiles = T.let("tiles", (end - first + (s.block_rows - 1)) // s.block_rows * s.columns)
        turn = T.local("turn", (1,), "int32")  # number of the tile

        def place(number: Expr) -> tuple[Expr, Expr, Expr]:
            """The group of rows of a tile, the first of them, and the column."""
            group, column = T.let("group", number // s.columns), T.let("column", number % s.columns)
            return group, T.let("row", first + group * s.block_rows), column

        def begin(number: Expr) -> None:
            """Begins a tile's first copies, if there is such a tile."""
            if s.rows:
                with T.If(number < tiles), T.Then():
                    _, row, column = place(number)
                    self._begin(row, end, column)

        T.buffer_store(turn, member, [0])
        if self.alone:
            begin(member)
        with T.While(turn[0] < tiles):
            group, row, column = place(turn[0])
            with T.unroll("m", s.tiles) as m, T.unroll("n", s.products) as n, T.unroll("e", 4) as e:
                T.buffer_store(self.acc, T.float32(0), [m, n, e])
            if s.rows:
                if not self.alone:
                    self._begin(row, end, column)
                self._products(row, end, column)
                if self.alone:
                    begin(T.let("next", turn[0] + members))  # on their way while this tile's sums are written
            self._write(row, end, column)
            if done is not None:
                self.barrier()
                with T.If(self.thread == 0), T.Then():
                    done(group)
            T.buffer_store(turn, turn[0] + members, [0])

    def _begin(self, row: Expr, end: Expr, column: Expr) -> None:
        """Begins the copies of a tile's first stages."""
        for stage in range(self.shape.stages - 1):
            if stage < self.shape.slabs:
                self._load_stage(row, end, column, stage, stage)
            cp_async_commit()

    def _products(self, row: Expr, end: Expr, column: Expr) -> None:
        s = self.shape
        T.note("main loop over K: wait for a stage, copy one ahead, multiply (mma)")
        with T.serial("slab", 0, s.slabs) as slab:
            cp_async_wait(s.stages - 2)
            self.barrier()
            ahead = T.let("ahead", slab + (s.stages - 1))
            with T.If(ahead < s.slabs), T.Then():
                self._load_stage(row, end, column, ahead, ahead % s.stages)
            cp_async_commit()
            base = T.let("base", slab % s.stages * s.stage_words)
            cut = self._raised(slab)
            with self._where(self._has_units(column)):
                for span in range(SPAN):
                    self._multiply(base, span, cut, slab)
        self.barrier()  # the next tile's copies overwrite the stages

    def _load_stage(self, row: Expr, end: Expr, column: Expr, slab: Expr, stage: Expr) -> None:
        """A slab of the operand that it belongs to, and of its weights."""
        base = T.let("base", stage * self.shape.stage_words)
        first, parts = 0, list(zip(self.job.operands, self.shape.parts, strict=True))
        if len(parts) == 1:
            self._load_slab(parts[0][0], base, row, end, column, slab, self.shape.slabs)
            return
        for operand, slabs in parts:
            own = slab - first
            if not isinstance(slab, int):
                with T.If(T.And(slab >= first, slab < first + slabs)), T.Then():
                    self._load_slab(operand, base, row, end, column, own, slabs)
            elif 0 <= own < slabs:
                self._load_slab(operand, base, row, end, column, own, slabs)
            first += slabs

    def _load_slab(self, operand: Operand, base: Expr, row: Expr, end: Expr, column: Expr, slab: Expr,
                   slabs: int) -> None:
        s, pw, columns = self.shape, per_word(self.job.dtype), operand.columns
        head = None  # where that of the tile's units starts
        if operand.heads > 1:
            columns = replace(columns, width=operand.depth)
            head = T.let("head", column * (8 * s.block_octets) // operand.depth * operand.depth)
        for count in (4, 1):
            if columns.together(count * pw) == count * pw:
                self._copy_rows(columns, base, row, end, slab, count, head)
                break
        else:
            self._copy_values(columns, base, row, end, slab)
        chunks = s.weight_words // 4
        for r in range(-(-chunks // THREADS)):
            index = T.let("index", r * THREADS + self.thread)
            with T.If(index < chunks), T.Then():
                source = (T.cast(column * slabs + slab, "int64") * s.weight_words + index * 4) * pw
                cp_async(self.shared.ptr_to([base + s.block_rows * ROW + index * 4]),
                         self.arguments[operand.weights].ptr_to([source]), 16)

    def _copy_rows(self, x: Columns, base: Expr, row: Expr, end: Expr, slab: Expr, count: int,
                   head: Expr | None = None) -> None:
        """Copies a slab of each row, ``count`` words at a time; what lies outside of it becomes zero."""
        s, pw, copies = self.shape, per_word(self.job.dtype), SPAN * 16 // count
        for r in range(s.block_rows * copies // THREADS):
            index = T.let("index", r * THREADS + self.thread)
            local, word = T.let("local", index // copies), T.let("word", index % copies * count)
            value = T.let("value", (slab * (SPAN * 16) + word) * pw)
            inside = T.let("inside", T.And(row + local < end, value < x.width))
            at = value if head is None else head + value
            source = T.Select(inside, x.place(row + local, at), T.int64(0))
            cp_async(self.shared.ptr_to([base + local * ROW + word]), self.arguments[x.name].ptr_to([source]),
                     count * 4, T.Select(inside, T.uint32(count * 4), T.uint32(0)))

    def _copy_values(self, x: Columns, base: Expr, row: Expr, end: Expr, slab: Expr) -> None:
        """Copies a slab of rows of 16-bit values that are not of whole words, which no asynchronous copy serves."""
        s, width = self.shape, SPAN * 32
        with T.serial("r", 0, s.block_rows * width // THREADS) as r:
            index = T.let("index", r * THREADS + self.thread)
            local, value = T.let("local", index // width), T.let("value", index % width)
            column = T.let("column", slab * width + value)
            place = (base + local * ROW) * 2 + value
            T.buffer_store(self.halves, T.float16(0), [place])
            with T.If(T.And(row + local < end, column < x.width)), T.Then():
                loaded = self.arguments[x.name][x.place(row + local, column)]
                half = loaded if self.job.dtype == "float16" else T.reinterpret("float16", loaded)
                T.buffer_store(self.halves, half, [place])

    def _raised(self, slab: Expr) -> Expr | bool:
        """True if the operand of a slab is raised: one answer for all, or for each."""
        raised = [o.columns.raised for o in self.job.operands]
        if len(set(raised)) == 1:
            return raised[0]
        first, found = 0, []
        for own, slabs in zip(raised, self.shape.parts, strict=True):
            found += [T.And(slab >= first, slab < first + slabs)] if own else []
            first += slabs
        return T.let("raised", reduce(T.Or, found))

    @staticmethod
    def _where(condition: Expr | bool) -> ExitStack:
        """A context for code that runs where the condition holds, if it may not."""
        stack = ExitStack()
        if condition is not True:
            stack.enter_context(T.If(condition))
            stack.enter_context(T.Then())
        return stack

    def _has_units(self, column: Expr) -> Expr | bool:
        """True if the warp has units to multiply, see :func:`~ecornn.schedules.gemm.mma.spares_warps`."""
        s = self.shape
        if not self.alone or not spares_warps(self.job, s):
            return True
        return T.let("has_units", (column * WARP_COLUMNS + self.warp_column) * (8 * s.octets) < self.job.units)

    def _has_values(self, slab: Expr, tile: int) -> Expr | bool:
        """True if a k-tile of a slab has values to multiply; of one operand."""
        if not self.alone or self.job.arithmetic != "float32" or len(self.job.operands) > 1:
            return True
        values, before = words(self.job.operands[0].depth, self.job.dtype), (self.shape.slabs - 1) * SPAN * 16
        return True if before + tile * WORDS < values else slab < self.shape.slabs - 1

    def _multiply(self, base: Expr, span: int, cut: Expr | bool, slab: Expr) -> None:
        """Adds the products of one pair of k-tiles of a stage; ``cut``: of the operand, as of :func:`split`."""
        with self._where(self._has_values(slab, 2 * span)):
            self._add(base, span, cut, slab)

    def _add(self, base: Expr, span: int, cut: Expr | bool, slab: Expr) -> None:
        s, b = self.shape, self.b
        first = base + s.block_rows * ROW + span * (s.weight_words // SPAN)
        with T.unroll("n", s.products) as n:
            place = first + ((self.warp_column * s.products + n) * 32 + self.lane) * 4
            ld_shared([b[n, i] for i in range(4)], self.shared.ptr_to([place]))
        for tile in range(2):
            with self._where(tile == 0 or self._has_values(slab, 2 * span + 1)):
                self._tile(base, span, tile, cut)

    def _tile(self, base: Expr, span: int, tile: int, cut: Expr | bool) -> None:
        s, kind, a, b = self.shape, self.job.arithmetic, self.a, self.b
        with T.unroll("m", s.tiles) as m:
            place = (base + ((self.warp_row * s.tiles + m) * 16 + self.lane % 16) * ROW
                     + span * 16 + tile * 8 + self.lane // 16 * 4)
            ldmatrix([a[m, i] for i in range(4)], self.shared.ptr_to([place]))
        with T.unroll("m", s.tiles) as m:
            rows = [split(a[m, i], kind, cut) for i in range(4)]
            with T.unroll("n", s.products) as n:
                mma([self.acc[m, n, i] for i in range(4)], rows,
                    [split(b[n, tile * 2 + i], kind) for i in range(2)], kind, apart=True)

    def _write(self, row: Expr, end: Expr, column: Expr) -> None:
        T.note("epilogue: sums and vectors to the values that the job makes")
        s, units, vectors = self.shape, self.job.units, self.arguments["vectors"]
        outputs = Outputs(self.epilogue, self.arguments, units, s.rows, self.acc, s.octets, s.tiles,
                          lambda i, at: vectors[i * units + at])
        outputs.write(
            lambda o: ((column * WARP_COLUMNS + self.warp_column) * s.octets + o) * 8 + self.lane % 4 * 2,
            lambda m, half: row + (self.warp_row * s.tiles + m) * 16 + half * 8 + self.lane // 4, end)
