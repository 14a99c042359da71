"""What the one-launch-a-step schedules share: vectors between launches, and a phase's scalars.

A step is one launch for each phase. A launch leaves its products in shared memory; then every
(batch row, hidden unit) is finished by one thread, here: the phase's scalars are spliced in, and
what later launches read is stored. Between launches live, in workspaces,

* ``states`` (S, B, H) float32: read and overwritten in place, each element by its own thread;
* ``operands_<p>``: the vectors that phase p multiplies, in the layer's dtype, as :class:`Layout`
  says. Those of phase 0 exist twice, for even and odd t: in a cell of one phase they are read by
  some blocks while others write the next ones;
* ``carried`` (C, B, H) float32: other scalars that a later phase of the same step reads;
* ``statistics`` (S, B) float32: those of the batch rows, where the cell has some (``step_rows.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ecornn.analysis import StepGraph
from ecornn.analysis.graph import variables
from ecornn.program import Buffer, Extent, Fill, Launch
from ecornn.schedules.base import Task
from ecornn.schedules.hoisted import Hoisted, in_float32
from ecornn.schedules.pointwise import emit, invariants, opening
from ecornn.schedules.timeline import Timeline, row_buffers

BEGIN_THREADS = 256


@dataclass(frozen=True)
class Layout:
    """How an operand (B, H) lies in memory: blocks of ``block`` units, the batch inside a block.

    ``rows`` and ``width`` are B and H, padded to what the kernels read; ``block == width`` is the
    plain layout with the hidden axis innermost.
    """

    rows: int
    width: int
    block: int

    @property
    def size(self) -> int:
        """Elements of one operand."""
        return self.rows * self.width

    def place(self, row: Any, unit: Any) -> Any:
        """Where element (row, unit) is."""
        if self.block == self.width:
            return row * self.width + unit
        return (unit // self.block * self.rows + row) * self.block + unit % self.block


def phase_count(graph: StepGraph) -> int:
    """Launches of a step: one for each phase, and one where there is no product at all."""
    return max(1, len(graph.phases))


def carried(graph: StepGraph) -> dict[Any, int]:
    """Scalars that a phase computes and a later one reads -> the number of the computing phase."""
    found: dict[Any, int] = {}
    for p, phase in enumerate(graph.phases):
        made = {r.var for r in phase.rows} | {a.var for a in phase.assigns}
        for reads in (_reads(graph, q) for q in range(p + 1, len(graph.phases))):
            found.update({v: p for v in reads if v in made})
    return found


def statistics(graph: StepGraph) -> dict[Any, int]:
    """Variables of statistics -> the number of the phase that they belong to."""
    return {v: p for p, phase in enumerate(graph.phases) for s in phase.statistics for v in s.made}


def _reads(graph: StepGraph, p: int) -> list[Any]:
    """Variables that phase p reads, in order, each once."""
    assigns = graph.phases[p].assigns if graph.phases else ()
    read = [v for a in assigns for v in variables(a.value)]
    read += [v for s in (graph.phases[p].statistics if graph.phases else ()) for v in s.operands]
    if p == phase_count(graph) - 1:
        read += graph.results.values()
    return list(dict.fromkeys(read))


def common_buffers(task: Task, layout: Layout) -> list[Buffer]:
    """Tensors of the call and the workspaces named above."""
    w, graph = task.workload, task.graph
    found = [Buffer("x", "x", w.dtype), Buffer("y", "y", w.dtype)]
    for name in graph.states:
        found += [Buffer(f"{name}_in", "state_in", w.dtype), Buffer(f"{name}_out", "state_out", w.dtype)]
    found += row_buffers(task.place)
    found.append(Buffer("states", "workspace", "float32", Extent(len(graph.states) * w.batch * w.hidden)))
    for p, phase in enumerate(graph.phases):
        copies = 2 if p == 0 else 1
        if phase.operands:
            found.append(Buffer(f"operands_{p}", "workspace", w.dtype,
                                Extent(copies * len(phase.operands) * layout.size)))
    if names := carried(graph):
        found.append(Buffer("carried", "workspace", "float32", Extent(len(names) * w.batch * w.hidden)))
    if names := statistics(graph):
        found.append(Buffer("statistics", "workspace", "float32", Extent(len(names) * w.batch)))
    return found


def begin_calls(task: Task, layout: Layout, buffers: list[Buffer]) -> list[Fill | Launch]:
    """What comes before the loop over t: zeros behind the last unit, then the kernel of begin_kernel."""
    fills: list[Fill | Launch] = []
    if layout.width > task.workload.hidden:  # 0 * NaN is not 0
        fills = [Fill(b.name, 0, b.extent) for b in buffers if b.name.startswith("operands_")]
    return [*fills, Launch("begin", _begin_blocks(task), BEGIN_THREADS)]


def _begin_blocks(task: Task) -> int:
    return -(-task.workload.batch * task.workload.hidden // BEGIN_THREADS)


def declare(T: Any, buffers: list[Buffer]) -> dict[str, Any]:
    """Kernel parameters ``T``, ``B``, ``t`` and all buffers; a kernel keeps those that it reads."""
    found = {name: T.arg(name, T.int32()) for name in ("T", "B", "t")}
    for b in buffers:
        found[b.name] = T.arg(b.name, T.buffer((T.int64(1 << 40),), b.dtype))
    return found


def begin_kernel(task: Task, layout: Layout, buffers: list[Buffer], math: str) -> Any:
    """``begin``: the states of the call into the workspaces; afterwards ``<state>_out`` may be written."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    w, graph = task.workload, task.graph
    with IRBuilder() as builder, T.prim_func():
        T.func_name("begin")
        scalars = StepScalars(T, task, layout, declare(T, buffers), math)
        T.device_entry()
        item = T.Bind(T.cta_id([_begin_blocks(task)]) * BEGIN_THREADS + T.thread_id([BEGIN_THREADS]))
        row, unit = T.Bind(item // w.hidden), T.Bind(item % w.hidden)
        with T.If(row < scalars.arguments["B"]), T.Then():
            values = []
            for name in graph.states:
                values.append(T.Bind(T.cast(scalars.arguments[f"{name}_in"][scalars.at(0, row, unit)], "float32")))
            timeline = scalars.timeline
            values = timeline.started(timeline.fresh(0, row, timeline.limit(row)), values)
            scalars.store_states(row, unit, values)
            scalars.store_first_operands(row, unit, values, scalars.constants(unit), 0)
    return builder.get()


class StepScalars:
    """Emits what one thread does for one (batch row, hidden unit), between products and stores.

    Parameters
    ----------
    T : the builder's module, ``tvm.tirx.script.builder.ir``
    arguments : the kernel's parameters, from :func:`declare`
    math : one of :data:`ecornn.schedules.pointwise.MATH`
    hoisted : how hoisted values lie in memory; default: in float32
    """

    def __init__(self, T: Any, task: Task, layout: Layout, arguments: dict[str, Any], math: str,
                 hoisted: Hoisted | None = None) -> None:
        self.T, self.task, self.graph, self.layout = T, task, task.graph, layout
        self.arguments, self.math, self.inputs = arguments, math, hoisted or in_float32(task)
        self.carried, self.statistics = carried(task.graph), statistics(task.graph)
        self.timeline = Timeline(T, task.place, arguments, arguments["T"], arguments["B"])
        w = task.workload
        largest = max(len(self.graph.states), len(self.carried)) * w.batch * w.hidden
        self.far = max(largest, 4 * layout.size) >= 1 << 31  # does int32 not reach every element?

    def wide(self, index: Any) -> Any:
        """``index`` in the integer type that reaches all of the workspaces."""
        return self.T.cast(index, "int64") if self.far else index

    def at(self, number: int, row: Any, unit: Any) -> Any:
        """Place in ``states`` or ``carried`` of the vector ``number``."""
        w = self.task.workload
        return (self.wide(row) + number * w.batch) * w.hidden + unit

    def constants(self, unit: Any) -> dict[Any, Any]:
        """Values that depend on parameters only."""
        T, H = self.T, self.task.workload.hidden
        if not self.graph.vectors:
            return {}
        vectors = {v.var: T.Bind(self.arguments["vectors"][i * H + unit])
                   for i, v in enumerate(self.graph.vectors)}
        return invariants(self.graph, vectors, self.math)

    def hoisted(self, row: Any, unit: Any) -> list[Any]:
        """This step's values of what does not depend on the state, as they are in memory."""
        T, a = self.T, self.arguments
        if not self.inputs.outputs:
            return []
        row = T.cast(self.timeline.at(a["t"]) * a["B"] + row, "int64")
        return [T.Bind(value) for value in self.inputs.load(T, a["hoisted"], row, unit)]

    def finish(self, p: int, row: Any, unit: Any, sums: dict[Any, Any], loaded: list[Any]) -> None:
        """Everything that follows the products ``sums`` of phase ``p``; row < B and unit < H. ``loaded``: by
        :meth:`hoisted`."""
        T, a, graph = self.T, self.arguments, self.graph
        before, constants, env = self._environment(p, row, unit, sums, loaded)
        env = emit(graph.phases[p].assigns if graph.phases else (), env | sums, self.math)
        if p < phase_count(graph) - 1:
            for number, (var, made) in enumerate(self.carried.items()):
                if made == p:
                    T.buffer_store(a["carried"], env[var], [self.at(number, row, unit)])
            self._store_operands(p + 1, row, unit, env, 0)
            return
        timeline, limit = self.timeline, self.timeline.limit(row)
        live = timeline.live(a["t"], limit)
        after = [timeline.masked(live, T.Bind(env[v]), old)
                 for v, old in zip(graph.results.values(), before, strict=True)]
        following = timeline.started(timeline.fresh(a["t"] + 1, row, limit), after)
        self.store_states(row, unit, following)
        self.store_first_operands(row, unit, following, constants, (a["t"] + 1) % 2)
        self._store_results(row, unit, dict(zip(graph.results, after, strict=True)), live)

    def before(self, p: int, row: Any, unit: Any, known: dict[Any, Any]) -> dict[Any, Any]:
        """What the statistics of phase ``p`` read; ``known``: those of this row that this kernel has computed."""
        return self._environment(p, row, unit, known, self.hoisted(row, unit))[2] | known

    def store_statistics(self, p: int, row: Any, values: dict[Any, Any]) -> None:
        """The statistics of phase ``p``, for later kernels."""
        for number, (var, made) in enumerate(self.statistics.items()):
            if made == p:
                self.T.buffer_store(self.arguments["statistics"], values[var], [self._of_row(number, row)])

    def _environment(self, p: int, row: Any, unit: Any, known: dict[Any, Any],
                     loaded: list[Any]) -> tuple[list[Any], dict[Any, Any], dict[Any, Any]]:
        """The states before the step, what depends on parameters only, and all that phase ``p`` reads that was made
        before it."""
        T, a, graph = self.T, self.arguments, self.graph
        hoisted = dict(zip(graph.hoisted_outputs, self.inputs.values(loaded)[0], strict=True))
        constants = self.constants(unit)
        states = [T.Bind(a["states"][self.at(s, row, unit)]) for s in range(len(graph.states))]
        env = constants | hoisted | dict(zip(graph.states.values(), states, strict=True))
        env, reads = emit(graph.prologue, env, self.math), _reads(graph, p)
        for number, (var, made) in enumerate(self.carried.items()):
            if made < p and var in reads:
                env[var] = T.Bind(a["carried"][self.at(number, row, unit)])
        for number, (var, made) in enumerate(self.statistics.items()):
            if made <= p and var in reads and var not in known:
                env[var] = T.Bind(a["statistics"][self._of_row(number, row)])
        return states, constants, env

    def _of_row(self, number: int, row: Any) -> Any:
        return number * self.task.workload.batch + row

    def store_states(self, row: Any, unit: Any, values: list[Any]) -> None:
        """The states, float32, in the order of ``graph.states``."""
        for s, value in enumerate(values):
            self.T.buffer_store(self.arguments["states"], value, [self.at(s, row, unit)])

    def store_first_operands(self, row: Any, unit: Any, states: list[Any], constants: dict[Any, Any],
                             parity: Any) -> None:
        """The operands of phase 0, which the states determine, for a step of that parity."""
        if self.graph.phases:
            env = constants | dict(zip(self.graph.states.values(), states, strict=True))
            self._store_operands(0, row, unit, emit(opening(self.graph), env, self.math), parity)

    def operand_base(self, p: int, parity: Any) -> Any:
        """First element of phase p's operands."""
        return self.wide(parity) * (len(self.graph.phases[p].operands) * self.layout.size)

    def _store_operands(self, p: int, row: Any, unit: Any, env: dict[Any, Any], parity: Any) -> None:
        T, dtype = self.T, self.task.workload.dtype
        if not self.graph.phases[p].operands:
            return
        place = T.Bind(self.operand_base(p, parity) + self.layout.place(self.wide(row), unit))
        for o, operand in enumerate(self.graph.phases[p].operands):
            T.buffer_store(self.arguments[f"operands_{p}"], T.cast(env[operand], dtype),
                           [place + o * self.layout.size])

    def _store_results(self, row: Any, unit: Any, after: dict[str, Any], live: Any) -> None:
        T, a, w, place = self.T, self.arguments, self.task.workload, self.task.place
        first = T.cast(self.timeline.at(a["t"]) * a["B"] + row, "int64") * place.y_width(w.hidden) + unit
        at = T.Bind(first + place.y_offset(w.hidden) if place.y_offset(w.hidden) else first)
        output = self.timeline.masked(live, after[self.graph.output], T.float32(0))
        T.buffer_store(a["y"], T.cast(output, w.dtype), [at])
        with T.If(a["t"] == a["T"] - 1), T.Then():
            for name, value in after.items():
                T.buffer_store(a[f"{name}_out"], T.cast(value, w.dtype), [self.at(0, row, unit)])
