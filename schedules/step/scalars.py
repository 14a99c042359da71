"""The common part of schedules with one launch a step: vectors between launches, a phase's scalars, and all launches.

A step is a launch for each phase, which leaves its products in shared memory; then a thread finishes each (batch row,
hidden unit), here: the phase's scalars are spliced in, and what later launches read is stored, in workspaces:

* ``states`` (S, B, H) float32: read and overwritten in place, each element by its own thread;
* ``operands_<p>``: the vectors that phase p multiplies, in the layer's dtype, as :class:`Layout` says. Those of phase 0
  exist twice, for even and odd t: in a cell of one phase some blocks read them while others write the next ones;
* ``carried`` (C, B, H) float32: other scalars that a later phase of the same step reads;
* ``statistics`` (S, B) float32: those of the batch rows, where the cell has some (:func:`rows_kernel`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ecornn.analysis import StepGraph, liveness
from ecornn.program import WORKSPACE, Buffer, Extent, Fill, Launch, Loop
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var, ceil_div
from ecornn.schedules.hoisted import Hoisted, hoisted_of
from ecornn.schedules.keeping import NOTHING, Spot, Stored, for_products, keeping, stored
from ecornn.schedules.scalars.pointwise import emit, invariants, vectors_at
from ecornn.schedules.scalars.row_sums import Env, RowSums, parts_of
from ecornn.schedules.timeline import Timeline

BEGIN_THREADS = 256
# a phase, the buffers that its kernel may use, and the kernel's name -> the kernel and its launch
Phase = Callable[[int, list[Buffer], str], tuple[PrimFunc, Launch]]


@dataclass(frozen=True)
class Layout:
    """An operand (B, H), padded to (``rows``, ``width``), in blocks of units; if ``block == width``, units inside."""

    rows: int
    width: int
    block: int

    @property
    def size(self) -> int:
        return self.rows * self.width  # elements of one operand

    def place(self, row: Expr, unit: Expr) -> Expr:
        if self.block == self.width:
            return row * self.width + unit
        return (unit // self.block * self.rows + row) * self.block + unit % self.block


def workspaces(task: Task, layout: Layout) -> list[Buffer]:
    w, graph = task.workload, task.graph
    sizes = {"states": len(graph.states) * w.batch * w.hidden}
    sizes |= {f"operands_{p}": (2 if p == 0 else 1) * len(phase.operands) * layout.size
              for p, phase in enumerate(graph.phases)}
    sizes |= {"carried": len(liveness.carried(graph)) * w.batch * w.hidden,
              "statistics": len(liveness.statistics(graph)) * w.batch}
    return [Buffer(name, WORKSPACE, w.dtype if name.startswith("operands") else "float32", Extent(size))
            for name, size in sizes.items() if size]


def values_of(graph: StepGraph, kept: Stored, p: int) -> dict[Spot, Var]:
    """The kept values of phase ``p``, by where they go; a value that no earlier phase makes is of the last one."""
    makers: dict[Var, int] = {}
    for number, phase in enumerate(graph.phases[:-1]):
        makers |= dict.fromkeys([q.var for q in phase.products], number)
        makers |= dict.fromkeys([a.var for a in liveness.assigns_of(graph, number)], number)
    last = liveness.phase_count(graph) - 1
    return {kept.spot(n): v for n, v in enumerate(kept.values) if makers.get(v, last) == p}


def begin_and_steps(task: Task, layout: Layout, weights: Iterable[Buffer], around: Sequence[Buffer], math: str,
                    inputs: Hoisted, phase: Phase) -> tuple[Component, Callable[[Stored], Component]]:
    """The component that fills workspaces from the call's states, and a function for all steps, by what they store."""
    own, w = [*workspaces(task, layout), *weights], task.workload
    buffers, blocks = [*around, *own], ceil_div(w.batch * w.hidden, BEGIN_THREADS)
    padded = [b for b in own if b.name.startswith("operands_") and layout.width > w.hidden]  # 0 * NaN is not 0
    begin = Component({"begin": begin_kernel(task, layout, buffers, math, inputs, blocks)}, calls=(
        *(Fill(b.name, 0, b.extent) for b in padded), Launch("begin", blocks, BEGIN_THREADS)))

    def loop(kept: Stored) -> Component:
        """All steps; the launch that makes ``kept`` values stores them, the last one of all stores states."""
        functions, steps, parts = {}, [], list(parts_of(task.graph))
        for number, part in enumerate(parts, 1):
            first = part[0] if isinstance(part, tuple) else part
            # a pass over rows leaves a phase with a product to the launch behind it
            finished = [p for p in part if not task.graph.phases[p].products] if isinstance(part, tuple) else [part]
            stores = (number == len(parts) and kept) or any(values_of(task.graph, kept, p) for p in finished)
            known = [*buffers, *(kept.buffers(w.batch, w.hidden, w.dtype) if stores else ())]
            name = keeping(f"{'rows' if isinstance(part, tuple) else 'step'}_{first}", kept if stores else NOTHING)
            if isinstance(part, tuple):
                functions[name], launch = rows_kernel(task, name, part, layout, known, math, inputs)
            else:
                functions[name], launch = phase(part, known, name)
            steps.append(launch)
        return Component(functions, tuple(own), (Loop(tuple(steps)),))

    return begin, loop


def declare(buffers: list[Buffer]) -> dict[str, TirBuffer]:
    """Kernel parameters ``T``, ``B``, ``t`` and all buffers; a kernel keeps those that it reads."""
    found = {name: T.arg(name, T.int32()) for name in ("T", "B", "t")}
    return found | {b.name: T.pointer(b.name, b.dtype) for b in buffers}


def begin_kernel(task: Task, layout: Layout, buffers: list[Buffer], math: str, hoisted: Hoisted,
                 blocks: int) -> PrimFunc:
    """``begin``: the call's states into workspaces, so ``<state>_out`` may be written; may read ``hoisted``."""
    w, graph = task.workload, task.graph
    with T.kernel("begin") as made:
        a = declare(buffers)
        scalars = StepScalars(task, layout, a, math, hoisted)
        T.device_entry()
        item = T.let("item", T.block(blocks) * BEGIN_THREADS + T.thread(BEGIN_THREADS))
        row, unit = T.let("row", item // w.hidden), T.let("unit", item % w.hidden)
        with T.when(row < a["B"]):
            T.note("before the first step: the states of the call into the workspaces")
            timeline = scalars.timeline
            values = [T.let(f"{name}_first", T.cast(a[f"{name}_in"][scalars.at(0, row, unit)], "float32"))
                      for name in graph.states]
            values = timeline.started(timeline.fresh(0, row, timeline.limit(row)), values)
            scalars.store_states(row, unit, values)
            scalars.store_first_operands(row, unit, values, scalars.constants(unit), T.int32(0), 0)
    return made()


class StepScalars:
    """Emits what one thread does for one (batch row, hidden unit), between products and stores. ``arguments``: of
    :func:`declare`; what has a buffer is kept; ``hoisted``: how hoisted values lie, by default in float32."""

    def __init__(self, task: Task, layout: Layout, arguments: dict[str, TirBuffer], math: str,
                 hoisted: Hoisted | None = None) -> None:
        self.task, self.graph, self.layout = task, task.graph, layout
        self.arguments, self.math, self.inputs = arguments, math, hoisted or hoisted_of(task)
        self.carried, self.statistics = liveness.carried(task.graph), liveness.statistics(task.graph)
        keeps = task.traversal.keep is not None and any(name.endswith("_kept") for name in arguments)
        self.kept = stored(task) if keeps else NOTHING
        self.timeline = Timeline(task.traversal, arguments, arguments["T"], arguments["B"])
        largest = max(len(self.graph.states), len(self.carried)) * task.workload.batch * task.workload.hidden
        self.far = max(largest, 4 * layout.size) >= 1 << 31  # does int32 not reach every element?

    def wide(self, index: Expr) -> Expr:
        """``index`` in the integer type that reaches all of the workspaces."""
        return T.cast(index, "int64") if self.far else index

    def at(self, number: int, row: Expr, unit: Expr) -> Expr:
        """The place in ``states`` or ``carried`` of the vector ``number``."""
        w = self.task.workload
        return (self.wide(row) + number * w.batch) * w.hidden + unit

    def constants(self, unit: Expr) -> dict[Var, Expr]:
        H = self.task.workload.hidden
        return invariants(self.graph, vectors_at(self.graph.vectors, self.arguments["vectors"], H, unit), self.math)

    def hoisted(self, row: Expr, unit: Expr, t: Expr | None = None) -> list[Expr]:
        """Loads the values that do not depend on the state, as they are in memory; of step ``t``, by default now."""
        if not self.inputs.outputs:
            return []
        a = self.arguments
        row = T.cast(self.timeline.at(a["t"] if t is None else t) * a["B"] + row, "int64")
        return [T.let("hoisted", value) for value in self.inputs.load(a["hoisted"], row, unit)]

    def finish(self, p: int, row: Expr, unit: Expr, sums: dict[Var, Expr], loaded: list[Expr]) -> None:
        """Emits all that follows the products ``sums`` of phase p; row < B, unit < H; ``loaded`` by :meth:`hoisted`."""
        a, graph = self.arguments, self.graph
        before, constants, env = self._environment(p, row, unit, sums, loaded)
        env = emit(liveness.assigns_of(graph, p), env | sums, self.math)
        values = {spot: env[v] for spot, v in values_of(graph, self.kept, p).items()}
        if p < liveness.phase_count(graph) - 1:
            for number, (var, made) in enumerate(self.carried.items()):
                if made == p:
                    T.buffer_store(a["carried"], env[var], [self.at(number, row, unit)])
            self._store_operands(p + 1, row, unit, env, 0)
            if values:
                self._keep(self._step_row(row), unit, values, self.timeline.live(a["t"], self.timeline.limit(row)))
            return
        timeline, limit = self.timeline, self.timeline.limit(row)
        live = timeline.live(a["t"], limit)
        after = [timeline.masked(live, T.let(f"{name}_new", env[v]), old)
                 for (name, v), old in zip(graph.results.items(), before, strict=True)]
        following = timeline.started(timeline.fresh(a["t"] + 1, row, limit), after)
        self.store_states(row, unit, following)
        self.store_first_operands(row, unit, following, constants, a["t"] + 1, (a["t"] + 1) % 2)
        traversal, step_row, outputs = self.task.traversal, self._step_row(row), [env[v] for v in graph.outputs]
        if traversal.backward:
            width = self.task.row or len(outputs) * self.task.workload.hidden  # of rows (T, B, O, H)
            self._store_outputs("outputs", T.let("at", step_row * width + unit), outputs, live)
            self._leave(row, unit, dict(zip(graph.results, following, strict=True)))  # they may have been cleared
            return
        results = dict(zip(graph.results, after, strict=True))
        own = graph.written * self.task.workload.hidden
        at = T.let("at", step_row * traversal.y_width(own) + unit + traversal.y_offset(own))
        self._store_outputs("y", at, outputs or [results[graph.output]], live)
        self._keep(step_row, unit, {Spot(f"{s}_kept"): results[s] for s in self.kept.states} | values, live)
        self._leave(row, unit, results)

    def before(self, p: int, row: Expr, unit: Expr, known: dict[Var, Expr]) -> dict[Var, Expr]:
        """The values that the statistics of phase ``p`` read; ``known``: those of this row that this kernel made."""
        return self._environment(p, row, unit, known, self.hoisted(row, unit))[2] | known

    def _environment(self, p: int, row: Expr, unit: Expr, known: dict[Var, Expr],
                     loaded: list[Expr]) -> tuple[list[Expr], dict[Var, Expr], dict[Var, Expr]]:
        """The states before the step, what depends on parameters only, and all made earlier that phase ``p`` reads."""
        a, graph = self.arguments, self.graph
        hoisted = dict(zip(graph.hoisted_outputs, self.inputs.values(loaded)[0], strict=True))
        constants, states = self.constants(unit), self.states_before(row, unit)
        env = constants | hoisted | dict(zip(graph.states.values(), states, strict=True))
        env, read = emit(graph.prologue, env, self.math), liveness.reads(graph, p)
        for number, (var, made) in enumerate(self.carried.items()):
            if made < p and var in read:
                env[var] = T.let(var.name, a["carried"][self.at(number, row, unit)])
        for number, (var, made) in enumerate(self.statistics.items()):
            if made <= p and var in read and var not in known:
                env[var] = T.let(var.name, a["statistics"][number * self.task.workload.batch + row])
        return states, constants, env

    def states_before(self, row: Expr, unit: Expr) -> list[Expr]:
        """The states before the step, in the order of ``graph.states``."""
        return [T.let(f"{name}_before", self.arguments["states"][self.at(s, row, unit)])
                for s, name in enumerate(self.graph.states)]

    def store_states(self, row: Expr, unit: Expr, values: list[Expr]) -> None:
        for s, value in enumerate(values):
            T.buffer_store(self.arguments["states"], value, [self.at(s, row, unit)])

    def store_first_operands(self, row: Expr, unit: Expr, states: list[Expr], constants: dict[Var, Expr],
                             t: Expr, parity: Expr) -> None:
        """Stores the operands of phase 0 for step t, of that parity, from the states before it; if t is T, unread."""
        if self.graph.phases:
            env = constants | dict(zip(self.graph.states.values(), states, strict=True))
            if liveness.late_operands(self.graph):
                loaded = self.hoisted(row, unit, T.let("t_next", T.min(t, self.arguments["T"] - 1)))
                env |= zip(self.graph.hoisted_outputs, self.inputs.values(loaded)[0], strict=True)
            self._store_operands(0, row, unit, emit(liveness.before_first(self.graph), env, self.math), parity)

    def operand_base(self, p: int, parity: Expr) -> Expr:
        return self.wide(parity) * (len(self.graph.phases[p].operands) * self.layout.size)

    def _store_operands(self, p: int, row: Expr, unit: Expr, env: dict[Var, Expr], parity: Expr) -> None:
        dtype, operands = self.task.workload.dtype, self.graph.phases[p].operands
        if not operands:
            return
        place = T.let("place", self.operand_base(p, parity) + self.layout.place(self.wide(row), unit))
        for o, operand in enumerate(operands):
            T.buffer_store(self.arguments[f"operands_{p}"], T.cast(env[operand], dtype), [place + o * self.layout.size])

    def _step_row(self, row: Expr) -> Expr:
        a = self.arguments
        place = T.cast(self.timeline.at(a["t"]) * a["B"] + row, "int64")
        return T.let("step_row", place) if self.kept else place

    def _keep(self, step_row: Expr, unit: Expr, values: dict[Spot, Expr], live: Expr | None) -> None:
        w = self.task.workload
        for spot, value in values.items():
            value = self.timeline.masked(live, value, T.float32(0))
            T.buffer_store(self.arguments[spot.buffer], T.cast(value, w.dtype), [spot.at(step_row, unit, w.hidden)])

    def _store_outputs(self, buffer: str, at: Expr, outputs: list[Expr], live: Expr | None) -> None:
        """Stores the outputs of a step, H apart from ``at`` on."""
        w = self.task.workload
        for o, output in enumerate(outputs):
            value = for_products(self.timeline.masked(live, output, T.float32(0)), self.task)
            T.buffer_store(self.arguments[buffer], T.cast(value, w.dtype), [at + o * w.hidden])

    def _leave(self, row: Expr, unit: Expr, last: dict[str, Expr]) -> None:
        a = self.arguments
        with T.when(a["t"] == a["T"] - 1):
            for name, value in last.items():
                T.buffer_store(a[f"{name}_out"], T.cast(value, self.task.workload.dtype), [self.at(0, row, unit)])


def rows_kernel(task: Task, name: str, phases: tuple[int, ...], layout: Layout, buffers: list[Buffer], math: str,
                inputs: Hoisted) -> tuple[PrimFunc, Launch]:
    """A kernel with a block a batch row, and its launch: statistics of phases with no product between, and all scalars
    of those without one. A thread owns units, so it finds again what it kept of them."""
    w, graph = task.workload, task.graph
    threads = min(1024, ceil_div(w.hidden, 32) * 32)
    words = max(RowSums.words(threads, graph.phases[p].statistics) for p in phases)
    with T.kernel(name) as made:
        a = declare(buffers)
        scalars = StepScalars(task, layout, a, math, inputs)
        T.device_entry()
        row, thread = T.named("row", T.cta_id([w.batch])), T.thread(threads)
        memory = T.shared(words)  # (statistic, warp)
        with T.when(row < a["B"]):
            T.note("a CTA a batch row: statistics over its units, then the scalars of phases without a product")
            sums, found = RowSums(threads, thread, memory), Env()

            def visit(p: int, known: Env, function: Callable[[Env, Expr], None]) -> None:
                with T.strided("unit", w.hidden, thread, threads) as unit:
                    function(scalars.before(p, row, unit, known), unit)

            for p in phases:
                found |= sums.statistics(graph.phases[p].statistics, w.hidden, partial(visit, p, dict(found)))
                with T.when(thread == 0):  # stores those of this phase, for later kernels
                    for number, (var, maker) in enumerate(scalars.statistics.items()):
                        if maker == p:
                            T.buffer_store(a["statistics"], found[var], [number * w.batch + row])
                if not graph.phases[p].products:
                    with T.strided("unit", w.hidden, thread, threads) as unit:
                        scalars.finish(p, row, unit, dict(found), scalars.hoisted(row, unit))
    return made(), Launch(name, w.batch, threads, 4 * words)
