"""The small kernel before the persistent one: the initial state into the exchange, sentinels elsewhere.

It also clears the counters of the projection that runs beside.
"""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.analysis.liveness import before_first, late_operands
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa.launch import launch_dependents, wait_on_earlier
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.few_steps import short
from ecornn.schedules.gemm.projection import may_be_followed
from ecornn.schedules.gemm.rows_mma import LEAST_ROWS
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.persistent.exchange import SENTINEL, pack
from ecornn.schedules.persistent.plan import PAIR, PersistentPlan, PhasePlan
from ecornn.schedules.scalars.pointwise import emit, invariants, vectors_at
from ecornn.schedules.timeline import Timeline, row_arguments

THREADS = 256


@dataclass(frozen=True)
class Head:
    """The ``first`` unit of a head, and how many it has."""

    first: Expr
    units: int


def begins_early(task: Task, plan: PersistentPlan) -> bool:
    """Whether launches of a call begin while the one ahead of them ends: of short calls, behind a projection that reads
    and writes nothing of what ``start`` does. Such a call's launches are three then, in this order.

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


def start_kernel(task: Task, plan: PersistentPlan, layout: Hoisted, blocks: int, math: str,
                 early: bool = False) -> PrimFunc:
    """``start(T, B, <state>_in ..., vectors, [hoisted,] exchange_0 ..., ready)``; ``early``: as
    :func:`begins_early` says.

    Words beyond H, which pad the last k-tiles, are zero in every slot, and stay so.
    """
    from tvm.script.ir_builder import IRBuilder

    graph = task.graph
    big = T.int64(1 << 40)
    with IRBuilder() as builder, T.prim_func():
        T.func_name("start")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        states = {s: T.arg(f"{s}_in", T.buffer((big,), plan.dtype)) for s in graph.states}
        vectors = T.arg("vectors", T.buffer((big,), "float32"))
        hoisted = T.arg("hoisted", T.buffer((big,), layout.dtype)) if late_operands(graph) else None
        rows = row_arguments(task.traversal)
        timeline = Timeline(task.traversal, rows, steps, batch)
        rings = [T.arg(f"exchange_{i}", T.buffer((big,), "uint32")) for i in range(len(plan.phases))]
        ready = T.arg("ready", T.buffer((big,), "uint32")) if plan.workers else None
        T.device_entry()
        first = T.let("first", T.block(blocks) * THREADS + T.thread(THREADS))
        T.note("before the recurrence: counters to zero, the first state and sentinels into the rings")
        if early:
            launch_dependents()
        if ready is not None:
            counters = T.let("counters", (steps * batch + (LEAST_ROWS - 1)) // LEAST_ROWS)
            turns = T.let("turns", (counters + (blocks * THREADS - 1)) // (blocks * THREADS))
            with T.serial("turn", 0, turns) as turn, T.If(turn * (blocks * THREADS) + first < counters), T.Then():
                T.buffer_store(ready, T.uint32(0), [turn * (blocks * THREADS) + first])
        for index, (phase, ring) in enumerate(zip(plan.phases, rings, strict=True)):
            words = plan.slot_words(phase)
            total = plan.groups * plan.ring * words
            with T.serial("turn", 0, -(-total // (blocks * THREADS))) as turn:
                place = T.let("place", turn * (blocks * THREADS) + first)
                with T.If(place < total), T.Then():
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
                            values = initial_values(task, states, vectors, timeline, at, math, hoisted, layout,
                                                    head_of(plan, group))
                            T.buffer_store(ring, pack(values, plan.dtype), [place])
                        with T.Else():
                            T.buffer_store(ring, rest, [place])
        if early:
            wait_on_earlier()
    return builder.get()


def located(plan: PersistentPlan, phase: PhasePlan, group: Expr, place: Expr) -> tuple[Expr, Expr, Expr]:
    """The first unit, of the group's, the batch row and the operand of a word of a slot."""
    part, lane = place % 4, place // 4 % 32
    tile, pair = place // 128 % plan.tiles, T.let("pair", place // (128 * plan.tiles))
    per_operand = plan.warps * phase.warp_pairs
    unit = T.let("unit", (pair % per_operand * PAIR + lane % 4 * 4 + part) * per_word(plan.dtype))
    rows = group if plan.heads == 1 else group // plan.heads
    return unit, T.let("row", rows * plan.rows + tile * 8 + lane // 4), pair // per_operand


def head_of(plan: PersistentPlan, group: Expr) -> Head | None:
    """What a group has of a layer with heads."""
    return Head(T.let("head_first", group % plan.heads * plan.own), plan.own) if plan.heads > 1 else None


def initial_values(task: Task, states: dict[str, TirBuffer], vectors: TirBuffer, timeline: Timeline,
                   at: tuple[Expr, Expr, Expr], math: str, hoisted: TirBuffer | None = None,
                   layout: Hoisted | None = None, head: Head | None = None) -> list[Expr]:
    """What a word of the first phase's first slot holds, as one or two float32 values; ``hoisted``, in ``layout``,
    where operands take inputs."""
    unit, row, operand = at
    return [initial_operand(task, states, vectors, timeline, row, T.let("own_unit", unit + e), operand, math, hoisted,
                            layout, head)
            for e in range(per_word(task.workload.dtype))]


def initial_operand(task: Task, states: dict[str, TirBuffer], vectors: TirBuffer, timeline: Timeline, row: Expr,
                    unit: Expr, operand: Expr, math: str, hoisted: TirBuffer | None = None,
                    layout: Hoisted | None = None, head: Head | None = None) -> Expr:
    """The first phase's operand for the state that the call was given; zero outside of it. ``unit``: of the ``head``'s
    if there is one."""
    graph, H, batch = task.graph, task.workload.hidden, timeline.batch
    count = H if head is None else head.units
    nearest = T.min(unit, count - 1)
    at, b = T.let("at", nearest if head is None else head.first + nearest), T.let("b", T.min(row, batch - 1))
    env = invariants(graph, vectors_at(graph.vectors, vectors, H, at), math) if graph.prologue else {}
    from_row, inside = b, T.And(unit < count, row < batch)
    if task.traversal.sequences:
        number = T.let("number", timeline.number(0, b))
        from_row, inside = T.cast(timeline.sequence(T.max(number, 0)), "int64"), T.And(inside, number >= 0)
    given = [T.let(f"{name}_given", T.cast(states[name][from_row * H + at], "float32")) for name in graph.states]
    env |= zip(graph.states.values(), timeline.started(timeline.fresh(0, b, timeline.limit(b)), given),
               strict=True)
    if late_operands(graph) and layout is not None:
        first = T.cast(timeline.at(T.int32(0)) * batch + b, "int64")
        env |= zip(graph.hoisted_outputs, layout.values(layout.load(hoisted, first, at))[0], strict=True)
    env = emit(before_first(graph), env, math)
    value = env[graph.phases[0].operands[0]]
    for i, other in enumerate(graph.phases[0].operands[1:], 1):
        value = T.Select(operand == i, env[other], value)
    return T.let("operand", T.Select(inside, value, T.float32(0)))
