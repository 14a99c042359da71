"""Rows of x that begin at multiples of 16 bytes.

A layer's x is as its caller has it: rows of 650 values of 16 bits are aligned to 4 bytes, and are copied to shared
memory 4 bytes at a time, where others come by 16. Products over all rows copy each row once for every tile of columns;
where that is often, x is copied once before, to rows that are aligned.
"""

from __future__ import annotations

from ecornn.program import WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import PrimFunc, T
from ecornn.schedules.cuda.isa.memory import st_global
from ecornn.schedules.gemm.job import CHUNK, Columns, whole_chunks

NAME = "x_aligned"
THREADS = 256
BLOCKS = 8  # a multiprocessor
# Microseconds: that a stage of 128 rows by 128 bytes takes longer when it comes in words; of another launch and what it
# waits for; and bytes that are copied in one
WORDS, LAUNCH, BYTES = 0.55, 3.0, 2e6
TILE = 256  # columns of a product that read a row together


def x_of(task: Task) -> Columns:
    """The place from which products over all rows read x: the workspace that :func:`align` makes, where that pays."""
    w, own = task.workload, task.own_input
    x = Columns("x", own, w.input)
    return Columns(NAME, own, whole_chunks(own, w.itemsize)) if _pays(task, x) else x


def align(task: Task) -> Component:
    """That workspace, if there is one, from x."""
    x = x_of(task)
    if x.name != NAME:
        return Component()
    w, blocks = task.workload, BLOCKS * task.device.cores
    source = Columns("x", task.own_input, w.input)
    return Component({"align": _kernel(source, x, w.itemsize, blocks)},
                     (Buffer(NAME, WORKSPACE, w.dtype, Extent(0, w.batch * x.stride)),),
                     (Launch("align", blocks, THREADS, names={"source": "x", "into": NAME}),))


def _pays(task: Task, x: Columns) -> bool:
    w, most = task.workload, CHUNK // task.workload.itemsize
    products = len(task.graph.hoisted_products)
    words = task.device.can.warpgroups and w.arithmetic != "float32" and x.copied(most) < most
    if not (words and products) or x.copied(most) * w.itemsize % 4 or x.width * w.itemsize % 4:
        return False
    rows, bytes_of_row = w.seq * w.batch, x.width * w.itemsize
    tiles = -(-rows // 128) * -(-w.hidden * products // TILE)
    stages = max(1.0, tiles / task.device.cores) * -(-bytes_of_row // 128)
    return WORDS * stages > LAUNCH + 2 * rows * bytes_of_row / BYTES


def _kernel(source: Columns, into: Columns, itemsize: int, blocks: int) -> PrimFunc:
    """``(T, B, source, into)``: a thread has 16 bytes of a row; zeros behind the row's values."""
    # in words, whatever the values are
    width, stride, offset = (n * itemsize // 4 for n in (source.width, source.stride, source.offset))
    chunks = into.stride * itemsize // CHUNK
    with T.kernel("align") as kernel:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        given, made = (T.pointer(n, "uint32") for n in ("source", "into"))
        T.device_entry()
        thread = T.let("first_item", T.cast(T.block(blocks) * THREADS + T.thread(THREADS), "int64"))
        total = T.let("total", T.cast(steps * batch, "int64") * chunks)
        turns = T.let("turns", (total - thread + (blocks * THREADS - 1)) // (blocks * THREADS))
        T.note("rows of x to rows that are aligned to 16 bytes, zeros behind their values")
        with T.serial("turn", T.int64(0), turns) as turn:
            item = T.let("item", turn * (blocks * THREADS) + thread)
            word = T.let("word", T.cast(item % chunks, "int32") * 4)
            place = T.let("place", item // chunks * stride + (word + offset))
            values = T.local("values", (4,), "uint32")
            for k in range(4):
                T.buffer_store(values, T.uint32(0), [k])
                with T.when(word + k < width):
                    T.buffer_store(values, given[place + k], [k])
            st_global(made.ptr_to([item * 4]), [values[k] for k in range(4)])
    return kernel()
