"""The code of the elementwise schedule: a thread has neighbouring units of one batch row for the whole sequence.

What a thread needs of hoisted inputs it copies itself, asynchronously, to a ring of slots in shared memory that
nobody else looks at, so that there is no barrier. Steps come in groups: the inputs of a group are waited for and
taken to registers, its steps are computed, unrolled, and the inputs of the group ``prefetch`` steps later are copied
to the slots that became free. (Loads to a ring of registers do as well for few steps ahead only: a warp waits for
several loads at once.)
"""

from __future__ import annotations

from collections.abc import Sequence

from ecornn.schedules.base import Knobs, Task, knob
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer
from ecornn.schedules.cuda.isa.copies import cp_async, cp_async_commit, cp_async_wait, cp_async_wait_all
from ecornn.schedules.cuda.isa.memory import ld_shared, st_global
from ecornn.schedules.cuda.isa.tensor_core import pack_pair
from ecornn.schedules.hoisted import Hoisted, Piece, hoisted_knob, hoisted_of
from ecornn.schedules.keeping import NOTHING, Spot, Stored, for_products, keeping
from ecornn.schedules.scalars.pointwise import MATH_TRADES, emit, invariants
from ecornn.schedules.sequence_kernel import SequenceKernel, written_by
from ecornn.schedules.timeline import row_arguments


class ElementwiseKnobs(Knobs):
    """The knobs of ``elementwise``."""

    units: int = knob("more units a thread: fewer and wider loads and stores; fewer: more threads")
    threads: int = knob("smaller blocks: spread over more multiprocessors; larger: fewer to start")
    prefetch: int = knob("steps that inputs are copied ahead: hides more of memory's latency, for shared memory")
    group: int = knob("more steps between waits for copies: fewer waits; fewer: less code and registers")
    hoisted: str = hoisted_knob()
    math: str = knob(MATH_TRADES)


def sequence_kernel(task: Task, cut: ElementwiseKnobs, blocks: int, kept: Stored = NOTHING) -> PrimFunc:
    """``sequence(T, B, hoisted, vectors, <state>_in, <state>_out, y, lengths, resets)``; of an adjoint's recurrence
    ``outputs`` in place of y; ``sequence_keeping`` stores what is ``kept``, too."""
    graph, w, hoisted, math = task.graph, task.workload, hoisted_of(task, cut.hoisted), cut.math
    columns = w.hidden // cut.units
    kinds = {"hoisted": hoisted.dtype} if graph.hoisted_outputs else {}
    kinds |= {"vectors": "float32"} | dict.fromkeys(written_by(task), w.dtype)
    kinds |= {f"{state}_{end}": w.dtype for state in graph.states for end in ("in", "out")}
    with T.kernel(keeping("sequence", kept)) as made:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = {name: T.pointer(name, kind) for name, kind in kinds.items()}
        arguments |= kept.arguments(w.dtype) | row_arguments(task.traversal)
        T.device_entry()
        block, thread = T.block(blocks), T.thread(cut.threads)
        ring = None
        if graph.hoisted_outputs:
            # (slot, piece, thread, word of the piece)
            ring = T.shared(ring_words(cut.prefetch, hoisted, cut.threads, cut.units))
        item = T.let("item", block * cut.threads + thread)
        row = T.let("row", item // columns)
        T.note("a thread takes its units of one batch row through all steps")
        with T.when(row < batch):
            unit = T.let("unit", item % columns * cut.units)
            kernel = SequenceKernel(task, hoisted, math, arguments, steps, batch, kept)
            _Units(kernel, cut, ring, thread, row, unit).run()
    return made()


def ring_words(prefetch: int, hoisted: Hoisted, threads: int, units: int) -> int:
    """Words of a block's ring in shared memory."""
    return prefetch * threads * hoisted.words(units)


class _Units:
    """Emits the code of a thread: units ``unit`` .. ``unit + count - 1`` of a row, in groups of ``group`` steps."""

    def __init__(self, kernel: SequenceKernel, cut: ElementwiseKnobs, ring: TirBuffer | None, thread: Expr, row: Expr,
                 unit: Expr) -> None:
        """``ring``: the block's shared memory, where there are hoisted values."""
        task, hoisted, batch, count, group = kernel.task, kernel.hoisted, kernel.batch, cut.units, cut.group
        self.task, self.graph, self.math, self.arguments = task, task.graph, kernel.math, kernel.arguments
        self.count, self.group, self.ring, self.thread = count, group, ring, thread
        self.threads, self.prefetch, self.hoisted = cut.threads, cut.prefetch, hoisted
        self.row, self.unit, self.kept = row, unit, kernel.kept
        self.steps, self.timeline = kernel.steps, kernel.timeline
        w, place = task.workload, task.traversal
        self.states = T.local("states", (len(self.graph.states), count), "float32")  # (state, unit)
        self.inputs = hoisted.registers(group, units=count)
        self.marks = T.local("marks", (group,), "int32") if place.resets else None  # a step of the group each
        # where hoisted inputs, y and kept states of the first step are, and how far apart steps are
        self.first = first = T.cast(self.timeline.at(T.int32(0)) * batch + row, "int64")
        self.apart = apart = T.cast(-batch if place.reverse else batch, "int64")
        self.input = T.let("inputs_first", first * hoisted.row)
        self.inputs_apart = T.let("inputs_apart", apart * hoisted.row)
        values = self.graph.written * w.hidden
        width, own = place.y_width(values), place.y_offset(values)
        if place.backward:
            width, own = self.task.row or len(self.graph.outputs) * w.hidden, 0
        self.output = T.let("y_first", first * width + (unit + own))
        self.outputs_apart = T.let("y_apart", apart * width)
        if self.kept:
            self.kept_first, self.kept_apart = self.output, self.outputs_apart  # where y has no other direction
        if self.kept and width > w.hidden:
            self.kept_first = T.let("kept_first", first * w.hidden + unit)
            self.kept_apart = T.let("kept_apart", apart * w.hidden)

    def run(self) -> None:
        """Emits the whole sequence."""
        H, group = self.task.workload.hidden, self.group
        T.note("prologue: copies of the first groups of steps (cp.async), constants, states")
        ahead = self.prefetch // group if self.ring is not None else 0  # groups
        for number in range(ahead):
            self._copy(T.int32(number), T.int32(number * group))
        self._mark(T.int32(0))
        values = [(v.var, [T.let(v.var.name, self.arguments["vectors"][k * H + self.unit + e])
                           for e in range(self.count)]) for k, v in enumerate(self.graph.vectors)]
        self.constants = [invariants(self.graph, {var: those[e] for var, those in values}, self.math)
                          for e in range(self.count)]
        self.limit = T.let("limit", self.timeline.limit(self.row))
        first = T.let("first", self.row * H + self.unit)
        for s, name in enumerate(self.graph.states):
            for e in range(self.count):
                T.buffer_store(self.states, T.cast(self.arguments[f"{name}_in"][first + e], "float32"), [s, e])
        groups = T.let("groups", self.steps // group)
        with T.serial("number", 0, groups) as number:
            T.note("a group of steps: wait for its inputs, carry them out, copy those of a group ahead")
            slot = T.let("slot", number % max(1, ahead) * group)
            if self.ring is not None:
                cp_async_wait(ahead - 1)
                for i in range(group):
                    self._take(i, slot)
            for i in range(group):
                self._step(i, T.let("t", number * group + i))
            if self.ring is not None:
                self._copy(T.let("group_ahead", number + ahead), slot)
            self._mark(T.let("next_group", number + 1))
        T.note("the steps that are no whole group")
        cp_async_wait_all()  # for the rest; and no thread leaves before its copies have landed
        slot = T.let("slot", groups % max(1, ahead) * group)
        for i in range(group - 1):
            t = T.let("t", groups * group + i)
            with T.when(t < self.steps):
                if self.ring is not None:
                    self._take(i, slot)
                self._step(i, t)
        T.note("epilogue: the last states")
        # an adjoint's may have been cleared since
        clears = self.timeline.fresh(self.steps, self.row, self.limit) if self.task.traversal.backward else None
        for s, name in enumerate(self.graph.states):
            for e, value in enumerate(self.timeline.started(clears, [self.states[s, e] for e in range(self.count)])):
                value = T.cast(value, self.task.workload.dtype)
                T.buffer_store(self.arguments[f"{name}_out"], value, [first + e])

    def _slot(self, slot: Expr, done: int, piece: Piece) -> Expr:
        """The pointer to this thread's piece in a slot, behind ``done`` words of the units."""
        assert self.ring is not None, "there are hoisted values"
        words = self.hoisted.words(self.count)
        return self.ring.ptr_to([(slot * words + done) * self.threads + self.thread * piece.words])

    def _copy(self, number: Expr, slot: Expr) -> None:
        """Begins to copy the inputs of a group of steps to the slots from ``slot`` on."""
        left = T.let("left", self.steps - number * self.group)
        first = T.let("first", self.input + T.cast(number * self.group, "int64") * self.inputs_apart)
        with T.If(left >= self.group):
            with T.Then():
                for i in range(self.group):
                    self._copy_step(T.let("step_at", first + i * self.inputs_apart), slot + i)
            with T.Else():
                for i in range(self.group - 1):
                    with T.when(left > i):
                        self._copy_step(T.let("step_at", first + i * self.inputs_apart), slot + i)
        cp_async_commit()

    def _copy_step(self, first: Expr, slot: Expr) -> None:
        done = 0
        for p in self.hoisted.pieces(self.count):
            source = self.arguments["hoisted"].ptr_to([first + (p.base + self.unit * p.apart)])
            cp_async(self._slot(slot, done, p), source, 4 * p.words)
            done += p.words

    def _take(self, i: int, slot: Expr) -> None:
        """Loads the inputs of a group's step i from the slots of the group."""
        done, kind = 0, "b32" if self.hoisted.packed else "f32"
        for p in self.hoisted.pieces(self.count):
            into = [self.inputs[i, done + k] for k in range(p.words)]
            ld_shared(into, self._slot(slot + i, done, p), kind)
            done += p.words

    def _mark(self, number: Expr) -> None:
        """Loads which of a group's steps begin a sequence; of the last step where there are no more."""
        for i in range(self.group if self.marks is not None else 0):
            t = T.let("t", T.min(number * self.group + i, self.steps - 1))
            T.buffer_store(self.marks, T.cast(self.timeline.mark(t, self.row), "int32"), [i])

    def _step(self, i: int, t: Expr) -> None:
        """Emits step t, the i-th of its group."""
        graph, timeline = self.graph, self.timeline
        live = timeline.live(t, self.limit)
        fresh = None if self.marks is None else timeline.starts(t, self.limit, self.marks[i])
        outputs: list[list[Expr]] = []  # of each unit
        kept_values: dict[Spot, list[Expr]] = {}
        loaded = [self.inputs[i, k] for k in range(self.hoisted.words(self.count))]
        inputs = self.hoisted.values(loaded, self.count)
        for e in range(self.count):
            stored = [T.let(f"{name}_before", self.states[s, e]) for s, name in enumerate(graph.states)]
            before = timeline.started(fresh, stored)
            env = self.constants[e] | dict(zip(graph.hoisted_outputs, inputs[e], strict=True))
            env = emit(graph.prologue, env | dict(zip(graph.states.values(), before, strict=True)), self.math)
            after = {name: timeline.masked(live, T.let(f"{name}_new", env[var]), old)
                     for (name, var), old in zip(graph.results.items(), before, strict=True)}
            for s, value in enumerate(after.values()):
                T.buffer_store(self.states, value, [s, e])
            made = [env[v] for v in graph.outputs]
            if not made and not self.task.traversal.backward:
                made = [after[graph.output]]
            outputs.append([for_products(timeline.masked(live, value, T.float32(0)), self.task) for value in made])
            for spot, value in self.kept.found(after, env).items():
                kept_values.setdefault(spot, []).append(timeline.masked(live, value, T.float32(0)))
        at = T.let("y_at", self.output + T.cast(t, "int64") * self.outputs_apart)
        for name in written_by(self.task):
            for o, made_here in enumerate(zip(*outputs, strict=True)):
                self._store(name, at + o * self.task.workload.hidden if o else at, made_here)
        if self.kept and self.kept_first is not self.output:
            at = T.let("kept_at", self.kept_first + T.cast(t, "int64") * self.kept_apart)
        rows = T.let("kept_row", self.first + T.cast(t, "int64") * self.apart) if self.kept.together else None
        for spot, values in kept_values.items():
            self._store(spot.buffer, at if spot.count == 1 or rows is None
                        else spot.at(rows, self.unit, self.task.workload.hidden), values)

    def _store(self, name: str, at: Expr, values: Sequence[Expr]) -> None:
        """Stores a step's values of the units, one beside the other."""
        into, dtype = self.arguments[name], self.task.workload.dtype
        if self.count == 1:
            T.buffer_store(into, T.cast(values[0], dtype), [at])
        elif dtype == "float32":
            st_global(into.ptr_to([at]), values, "f32")
        else:
            words = [pack_pair(values[e], values[e + 1], dtype) for e in range(0, self.count, 2)]
            st_global(into.ptr_to([at]), words)
