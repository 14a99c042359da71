"""The places of the values of a backward pass: rows are those of T*B in x's time, whatever the direction.

    x, dx                 (T, B, I), and behind it H of each of the cell's inputs; of x there may be ``x_aligned``
    y, dy                 (T, B, W), this direction's H of each output from an offset on; y is zero where a row takes
                          no part
    <state>_kept          (T, B, H), a state after each step; of the output state that is y
    values_kept           (T, B, V H), with keep="gates" other values of each step, as many as ``outputs`` are
    value<n>_kept         (T, B, H), any more of them
    before_<state>        (T, B, P), a state before each step, by ``gathered``: H values, padded to 16 bytes
    hoisted               what the recurrence reads, as ``Hoisted`` lays it out; by ``replay``
    outputs               (T, B, P), what the recurrence writes: ``written``, O H values; zero where a row takes no
                          part; with TF32 each value is ``raised``. Padded to lines of memory; may lie in values_kept
    last_<state>          (B, H), a state of the recurrence after its last step; (S, H) of S sequences in columns
    d_<parameter>         gradients, float32, in te shape
    d_<state>_in          (B, H) or (S, H), gradients of first states
    count                 (1,), int32, S, which is T*B at most

All of the layer's data type, where nothing else is said. A long sequence goes in chunks of time
(``schedules/chunks.py``): workspaces then have a chunk's rows.

The state before a step is zero where a sequence starts there, and where the row takes no part in the step. Of sequences
in columns it is each one's first state, or what a piece in a neighbouring column ended with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.kept import Kept
from ecornn.analysis.step import StepGraph
from ecornn.program import EARLIER, LATER, WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var
from ecornn.schedules.cuda.isa import ld_global, st_global
from ecornn.schedules.cuda.isa.tensor_core import lowered, pack, unpack, words
from ecornn.schedules.gemm.job import BATCH, SEQUENCES, Columns, whole_chunks
from ecornn.schedules.gemm.projection import x_of
from ecornn.schedules.keeping import outputs_row, spot, together, written
from ecornn.schedules.rates import light
from ecornn.schedules.timeline import Timeline, row_arguments
from ecornn.workload import Traversal

Within = Callable[[Expr, int], Expr]  # (unit, e) -> unit + e, or one that there is


@dataclass(frozen=True)
class Place:
    columns: Columns
    dtype: str

    def load(self, arguments: Mapping[str, TirBuffer], row: Expr, unit: Expr, within: Within, span: int,
             aligned: bool = False) -> list[Expr]:
        """``span`` (1, 2 or 4) units, float32; ``unit``: a multiple. ``aligned``: so is the place of all of them."""
        values = self._as_stored(arguments, row, unit, within, span, aligned)
        return [lowered(value) for value in values] if self.columns.raised else values

    def _as_stored(self, arguments: Mapping[str, TirBuffer], row: Expr, unit: Expr, within: Within, span: int,
                   aligned: bool) -> list[Expr]:
        buffer, columns = arguments[self.columns.name], self.columns
        if span == 1 or not (aligned or columns.together(span) == span):
            places = [columns.place(row, within(unit, e)) for e in range(span)]
            return [T.let("value", T.cast(buffer[place], "float32")) for place in places]
        first = buffer.ptr_to([columns.place(row, unit)])
        if self.dtype == "float32":
            loaded = T.local("loaded", (span,), "float32")
            ld_global([loaded[e] for e in range(span)], first, "f32")
            return [loaded[e] for e in range(span)]
        loaded = T.local("loaded", (words(span, self.dtype),), "uint32")
        each = [loaded[k] for k in range(words(span, self.dtype))]
        ld_global(each, first)
        return unpack(each, span, self.dtype)

    def store(self, arguments: Mapping[str, TirBuffer], row: Expr, unit: Expr, values: Sequence[Expr]) -> None:
        """Stores ``values`` of as many neighbouring units, from ``unit`` on, but not those beyond the last unit."""
        buffer, columns, span = arguments[self.columns.name], self.columns, len(values)
        if span == 1 or columns.together(span) < span:
            for e, value in enumerate(values):
                with T.when(unit + e < columns.width):
                    T.buffer_store(buffer, T.cast(value, self.dtype), [columns.place(row, unit + e)])
            return
        first = buffer.ptr_to([columns.place(row, unit)])
        if self.dtype == "float32":
            st_global(first, values, "f32")
        else:
            st_global(first, pack(values, self.dtype))


def read_before(adjoint: Adjoint, kept: Kept) -> tuple[str, ...]:
    return tuple(n for n, leaf in adjoint.forward.states.items() if leaf in {*adjoint.needed, *kept.replay.given})


@dataclass(frozen=True)
class Memory:
    task: Task
    adjoint: Adjoint
    kept: Kept

    @property
    def forward(self) -> StepGraph:
        return self.adjoint.forward

    @property
    def dtype(self) -> str:
        return self.task.workload.dtype

    @property
    def each_state(self) -> str:
        return rows_of_states(self.task.traversal)  # the kind of rows that states have, of :func:`rows_of_states`

    def y(self, name: str, output: int = 0) -> Columns:
        """y, or its gradient; of several outputs the one of that number."""
        H, traversal = self.task.workload.hidden, self.task.traversal
        own = self.adjoint.forward.written * H
        return Columns(name, H, traversal.y_width(own), traversal.y_offset(own) + output * H)

    def after(self, state: str) -> Columns:
        H = self.task.workload.hidden
        return self.y("y") if state == self.adjoint.forward.output else Columns(f"{state}_kept", H, H)

    def before(self, state: str) -> Columns:
        H = self.task.workload.hidden
        return Columns(f"before_{state}", H, whole_chunks(H, self.task.workload.itemsize))

    @property
    def outputs_row(self) -> int:
        return outputs_row(self.task, self.adjoint)  # values from one row of ``outputs`` to the next

    @property
    def x(self) -> Columns:
        return x_of(self.task)  # the columns from which products and steps read x

    def inputs(self, name: str, dtype: str) -> dict[Var, Place]:
        """The cell's inputs in the rows of x, or of dx."""
        w = self.task.workload
        return {v: Place(Columns(name, w.hidden, w.input, at), dtype)
                for v, at in self.adjoint.forward.input_offsets(w.input, w.hidden).items()}

    def leaves(self) -> dict[Var, Place]:
        """The places of the values that each step has before the recurrence begins."""
        forward, H = self.adjoint.forward, self.task.workload.hidden
        found = {forward.results[n]: Place(self.after(n), self.dtype) for n in self.kept.states}
        several = together(self.task, self.adjoint, len(self.kept.values))
        for number, var in enumerate(self.kept.values):
            at = spot(number, several)
            found[var] = Place(Columns(at.buffer, H, at.count * H, at.number * H), self.dtype)
        found |= {forward.states[n]: Place(self.before(n), self.dtype) for n in read_before(self.adjoint, self.kept)}
        if forward.x is not None:
            found[forward.x] = Place(self.x, self.dtype)
        found |= self.inputs("x", self.dtype)
        return found | {v: Place(self.y("dy", n), self.dtype) for n, v in enumerate(self.adjoint.dys)}

    def outputs(self) -> dict[Var, Place]:
        H, row, raised = self.task.workload.hidden, self.outputs_row, self.task.workload.arithmetic == "tf32"
        return {v: Place(Columns("outputs", H, row, o * H, raised), self.dtype)
                for o, v in enumerate(written(self.adjoint))}

    def last(self) -> dict[Var, Place]:
        H, graph = self.task.workload.hidden, self.adjoint.recurrence
        return {v: Place(Columns(f"last_{n}", H, H), self.dtype) for n, v in graph.states.items()}


@dataclass
class Workspaces:
    """Workspaces in the making: places for values one beside the other, (rows, N, H) in all."""

    name: str
    dtype: str
    units: int
    role: str
    variables: list[Var] = field(default_factory=list)

    def add(self, variables: Iterable[Var]) -> None:
        """Makes room for the variables that have none yet."""
        self.variables += [v for v in dict.fromkeys(variables) if not any(v.same_as(o) for o in self.variables)]

    def places(self) -> dict[Any, Place]:
        stride = len(self.variables) * self.units
        return {v: Place(Columns(self.name, self.units, stride, n * self.units), self.dtype)
                for n, v in enumerate(self.variables)}

    def buffers(self, batch: int, each: str) -> tuple[Buffer, ...]:
        """The buffer, if anything is in it; ``each``: the kind of its rows; there may be as many sequences as steps."""
        size = batch * len(self.variables) * self.units
        return (Buffer(self.name, self.role, self.dtype, rows_extent(each, size)),) if size else ()


def rows_of_states(traversal: Traversal) -> str:
    """The kind of rows that first and last states have: ``each`` of a :class:`~ecornn.schedules.gemm.job.Job`."""
    return SEQUENCES if traversal.sequences else BATCH


def rows_extent(each: str, size: int) -> Extent:
    """``size`` elements for each row of the compiled batch, in each step where there may be as many rows."""
    return Extent(size) if each == BATCH else Extent(0, size)


def materialized(memory: Memory) -> tuple[Workspaces, Workspaces]:
    """Forward values that passes after the recurrence read and memory lacks: factors; others, in float32."""
    back, H = memory.adjoint, memory.task.workload.hidden
    multiplied = Workspaces("replayed", memory.dtype, H, WORKSPACE)
    read = Workspaces("replayed_values", "float32", H, WORKSPACE)
    known = memory.leaves().keys() | memory.outputs().keys()
    replayed = set(memory.kept.replay.outputs)
    outers = (*back.recurrence.outer_products, *back.inputs.outer_products)
    multiplied.add(v for o in outers for v in (o.value, o.operand) if v is not None and v in replayed - known)
    read.add(v for v in back.inputs.given if v in replayed - known)
    return multiplied, read


def replayed(memory: Memory) -> dict[Var, Place]:
    multiplied, read = materialized(memory)
    return {**multiplied.places(), **read.places()}


def finish_summed(memory: Memory) -> Workspaces:
    """The workspace of values that remain to be summed over the batch, float32."""
    found = Workspaces("finish_summed", "float32", memory.task.workload.hidden, WORKSPACE)
    found.add(s.value for s in memory.adjoint.finish.sums)
    return found


THREADS = 256
BLOCKS = 8  # a multiprocessor


def gathered(memory: Memory, chunked: bool = False) -> list[Component]:
    """``before_<state>`` of each state that is read; ``chunked``: of a chunk, whose neighbours lie around it."""
    w, cores, found = memory.task.workload, memory.task.device.cores, []
    few = -(-w.seq * w.batch * w.hidden // (THREADS * 16 // w.itemsize))  # blocks, if each thread has 16 bytes
    blocks = cores * (min(BLOCKS, -(-few // cores)) if light(memory.task) else BLOCKS)
    for state in read_before(memory.adjoint, memory.kept):
        after, before = memory.after(state), memory.before(state)
        function = "gather_y" if after.name == "y" else "gather"
        names = {"after": after.name, "before": before.name, "first": f"{state}_in"}
        found.append(Component({function: _kernel(memory.task, function, after, before.stride, blocks, chunked)},
                               (Buffer(before.name, WORKSPACE, w.dtype, Extent(0, w.batch * before.stride)),),
                               (Launch(function, blocks, THREADS, names=names),)))
    return found


def _kernel(task: Task, name: str, source: Columns, stride: int, blocks: int, chunked: bool) -> PrimFunc:
    """Threads take 16 bytes of neighbouring units each, if rows are aligned to these. ``stride``: of what is made."""
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
    """The state before a row's step: ``zero``, row ``first`` of first states, or that after row ``beside``'s step."""

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
