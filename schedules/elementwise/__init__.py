"""Elementwise: one launch for the sequence of a cell without recurrent products, such as IndRNN and SRU.

Every unit of every batch row is then a recurrence of its own. A thread keeps the states of a few neighbouring units in
registers from first to last step, and copies inputs of later steps meanwhile. Input products are hoisted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ecornn.program import Launch, Program
from ecornn.schedules.assemble import assemble
from ecornn.schedules.backward.assemble import assemble_recurrence, beyond
from ecornn.schedules.base import Component, Config, Knob, Knobs, Schedule, Task, knob, no_room
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, ceil_div
from ecornn.schedules.cuda.isa import cp_async, cp_async_commit, cp_async_wait, cp_async_wait_all, ld_shared, st_global
from ecornn.schedules.cuda.isa.tensor_core import pack
from ecornn.schedules.gemm.projection import no_projection, projection_time
from ecornn.schedules.hoisted import Hoisted, Piece, gained, hoisted_choices, hoisted_knob, hoisted_of, preferred
from ecornn.schedules.keeping import NOTHING, Spot, Stored, for_products, keeping
from ecornn.schedules.rates import gpu_rates
from ecornn.schedules.scalars.pointwise import MATH_TRADES, emit, invariants, math_choices
from ecornn.schedules.sequence_kernel import SequenceKernel, written_by
from ecornn.schedules.timeline import row_arguments


class ElementwiseKnobs(Knobs):
    units: int = knob("units of a thread. More: fewer and wider loads and stores; fewer: more threads")
    threads: int = knob("threads in a block. Fewer: work for more multiprocessors; more: fewer blocks to start")
    prefetch: int = knob("steps by which inputs are copied ahead. More: more latency is hidden, but more shared memory")
    group: int = knob("steps between waits for copies. More: fewer waits; fewer: less code and fewer registers")
    hoisted: str = hoisted_knob()
    math: str = knob(MATH_TRADES)


def sequence_kernel(task: Task, cut: ElementwiseKnobs, blocks: int, kept: Stored = NOTHING) -> PrimFunc:
    """The kernel ``sequence``, of an adjoint with ``outputs`` in place of y; ``sequence_keeping`` stores what is
    ``kept``, too. A thread has neighbouring units of one batch row, and copies what it needs of hoisted inputs itself,
    asynchronously, to its own slots in shared memory, so without barriers. A group of steps is waited for, taken to
    registers and computed, unrolled; then the inputs ``prefetch`` steps ahead are copied. (Loads to registers suffer
    for more than a few steps ahead: a warp waits for several loads at once.)"""
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
        # (slot, piece, thread, word of the piece)
        ring = T.shared(ring_words(cut, hoisted)) if graph.hoisted_outputs else None
        item = T.let("item", block * cut.threads + thread)
        row = T.let("row", item // columns)
        T.note("a thread takes its units of one batch row through all steps")
        with T.when(row < batch):
            unit = T.let("unit", item % columns * cut.units)
            kernel = SequenceKernel(task, hoisted, math, arguments, steps, batch, kept)
            _Units(kernel, cut, ring, thread, row, unit).run()
    return made()


def ring_words(cut: ElementwiseKnobs, hoisted: Hoisted) -> int:
    return cut.prefetch * cut.threads * hoisted.words(cut.units)  # words of a block's ring in shared memory


class _Units:
    """Emits the code of a thread: units ``unit`` .. ``unit + count - 1`` of a row, in groups of ``group`` steps."""

    def __init__(self, kernel: SequenceKernel, cut: ElementwiseKnobs, ring: TirBuffer | None, thread: Expr, row: Expr,
                 unit: Expr) -> None:
        """``ring``: the block's shared memory, where there are hoisted values."""
        task, hoisted, batch, count, group = kernel.task, kernel.hoisted, kernel.batch, cut.units, cut.group
        self.task, self.graph, self.math, self.arguments = task, task.graph, kernel.math, kernel.arguments
        self.hoisted, self.kept, self.steps, self.timeline = hoisted, kernel.kept, kernel.steps, kernel.timeline
        self.count, self.group, self.threads, self.prefetch = count, group, cut.threads, cut.prefetch
        self.ring, self.thread, self.row, self.unit = ring, thread, row, unit
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
        width, own = ((task.row or len(self.graph.outputs) * w.hidden, 0) if place.backward
                      else (place.y_width(values), place.y_offset(values)))
        self.output = T.let("y_first", first * width + (unit + own))
        self.outputs_apart = T.let("y_apart", apart * width)
        self.kept_first, self.kept_apart = self.output, self.outputs_apart  # where y has no other direction
        if self.kept and width > w.hidden:
            self.kept_first = T.let("kept_first", first * w.hidden + unit)
            self.kept_apart = T.let("kept_apart", apart * w.hidden)

    def run(self) -> None:
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
            for p in self.hoisted.pieces(self.count):
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
        for p in self.hoisted.pieces(self.count):
            ld_shared(p.of(self.inputs, i), self._slot(slot + i, p), "b32" if self.hoisted.packed else "f32")

    def _mark(self, number: Expr) -> None:
        """Loads which of a group's steps begin a sequence; of the last step where there are no more."""
        for i in range(self.group if self.marks is not None else 0):
            t = T.let("t", T.min(number * self.group + i, self.steps - 1))
            T.buffer_store(self.marks, T.cast(self.timeline.mark(t, self.row), "int32"), [i])

    def _step(self, i: int, t: Expr) -> None:
        graph, timeline = self.graph, self.timeline
        live = timeline.live(t, self.limit)
        fresh = None if self.marks is None else timeline.starts(t, self.limit, self.marks[i])
        outputs, kept_values = list[list[Expr]](), dict[Spot, list[Expr]]()  # of each unit
        inputs = self.hoisted.values([self.inputs[i, k] for k in range(self.hoisted.words(self.count))], self.count)
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
            made += [] if made or self.task.traversal.backward else [after[graph.output]]
            outputs.append([for_products(timeline.masked(live, value, T.float32(0)), self.task) for value in made])
            for spot, value in self.kept.found(after, env).items():
                kept_values.setdefault(spot, []).append(timeline.masked(live, value, T.float32(0)))
        at = T.let("y_at", self.output + T.cast(t, "int64") * self.outputs_apart)
        for name in written_by(self.task):
            for o, made_here in enumerate(zip(*outputs, strict=True)):
                self._store(name, at + o * self.task.workload.hidden, made_here)
        if self.kept and self.kept_first is not self.output:
            at = T.let("kept_at", self.kept_first + T.cast(t, "int64") * self.kept_apart)
        rows = T.let("kept_row", self.first + T.cast(t, "int64") * self.apart) if self.kept.together else None
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


UNITS, THREADS = (1, 2, 4), (32, 64, 128, 256)
PREFETCH, GROUP = (8, 16, 32, 64, 128), (4, 8, 16)
REGISTERS = 48  # of a thread, beside states, constants and inputs: addresses and a step's scalars
CODE = 8192  # scalars of unrolled code, at most


class Elementwise(Schedule[ElementwiseKnobs]):
    """Serves every cell without a recurrent product, and its adjoint."""

    name = "elementwise"
    revision = 1
    kind = "cuda"
    backward = True

    def refuses(self, task: Task) -> str | None:
        if task.traversal.backward and (reason := beyond(task)):
            return reason
        if task.graph.phases:
            what = "a recurrent product" if task.graph.product_phases else "statistics that depend on states"
            return f"cell {task.graph.cell!r} has {what}"
        if fault := no_projection(task):
            return fault
        if self._first_valid(task) is None:
            return f"cell {task.graph.cell!r} has too many values for the registers of a thread"
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        units = tuple(u for u in UNITS if task.workload.hidden % u == 0)
        return ElementwiseKnobs.offered({"units": units, "threads": THREADS, "prefetch": PREFETCH, "group": GROUP,
                                         "hoisted": hoisted_choices(task), "math": math_choices(task)})

    def plan(self, task: Task, config: Config) -> ElementwiseKnobs:
        return ElementwiseKnobs(config)

    def check(self, task: Task, config: Config) -> str | None:
        plan = self.plan(task, config)
        group, threads, scalars = plan.group, plan.threads, _scalars(task, plan)
        if plan.prefetch < group:
            return f"groups of {group} steps need copies as many steps ahead, not {plan.prefetch}"
        if plan.hoisted == "same" and plan.units * len(task.graph.hoisted_outputs) % 2:
            return "an asynchronous copy needs an even number of 16-bit values per thread"
        if scalars > CODE:
            return f"the unrolled code has {scalars} scalars; at most {CODE} are allowed"
        return no_room(task.device, _shared(task, plan), threads, _registers(task, plan))

    def default(self, task: Task) -> Config:
        found = self._first_valid(task)
        assert found is not None, "default() is for tasks that serves() accepts"
        best = {**found, "hoisted": preferred(task, estimate(task, self.plan(task, found)))}
        pair = {**best, "units": max(2, self.plan(task, best).units)}  # of units: what an asynchronous copy serves
        return next((c for c in (best, pair) if task.workload.hidden % self.plan(task, c).units == 0
                     and self.check(task, c) is None), found)

    def _first_valid(self, task: Task) -> Config | None:
        """The first that fits, copying as far ahead as shared memory allows; two units where threads are enough."""
        w, cores = task.workload, task.device.cores
        exact = w.dtype == "float32" or task.traversal.backward
        units = 2 if w.hidden % 2 == 0 and w.batch * w.hidden >= MANY * cores else 1
        for group in (8, 4):
            for prefetch in (64, 32, 16, 8):
                config: Config = {"units": units, "threads": 64, "prefetch": prefetch, "group": group,
                                  "hoisted": "float32", "math": "exact" if exact else "fast"}
                plan = self.plan(task, config)
                together = min(ceil_div(_blocks(task, plan), cores), 16)
                fits = _shared(task, plan) * together <= task.device.shared or prefetch == 8
                if fits and self.check(task, config) is None:
                    return config
        return None

    def expected(self, task: Task) -> float:
        return estimate(task, self.plan(task, self.default(task)))

    def features(self, task: Task, plan: ElementwiseKnobs) -> dict[str, float]:
        w, threads, cores, blocks = task.workload, plan.threads, task.device.cores, _blocks(task, plan)
        units = w.batch * w.hidden
        return {"blocks": blocks, "waves": blocks / cores, "warps": blocks * threads / 32 / cores,
                "waste": blocks * threads * plan.units / units, "bytes": _step_bytes(task, plan),
                "in_flight": plan.prefetch * units * len(task.graph.hoisted_outputs) * _input_bytes(task, plan),
                "registers": _registers(task, plan), "shared": _shared(task, plan), "scalars": _scalars(task, plan),
                "estimate": estimate(task, plan)}

    def recurrence(self, task: Task, plan: ElementwiseKnobs, kept: Stored = NOTHING) -> Component:
        """The recurrence of a layer, which stores what is ``kept`` besides, or of an adjoint."""
        blocks, name = _blocks(task, plan), keeping("sequence", kept)
        kernel = sequence_kernel(task, plan, blocks, kept)
        return Component({name: kernel}, calls=(Launch(name, blocks, plan.threads, _shared(task, plan)),))

    def program(self, task: Task, plan: ElementwiseKnobs) -> Program:
        layout = hoisted_of(task, plan.hoisted)
        if task.traversal.backward:
            return assemble_recurrence(task, self.recurrence(task, plan), layout)
        return assemble(task, partial(self.recurrence, task, plan), layout)


MANY = 256  # units of all rows for each multiprocessor
# instructions that are issued: of a step, an input value, a unit's step, a scalar, and of a group of steps
STEP, INPUT, UNIT, SCALAR, WAIT = 8, 5, 2, 4, 30
# cycles of a warp alone: of a dependent scalar, of a step and of a group of steps beside
CHAINED, BESIDE, WAITED = 12, 8, 60


def estimate(task: Task, plan: ElementwiseKnobs) -> float:
    """Nanoseconds of a step, roughly: projection, then the longest of a warp's step, instructions, copies, memory."""
    units, threads, prefetch, group = plan.units, plan.threads, plan.prefetch, plan.group
    graph, cores, rates = task.graph, task.device.cores, gpu_rates(task.device)
    most = ceil_div(_blocks(task, plan), cores) * ceil_div(threads, 32)  # warps of the busiest multiprocessor
    issued = STEP + INPUT * len(graph.hoisted_outputs) + units * (UNIT + SCALAR * len(graph.prologue)) + WAIT / group
    alone = CHAINED * len(graph.prologue) + BESIDE + WAITED / group + issued
    room = task.device.shared // max(1, _shared(task, plan)) * (threads // 32)  # warps at once
    waves = most / max(1, min(most, room, rates.threads // 32))
    cycles = max(waves * alone, most / 4 * issued, waves * rates.memory_latency / prefetch)
    moved = _step_bytes(task, plan) / (rates.memory * cores)
    return projection_time(task) / cores - gained(task, plan.hoisted) + max(cycles / rates.clock, moved)


def _step_bytes(task: Task, plan: ElementwiseKnobs) -> int:
    w, graph = task.workload, task.graph
    made = len(graph.outputs) if task.traversal.backward else graph.written
    return w.batch * w.hidden * (len(graph.hoisted_outputs) * _input_bytes(task, plan) + made * w.itemsize)


def _input_bytes(task: Task, plan: ElementwiseKnobs) -> int:
    return task.workload.itemsize if plan.hoisted == "same" else 4  # bytes of a hoisted value


def _scalars(task: Task, plan: ElementwiseKnobs) -> int:
    return plan.units * plan.group * len(task.graph.prologue)  # scalars that are computed in unrolled code


def _registers(task: Task, plan: ElementwiseKnobs) -> int:
    graph, group = task.graph, plan.group
    kept = len(graph.states) + len(graph.invariant_outputs) + len(graph.hoisted_outputs) * group
    return plan.units * (kept + 2) + (3 * group if task.traversal.resets else 0) + REGISTERS


def _shared(task: Task, plan: ElementwiseKnobs) -> int:
    return 4 * ring_words(plan, hoisted_of(task, plan.hoisted))  # bytes of a block's shared memory


def _blocks(task: Task, plan: ElementwiseKnobs) -> int:
    return ceil_div(task.workload.batch * task.workload.hidden, plan.units * plan.threads)
