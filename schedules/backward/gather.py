"""The states before each step, of all steps at once, from those after each step and the first ones.

    before[t, b] = the state that step t of row b began with; zero where a sequence starts there, and where the row
                   takes no part in the step

Of sequences in columns that is each one's first state where it begins, and where it goes on in a neighbouring column
the state that the piece there ended with, which a search of the table finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ecornn.program import EARLIER, LATER, WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.backward.memory import Memory, read_before
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa import ld_global, st_global
from ecornn.schedules.gemm.job import Columns
from ecornn.schedules.timeline import Timeline, row_arguments
from ecornn.workload import Traversal

THREADS = 256
BLOCKS = 8  # a multiprocessor


def gathered(memory: Memory, chunked: bool = False) -> list[Component]:
    """``before_<state>`` of each state that is read, from ``<state>_kept`` or y, ``<state>_in``, lengths and resets.
    ``chunked``: of a chunk, whose neighbours lie around it."""
    return [_gather(memory, state, chunked) for state in read_before(memory.adjoint, memory.kept)]


def _gather(memory: Memory, state: str, chunked: bool) -> Component:
    w, after, before = memory.task.workload, memory.after(state), memory.before(state)
    blocks, of_y = BLOCKS * memory.task.device.cores, after.name == "y"
    function = "gather_y" if of_y else "gather"
    names = {"after": after.name, "before": before.name, "first": f"{state}_in"}
    return Component({function: _kernel(memory.task, function, after, before.stride, blocks, chunked)},
                     (Buffer(before.name, WORKSPACE, w.dtype, Extent(0, w.batch * before.stride)),),
                     (Launch(function, blocks, THREADS, names=names),))


def _kernel(task: Task, name: str, source: Columns, stride: int, blocks: int, chunked: bool) -> PrimFunc:
    """``(T, B, first_step, all_steps, after, first, before, lengths, resets)``: threads take some neighbouring units
    each, as many as are 16 bytes, if rows are aligned to these. ``stride``: of what is made."""
    w, traversal = task.workload, task.traversal
    span = source.together(16 // w.itemsize)
    chunks = w.hidden // span
    with T.kernel(name) as made:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        first_step, left = (T.arg("first_step", T.int32()), T.arg("all_steps", T.int32())) if chunked else (0, steps)
        after, before, first = (T.pointer(n, w.dtype) for n in ("after", "before", "first"))
        masks = row_arguments(traversal)
        T.device_entry()
        T.note("the state before each step: that after the one before it, or the sequence's first one")
        thread = T.block(blocks) * THREADS + T.thread(THREADS)
        with T.items(T.cast(steps * batch, "int64") * chunks, thread, blocks * THREADS) as item:
            row, unit = T.let("row", T.cast(item // chunks, "int32")), T.let("unit", item % chunks * span)
            if traversal.sequences:
                origin = _of_sequences(Timeline(traversal, masks, steps, batch), row)
            else:
                origin = _of_rows(traversal, masks, row, batch, steps, first_step, left, chunked)
            words = span * w.itemsize // 4  # none: a single value of 16 bits
            values = T.local("values", (max(1, words),), "uint32" if words else w.dtype)
            for k in range(max(1, words)):
                T.buffer_store(values, T.uint32(0) if words else T.cast(T.float32(0), w.dtype), [k])
            with T.when(T.And(T.Not(origin.zero), T.Not(origin.earliest))):
                _load(values, words, after, source.place(origin.beside, unit))
            with T.when(T.And(T.Not(origin.zero), origin.earliest)):
                _load(values, words, first, T.cast(origin.first, "int64") * w.hidden + unit)
            place = T.let("place", T.cast(row, "int64") * stride + unit)
            if words:
                st_global(before.ptr_to([place]), [values[k] for k in range(words)])
            else:
                T.buffer_store(before, values[0], [place])
    return made()


@dataclass(frozen=True)
class _Origin:
    """The origin of a row's state before its step: none if ``zero``; row ``first`` of the first states if ``earliest``;
    else the state after the step of row ``beside``."""

    zero: Expr
    earliest: Expr
    beside: Expr
    first: Expr


def _of_rows(traversal: Traversal, masks: Mapping[str, TirBuffer], row: Expr, batch: Expr, steps: Expr,
             first_step: Expr, left: Expr, chunked: bool) -> _Origin:
    """The origin if each row of the batch is one sequence, but for resets."""
    back = traversal.reverse
    t, b = T.let("t", row // batch), T.let("b", row % batch)
    after_this = left - first_step if chunked else steps
    end = T.let("end", T.min(masks["lengths"][b], after_this) if traversal.lengths else after_this)
    earliest = T.let("earliest", t >= end - 1 if back else t + first_step == 0 if chunked else t == 0)
    zero: Expr = t >= end
    if traversal.resets:
        step = T.Select(earliest, t, t + 1) if back else t
        mark = masks["resets"][T.cast(step * batch + b, "int64")] != T.uint8(0)
        zero = T.Or(zero, T.And(T.Not(earliest), mark) if back else mark)
    return _Origin(zero, earliest, row + batch if back else row - batch, b)


def _of_sequences(timeline: Timeline, row: Expr) -> _Origin:
    """The origin if each column has one sequence or piece after the other."""
    steps, batch, table = timeline.steps, timeline.batch, timeline.arguments["sequences"]
    back = timeline.traversal.reverse
    number, beside = T.let("number", table[row]), T.let("beside", row + batch if back else row - batch)
    inside = T.let("inside", beside < steps * batch if back else beside >= 0)
    begins = T.let("begins", T.Or(T.Not(inside), table[T.Select(inside, beside, row)] != number))
    goes_on = T.let("goes_on", T.And(begins, T.And(number >= 0, timeline.continues(number))))
    at = T.variable("at", "int32", beside)
    with T.when(goes_on):
        other = T.let("other", T.bitwise_xor(number, EARLIER + LATER))  # as its other piece is marked
        column = T.let("column", row % batch + timeline.other)
        # the first steps of a column, of which the last one is looked for; or in reverse the last ones
        mine, others = T.local("mine", (1,), "int32"), T.local("others", (1,), "int32")
        T.buffer_store(mine, steps - 1 if back else T.int32(0), [0])
        T.buffer_store(others, T.int32(-1) if back else steps, [0])
        with T.While(mine[0] - others[0] > 1 if back else others[0] - mine[0] > 1):
            middle = T.let("middle", (mine[0] + others[0]) // 2)
            same = T.let("same", table[middle * batch + column] == other)
            T.buffer_store(mine, T.Select(same, middle, mine[0]), [0])
            T.buffer_store(others, T.Select(same, others[0], middle), [0])
        T.buffer_store(at, mine[0] * batch + column, [0])
    first = timeline.sequence(T.max(number, 0))
    return _Origin(number < 0, T.let("earliest", T.And(begins, T.Not(goes_on))), at[0], first)


def _load(values: TirBuffer, words: int, buffer: TirBuffer, place: Expr) -> None:
    if words:
        ld_global([values[k] for k in range(words)], buffer.ptr_to([place]))
    else:
        T.buffer_store(values, buffer[place], [0])
