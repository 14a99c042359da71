"""Outer products added up over all rows of T*B: gradients of weights are such sums.

    into[m, n] = sum over rows r of values[r, m] * operand[r, n]

Both operands have the rows that are summed over on the outside, so that they are read across. Where the tiles fill the
chip each block goes through all rows and writes to where the sum belongs. Else the rows go to ``parts`` of blocks, each
of which leaves a sum in the workspace ``parts``; a kernel of its own adds these in order, so that every run has the
same bits. ``outer_kernel`` computes them by ``mma``, a block a tile of one part of the rows (``mma_mainloop.py``);
fragments are read across by ``ldmatrix.trans``, or 32-bit words one by one. On Hopper ``outer_wgmma.py`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from ecornn.device import Device
from ecornn.dtypes import ITEMSIZE
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa import ld_global, st_global, sync_block
from ecornn.schedules.cuda.isa.tensor_core import ldmatrix, per_word
from ecornn.schedules.gemm.job import SLOWER, Columns
from ecornn.schedules.gemm.mma_mainloop import COLUMN_WARPS, ROW_WARPS, THREADS, MmaMainloop, Staged
from ecornn.schedules.rates import gpu_rates
from ecornn.schedules.timeline import takes_part

MOST_PARTS = 16
LEAST_ROWS = 256  # of a part
TOGETHER = 12  # pairs of sums that a thread has loaded at once


@dataclass(frozen=True)
class OuterJob:
    """Such sums of one pair of operands. Of several ``heads`` ``operand`` has the columns of the first, then those of
    the others, each for its own part of ``values``, which has all heads of a gate before the next one's."""

    name: str  # of the kernel
    device: Device
    dtype: str
    arithmetic: str
    values: Columns
    operand: Columns
    rows: int  # T*B that the sizes are chosen for; any number may come
    mask: str | None = None  # of timeline.rows_mask: rows that take no part in their step count as zeros
    heads: int = 1

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def declare(self, into: Into, parts: int) -> Arguments:
        """The parameters of a kernel: ``(T, B, add, values, operand, mask, into)``."""
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        into = into.told() if parts == 1 else into
        kinds = {"values": self.dtype, "operand": self.dtype} | ({self.mask: "int32"} if self.mask else {})
        buffers = {name: T.pointer(name, kind) for name, kind in kinds.items()}
        return Arguments(self, steps, batch, buffers, T.pointer("into", "float32"), into, parts)


@dataclass(frozen=True)
class Arguments:
    """The parameters of a kernel of ``parts``: its T and B, what it reads, and where sums belong."""

    job: OuterJob
    steps: Expr
    batch: Expr
    buffers: Mapping[str, TirBuffer]
    sums: TirBuffer
    into: Into
    parts: int

    def live(self, row: Expr, inside: Expr | None = None) -> Expr:
        """Tells whether a row takes part in its step; ``inside``: whether there is such a row."""
        assert self.job.mask is not None
        return takes_part(self.job.mask, self.buffers[self.job.mask], row, self.batch, inside)

    def store(self, part: Expr, m: Expr, first: Expr, pairs: Sequence[tuple[Expr, Expr]]) -> None:
        """A row of sums, to where they belong; of several parts to the workspace ``parts``, (parts, m, n)."""
        height, width = self.job.values.width, self.job.operand.width
        of_part = Into(lambda m: T.cast(part * height + m, "int64") * width, add=False)
        (self.into if self.parts == 1 else of_part).store_row(self.sums, self.job, m, first, pairs)


@dataclass(frozen=True)
class Into:
    """The place of sums, in a float32 buffer."""

    row: Callable[[Expr], Expr]  # m -> where its sums start, int64; they lie one behind the other
    add: bool | Expr | None  # to what is there; None: where the kernel's scalar ``add`` is not 0

    def told(self) -> Into:
        """The same in a kernel that is being built, which gets the scalar if it is needed."""
        return replace(self, add=T.arg("add", T.int32()) != 0) if self.add is None else self

    def store(self, buffer: TirBuffer, m: Expr, n: Expr, value: Expr) -> None:
        to = T.let("to", self.row(m) + n)
        T.buffer_store(buffer, with_existing(self.add, buffer[to], value), [to])

    def store_row(self, buffer: TirBuffer, job: OuterJob, m: Expr, first: Expr,
                  pairs: Sequence[tuple[Expr, Expr]]) -> None:
        """Sums of two neighbours at ``first``, an even n, and at every eighth from there on, as far as ``job`` goes."""
        width = job.operand.width
        with T.when(m < job.values.width):
            if width % 2 == 0:
                self._store_pairs(buffer, m, first, width, pairs)
                return
            for (n, pair), e in product(enumerate(pairs), range(2)):
                with T.when(first + (n * 8 + e) < width):
                    self.store(buffer, m, first + (n * 8 + e), pair[e])

    def _store_pairs(self, buffer: TirBuffer, m: Expr, first: Expr, width: int,
                     pairs: Sequence[tuple[Expr, Expr]]) -> None:
        """Loads what is there for ``TOGETHER`` pairs before it stores the first: a store that waits for its load would
        keep the next load waiting. Places differ by constants, as instructions have them: a gate's takes a division."""
        kept = T.local("to", (1,), "int64")  # a variable that TVM does not put the expression in place of
        T.buffer_store(kept, self.row(m) + first, [0])
        for start in range(0, len(pairs), TOGETHER):
            some = pairs[start:start + TOGETHER]
            offsets = [n * 8 for n in range(start, start + len(some))]
            if self.add is not False:
                before = T.local("before", (len(some), 2), "float32")
                for place in product(range(len(some)), range(2)) if self.add is not True else ():
                    T.buffer_store(before, T.float32(0), list(place))
                with T.when(self.add):
                    for k, offset in enumerate(offsets):
                        with T.when(first + offset < width):
                            ld_global([before[k, 0], before[k, 1]], buffer.ptr_to([kept[0] + offset]), "f32")
                some = [(before[k, 0] + one, before[k, 1] + other) for k, (one, other) in enumerate(some)]
            for offset, pair in zip(offsets, some, strict=True):
                with T.when(first + offset < width):
                    st_global(buffer.ptr_to([kept[0] + offset]), pair, "f32")


def with_existing(add: bool | Expr | None, before: Expr, value: Expr) -> Expr:
    """``value``, or the sum of it and ``before``, which is not read elsewhere."""
    if isinstance(add, bool):
        return before + value if add else value
    return T.if_then_else(add, before, T.float32(0)) + value


@dataclass(frozen=True)
class OuterShape:
    height: int  # sums of a tile: columns of ``values``
    width: int  # and of ``operand``
    down: int  # tiles over ``values``
    across: int  # and over ``operand``
    depth: int  # rows of a stage
    stage_bytes: int  # of both operands
    stages: int  # of the pipeline, each in shared memory
    beside: int = 0  # bytes of shared memory that something else takes
    parts: int = 1  # of the rows

    @property
    def tiles(self) -> int:  # tiles of each part
        return self.down * self.across

    @property
    def shared(self) -> int:  # bytes of dynamic shared memory
        return self.stages * self.stage_bytes + self.beside


def best_parts(job: OuterJob, tiles: int, row: float, at_once: int) -> int:
    """Parts of the rows that fill the chip's last turn without too many sums in memory; see :func:`expected`."""
    most = max(1, min(MOST_PARTS, job.rows // LEAST_ROWS))
    return min(range(1, most + 1), key=partial(expected, job, tiles, row, at_once))


def expected(job: OuterJob, tiles: int, row: float, at_once: int, parts: int) -> float:
    """Nanoseconds; ``row``: that a tile takes for half a row, ``at_once``: blocks."""
    stored = 8.0 * job.values.width * job.operand.width / gpu_rates(job.device).memory_beside  # and loaded
    return -(-tiles * parts // at_once) * (2 * job.rows / parts) * row + (parts + (parts > 1)) * stored


def adding_kernel(name: str, height: int, width: int, parts: int, blocks: int, into: Into) -> PrimFunc:
    """``(add, parts, into)``: the sum of ``parts`` (parts, height, width), in order, to ``into``."""
    with T.kernel(name) as made:
        into = into.told()
        source, sums = (T.pointer(n, "float32") for n in ("parts", "into"))
        T.device_entry()
        thread, size = T.let("first_item", T.block(blocks) * THREADS + T.thread(THREADS)), height * width
        T.note("a thread an element: the parts' sums, in order")
        with T.serial("turn", 0, -(-size // (blocks * THREADS))) as turn:
            item = T.let("item", T.cast(turn * (blocks * THREADS) + thread, "int64"))
            with T.when(item < size):
                total = source[item]
                for part in range(1, parts):
                    total = total + source[item + part * size]
                into.store(sums, item // width, item % width, total)
    return made()


STAGES = 4
PAD = 8  # values behind a row of a stage, which keep reads across it free of bank conflicts
LEAST_HEIGHT, LEAST_WIDTH = ROW_WARPS * 16, COLUMN_WARPS * 8  # of a tile


def outer_shape(job: OuterJob) -> OuterShape:
    """The tiles of 256 threads, of which a multiprocessor holds two."""
    m_tiles = next(n for n in (1, 2, 4) if n == 2 * per_word(job.dtype) or LEAST_HEIGHT * n >= job.values.width)
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
        # as variables: TVM's simplifier would put these quotients into every condition, and take 0.3 s
        self.first = T.variable("first_stage", "int32", self.part * each)[0]
        self.count = T.variable("stage_count", "int32", T.max(0, T.min(each, stages - self.first)))[0]
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
        s = self.shape
        pitch = s.height + PAD
        return (Staged(self.values, base, s.depth, s.height, pitch),
                Staged(self.values, base + s.depth * pitch, s.depth, s.width, s.width + PAD))

    def _load(self, number: Expr, stage: Expr) -> None:
        job, arguments = self.job, self.arguments
        values, operand = self._staged(T.let("base", stage * self.stage_size))
        row0 = T.let("row0", (self.first + number) * self.shape.depth)
        live = arguments.live if job.mask else None
        for name, x, to, first, head in (("values", job.values, values, self.m0, None),
                                         ("operand", job.operand, operand, self.n0, self.head)):
            self.copy(x, arguments.buffers[name], to, x.together(16 // job.itemsize), row0, self.rows, first, head,
                      live, unrolled=16)

    def _add(self, _: Expr, base: Expr) -> None:
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
        column, k = self.lane // 4, k + self.lane % 4
        with T.unroll("m", self.tiles) as m:
            for i in range(4):
                place = values.base + (k + i // 2 * 4) * values.pitch + self.m_warp + m * 16 + column + i % 2 * 8
                T.buffer_store(self.a, self.words[place], [m, i])
        with T.unroll("n", self.products) as n:
            for i in range(2):
                place = operand.base + (k + i * 4) * operand.pitch + self.n_warp + n * 8 + column
                T.buffer_store(self.b, self.words[place], [n, i])
