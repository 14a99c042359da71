"""The small kernel before: the initial state into the exchange, zero where there is none, and counters."""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.builder import PrimFunc, T
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.persistent.exchange import pack
from ecornn.schedules.persistent_wide.exchange import place_of
from ecornn.schedules.persistent_wide.plan import SLOTS, SPACING, WidePlan
from ecornn.schedules.scalars.initial import BLOCKS, THREADS, declare_start, initial_values, start_thread


def start_kernel(task: Task, plan: WidePlan, layout: Hoisted, math: str) -> PrimFunc:
    """``start(T, B, <state>_in ..., vectors, [hoisted,] exchange, counters)``.

    Words beyond H, which pad the last chunks, are zero in both slots, and stay so.
    """
    with T.kernel("start") as made:
        kernel = declare_start(task, layout, math)
        exchange, counters = T.pointer("exchange", "uint32"), T.pointer("counters", "uint32")
        T.device_entry()
        T.note("before the recurrence: chunk counters to zero, the first state into the exchange")
        first = start_thread()
        with T.when(first < plan.groups * plan.counters):
            T.buffer_store(counters, T.uint32(0), [first * SPACING])
        with T.strided("place", plan.groups * SLOTS * plan.slot_words, first, BLOCKS * THREADS) as place:
            group = T.let("group", place // (SLOTS * plan.slot_words))
            unit, column, operand = place_of(plan, T.let("word", place % plan.slot_words))
            unit, column = T.let("unit", unit), T.let("column", column)
            row = T.let("row", group * plan.rows + column)
            slot = place // plan.slot_words % SLOTS
            given = T.And(slot == 0, T.And(unit < plan.hidden, column < plan.rows))
            with T.If(given if plan.operands == 1 else T.And(given, operand < plan.operands)):
                with T.Then():
                    values = initial_values(kernel, (unit, row, operand))
                    T.buffer_store(exchange, pack(values, plan.dtype), [place])
                with T.Else():
                    T.buffer_store(exchange, T.uint32(0), [place])
    return made()
