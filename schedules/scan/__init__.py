"""Scan: the time of a sequence in chunks, side by side, for cells whose states are affine maps of their past.

Where B x H units are too few to fill a GPU, steps that wait for each other leave it idle. Two neighbouring steps of an
affine map are one: so the map of each chunk is composed, all chunks at the same time; the first states of all chunks
come of these maps; then the steps of each are carried out from its own. The coefficients of maps are computed twice,
and hoisted inputs are read twice."""

from __future__ import annotations

from collections.abc import Iterator

from ecornn.analysis import StepGraph
from ecornn.program import WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.base import Component, Config, Task
from ecornn.schedules.builder import PrimFunc, ceil_div
from ecornn.schedules.elementwise import UnitSchedule, input_bytes, shared_of, step_bytes, step_cycles
from ecornn.schedules.elementwise.units import blocks_of
from ecornn.schedules.gemm.projection import projection_time
from ecornn.schedules.hoisted import gained
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.rates import gpu_rates
from ecornn.schedules.scan.kernels import (
    GROUPS,
    LANES,
    MAPS,
    Layout,
    ScanKnobs,
    carry_blocks,
    carry_kernel,
    carry_words,
    compose_kernel,
    replay_kernel,
)

CHUNKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
UNMEASURED = 1.5  # times the estimate of its kernels, until it is held against a GPU
FULL = 16_384  # units of all rows from which steps, one after the other, keep an H100 busy: nothing is to be gained


class Scan(UnitSchedule[ScanKnobs]):
    """Serves cells without a recurrent product whose states are affine maps of their past, and the adjoint of every
    cell without a recurrent product."""

    name = "scan"
    revision = 1
    declared = ScanKnobs
    latest = 4

    def __init__(self) -> None:
        self._layouts: dict[int, tuple[StepGraph, Layout | None]] = {}  # by a graph's id, of the latest graphs

    def generation(self, task: Task) -> int:
        return self.latest

    def layout(self, graph: StepGraph) -> Layout | None:
        if id(graph) not in self._layouts:
            while len(self._layouts) >= 64:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[id(graph)] = graph, Layout.of(graph)
        return self._layouts[id(graph)][1]

    def layout_of(self, task: Task) -> Layout:
        layout = self.layout(task.graph)
        assert layout is not None, "for tasks that serves() accepts"
        return layout

    def refuses(self, task: Task) -> str | None:
        if not task.graph.phases and self.layout(task.graph) is None:
            return f"cell {task.graph.cell!r} has states that are no affine map of their past"
        return super().refuses(task)

    def more(self, task: Task) -> Iterator[Config]:
        yield from ({"chunks": n} for n in CHUNKS if n <= max(task.workload.seq, CHUNKS[0]))

    def blocks(self, task: Task, plan: ScanKnobs) -> int:
        return blocks_of(task, plan) * plan.chunks

    def registers(self, task: Task, plan: ScanKnobs) -> int:
        composed = max(len(level.places) for level in self.layout_of(task).levels)
        return super().registers(task, plan) + 2 * plan.units * composed

    def rank(self, task: Task) -> float:
        work, cores = task.workload, task.device.cores
        full = work.batch * work.hidden * 132 >= FULL * cores
        return float("inf") if full else super().rank(task)

    def estimate(self, task: Task, plan: ScanKnobs) -> float:
        """Projection, then each kernel: steps of chunks as `elementwise` takes them, maps from memory, and launches."""
        work, rates, cores, layout = task.workload, gpu_rates(task.device), task.device.cores, self.layout_of(task)
        rate, units = rates.memory * cores, work.batch * work.hidden

        def chunk(scalars: int, inputs: int, moved: float) -> float:
            cycles = step_cycles(task, plan, self.blocks(task, plan), scalars, inputs)
            return ceil_div(work.seq, plan.chunks) * max(cycles / rates.clock, plan.chunks * moved / rate)

        total = chunk(len(task.graph.prologue), len(task.graph.hoisted_outputs), step_bytes(task, plan))
        for level in layout.levels:
            inputs = sum(v in level.read for v in task.graph.hoisted_outputs)
            products = len(level.map.matrix) * (len(level.map.states) + 1)
            total += chunk(len(level.assigns) + products, inputs, units * inputs * input_bytes(task, plan))
            waited = 2 * ceil_div(plan.chunks, GROUPS) * rates.l2_latency + GROUPS * rates.barrier  # cycles
            maps = 4 * units * len(level.places) * plan.chunks
            total += 2 * rates.launch + waited / rates.clock + 3 * maps / rate
        return projection_time(task) / cores - gained(task, plan.hoisted) + UNMEASURED * total / work.seq

    def recurrence(self, task: Task, plan: ScanKnobs, kept: Stored = NOTHING) -> Component:
        """The recurrence of a layer, which stores what is ``kept`` besides, or of an adjoint."""
        layout, shared = self.layout_of(task), shared_of(task, plan)
        functions, calls = dict[str, PrimFunc](), list[Launch]()
        for n, level in enumerate(layout.levels):
            functions |= {f"compose{n}": compose_kernel(task, plan, layout, n),
                          f"carry{n}": carry_kernel(task, layout, n, plan.chunks)}
            calls += [Launch(f"compose{n}", blocks_of(task, plan) * (plan.chunks - 1), plan.threads, shared),
                      Launch(f"carry{n}", carry_blocks(task), LANES * GROUPS, 4 * carry_words(level))]
        name = keeping("replay", kept)
        functions[name] = replay_kernel(task, plan, layout, kept)
        calls.append(Launch(name, self.blocks(task, plan), plan.threads, shared))
        values = (plan.chunks - 1) * layout.slots * task.workload.batch * task.workload.hidden
        return Component(functions, (Buffer(MAPS, WORKSPACE, "float32", Extent(values)),), tuple(calls))
