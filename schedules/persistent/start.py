"""The small kernel before the persistent one: the initial state into the exchange, sentinels elsewhere.

It also clears the counters of the projection that runs beside.
"""

from __future__ import annotations

from typing import Any

from ecornn.schedules.base import Task
from ecornn.schedules.persistent.exchange import SENTINEL, pack
from ecornn.schedules.persistent.plan import PAIR, PhasePlan, Plan
from ecornn.schedules.pointwise import emit, invariants, opening
from ecornn.schedules.projection import LEAST_ROWS
from ecornn.schedules.tensor_core import per_word
from ecornn.schedules.timeline import Timeline, row_arguments

THREADS = 256


def start_kernel(task: Task, plan: Plan, blocks: int, math: str) -> Any:
    """``start(T, B, <state>_in ..., vectors, exchange_0 ..., ready)``.

    Words beyond H, which pad the last k-tiles, are zero in every slot, and stay so.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    graph = task.graph
    big = T.int64(1 << 40)
    with IRBuilder() as builder, T.prim_func():
        T.func_name("start")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        states = {s: T.arg(f"{s}_in", T.buffer((big,), plan.dtype)) for s in graph.states}
        vectors = T.arg("vectors", T.buffer((big,), "float32"))
        rows = row_arguments(T, task.place)
        timeline = Timeline(T, task.place, rows, steps, batch)
        rings = [T.arg(f"exchange_{i}", T.buffer((big,), "uint32")) for i in range(len(plan.phases))]
        ready = T.arg("ready", T.buffer((big,), "uint32")) if plan.workers else None
        T.device_entry()
        first = T.Bind(T.cta_id([blocks]) * THREADS + T.thread_id([THREADS]))
        if ready is not None:
            counters = T.Bind((steps * batch + (LEAST_ROWS - 1)) // LEAST_ROWS)
            turns = T.Bind((counters + (blocks * THREADS - 1)) // (blocks * THREADS))
            with T.serial(0, turns) as turn, T.If(turn * (blocks * THREADS) + first < counters), T.Then():
                T.buffer_store(ready, T.uint32(0), [turn * (blocks * THREADS) + first])
        for index, (phase, ring) in enumerate(zip(plan.phases, rings, strict=True)):
            words = plan.slot_words(phase)
            total = plan.groups * plan.ring * words
            with T.serial(0, -(-total // (blocks * THREADS))) as turn:
                place = T.Bind(turn * (blocks * THREADS) + first)
                with T.If(place < total), T.Then():
                    within = T.Bind(place % words)
                    slot, group = T.Bind(place // words % plan.ring), T.Bind(place // (words * plan.ring))
                    at = located(T, plan, phase, group, within)
                    rest = T.Bind(T.Select(at[0] < plan.hidden, T.uint32(SENTINEL), T.uint32(0)))
                    if index:
                        T.buffer_store(ring, rest, [place])
                        continue
                    with T.If(slot == 0):
                        with T.Then():
                            values = initial_values(T, task, states, vectors, timeline, at, math)
                            T.buffer_store(ring, pack(values, plan.dtype), [place])
                        with T.Else():
                            T.buffer_store(ring, rest, [place])
    return builder.get()


def located(T: Any, plan: Plan, phase: PhasePlan, group: Any, place: Any) -> tuple[Any, Any, Any]:
    """The first unit, the batch row and the operand of a word of a slot."""
    part, lane = place % 4, place // 4 % 32
    tile, pair = place // 128 % plan.tiles, T.Bind(place // (128 * plan.tiles))
    per_operand = plan.warps * phase.warp_pairs
    unit = T.Bind((pair % per_operand * PAIR + lane % 4 * 4 + part) * per_word(plan.dtype))
    return unit, T.Bind(group * plan.rows + tile * 8 + lane // 4), pair // per_operand


def initial_values(T: Any, task: Task, states: dict[str, Any], vectors: Any, timeline: Timeline,
                   at: tuple[Any, Any, Any], math: str) -> list[Any]:
    """What a word of the first phase's first slot holds, as one or two float32 values."""
    unit, row, operand = at
    return [initial_operand(T, task, states, vectors, timeline, row, T.Bind(unit + e), operand, math)
            for e in range(per_word(task.workload.dtype))]


def initial_operand(T: Any, task: Task, states: dict[str, Any], vectors: Any, timeline: Timeline, row: Any,
             unit: Any, operand: Any, math: str) -> Any:
    """The first phase's operand for the state that the call was given; zero outside of it."""
    graph, H, batch = task.graph, task.workload.hidden, timeline.batch
    at, b = T.Bind(T.min(unit, H - 1)), T.Bind(T.min(row, batch - 1))
    env = {v.var: T.Bind(vectors[i * H + at]) for i, v in enumerate(graph.vectors)} if graph.prologue else {}
    env = invariants(graph, env, math) if graph.prologue else env
    from_row, inside = b, T.And(unit < H, row < batch)
    if task.place.sequences:
        number = T.Bind(timeline.number(0, b))
        from_row, inside = T.cast(timeline.sequence(T.max(number, 0)), "int64"), T.And(inside, number >= 0)
    given = [T.Bind(T.cast(states[name][from_row * H + at], "float32")) for name in graph.states]
    env |= zip(graph.states.values(), timeline.started(timeline.fresh(0, b, timeline.limit(b)), given),
               strict=True)
    env = emit(opening(graph), env, math)
    value = env[graph.phases[0].operands[0]]
    for i, other in enumerate(graph.phases[0].operands[1:], 1):
        value = T.Select(operand == i, env[other], value)
    return T.Bind(T.Select(inside, value, T.float32(0)))
