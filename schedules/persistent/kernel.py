"""The persistent kernel: one launch for the whole sequence, recurrent weights on chip throughout.

Blocks form groups; a group serves its own batch rows and holds all recurrent weights, or those of a head, a block the
rows of ``units`` hidden units. In every block

* product warps split the hidden axis (K) among them. Each waits for its part of the exchanged state, which it reads
  straight into operand B, multiplies it with its weights (operand A: registers, or shared memory
  where they do not fit), and leaves partial sums in shared memory;
* gate warps add the partial sums, compute the cell's scalars, and send the new state first and everything else
  (y, wipes, the next step's inputs) afterwards.

State travels through L2, or, where a group is a cluster, inside it (``exchange.py``); statistics, which gate warps
exchange among themselves, likewise (``sums.py``).

Blocks that are left over may work on the input projection meanwhile (``projection_workers.py``).

Two buffers of partial sums, each with a named barrier that all warps of the recurrence wait at: gate warps for
the sums, product warps for the gate warps, which have by then read the other buffer. That makes product warps poll at
the same time, too, and costs nothing: gate warps wait for longer.
"""

from __future__ import annotations

from functools import partial

from ecornn.schedules.base import Task
from ecornn.schedules.builder import PrimFunc, T
from ecornn.schedules.gemm.mma_mainloop import THREADS
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.persistent.exchange import Carrier, Cluster, Ring
from ecornn.schedules.persistent.gates import Gates
from ecornn.schedules.persistent.plan import PersistentPlan, block_shared
from ecornn.schedules.persistent.products import Position, products
from ecornn.schedules.persistent.projection_workers import ProjectionWorkers
from ecornn.schedules.sequence_kernel import SequenceKernel


def persistent_kernel(task: Task, plan: PersistentPlan, hoisted: Hoisted, math: str, kept: Stored = NOTHING,
                      early: bool = False) -> PrimFunc:
    """``persistent(T, B, [x, input_weights, ready,] hoisted, vectors, <state>_in, <state>_out,
    recurrent_<p>, [scales_<p>,] [exchange_<p>,] y)``; of an adjoint's recurrence ``outputs`` in place of y;
    ``persistent_keeping`` stores what is ``kept``, too. ``early``: launched as :func:`begins_early` says."""
    phases = range(len(plan.phases))
    own = {f"recurrent_{i}": "uint8" if plan.scaled else plan.dtype for i in phases}
    own |= {f"scales_{i}": "float32" for i in phases if plan.scaled}
    if not plan.cluster:
        own |= dict.fromkeys([f"exchange_{i}" for i in phases] + [f"sums_{e}" for e in range(len(plan.sums))], "uint32")
    with T.kernel(keeping("persistent", kept)) as made:
        before = partial(ProjectionWorkers.declare, task, hoisted) if plan.workers else dict
        kernel = SequenceKernel.declare(task, hoisted, math, own, kept, early, before)
        weights, rings = ([kernel.arguments[f"{name}_{i}"] for i in phases if f"{name}_{i}" in own]
                          for name in ("recurrent", "exchange"))
        T.device_entry()
        recurrent = plan.groups * plan.blocks
        block, thread = T.block(recurrent + plan.workers), T.thread(plan.block_threads)
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        # in order: 2 sides of partial sums, weights, what is exchanged; of a worker: its stages
        shared = T.shared(block_shared(task, plan) // 4)
        beside = ProjectionWorkers(kernel, plan) if plan.workers else None

        def recurrence() -> None:
            T.note("a group of CTAs holds all recurrent weights for its batch rows; each CTA has some hidden units")
            group, member = T.let("group", block // plan.blocks), T.let("member", block % plan.blocks)
            place = T.let("place", group % plan.heads * plan.blocks + member) if plan.heads > 1 else member
            warp, lane = T.let("warp", thread // 32), T.let("lane", thread % 32)
            carrier: Carrier = Ring(plan, rings, group)
            if plan.cluster:
                carrier = Cluster(plan, kernel.steps, shared)
                carrier.begin(kernel, group, thread)
            with T.If(warp < plan.warps):
                with T.Then():
                    products(plan, kernel.steps, Position(place, warp, lane), weights, carrier, shared, early)
                with T.Else(), T.when(warp < plan.warps + plan.gate_warps):
                    Gates(kernel, plan, carrier, shared, group, member,
                          T.let("gate_thread", thread - plan.warps * 32), beside).run()

        if beside is None:
            recurrence()
        else:
            with T.If(block < recurrent):
                with T.Then():
                    recurrence()
                with T.Else(), T.when(thread < THREADS):
                    beside.work(T.let("worker", block - recurrent), thread, shared)
    return made()
