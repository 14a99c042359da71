"""The code of the hoisted projection: tiles of rows and units, by teams of 256 threads.

A team of 8 warps computes ``block_rows`` rows x 4 groups of units at a time; the columns are ordered
so that one thread holds every gate of a unit, and the cell's hoisted scalars are computed on the
accumulators. Tiles of x and of the packed weights come through shared memory in a pipeline of
``cp.async`` copies. x may have any I: rows that are not 16-byte aligned are copied word by word, or
value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.gemm.mma import ROW, SPAN, THREADS, WARP_COLUMNS, Shape, rows_ahead
from ecornn.schedules.gemm.outputs import Outputs
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.isa.tensor_core import mma, per_word, split


def projection_kernel(task: Task, shape: Shape, layout: Hoisted, blocks: int, ahead: int) -> PrimFunc:
    """``project(T, B, x, input_weights, vectors, hoisted)``: the first ``ahead`` percent of the rows."""
    from tvm.script.ir_builder import IRBuilder

    with IRBuilder() as builder, T.prim_func():
        T.func_name("project")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = projection_arguments(task, shape)
        arguments["vectors"] = T.arg("vectors", T.buffer((T.int64(1 << 40),), "float32"))
        arguments["hoisted"] = T.arg("hoisted", T.buffer((T.int64(1 << 40),), layout.dtype))
        T.device_entry()
        block, thread = T.block(blocks), T.thread(THREADS)
        # float32 in every kernel: CUDA wants one type for all dynamic shared memory of a file
        memory = T.shared(shape.shared // 4)  # (stage, rows of x and then weights)
        rows = T.let("rows", steps * batch)
        team = Team(task, shape, layout, arguments, memory, thread, T.cuda.cta_sync)
        team.run(T.int32(0), T.let("rows_ahead", rows_ahead(rows, ahead)), block, blocks)
    return builder.get()


def projection_arguments(task: Task, shape: Shape) -> dict[str, TirBuffer]:
    """Declares ``x`` and ``input_weights``."""
    names = ("x", "input_weights") if shape.rows else ("x",)
    return {n: T.arg(n, T.buffer((T.int64(1 << 40),), task.workload.dtype)) for n in names}


class Team:
    """Emits the code of 256 threads that compute tiles.

    Parameters
    ----------
    arguments : buffers ``x``, ``input_weights``, ``vectors`` and ``hoisted`` (as ``layout`` says)
    memory : dynamic shared memory, float32, at least ``shape.shared`` bytes
    thread : 0 to 255
    barrier : emits a barrier of these threads
    """

    def __init__(self, task: Task, shape: Shape, layout: Hoisted, arguments: Mapping[str, TirBuffer], memory: TirBuffer,
                 thread: Expr, barrier: Callable[[], Expr]) -> None:
        self.task, self.shape, self.layout = task, shape, layout
        self.arguments, self.thread, self.barrier = arguments, thread, barrier
        self.shared = memory.view("uint32")
        self.halves = memory.view("float16" if per_word(task.workload.dtype) == 2 else "uint32")
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
        written by all threads.
        """
        s = self.shape
        tiles = T.let("tiles", (end - first + (s.block_rows - 1)) // s.block_rows * s.columns)
        turn = T.local("turn", (1,), "int32")  # number of the tile
        T.buffer_store(turn, member, [0])
        with T.While(turn[0] < tiles):
            group, column = T.let("group", turn[0] // s.columns), T.let("column", turn[0] % s.columns)
            row = T.let("row", first + group * s.block_rows)
            with T.unroll("m", s.tiles) as m, T.unroll("n", s.products) as n, T.unroll("e", 4) as e:
                T.buffer_store(self.acc, T.float32(0), [m, n, e])
            if s.rows:
                self._products(row, end, column)
            self._write(row, end, column)
            if done is not None:
                T.evaluate(self.barrier())
                with T.If(self.thread == 0), T.Then():
                    done(group)
            T.buffer_store(turn, turn[0] + members, [0])

    def _products(self, row: Expr, end: Expr, column: Expr) -> None:
        s = self.shape
        for stage in range(s.stages - 1):
            if stage < s.slabs:
                self._load_stage(row, end, column, stage, stage)
            T.evaluate(T.ptx["cp.async.commit_group"]())
        with T.serial("slab", 0, s.slabs) as slab:
            T.evaluate(T.ptx["cp.async.wait_group"](s.stages - 2))
            T.evaluate(self.barrier())
            ahead = T.let("ahead", slab + (s.stages - 1))
            with T.If(ahead < s.slabs), T.Then():
                self._load_stage(row, end, column, ahead, ahead % s.stages)
            T.evaluate(T.ptx["cp.async.commit_group"]())
            base = T.let("base", slab % s.stages * s.stage_words)
            for span in range(SPAN):
                self._multiply(base, span)
        T.evaluate(self.barrier())  # the next tile's copies overwrite the stages

    def _load_stage(self, row: Expr, end: Expr, column: Expr, slab: Expr, stage: Expr) -> None:
        s, w = self.shape, self.task.workload
        pw = per_word(w.dtype)
        base = T.let("base", stage * s.stage_words)
        for count in (4, 1):
            if (w.input * w.itemsize) % (count * 4) == 0:
                self._copy_rows(base, row, end, slab, count)
                break
        else:
            self._copy_values(base, row, end, slab)
        chunks = s.weight_words // 4
        for r in range(-(-chunks // THREADS)):
            index = T.let("index", r * THREADS + self.thread)
            with T.If(index < chunks), T.Then():
                source = (T.cast(column * s.slabs + slab, "int64") * s.weight_words + index * 4) * pw
                T.evaluate(T.ptx["cp.async.cg.shared.global"](
                    self.shared.ptr_to([base + s.block_rows * ROW + index * 4]),
                    self.arguments["input_weights"].ptr_to([source]), 16))

    def _copy_rows(self, base: Expr, row: Expr, end: Expr, slab: Expr, count: int) -> None:
        """Copies a slab of each row, ``count`` words at a time; what lies outside x becomes zero."""
        s, I = self.shape, self.task.workload.input
        pw, copies = per_word(self.task.workload.dtype), SPAN * 16 // count
        kind = "cp.async.cg.shared.global" if count == 4 else "cp.async.ca.shared.global"
        for r in range(s.block_rows * copies // THREADS):
            index = T.let("index", r * THREADS + self.thread)
            local, word = T.let("local", index // copies), T.let("word", index % copies * count)
            value = T.let("value", (slab * (SPAN * 16) + word) * pw)
            inside = T.let("inside", T.And(row + local < end, value < I))
            source = T.Select(inside, T.cast(row + local, "int64") * I + value, T.int64(0))
            T.evaluate(T.ptx[kind](self.shared.ptr_to([base + local * ROW + word]),
                                   self.arguments["x"].ptr_to([source]), count * 4,
                                   T.Select(inside, T.uint32(count * 4), T.uint32(0))))

    def _copy_values(self, base: Expr, row: Expr, end: Expr, slab: Expr) -> None:
        """The same for rows of an odd number of 16-bit values, which no asynchronous copy serves."""
        s, I, width = self.shape, self.task.workload.input, SPAN * 32
        with T.serial("r", 0, s.block_rows * width // THREADS) as r:
            index = T.let("index", r * THREADS + self.thread)
            local, value = T.let("local", index // width), T.let("value", index % width)
            column = T.let("column", slab * width + value)
            place = (base + local * ROW) * 2 + value
            T.buffer_store(self.halves, T.float16(0), [place])
            with T.If(T.And(row + local < end, column < I)), T.Then():
                loaded = self.arguments["x"][T.cast(row + local, "int64") * I + column]
                half = loaded if self.task.workload.dtype == "float16" else T.reinterpret("float16", loaded)
                T.buffer_store(self.halves, half, [place])

    def _multiply(self, base: Expr, span: int) -> None:
        """Adds the products of one pair of k-tiles of a stage."""
        s, kind, a, b = self.shape, self.task.workload.arithmetic, self.a, self.b
        first = base + s.block_rows * ROW + span * (s.weight_words // SPAN)
        with T.unroll("n", s.products) as n:
            place = first + ((self.warp_column * s.products + n) * 32 + self.lane) * 4
            T.evaluate(T.ptx["ld.shared.v4.b32"](*(b[n, i] for i in range(4)), self.shared.ptr_to([place])))
        for tile in range(2):
            with T.unroll("m", s.tiles) as m:
                place = (base + ((self.warp_row * s.tiles + m) * 16 + self.lane % 16) * ROW
                         + span * 16 + tile * 8 + self.lane // 16 * 4)
                T.evaluate(T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
                    *(a[m, i] for i in range(4)), self.shared.ptr_to([place])))
            with T.unroll("m", s.tiles) as m:
                rows = [split(a[m, i], kind) for i in range(4)]
                with T.unroll("n", s.products) as n:
                    mma([self.acc[m, n, i] for i in range(4)], rows,
                        [split(b[n, tile * 2 + i], kind) for i in range(2)], kind, apart=True)

    def _write(self, row: Expr, end: Expr, column: Expr) -> None:
        s, H, vectors = self.shape, self.task.workload.hidden, self.arguments["vectors"]
        outputs = Outputs(self.task, self.acc, s.octets, s.tiles, self.arguments["x"], self.arguments["hoisted"],
                          self.layout, lambda i, at: vectors[i * H + at])
        outputs.write(
            lambda o: ((column * WARP_COLUMNS + self.warp_column) * s.octets + o) * 8 + self.lane % 4 * 2,
            lambda m, half: row + (self.warp_row * s.tiles + m) * 16 + half * 8 + self.lane // 4, end)
