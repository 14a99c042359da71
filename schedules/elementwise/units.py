"""A thread that goes through steps of a few units: copies of hoisted inputs, waits, groups of unrolled steps.

It copies what it needs of hoisted inputs itself, asynchronously, to its own slots in shared memory, so without
barriers. A group of steps is waited for, taken to registers and computed, unrolled; then the inputs ``prefetch`` steps
ahead are copied. (Loads to registers suffer for more than a few steps ahead: a warp waits for several loads at once.)
Subclasses say what a step is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ecornn.analysis import Assign
from ecornn.schedules.base import Knobs, Task, knob
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda.isa import cp_async, cp_async_commit, cp_async_wait, cp_async_wait_all, ld_shared, st_global
from ecornn.schedules.cuda.isa.tensor_core import pack
from ecornn.schedules.hoisted import Hoisted, Piece, hoisted_knob, hoisted_of
from ecornn.schedules.keeping import NOTHING, Spot, Stored, for_products
from ecornn.schedules.scalars.pointwise import MATH_TRADES, emit, invariants
from ecornn.schedules.sequence_kernel import SequenceKernel, written_by
from ecornn.schedules.timeline import row_arguments


class ElementwiseKnobs(Knobs):
    units: int = knob("units of a thread. More: fewer and wider loads and stores; fewer: more threads")
    threads: int = knob("threads in a block. Fewer: work for more multiprocessors; more: fewer blocks to start")
    prefetch: int = knob("steps by which inputs are copied ahead. More: more latency is hidden, but more shared memory")
    group: int = knob("steps between waits for copies. More: fewer waits; fewer: less code and fewer registers")
    hoisted: str = hoisted_knob()
    math: str = knob(MATH_TRADES)


def ring_words(cut: ElementwiseKnobs, hoisted: Hoisted) -> int:
    return cut.prefetch * cut.threads * hoisted.words(cut.units)  # words of a block's ring in shared memory


@dataclass(frozen=True)
class UnitThread:
    """A thread of a kernel, and the units that it has of a batch row."""

    kernel: SequenceKernel
    cut: ElementwiseKnobs
    ring: TirBuffer | None  # the block's shared memory, where there are hoisted values: (slot, piece, thread, word)
    thread: Expr  # in its block
    row: Expr
    unit: Expr  # the first one


def units_kernel(name: str, task: Task, cut: ElementwiseKnobs, kinds: Mapping[str, str],
                 code: Callable[[UnitThread, Expr], None], parts: int = 1, kept: Stored = NOTHING) -> PrimFunc:
    """A kernel with a thread for ``units`` neighbouring units of a batch row, in each of ``parts`` blocks of blocks.
    ``kinds``: its parameters beside ``T, B``, masks and what is ``kept``, flat, with their types. ``code`` emits the
    code of a thread, which is given with the number of its part."""
    hoisted, columns, blocks = hoisted_of(task, cut.hoisted), task.workload.hidden // cut.units, blocks_of(task, cut)
    with T.kernel(name) as made:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = {name: T.pointer(name, kind) for name, kind in kinds.items()}
        arguments |= kept.arguments(task.workload.dtype) | row_arguments(task.traversal)
        T.device_entry()
        block, thread = T.block(blocks * parts), T.thread(cut.threads)
        ring = T.shared(ring_words(cut, hoisted)) if task.graph.hoisted_outputs else None
        item = T.let("item", (block if parts == 1 else block % blocks) * cut.threads + thread)
        row = T.let("row", item // columns)
        T.note("a thread takes its units of one batch row through all steps" if parts == 1 else
               "a thread takes its units of one batch row through the steps of its chunk")
        with T.when(row < batch):
            unit = T.let("unit", item % columns * cut.units)
            kernel = SequenceKernel(task, hoisted, cut.math, arguments, steps, batch, kept)
            code(UnitThread(kernel, cut, ring, thread, row, unit), block // blocks)
    return made()


def recurrence_kinds(task: Task, cut: ElementwiseKnobs) -> dict[str, str]:
    """The parameters of a kernel of whole steps, with their types."""
    graph, w = task.graph, task.workload
    kinds = {"hoisted": hoisted_of(task, cut.hoisted).dtype} if graph.hoisted_outputs else {}
    kinds |= {"vectors": "float32"} | dict.fromkeys(written_by(task), w.dtype)
    return kinds | {f"{state}_{end}": w.dtype for state in graph.states for end in ("in", "out")}


def blocks_of(task: Task, cut: ElementwiseKnobs) -> int:
    """Blocks whose threads have all units of all rows."""
    return ceil_div(task.workload.batch * task.workload.hidden, cut.units * cut.threads)


@dataclass(frozen=True)
class Span:
    """Steps ``first .. first + count - 1`` of a sequence, which a thread goes through; none where ``count`` is 0."""

    first: Expr
    count: Expr


class Units(ABC):
    """Emits the code of a thread: units ``unit`` .. ``unit + count - 1`` of a row, in groups of ``group`` steps."""

    def __init__(self, of: UnitThread, states: Iterable[str], span: Span | None = None) -> None:
        """``states``: those that the thread keeps in registers; ``span``: the steps, by default all."""
        kernel, cut, row = of.kernel, of.cut, of.row
        task, hoisted, batch, count, group = kernel.task, kernel.hoisted, kernel.batch, cut.units, cut.group
        self.task, self.graph, self.math, self.arguments = task, task.graph, kernel.math, kernel.arguments
        self.hoisted, self.kept, self.timeline = hoisted, kernel.kept, kernel.timeline
        self.all_steps, self.batch, self.span = kernel.steps, batch, span
        self.steps = kernel.steps if span is None else span.count
        self.count, self.group, self.threads, self.prefetch = count, group, cut.threads, cut.prefetch
        self.ring, self.thread, self.row, self.unit = of.ring, of.thread, row, of.unit
        self.kept_states = {name: s for s, name in enumerate(states)}
        place = task.traversal
        self.states: TirBuffer = (T.local("states", (len(self.kept_states), count), "float32") if self.kept_states
                                  else None)
        self.inputs = hoisted.registers(group, units=count)
        self.marks = T.local("marks", (group,), "int32") if place.resets else None  # a step of the group each
        # where hoisted inputs, y and kept states of the first step are, and how far apart steps are
        at = self.timeline.at(T.int32(0) if span is None else span.first)
        self.first = T.cast(at * batch + row, "int64")
        self.apart = T.cast(-batch if place.reverse else batch, "int64")
        self.input = T.let("inputs_first", self.first * hoisted.row)
        self.inputs_apart = T.let("inputs_apart", self.apart * hoisted.row)

    @abstractmethod
    def begin(self, first: Expr) -> None:
        """Fills registers before the first step; ``first``: the place of the units in an array (B, H)."""

    @abstractmethod
    def step(self, i: int, number: Expr) -> None:
        """The span's step of this ``number``, the i-th of its group."""

    @abstractmethod
    def end(self, first: Expr) -> None:
        """Stores the results of the span after its last step."""

    def reads(self) -> Container[Var] | None:
        """The hoisted values that steps read; None: all."""
        return None

    def run(self) -> None:
        H, group = self.task.workload.hidden, self.group
        T.note("prologue: copies of the first groups of steps (cp.async), constants, states")
        self.pieces = self._read_pieces()
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
        self.begin(first)
        groups = T.let("groups", self.steps // group)
        with T.serial("number", 0, groups) as number:
            T.note("a group of steps: wait for its inputs, carry them out, copy those of a group ahead")
            slot = T.let("slot", number % max(1, ahead) * group)
            if self.ring is not None:
                cp_async_wait(ahead - 1)
                for i in range(group):
                    self._take(i, slot)
            for i in range(group):
                self.step(i, T.let("t", number * group + i))
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
                self.step(i, t)
        T.note("epilogue: the last states")
        self.end(first)

    def _read_pieces(self) -> list[Piece]:
        """The pieces that have values which steps read."""
        read, pieces = self.reads(), self.hoisted.pieces(self.count)
        if read is None:
            return list(pieces)
        wanted = {own[q][0] for own in self.hoisted.order(self.count)
                  for q, var in enumerate(self.graph.hoisted_outputs) if var in read}
        return [p for p in pieces if not wanted.isdisjoint(range(p.register, p.register + p.words))]

    def _slot(self, slot: Expr, piece: Piece) -> Expr:
        assert self.ring is not None, "there are hoisted values"
        words = self.hoisted.words(self.count)
        return self.ring.ptr_to([(slot * words + piece.register) * self.threads + self.thread * piece.words])

    def _copy(self, number: Expr, slot: Expr) -> None:
        """Begins to copy the inputs of a group of steps to the slots from ``slot`` on."""
        left = T.let("left", self.steps - number * self.group)
        first = T.let("first", self.input + T.cast(number * self.group, "int64") * self.inputs_apart)

        def copy_step(i: int) -> None:
            at = T.let("step_at", first + i * self.inputs_apart)
            for p in self.pieces:
                source = self.arguments["hoisted"].ptr_to([at + (p.base + self.unit * p.apart)])
                cp_async(self._slot(slot + i, p), source, 4 * p.words)

        with T.If(left >= self.group):
            with T.Then():
                for i in range(self.group):
                    copy_step(i)
            with T.Else():
                for i in range(self.group - 1):
                    with T.when(left > i):
                        copy_step(i)
        cp_async_commit()

    def _take(self, i: int, slot: Expr) -> None:
        for p in self.pieces:
            ld_shared(p.of(self.inputs, i), self._slot(slot + i, p), "b32" if self.hoisted.packed else "f32")

    def _mark(self, number: Expr) -> None:
        """Loads which of a group's steps begin a sequence; of the last step where there are no more."""
        for i in range(self.group if self.marks is not None else 0):
            t = T.let("t", T.min(self.in_time(number * self.group + i), self.all_steps - 1))
            T.buffer_store(self.marks, T.cast(self.timeline.mark(t, self.row), "int32"), [i])

    def in_time(self, number: Expr) -> Expr:
        """The step of the sequence that the span's ``number``-th is."""
        return number if self.span is None else self.span.first + number

    def load_states(self, first: Expr) -> None:
        """Loads the states that the call begins with."""
        for name, s in self.kept_states.items():
            for e in range(self.count):
                T.buffer_store(self.states, T.cast(self.arguments[f"{name}_in"][first + e], "float32"), [s, e])

    def masks(self, i: int, number: Expr) -> tuple[Expr | None, Expr | None]:
        """True if the row takes part in a step, and if a sequence starts before it; None as the timeline says."""
        t = self.in_time(number)
        live = self.timeline.live(t, self.limit)
        return live, None if self.marks is None else self.timeline.starts(t, self.limit, self.marks[i])

    def loaded(self, i: int) -> list[list[Expr]]:
        """The hoisted values of a step, of each unit."""
        return self.hoisted.values([self.inputs[i, k] for k in range(self.hoisted.words(self.count))], self.count)

    def before(self, e: int, fresh: Expr | None) -> dict[str, Expr]:
        """The states that are kept, before a step of unit ``e``."""
        stored = [T.let(f"{name}_before", self.states[s, e]) for name, s in self.kept_states.items()]
        return dict(zip(self.kept_states, self.timeline.started(fresh, stored), strict=True))

    def computed(self, e: int, inputs: Sequence[Expr], before: dict[str, Expr],
                 assigns: Iterable[Assign]) -> dict[Var, Expr]:
        """The values of a step of unit ``e``, by the ``assigns`` of the prologue."""
        env = self.constants[e] | dict(zip(self.graph.hoisted_outputs, inputs, strict=True))
        return emit(assigns, env | {self.graph.states[n]: v for n, v in before.items()}, self.math)

    def advance(self, env: dict[Var, Expr], live: Expr | None, before: dict[str, Expr], e: int) -> dict[str, Expr]:
        """The states that are kept, after a step of unit ``e``; they are in registers then."""
        after = {name: self.timeline.masked(live, T.let(f"{name}_new", env[self.graph.results[name]]), old)
                 for name, old in before.items()}
        for name, value in after.items():
            T.buffer_store(self.states, value, [self.kept_states[name], e])
        return after


class Recurrence(Units):
    """All of a step: its states from the call's own first ones to its last ones, y or ``outputs``, and kept values."""

    def __init__(self, of: UnitThread, span: Span | None = None) -> None:
        super().__init__(of, of.kernel.task.graph.states, span)
        task, place, H = self.task, self.task.traversal, self.task.workload.hidden
        values = self.graph.written * H
        width, own = ((task.row or len(self.graph.outputs) * H, 0) if place.backward
                      else (place.y_width(values), place.y_offset(values)))
        self.output = T.let("y_first", self.first * width + (self.unit + own))
        self.outputs_apart = T.let("y_apart", self.apart * width)
        self.kept_first, self.kept_apart = self.output, self.outputs_apart  # where y has no other direction
        if self.kept and width > H:
            self.kept_first = T.let("kept_first", self.first * H + self.unit)
            self.kept_apart = T.let("kept_apart", self.apart * H)

    def begin(self, first: Expr) -> None:
        self.load_states(first)

    def end(self, first: Expr) -> None:
        # an adjoint's may have been cleared since
        place = self.task.traversal
        clears = self.timeline.fresh(self.all_steps, self.row, self.limit) if place.backward else None
        for name, s in self.kept_states.items():
            for e, value in enumerate(self.timeline.started(clears, [self.states[s, e] for e in range(self.count)])):
                value = T.cast(value, self.task.workload.dtype)
                T.buffer_store(self.arguments[f"{name}_out"], value, [first + e])

    def step(self, i: int, number: Expr) -> None:
        graph, timeline = self.graph, self.timeline
        live, fresh = self.masks(i, number)
        outputs, kept_values = list[list[Expr]](), dict[Spot, list[Expr]]()  # of each unit
        inputs = self.loaded(i)
        for e in range(self.count):
            before = self.before(e, fresh)
            env = self.computed(e, inputs[e], before, graph.prologue)
            after = self.advance(env, live, before, e)
            made = [env[v] for v in graph.outputs]
            made += [] if made or self.task.traversal.backward else [after[graph.output]]
            outputs.append([for_products(timeline.masked(live, value, T.float32(0)), self.task) for value in made])
            for spot, value in self.kept.found(after, env).items():
                kept_values.setdefault(spot, []).append(timeline.masked(live, value, T.float32(0)))
        at = T.let("y_at", self.output + T.cast(number, "int64") * self.outputs_apart)
        for name in written_by(self.task):
            for o, made_here in enumerate(zip(*outputs, strict=True)):
                self._store(name, at + o * self.task.workload.hidden, made_here)
        if self.kept and self.kept_first is not self.output:
            at = T.let("kept_at", self.kept_first + T.cast(number, "int64") * self.kept_apart)
        rows = T.let("kept_row", self.first + T.cast(number, "int64") * self.apart) if self.kept.together else None
        for spot, values in kept_values.items():
            self._store(spot.buffer, at if spot.count == 1 or rows is None
                        else spot.at(rows, self.unit, self.task.workload.hidden), values)

    def _store(self, name: str, at: Expr, values: Sequence[Expr]) -> None:
        into, dtype = self.arguments[name], self.task.workload.dtype
        if self.count == 1:
            T.buffer_store(into, T.cast(values[0], dtype), [at])
        elif dtype == "float32":
            st_global(into.ptr_to([at]), values, "f32")
        else:
            st_global(into.ptr_to([at]), pack(values, dtype))
