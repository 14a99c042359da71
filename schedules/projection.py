"""The input projection hoisted out of time: one product over all T*B rows, on tensor cores.

    out[t, b, q, j] = hoisted output q of unit j, from x[t, b, :], the input weights and the biases

Blocks of 8 warps compute 128 rows x 4 groups of units; the columns are ordered so that one thread
holds every gate of a unit, and the cell's hoisted scalars are computed on the accumulators. Tiles of
x and of the packed weights come through shared memory in a pipeline of ``cp.async`` copies. x may
have any I: rows that are not 16-byte aligned are copied word by word, or value by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ecornn.program import Buffer, Extent, Launch, Packing
from ecornn.schedules.base import Task
from ecornn.schedules.pointwise import emit, invariants, vector_sources
from ecornn.schedules.tensor_core import mma, per_word, split, words

STAGES = 3
WIDE = 8  # n8 tiles of a warp, about: wider ones read less shared memory a product
WARP_COLUMNS = 4  # warps side by side over units; 2 over rows
THREADS = 256
SPAN = 2  # pairs of k-tiles (16 words each) of a stage: whole 128-byte lines of x
ROW = SPAN * 16 + 4  # words of a row of x in a stage; the 4 keep ldmatrix free of bank conflicts


@dataclass(frozen=True)
class Part:
    """A piece of a program that other schedules put in front of theirs."""

    functions: dict[str, Any]
    buffers: tuple[Buffer, ...]
    calls: tuple[Launch, ...]


@dataclass(frozen=True)
class _Shape:
    rows: int  # hoisted products a unit has
    outputs: int
    octets: int  # groups of 8 units a warp computes
    tiles: int  # m16 tiles of a warp
    columns: int  # blocks over the units
    slabs: int  # stages' worth of K, SPAN * 16 words each

    @property
    def block_octets(self) -> int:
        return WARP_COLUMNS * self.octets

    @property
    def block_rows(self) -> int:
        return 2 * 16 * self.tiles

    @property
    def weight_words(self) -> int:
        """Words of packed weights a block needs for a slab."""
        return SPAN * self.block_octets * self.rows * 128

    @property
    def stage_words(self) -> int:
        return self.block_rows * ROW + self.weight_words

    @property
    def shared(self) -> int:
        return max(STAGES * self.stage_words * 4, 16)


def shape_of(task: Task) -> _Shape:
    """How the projection of a task is cut."""
    w, graph = task.workload, task.graph
    rows = len(graph.hoisted_rows)
    octets = max(1, WIDE // max(rows, 1))
    accumulators = octets * max(rows, 1)
    tiles = 4 if accumulators <= 8 else 2 if accumulators <= 16 else 1
    columns = -(-w.hidden // (8 * WARP_COLUMNS * octets))
    slabs = -(-words(w.input, w.dtype) // (SPAN * 16)) if rows else 0
    return _Shape(rows, len(graph.hoisted_outputs), octets, tiles, columns, slabs)


def project(task: Task, out_dtype: str = "float32") -> Part:
    """The projection of a task, writing workspace ``hoisted`` (T*B, Q, H) of ``out_dtype``.

    Q is ``len(task.graph.hoisted_outputs)``; T and B are those of the call. Adds buffers
    ``hoisted``, ``input_weights`` and ``vectors`` (V, H, float32; the cell's parameter vectors).
    A cell without hoisted outputs needs no projection: the part is then only ``vectors``.
    """
    w, graph = task.workload, task.graph
    vectors = Buffer("vectors", "packed", "float32", Extent(max(1, len(graph.vectors)) * w.hidden), Packing(
        vector_sources(graph) or (("", 0),), (max(1, len(graph.vectors)), w.hidden),
        (max(1, len(graph.vectors)), w.hidden), (0, 1), "float32"))
    shape = shape_of(task)
    if not shape.outputs:
        return Part({}, (vectors,), ())
    hoisted = Buffer("hoisted", "workspace", out_dtype, Extent(0, w.batch * shape.outputs * w.hidden))
    buffers = [vectors, hoisted]
    if shape.rows:
        n, c, o = per_word(w.dtype), shape.columns, shape.block_octets
        units, pairs = c * o * 8, shape.slabs * SPAN
        inputs = pairs * 16 * n
        packing = Packing(tuple((r.weight, r.gate) for r in graph.hoisted_rows),
                          (shape.rows, units, inputs), (shape.rows, c, o, 8, pairs, 2, 2, 4, n),
                          (1, 4, 2, 0, 3, 7, 5, 6, 8), w.dtype)
        buffers.append(Buffer("input_weights", "packed", w.dtype, Extent(shape.rows * units * inputs), packing))
    blocks = task.device.cores * (1 if shape.tiles * shape.octets * max(shape.rows, 1) > 16 else 2)
    return Part({"project": _kernel(task, shape, out_dtype, blocks)}, tuple(buffers),
                (Launch("project", blocks, THREADS, shape.shared),))


def _kernel(task: Task, s: _Shape, out_dtype: str, blocks: int) -> Any:
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    w, graph = task.workload, task.graph
    H, I, dtype, pw = w.hidden, w.input, w.dtype, per_word(w.dtype)
    big = T.int64(1 << 40)
    with IRBuilder() as builder, T.prim_func():
        T.func_name("project")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        x = T.arg("x", T.buffer((big,), dtype))
        weights = T.arg("input_weights", T.buffer((big,), dtype)) if s.rows else None
        vectors = T.arg("vectors", T.buffer((big,), "float32"))
        out = T.arg("hoisted", T.buffer((big,), out_dtype))
        T.device_entry()
        block, thread = T.cta_id([blocks]), T.thread_id([THREADS])
        # float32 in every kernel: CUDA wants one type for all dynamic shared memory of a file
        memory = T.alloc_buffer((s.shared // 4,), "float32", scope="shared.dyn", align=16)
        shared, halves = memory.view("uint32"), memory.view("float16" if pw == 2 else "uint32")
        acc = T.alloc_buffer((s.tiles, s.octets * max(s.rows, 1), 4), "float32", scope="local")
        a = T.alloc_buffer((s.tiles, 4), "uint32", scope="local")
        bw = T.alloc_buffer((max(s.rows, 1) * s.octets, 4), "uint32", scope="local")
        lane, warp = T.Bind(thread % 32), T.Bind(thread // 32)
        warp_row, warp_column = T.Bind(warp // WARP_COLUMNS), T.Bind(warp % WARP_COLUMNS)
        total = T.Bind(steps * batch)
        tiles = T.Bind((total + (s.block_rows - 1)) // s.block_rows * s.columns)
        turn = T.alloc_buffer((1,), "int32", scope="local")
        T.buffer_store(turn, block, [0])

        def load_stage(row0: Any, column: Any, slab: Any, stage: Any) -> None:
            base = T.Bind(stage * s.stage_words)
            for word_count in (4, 1):
                if (I * w.itemsize) % (word_count * 4) == 0:
                    _copy_rows(T, s, x, shared, base, row0, slab, thread, total, I, pw, word_count)
                    break
            else:
                _copy_values(T, s, x, halves, base, row0, slab, thread, total, I, dtype)
            chunks = s.weight_words // 4
            for r in range(-(-chunks // THREADS)):
                index = T.Bind(r * THREADS + thread)
                with T.If(index < chunks), T.Then():
                    assert weights is not None, "only called where there are products"
                    source = (T.cast(column * s.slabs + slab, "int64") * s.weight_words + index * 4) * pw
                    T.evaluate(T.ptx["cp.async.cg.shared.global"](
                        shared.ptr_to([base + s.block_rows * ROW + index * 4]), weights.ptr_to([source]), 16))

        with T.While(turn[0] < tiles):
            row0, column = T.Bind(turn[0] // s.columns * s.block_rows), T.Bind(turn[0] % s.columns)
            with T.unroll(s.tiles) as m, T.unroll(s.octets * max(s.rows, 1)) as n, T.unroll(4) as e:
                T.buffer_store(acc, T.float32(0), [m, n, e])
            if s.rows:
                for stage in range(STAGES - 1):
                    if stage < s.slabs:
                        load_stage(row0, column, stage, stage)
                    T.evaluate(T.ptx["cp.async.commit_group"]())
                with T.serial(0, s.slabs) as slab:
                    T.evaluate(T.ptx["cp.async.wait_group"](STAGES - 2))
                    T.evaluate(T.cuda.cta_sync())
                    ahead = T.Bind(slab + (STAGES - 1))
                    with T.If(ahead < s.slabs), T.Then():
                        load_stage(row0, column, ahead, ahead % STAGES)
                    T.evaluate(T.ptx["cp.async.commit_group"]())
                    base = T.Bind(slab % STAGES * s.stage_words)
                    for span in range(SPAN):
                        _multiply(T, s, dtype, shared, base, span, warp_row, warp_column, lane, a, bw, acc)
                T.evaluate(T.cuda.cta_sync())  # the next tile's copies overwrite the stages
            with T.unroll(s.octets) as o:
                unit = T.Bind(((column * WARP_COLUMNS + warp_column) * s.octets + o) * 8 + lane % 4 * 2)
                with T.If(unit < H), T.Then():
                    constants = []
                    for e in range(2):
                        at = T.Bind(T.min(unit + e, H - 1))
                        env = {v.var: T.Bind(vectors[i * H + at]) for i, v in enumerate(graph.vectors)}
                        constants.append(invariants(graph, env))
                    with T.unroll(s.tiles) as m, T.unroll(2) as half:
                        row = T.Bind(row0 + (warp_row * s.tiles + m) * 16 + half * 8 + lane // 4)
                        with T.If(row < total), T.Then():
                            _finish(T, graph, s, constants, acc, m, o, half, row, unit, x, out, out_dtype, H)
            T.buffer_store(turn, turn[0] + blocks, [0])
    return builder.get()


def _multiply(T: Any, s: _Shape, dtype: str, shared: Any, base: Any, span: int, warp_row: Any,
              warp_column: Any, lane: Any, a: Any, bw: Any, acc: Any) -> None:
    """Adds the products of one pair of k-tiles of a stage."""
    columns = s.octets * s.rows
    first = base + s.block_rows * ROW + span * (s.weight_words // SPAN)
    with T.unroll(columns) as n:
        place = first + ((warp_column * columns + n) * 32 + lane) * 4
        T.evaluate(T.ptx["ld.shared.v4.b32"](bw[n, 0], bw[n, 1], bw[n, 2], bw[n, 3], shared.ptr_to([place])))
    for tile in range(2):
        with T.unroll(s.tiles) as m:
            place = base + ((warp_row * s.tiles + m) * 16 + lane % 16) * ROW + span * 16 + tile * 8 + lane // 16 * 4
            T.evaluate(T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
                a[m, 0], a[m, 1], a[m, 2], a[m, 3], shared.ptr_to([place])))
        with T.unroll(s.tiles) as m:
            rows = [split(a[m, i], dtype) for i in range(4)]
            with T.unroll(columns) as n:
                mma([acc[m, n, i] for i in range(4)], rows, [split(bw[n, tile * 2 + i], dtype) for i in range(2)],
                    dtype)


def _copy_rows(T: Any, s: _Shape, x: Any, shared: Any, base: Any, row0: Any, slab: Any, thread: Any,
               total: Any, I: int, pw: int, count: int) -> None:
    """Copies a slab of each row, ``count`` words at a time; what lies outside x becomes zero."""
    copies = SPAN * 16 // count
    kind = "cp.async.cg.shared.global" if count == 4 else "cp.async.ca.shared.global"
    for r in range(s.block_rows * copies // THREADS):
        index = T.Bind(r * THREADS + thread)
        row, word = T.Bind(index // copies), T.Bind(index % copies * count)
        value = T.Bind((slab * (SPAN * 16) + word) * pw)
        inside = T.Bind(T.And(row0 + row < total, value < I))
        source = T.Select(inside, T.cast(row0 + row, "int64") * I + value, T.int64(0))
        T.evaluate(T.ptx[kind](shared.ptr_to([base + row * ROW + word]), x.ptr_to([source]), count * 4,
                               T.Select(inside, T.uint32(count * 4), T.uint32(0))))


def _copy_values(T: Any, s: _Shape, x: Any, halves: Any, base: Any, row0: Any, slab: Any, thread: Any,
                 total: Any, I: int, dtype: str) -> None:
    """The same for rows of an odd number of 16-bit values, which no asynchronous copy serves."""
    width = SPAN * 32
    with T.serial(0, s.block_rows * width // THREADS) as r:
        index = T.Bind(r * THREADS + thread)
        row, value = T.Bind(index // width), T.Bind(index % width)
        column = T.Bind(slab * width + value)
        place = (base + row * ROW) * 2 + value
        T.buffer_store(halves, T.float16(0), [place])
        with T.If(T.And(row0 + row < total, column < I)), T.Then():
            loaded = x[T.cast(row0 + row, "int64") * I + column]
            T.buffer_store(halves, loaded if dtype == "float16" else T.reinterpret("float16", loaded), [place])


def _finish(T: Any, graph: Any, s: _Shape, constants: list[dict[Any, Any]], acc: Any, m: Any, o: Any,
            half: Any, row: Any, unit: Any, x: Any, out: Any, out_dtype: str, H: int) -> None:
    """The cell's hoisted scalars of two neighbouring units, and their store."""
    pairs = []
    for e in range(2):
        env = dict(constants[e])
        for r, product in enumerate(graph.hoisted_rows):
            env[product.var] = acc[m, o * s.rows + r, half * 2 + e]
        if graph.x is not None:
            at = T.cast(row, "int64") * H + T.min(unit + e, H - 1)
            env[graph.x] = T.Bind(T.cast(x[at], "float32"))
        env = emit(graph.hoisted, env)
        pairs.append([env[v] for v in graph.hoisted_outputs])
    for q in range(s.outputs):
        place = T.Bind((T.cast(row, "int64") * s.outputs + q) * H + unit)
        if H % 2 == 0 and out_dtype == "float32":
            T.evaluate(T.ptx["st.global.v2.f32"](out.ptr_to([place]), pairs[0][q], pairs[1][q]))
        else:
            T.buffer_store(out, T.cast(pairs[0][q], out_dtype), [place])
            with T.If(unit + 1 < H), T.Then():
                T.buffer_store(out, T.cast(pairs[1][q], out_dtype), [place + 1])
