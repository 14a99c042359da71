"""How many sequences lie in the columns of a call: passes over first and last states have a row for each."""

from __future__ import annotations

from ecornn.program import WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.base import Component
from ecornn.schedules.builder import Expr, PrimFunc, T
from ecornn.schedules.cuda.isa.threads import sync_block
from ecornn.schedules.gemm.job import COUNT
from ecornn.schedules.timeline import Timeline
from ecornn.workload import Traversal

THREADS = 1024
FEW = 32  # of which each of as many threads has the highest number; then one thread that of all


def count_sequences(traversal: Traversal) -> Component:
    """``count`` (1,), int32, from the table ``sequences``, whose numbers are those from 0 on."""
    return Component({"count_sequences": _kernel(traversal)}, (Buffer(COUNT, WORKSPACE, "int32", Extent(1)),),
                     (Launch("count_sequences", 1, THREADS, 4 * THREADS),))


def _kernel(traversal: Traversal) -> PrimFunc:
    """``(T, B, sequences, count)``, one block."""
    from tvm.script.ir_builder import IRBuilder

    with IRBuilder() as builder, T.prim_func():
        T.func_name("count_sequences")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        table, count = (T.arg(name, T.buffer((T.int64(1 << 40),), "int32")) for name in ("sequences", COUNT))
        T.device_entry()
        T.block(1)
        thread = T.thread(THREADS)
        found, highest = T.shared(THREADS).view("int32"), T.local("highest", (1,), "int32")
        timeline, total = Timeline(traversal, {"sequences": table}, steps, batch), T.let("total", steps * batch)

        def include(number: Expr) -> None:
            T.buffer_store(highest, T.max(highest[0], number), [0])

        T.note("each thread's highest number of a sequence, then the CTA's, through shared memory")
        T.buffer_store(highest, T.int32(-1), [0])
        with T.serial("turn", 0, T.let("turns", (total - thread + (THREADS - 1)) // THREADS)) as turn:
            number = T.let("number", table[turn * THREADS + thread])
            include(T.Select(number < 0, T.int32(-1), timeline.sequence(number)))
        T.buffer_store(found, highest[0], [thread])
        sync_block()
        with T.If(thread < FEW), T.Then(), T.unroll("k", THREADS // FEW) as k:
            include(found[thread + k * FEW])
        sync_block()
        T.buffer_store(found, highest[0], [thread])
        sync_block()
        with T.If(thread == 0), T.Then():
            with T.unroll("k", FEW) as k:
                include(found[k])
            T.buffer_store(count, highest[0] + 1, [0])
    return builder.get()
