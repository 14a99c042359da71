"""Elementwise: one launch for the sequence of a cell without recurrent products, such as IndRNN and SRU.

Every unit of every batch row is then a recurrence of its own. A thread keeps the states of a few neighbouring units
in registers from the first step to the last, and copies the inputs of later steps meanwhile. Input products are
hoisted.
"""

from __future__ import annotations

from functools import partial

from ecornn.program import Launch, Program
from ecornn.schedules.assemble import assemble
from ecornn.schedules.backward.recurrence import assemble_recurrence, beyond
from ecornn.schedules.base import Component, Config, Knob, Schedule, Task, no_room
from ecornn.schedules.builder import ceil_div
from ecornn.schedules.elementwise.kernel import ElementwiseKnobs, ring_words, sequence_kernel
from ecornn.schedules.gemm.projection import no_projection, projection_time
from ecornn.schedules.hoisted import gained, hoisted_choices, hoisted_of, preferred
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.rates import gpu_rates
from ecornn.schedules.scalars.pointwise import math_choices

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
            what = "a recurrent product" if task.graph.product_phases else "statistics of what states give"
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
            return f"groups of {group} steps, but copies only {plan.prefetch} steps ahead"
        if plan.hoisted == "same" and plan.units * len(task.graph.hoisted_outputs) % 2:
            return "one unit a thread, of an odd number of 16-bit values, which no asynchronous copy serves"
        if scalars > CODE:
            return f"{scalars} scalars of unrolled code"
        return no_room(task.device, _shared(task, plan), threads, _registers(task, plan))

    def default(self, task: Task) -> Config:
        found = self._first_valid(task)
        assert found is not None, "default() is for tasks that serves() accepts"
        best = {**found, "hoisted": preferred(task, estimate(task, self.plan(task, found)))}
        pair = {**best, "units": max(2, self.plan(task, best).units)}  # of units: what an asynchronous copy serves
        return next((c for c in (best, pair) if task.workload.hidden % self.plan(task, c).units == 0
                     and self.check(task, c) is None), found)

    def _first_valid(self, task: Task) -> Config | None:
        """The first configuration that fits, or None. It copies as far ahead as all blocks of a multiprocessor have
        shared memory for; one unit a thread, or two where there are threads enough."""
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
        w, threads, blocks = task.workload, plan.threads, _blocks(task, plan)
        return {
            "blocks": blocks, "waves": blocks / task.device.cores, "warps": blocks * threads / 32 / task.device.cores,
            "waste": blocks * threads * plan.units / (w.batch * w.hidden), "bytes": _step_bytes(task, plan),
            "in_flight": plan.prefetch * w.batch * w.hidden * len(task.graph.hoisted_outputs)
            * _input_bytes(task, plan),
            "registers": _registers(task, plan), "shared": _shared(task, plan), "scalars": _scalars(task, plan),
            "estimate": estimate(task, plan)}

    def recurrence(self, task: Task, plan: ElementwiseKnobs, kept: Stored = NOTHING) -> Component:
        """The recurrence of a layer that stores what is ``kept`` besides; or of an adjoint: from ``hoisted``, as
        :func:`~ecornn.schedules.hoisted.hoisted_of` says, to ``outputs``, and around it come
        :func:`~ecornn.schedules.backward.recurrence.recurrence_buffers`."""
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
    """Nanoseconds of a step, roughly: a model for ordering configurations, not for reporting.

    The projection; then the longest of one warp's step, of the instructions of all warps, of the copies under way
    and of what memory moves.
    """
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
    """Bytes of a step that are read and written."""
    w, graph = task.workload, task.graph
    made = len(graph.outputs) if task.traversal.backward else graph.written
    return w.batch * w.hidden * (len(graph.hoisted_outputs) * _input_bytes(task, plan) + made * w.itemsize)


def _input_bytes(task: Task, plan: ElementwiseKnobs) -> int:
    """Bytes of a hoisted value."""
    return task.workload.itemsize if plan.hoisted == "same" else 4


def _scalars(task: Task, plan: ElementwiseKnobs) -> int:
    """Scalars that are computed in unrolled code."""
    return plan.units * plan.group * len(task.graph.prologue)


def _registers(task: Task, plan: ElementwiseKnobs) -> int:
    """Estimate of a thread's registers."""
    graph, units, group = task.graph, plan.units, plan.group
    kept = len(graph.states) + len(graph.invariant_outputs) + len(graph.hoisted_outputs) * group
    return units * (kept + 2) + (3 * group if task.traversal.resets else 0) + REGISTERS


def _shared(task: Task, plan: ElementwiseKnobs) -> int:
    """Bytes of a block's shared memory."""
    return 4 * ring_words(plan.prefetch, hoisted_of(task, plan.hoisted), plan.threads,
                          plan.units)


def _blocks(task: Task, plan: ElementwiseKnobs) -> int:
    w = task.workload
    return ceil_div(w.batch * w.hidden, plan.units * plan.threads)
