"""The persistent kernel: one launch for the whole sequence, recurrent weights on chip throughout.

Blocks form groups; a group serves its own batch rows and holds all recurrent weights, a block the
rows of ``units`` hidden units. In every block

* product warps split the hidden axis (K) among them. Each waits for its part of the exchanged state, which it reads
  straight into operand B, multiplies it with its weights (operand A: registers, or shared memory
  where they do not fit), and leaves partial sums in shared memory;
* gate warps add the partial sums, compute the cell's scalars, and send the new state first and everything else
  (y, wipes, the next step's inputs) afterwards.

State travels through L2 (``exchange.py``), or, where a group is a cluster, inside it (``cluster.py``); statistics,
which gate warps exchange among themselves, likewise (``sums.py``).

Blocks that are left over may work on the input projection meanwhile (``beside.py``).

Two buffers of partial sums, each with a named barrier that all warps of the recurrence wait at: gate warps for
the sums, product warps for the gate warps, which have by then read the other buffer. That makes product warps poll at
the same time, too, and costs nothing: gate warps wait for longer.
"""

from __future__ import annotations

from typing import Any

from ecornn.schedules.base import Task
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.persistent.beside import Beside
from ecornn.schedules.persistent.cluster import Cluster
from ecornn.schedules.persistent.exchange import Ring
from ecornn.schedules.persistent.gates import Gates
from ecornn.schedules.persistent.plan import Plan, block_shared
from ecornn.schedules.persistent.products import products
from ecornn.schedules.projection import THREADS
from ecornn.schedules.timeline import piece_arguments, row_arguments


def persistent_kernel(task: Task, plan: Plan, hoisted: Hoisted, math: str) -> Any:
    """``persistent(T, B, [x, input_weights, ready,] hoisted, vectors, <state>_in, <state>_out,
    recurrent_<p>, [exchange_<p>,] y)``."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    graph, dtype = task.graph, plan.dtype
    big = T.int64(1 << 40)
    with IRBuilder() as builder, T.prim_func():
        T.func_name("persistent")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = Beside.declare(T, task) if plan.workers else {}
        if graph.hoisted_outputs:
            arguments["hoisted"] = T.arg("hoisted", T.buffer((big,), hoisted.dtype))
        if graph.row_inputs:
            arguments["row_sums"] = T.arg("row_sums", T.buffer((big,), "float32"))
        arguments["vectors"] = T.arg("vectors", T.buffer((big,), "float32"))
        for s in graph.states:
            for name in (f"{s}_in", f"{s}_out"):
                arguments[name] = T.arg(name, T.buffer((big,), dtype))
        weights = [T.arg(f"recurrent_{i}", T.buffer((big,), dtype)) for i in range(len(plan.phases))]
        rings = [T.arg(f"exchange_{i}", T.buffer((big,), "uint32")) for i in range(0 if plan.cluster else len(weights))]
        for e in range(0 if plan.cluster else len(plan.sums)):
            arguments[f"sums_{e}"] = T.arg(f"sums_{e}", T.buffer((big,), "uint32"))
        arguments["y"] = T.arg("y", T.buffer((big,), dtype))
        arguments |= row_arguments(T, task.place) | piece_arguments(T, task.place)
        T.device_entry()
        recurrent = plan.groups * plan.blocks
        block, thread = T.cta_id([recurrent + plan.workers]), T.thread_id([plan.block_threads])
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        shared = T.alloc_buffer((block_shared(task, plan) // 4,), "float32", scope="shared.dyn", align=16)
        beside = Beside(T, task, plan, arguments, steps, batch, hoisted) if plan.workers else None

        def recurrence() -> None:
            group, member = T.Bind(block // plan.blocks), T.Bind(block % plan.blocks)
            warp, lane = T.Bind(thread // 32), T.Bind(thread % 32)
            carrier: Ring | Cluster = Ring(T, plan, rings, group)
            if plan.cluster:
                carrier = Cluster(T, plan, steps, shared)
                carrier.begin(task, arguments, batch, group, thread, math)
            with T.If(warp < plan.warps):
                with T.Then():
                    products(T, plan, steps, member, warp, lane, weights, carrier, shared)
                with T.Else(), T.If(warp < plan.warps + plan.gate_warps), T.Then():
                    Gates(T, task, plan, math, arguments, carrier, shared, group, member,
                          T.Bind(thread - plan.warps * 32), steps, batch, hoisted, beside).run()

        if beside is None:
            recurrence()
        else:
            with T.If(block < recurrent):
                with T.Then():
                    recurrence()
                with T.Else(), T.If(thread < THREADS), T.Then():
                    beside.work(T.Bind(block - recurrent), thread, shared)
    return builder.get()
