"""The small kernel before: the initial state into the exchange, zero where there is none, and counters."""

from __future__ import annotations

from ecornn.analysis.liveness import late_operands
from ecornn.schedules.base import Task
from ecornn.schedules.builder import PrimFunc, T
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.persistent.exchange import pack
from ecornn.schedules.persistent.start import initial_operand
from ecornn.schedules.persistent_wide.exchange import place_of
from ecornn.schedules.persistent_wide.plan import SLOTS, SPACING, WidePlan
from ecornn.schedules.timeline import Timeline, row_arguments

THREADS = 256


def start_kernel(task: Task, plan: WidePlan, layout: Hoisted, blocks: int, math: str) -> PrimFunc:
    """``start(T, B, <state>_in ..., vectors, [hoisted,] exchange, counters)``.

    Words beyond H, which pad the last chunks, are zero in both slots, and stay so.
    """
    from tvm.script.ir_builder import IRBuilder

    graph, big = task.graph, T.int64(1 << 40)
    with IRBuilder() as builder, T.prim_func():
        T.func_name("start")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        states = {s: T.arg(f"{s}_in", T.buffer((big,), plan.dtype)) for s in graph.states}
        vectors = T.arg("vectors", T.buffer((big,), "float32"))
        hoisted = T.arg("hoisted", T.buffer((big,), layout.dtype)) if late_operands(graph) else None
        rows = row_arguments(task.traversal)
        timeline = Timeline(task.traversal, rows, steps, batch)
        exchange = T.arg("exchange", T.buffer((big,), "uint32"))
        counters = T.arg("counters", T.buffer((big,), "uint32"))
        T.device_entry()
        T.note("before the recurrence: chunk counters to zero, the first state into the exchange")
        first = T.let("first", T.block(blocks) * THREADS + T.thread(THREADS))
        with T.If(first < plan.groups * plan.counters), T.Then():
            T.buffer_store(counters, T.uint32(0), [first * SPACING])
        total = plan.groups * SLOTS * plan.slot_words
        with T.serial("turn", 0, -(-total // (blocks * THREADS))) as turn:
            place = T.let("place", turn * (blocks * THREADS) + first)
            with T.If(place < total), T.Then():
                group = T.let("group", place // (SLOTS * plan.slot_words))
                unit, column, operand = place_of(plan, T.let("word", place % plan.slot_words))
                unit, column = T.let("unit", unit), T.let("column", column)
                row = T.let("row", group * plan.rows + column)
                slot = place // plan.slot_words % SLOTS
                given = T.And(slot == 0, T.And(unit < plan.hidden, column < plan.rows))
                with T.If(given if plan.operands == 1 else T.And(given, operand < plan.operands)):
                    with T.Then():
                        values = [initial_operand(task, states, vectors, timeline, row, T.let("own_unit", unit + e),
                                                  operand, math, hoisted, layout) for e in range(2)]
                        T.buffer_store(exchange, pack(values, plan.dtype), [place])
                    with T.Else():
                        T.buffer_store(exchange, T.uint32(0), [place])
    return builder.get()
