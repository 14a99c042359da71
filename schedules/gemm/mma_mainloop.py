"""The main loop on mma: 8 warps multiply from stages in shared memory, which they fill ahead (cp.async).

2 warps are over the rows of a tile and 4 over its columns. A stage is free for copies once all warps have come to the
barrier behind it; in turn each copies ``stages - 1`` ahead and multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa import cp_async, cp_async_commit, cp_async_wait
from ecornn.schedules.cuda.isa.tensor_core import mma, per_word, split
from ecornn.schedules.gemm.job import Columns

THREADS = 256
ROW_WARPS, COLUMN_WARPS = 2, 4

Live = Callable[[Expr, Expr], Expr]  # a row, and whether there is such a value of it -> whether it counts
Load = Callable[[Any, Any], None]  # emits the copies of one stage's worth of K: its number, and the stage, Expr or int


@dataclass(frozen=True)
class Staged:
    """An operand's rows in a stage."""

    buffer: TirBuffer
    base: Expr
    height: int
    width: int  # words or values of a row
    pitch: int  # from row to row


class MmaMainloop:
    """Emits it; a job says what a stage holds, and reads the fragments ``a`` and ``b`` of a k-tile. ``memory``: dynamic
    shared memory, float32; ``tiles``, ``products``: m16 and n8 tiles of a warp; ``stage_size``: in elements;
    ``thread``: 0 to 255; ``barrier`` emits theirs; ``words``: read at once of each n8 tile, 2 for each k-tile."""

    def __init__(self, dtype: str, arithmetic: str, memory: TirBuffer, tiles: int, products: int, stages: int,
                 stage_size: int, thread: Expr, barrier: Callable[[], object], words: int = 2) -> None:
        self.dtype, self.arithmetic, self.tiles, self.products = dtype, arithmetic, tiles, products
        self.stages, self.stage_size, self.thread, self.barrier = stages, stage_size, thread, barrier
        self.words = memory.view("uint32")
        self.values = memory.view("float16" if per_word(dtype) == 2 else "uint32")
        self.lane, warp = T.let("lane", thread % 32), T.let("warp", thread // 32)
        self.warp_row = T.let("warp_row", warp // COLUMN_WARPS)
        self.warp_column = T.let("warp_column", warp % COLUMN_WARPS)
        self.acc = T.local("acc", (tiles, products, 4), "float32")  # (m16 tile, n8 tile, 4 of fragment C)
        self.a = T.local("a", (tiles, 4), "uint32")  # (m16 tile, 4 of fragment A)
        self.b = T.local("b", (products, words), "uint32")  # (n8 tile, 2 of fragment B of each k-tile)

    def clear(self) -> None:
        with T.unroll("m", self.tiles) as m, T.unroll("n", self.products) as n, T.unroll("e", 4) as e:
            T.buffer_store(self.acc, T.float32(0), [m, n, e])

    def begin(self, count: Expr | int, load: Load) -> None:
        """The prologue: the first copies of ``count`` stages' worth of K."""
        for stage in range(self.stages - 1):
            if not isinstance(count, int) or stage < count:
                with T.when(isinstance(count, int) or count > stage):
                    load(stage, stage)
            cp_async_commit()

    def products_of(self, count: Expr | int, load: Load, multiply: Callable[[Expr, Expr], None]) -> None:
        """The main loop, behind :meth:`begin`: ``multiply(number, first element of the stage)`` for each."""
        with T.serial("slab", 0, count) as slab:
            cp_async_wait(self.stages - 2)
            self.barrier()
            ahead = T.let("ahead", slab + (self.stages - 1))
            with T.when(ahead < count):
                load(ahead, ahead % self.stages)
            cp_async_commit()
            multiply(slab, T.let("base", slab % self.stages * self.stage_size))

    def multiply(self, k_tile: int = 0, cut_a: Expr | bool = False, cut_b: Expr | bool = False) -> None:
        """Adds the products of a k-tile's fragments; ``cut_a``, ``cut_b``: ``cut`` of :func:`split`."""
        a, b, kind = self.a, self.b, self.arithmetic
        with T.unroll("m", self.tiles) as m:
            rows = [split(a[m, i], kind, cut_a) for i in range(4)]
            with T.unroll("n", self.products) as n:
                columns = [split(b[n, k_tile * 2 + i], kind, cut_b) for i in range(2)]
                mma([self.acc[m, n, i] for i in range(4)], rows, columns, kind, apart=True)

    def copy(self, x: Columns, source: TirBuffer, to: Staged, count: int, row: Expr, end: Expr, first: Expr,
             head: Expr | None = None, live: Live | None = None, unrolled: int = 4) -> None:
        """Copies rows ``row`` to ``end``, from element ``first`` on, ``count`` elements at a time; zeros for what lies
        outside, or is not ``live(row, inside)``. Values that are no whole words come one by one. ``head``: value where
        those of the tile begin; ``unrolled``: copies of as many bytes, or more."""
        values = 1 if to.buffer is self.values else per_word(self.dtype)  # of an element
        bytes_, each = count * values * 4 // per_word(self.dtype), to.width // max(count, 1)
        if bytes_ < 4:
            self._copy_values(x, source, to, values, row, end, first, head, live)
            return
        def one(index: Expr) -> None:
            local, word = T.let("local", index // each), T.let("word", index % each * count)
            value = T.let("value", (first + word) * values)
            inside = T.let("inside", T.And(row + local < end, value < x.width))
            if live is not None:
                inside = T.let("live", T.And(inside, live(row + local, inside)))
            at = T.Select(inside, x.place(row + local, value if head is None else head + value), T.int64(0))
            cp_async(to.buffer.ptr_to([to.base + local * to.pitch + word]), source.ptr_to([at]), bytes_,
                     T.Select(inside, T.uint32(bytes_), T.uint32(0)))
        self.share(to.height * each, one, bytes_ < unrolled)

    def _copy_values(self, x: Columns, source: TirBuffer, to: Staged, values: int, row: Expr, end: Expr, first: Expr,
                     head: Expr | None, live: Live | None) -> None:
        """The same for rows of 16-bit values that are not of whole words, which no asynchronous copy serves."""
        width = to.width * values
        def one(index: Expr) -> None:
            local, value = T.let("local", index // width), T.let("value", index % width)
            column = T.let("column", first * values + value)
            place = [(to.base + local * to.pitch) * values + value]
            T.buffer_store(self.values, T.float16(0), place)
            inside = T.And(row + local < end, column < x.width)
            if live is not None:
                inside = T.let("inside", inside)
                inside = T.And(inside, live(row + local, inside))
            with T.when(inside):
                loaded = source[x.place(row + local, column if head is None else head + column)]
                T.buffer_store(self.values, loaded if self.dtype == "float16" else T.reinterpret("float16", loaded),
                               place)
        self.share(to.height * width, one, True)

    def share(self, count: int, emit: Callable[[Expr], None], rolled: bool = False) -> None:
        """Deals out ``count`` items to the threads: ``emit(item)``, in a loop that is ``rolled`` or not."""
        def one(turn: Expr | int) -> None:
            index = T.let("index", turn * THREADS + self.thread)
            with T.when(count % THREADS == 0 or index < count):
                emit(index)
        if rolled:
            with T.serial("r", 0, -(-count // THREADS)) as turn:
                one(turn)
            return
        for turn in range(-(-count // THREADS)):
            one(turn)
