"""A product over all rows by ``mma``: tiles of rows and units, by teams of 256 threads (``mma_mainloop.py``).

A team of 8 warps computes ``height`` rows x 4 groups of units at a time; the columns are ordered so that one thread
holds every product of a unit, and what is made of them is computed on the accumulators. Rows may be of any width: those
that are not 16-byte aligned are copied word by word, or value by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce
from itertools import product
from math import gcd, prod

from ecornn.program import Packing
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa import cp_async, launch_dependents, ld_shared, sync_block
from ecornn.schedules.cuda.isa.tensor_core import WORDS, ldmatrix, per_word, words
from ecornn.schedules.gemm.job import CHUNK, LINE, Epilogue, Job, Operand, Shape, write_tile
from ecornn.schedules.gemm.mma_mainloop import COLUMN_WARPS, ROW_WARPS, THREADS, Load, MmaMainloop, Staged

STAGES = 3  # 2 where shared memory is short
WIDE = 8  # n8 tiles of a warp, about: wider ones read less shared memory a product
SPAN = 2  # pairs of k-tiles (16 words each) of a stage: whole 128-byte lines of x
ROW = SPAN * 16 + 4  # words of a row of x in a stage; the 4 keep ldmatrix free of bank conflicts
LEAST_ROWS = 16 * ROW_WARPS  # of a tile
AHEAD = 128  # the rows done ahead are a multiple of this, and it is one of every block's rows
SPARE_REGISTERS = 50  # addresses and loop state beside accumulators and fragments


def shape_of(job: Job) -> Shape:
    """The tiles of a kernel that has the multiprocessor to itself; its ``shared`` may still be too much."""
    rows = job.rows
    exact, heads = job.arithmetic == "float32", [o.depth for o in job.operands if o.heads > 1]
    octets = max(1, (WIDE // 2 if exact else WIDE) // max(rows, 1))  # sums of k-tiles need registers, too
    fitting = [n for n in range(1, octets + 1) if n == 1 or all(own % (8 * COLUMN_WARPS * n) == 0 for own in heads)]
    accumulators = fitting[-1] * max(rows, 1)
    tiles = 1 if accumulators > 16 else 2 if accumulators > 8 or exact else 4
    parts = tuple(-(-words(o.depth, job.dtype) // (LINE // 4)) for o in job.operands)
    def of(octets: int, tiles: int) -> Shape:
        columns = -(-job.units // (8 * COLUMN_WARPS * octets))
        return Shape(rows, COLUMN_WARPS * octets, LEAST_ROWS * tiles, columns, parts, ROW * 4, STAGES)
    shape = of(fitting[-1], tiles)
    if not rows:
        return replace(shape, stages=0, beside=16)
    if exact and job.expected is not None and turns(job, shape) < 1:
        # Tiles that are as small as fill the chip: what a block multiplies is all of the time.
        shape = min((of(*size) for size in product(fitting, range(1, tiles + 1))), key=partial(_effort, job))
    while shape.shared > job.device.shared and (shape.stages, shape.height) != (2, LEAST_ROWS):
        shape = replace(shape, stages=2) if shape.stages > 2 else replace(shape, height=shape.height // 2)
    return shape


def turns(job: Job, s: Shape) -> float:
    """How many tiles of the expected rows a multiprocessor has."""
    assert job.expected is not None
    return -(-job.expected // s.height) * s.columns / job.device.cores


def _effort(job: Job, s: Shape) -> float:
    """A multiprocessor's work: products of tiles of ``mma``, and the splitting of their operands."""
    tiles, products = warp_tiles(s)
    return max(1.0, turns(job, s)) * (tiles * products + tiles + products)


def warp_tiles(s: Shape) -> tuple[int, int]:
    """The m16 and n8 tiles of a warp."""
    return s.height // LEAST_ROWS, s.octets // COLUMN_WARPS * max(s.rows, 1)


def blocks_of(job: Job, s: Shape) -> int:
    """Blocks of a kernel that has the GPU to itself. Where the last column is less work, as many as have no divisor in
    common with the columns: each block, and each multiprocessor, then has tiles of all of them."""
    blocks = job.device.cores * (1 if prod(warp_tiles(s)) > 16 else 2)
    while spares_warps(job, s) and gcd(blocks, s.columns) > 1:
        blocks -= 1
    return blocks


def spares_warps(job: Job, s: Shape) -> bool:
    """Tells whether warps of the last column have no units and do not multiply padding: in float32, which is slow."""
    return job.arithmetic == "float32" and s.columns * s.units - job.units >= s.units // COLUMN_WARPS


def shape_within(job: Job, registers: int) -> Shape | None:
    """The largest tiles for which a thread has ``registers``; None where even the smallest need more."""
    shape, split = shape_of(job), 2 if job.arithmetic == "float32" else 1
    while shape.height >= LEAST_ROWS:
        tiles, products = warp_tiles(shape)
        if (tiles * products + split * (tiles + products)) * 4 + SPARE_REGISTERS <= registers:
            return shape
        shape = replace(shape, height=shape.height // 2)
    return None


def packing_of(job: Job, s: Shape, operand: Operand) -> Packing:
    """(column, slab) tiles of k-tiles, octets and fragments: a block's weights of a stage are one piece."""
    pairs, n = s.parts[job.operands.index(operand)] * SPAN, per_word(job.dtype)
    return operand.packing(s.rows, (s.columns, s.octets, 8), (pairs, 2, 2, 4, n), (1, 4, 2, 0, 3, 7, 5, 6, 8),
                           job.dtype)


def rows_ahead(rows: Expr, ahead: int) -> Expr:
    """How many of ``rows`` = T*B (an expression, int32) are done ahead: a multiple of ``AHEAD``, or all."""
    common = gcd(ahead, 100)  # TVM's simplifier overflows with 75 / 100
    return rows if ahead == 100 else rows // AHEAD * (ahead // common) // (100 // common) * AHEAD


def mma_kernel(job: Job, shape: Shape, epilogue: Epilogue, blocks: int, ahead: int = 100) -> PrimFunc:
    """``(T, B, operands, weights, vectors, what the epilogue needs)``: the first ``ahead`` percent of the rows."""
    with T.kernel(job.name) as made:
        arguments, count = job.declare(epilogue)
        T.device_entry()
        block, thread = T.block(blocks), T.thread(THREADS)
        if job.followed:
            launch_dependents()
        memory, rows = T.shared(shape.shared // 4), T.let("rows", count)  # (stage, rows of operands and then weights)
        team = Team(job, shape, epilogue, arguments, memory, thread, sync_block)
        team.run(T.int32(0), T.let("rows_ahead", rows_ahead(rows, ahead)), block, blocks)
    return made()


class Team(MmaMainloop):
    """Emits the code of 256 threads that compute tiles. ``arguments`` has buffers by name."""

    def __init__(self, job: Job, shape: Shape, epilogue: Epilogue, arguments: Mapping[str, TirBuffer],
                 memory: TirBuffer, thread: Expr, barrier: Callable[[], object]) -> None:
        super().__init__(job.dtype, job.arithmetic, memory, *warp_tiles(shape), shape.stages, shape.stage_bytes // 4,
                         thread, barrier, words=4)
        self.job, self.shape, self.epilogue, self.arguments = job, shape, epilogue, arguments
        self.alone = True  # nobody waits for its tiles

    def run(self, first: Expr, end: Expr, member: Expr, members: int,
            done: Callable[[Expr], None] | None = None) -> None:
        """The tile scheduler: tiles ``member``, ``member + members``, ... of rows ``first`` to ``end``, in their order.
        ``done(n)`` is emitted for thread 0, when a tile of the n-th group of ``height`` rows is written by all threads.
        Where somebody waits for that, copies begin with their tile, and padding is multiplied: blocks beside a
        recurrence have its registers, too few for what spares that."""
        T.note("tiles of rows by units, in turn")
        s, self.alone = self.shape, done is None
        tiles = T.let("tiles", (end - first + (s.height - 1)) // s.height * s.columns)
        turn = T.local("turn", (1,), "int32")  # number of the tile
        def place(number: Expr) -> tuple[Expr, Expr, Expr]:
            group, column = T.let("group", number // s.columns), T.let("column", number % s.columns)
            return group, T.let("row", first + group * s.height), column
        def load(row: Expr, column: Expr) -> Load:
            return partial(self._load_stage, row, end, column)
        def begin(number: Expr) -> None:  # a tile's first copies, if there is such a tile
            with T.when(number < tiles):
                self.begin(s.slabs, load(*place(number)[1:]))
        T.buffer_store(turn, member, [0])
        if self.alone and s.rows:
            begin(member)
        with T.While(turn[0] < tiles):
            group, row, column = place(turn[0])
            self.clear()
            if s.rows:
                if not self.alone:
                    self.begin(s.slabs, load(row, column))
                T.note("main loop over K: wait for a stage, copy one ahead, multiply (mma)")
                self.products_of(s.slabs, load(row, column), partial(self._multiply, column))
                self.barrier()  # the next tile's copies overwrite the stages
                if self.alone:
                    begin(T.let("next", turn[0] + members))  # on their way while this tile's sums are written
            self._write(row, end, column)
            if done is not None:
                self.barrier()
                with T.when(self.thread == 0):
                    done(group)
            T.buffer_store(turn, turn[0] + members, [0])

    def _multiply(self, column: Expr, slab: Expr, base: Expr) -> None:
        s, raised, has_units = self.shape, [o.columns.raised for o in self.job.operands], True
        cut = raised[0]  # whether the slab's operand is raised: one answer for all, or for each
        if len(set(raised)) > 1:
            cut = T.let("raised", reduce(T.Or, [own for o, _, _, own in self._parts(slab) if o.columns.raised]))
        if self.alone and spares_warps(self.job, s):
            has_units = T.let("has_units", (column * COLUMN_WARPS + self.warp_column) * (s.units // COLUMN_WARPS)
                              < self.job.units)
        with T.when(has_units):
            for span in range(SPAN):
                with T.when(self._has_values(slab, 2 * span)):
                    self._add(base, span, cut, slab)

    def _parts(self, slab: Expr | int) -> Iterator[tuple[Operand, int, Expr | int, Expr | bool]]:
        """Each operand, its number of slabs, which of them ``slab`` is, and whether it is one of them."""
        first, alone = 0, len(self.job.operands) == 1
        for operand, slabs in zip(self.job.operands, self.shape.parts, strict=True):
            known, last = isinstance(slab, int), first + slabs
            own = first <= slab < last if known else T.And(slab >= first, slab < last)
            yield operand, slabs, slab - first, alone or own
            first = last

    def _load_stage(self, row: Expr, end: Expr, column: Expr, slab: Expr | int, stage: Expr | int) -> None:
        base = T.let("base", stage * self.stage_size)
        for operand, slabs, own, inside in self._parts(slab):
            if inside is not False:
                with T.when(inside):
                    self._load_slab(operand, base, row, end, column, own, slabs)

    def _load_slab(self, operand: Operand, base: Expr, row: Expr, end: Expr, column: Expr, slab: Expr,
                   slabs: int) -> None:
        s, pw, columns = self.shape, per_word(self.job.dtype), operand.columns
        head = None  # where that of the tile's units starts
        if operand.heads > 1:
            columns = replace(columns, width=operand.depth)
            head = T.let("head", column * s.units // operand.depth * operand.depth)
        count = next((n for n in (4, 1) if columns.together(n * pw) == n * pw), 0)
        to = Staged(self.words, base, s.height, SPAN * 16, ROW)
        self.copy(columns, self.arguments[columns.name], to, count, row, end, slab * (SPAN * 16), head)
        def weights(index: Expr) -> None:
            source = (T.cast(column * slabs + slab, "int64") * (s.weight_bytes // 4) + index * 4) * pw
            cp_async(self.words.ptr_to([base + s.height * ROW + index * 4]),
                     self.arguments[operand.weights].ptr_to([source]), CHUNK)
        self.share(s.weight_bytes // CHUNK, weights)

    def _has_values(self, slab: Expr, tile: int) -> Expr | bool:
        """Tells whether a k-tile of a slab has values, where there is one operand."""
        if not self.alone or self.job.arithmetic != "float32" or len(self.job.operands) > 1:
            return True
        values, before = words(self.job.operands[0].depth, self.job.dtype), (self.shape.slabs - 1) * SPAN * 16
        return True if before + tile * WORDS < values else slab < self.shape.slabs - 1

    def _add(self, base: Expr, span: int, cut: Expr | bool, slab: Expr) -> None:
        """Adds the products of one pair of k-tiles of a stage; ``cut``: the operand's, see :func:`split`."""
        s, a, b = self.shape, self.a, self.b
        first = base + s.height * ROW + span * (s.weight_bytes // 4 // SPAN)
        with T.unroll("n", self.products) as n:
            place = first + ((self.warp_column * self.products + n) * 32 + self.lane) * 4
            ld_shared([b[n, i] for i in range(4)], self.words.ptr_to([place]))
        for tile in range(2):
            with T.when(tile == 0 or self._has_values(slab, 2 * span + 1)):
                with T.unroll("m", self.tiles) as m:
                    place = (base + ((self.warp_row * self.tiles + m) * 16 + self.lane % 16) * ROW
                             + span * 16 + tile * 8 + self.lane // 16 * 4)
                    ldmatrix([a[m, i] for i in range(4)], self.words.ptr_to([place]))
                self.multiply(tile, cut)

    def _write(self, row: Expr, end: Expr, column: Expr) -> None:
        T.note("epilogue: sums and vectors to the values that the job makes")
        units, vectors, octets = self.job.units, self.arguments["vectors"], self.shape.octets // COLUMN_WARPS
        write_tile(
            self.job, self.epilogue, self.arguments, self.acc, lambda i, at: vectors[i * units + at],
            lambda o: ((column * COLUMN_WARPS + self.warp_column) * octets + o) * 8 + self.lane % 4 * 2,
            lambda m, half: row + (self.warp_row * self.tiles + m) * 16 + half * 8 + self.lane // 4, end)
