"""The small kernel before the persistent one: the initial state into the exchange, sentinels elsewhere.

It also clears the counters of the projection that runs beside.
"""

from __future__ import annotations

from ecornn.analysis.liveness import late_operands
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, T
from ecornn.schedules.cuda.isa.launch import launch_dependents, wait_on_earlier
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.few_steps import short
from ecornn.schedules.gemm.projection import may_be_followed
from ecornn.schedules.gemm.rows_mma import LEAST_ROWS
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.persistent.exchange import SENTINEL, pack
from ecornn.schedules.persistent.plan import PAIR, PersistentPlan, PhasePlan
from ecornn.schedules.scalars.initial import BLOCKS, THREADS, Head, declare_start, initial_values, start_thread


def begins_early(task: Task, plan: PersistentPlan) -> bool:
    """Tells whether launches of a call begin while the one ahead of them ends: of short calls, behind a projection that
    reads and writes nothing of what ``start`` does. Such a call's launches are three then, in this order.

    ``project``  lets ``start`` begin when all of its own blocks have.
    ``start``    lets ``persistent`` begin, writes the exchange, and waits for ``project``: its end is that of both.
    ``persistent``  loads weights, waits for ``start``, and then reads hoisted values and states, and writes.

    What is read or written before a wait was written by an earlier call, all of which had ended when ``project``
    began: that is launched without leave to be early. Nobody waits for a block that is not there yet: ``project`` and
    ``start`` wait for nothing but what is ahead of them, and ``persistent``, whose blocks wait for each other, is
    cooperative.
    """
    if plan.cluster or plan.sums or plan.ahead < 100:  # what comes first is no load of weights, or no projection
        return False
    return short(task) and may_be_followed(task) and not late_operands(task.graph)  # which start reads


def start_kernel(task: Task, plan: PersistentPlan, layout: Hoisted, math: str, early: bool = False) -> PrimFunc:
    """``start(T, B, <state>_in ..., vectors, [hoisted,] exchange_0 ..., ready)``; ``early``: as
    :func:`begins_early` says.

    Words beyond H, which pad the last k-tiles, are zero in every slot, and stay so.
    """
    with T.kernel("start") as made:
        kernel = declare_start(task, layout, math)
        rings = [T.pointer(f"exchange_{i}", "uint32") for i in range(len(plan.phases))]
        ready = T.pointer("ready", "uint32") if plan.workers else None
        T.device_entry()
        first, threads = start_thread(), BLOCKS * THREADS
        T.note("before the recurrence: counters to zero, the first state and sentinels into the rings")
        if early:
            launch_dependents()
        if ready is not None:
            counters = T.let("counters", (kernel.steps * kernel.batch + (LEAST_ROWS - 1)) // LEAST_ROWS)
            turns = T.let("turns", (counters + (threads - 1)) // threads)
            with T.serial("turn", 0, turns) as turn, T.when(turn * threads + first < counters):
                T.buffer_store(ready, T.uint32(0), [turn * threads + first])
        for index, (phase, ring) in enumerate(zip(plan.phases, rings, strict=True)):
            words = plan.slot_words(phase)
            with T.strided("place", plan.groups * plan.ring * words, first, threads) as place:
                within = T.let("within", place % words)
                slot = T.let("slot", place // words % plan.ring)
                group = T.let("group", place // (words * plan.ring))
                at = located(plan, phase, group, within)
                rest = T.let("rest", T.Select(at[0] < phase.units, T.uint32(SENTINEL), T.uint32(0)))
                if index:
                    T.buffer_store(ring, rest, [place])
                    continue
                with T.If(slot == 0):
                    with T.Then():
                        values = initial_values(kernel, at, head_of(plan, group))
                        T.buffer_store(ring, pack(values, plan.dtype), [place])
                    with T.Else():
                        T.buffer_store(ring, rest, [place])
        if early:
            wait_on_earlier()
    return made()


def located(plan: PersistentPlan, phase: PhasePlan, group: Expr, place: Expr) -> tuple[Expr, Expr, Expr]:
    """The first unit, of the group's, the batch row and the operand of a word of a slot."""
    part, lane = place % 4, place // 4 % 32
    tile, pair = place // 128 % plan.tiles, T.let("pair", place // (128 * plan.tiles))
    per_operand = plan.warps * phase.warp_pairs
    unit = T.let("unit", (pair % per_operand * PAIR + lane % 4 * 4 + part) * per_word(plan.dtype))
    rows = group if plan.heads == 1 else group // plan.heads
    return unit, T.let("row", rows * plan.rows + tile * 8 + lane // 4), pair // per_operand


def head_of(plan: PersistentPlan, group: Expr) -> Head | None:
    """The head that a group has, of a layer with heads."""
    return Head(T.let("head_first", group % plan.heads * plan.own), plan.own) if plan.heads > 1 else None
