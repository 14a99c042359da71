"""Elementwise: one launch for the sequence of a cell without recurrent products, such as IndRNN and SRU.

Every unit of every batch row is then a recurrence of its own. A thread keeps the states of a few neighbouring units in
registers from first to last step, and copies inputs of later steps meanwhile. Input products are hoisted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import TypeVar

from ecornn.program import Launch, Program
from ecornn.schedules.assemble import assemble
from ecornn.schedules.backward.assemble import assemble_recurrence, beyond
from ecornn.schedules.base import Component, Config, Knob, Schedule, Task, no_room
from ecornn.schedules.builder import Expr, PrimFunc, ceil_div
from ecornn.schedules.elementwise.units import (
    ElementwiseKnobs,
    Recurrence,
    UnitThread,
    blocks_of,
    recurrence_kinds,
    ring_words,
    units_kernel,
)
from ecornn.schedules.gemm.projection import no_projection, projection_time
from ecornn.schedules.hoisted import gained, hoisted_choices, hoisted_of, preferred
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.rates import gpu_rates
from ecornn.schedules.scalars.pointwise import math_choices


def sequence_kernel(task: Task, cut: ElementwiseKnobs, kept: Stored = NOTHING) -> PrimFunc:
    """The kernel ``sequence``, of an adjoint with ``outputs`` in place of y; ``sequence_keeping`` stores what is
    ``kept``, too."""
    def code(thread: UnitThread, part: Expr) -> None:
        Recurrence(thread).run()

    return units_kernel(keeping("sequence", kept), task, cut, recurrence_kinds(task, cut), code, kept=kept)


OwnKnobs = TypeVar("OwnKnobs", bound=ElementwiseKnobs)
UNITS, THREADS = (1, 2, 4), (32, 64, 128, 256)
PREFETCH, GROUP = (8, 16, 32, 64, 128), (4, 8, 16)
REGISTERS = 48  # of a thread, beside states, constants and inputs: addresses and a step's scalars
CODE = 8192  # scalars of unrolled code, at most


class UnitSchedule(Schedule[OwnKnobs]):
    """A schedule of threads that have a few units each, of a cell without a recurrent product, or of its adjoint."""

    kind = "cuda"
    backward = True
    declared: type[OwnKnobs]

    @abstractmethod
    def blocks(self, task: Task, plan: OwnKnobs) -> int:
        """Blocks of the kernel that carries out the steps."""

    @abstractmethod
    def estimate(self, task: Task, plan: OwnKnobs) -> float:
        """Nanoseconds of a step, roughly."""

    def more(self, task: Task) -> Iterator[Config]:
        """The values of knobs that only this schedule has, of which the default is chosen by the estimate."""
        yield {}

    def refuses(self, task: Task) -> str | None:
        if task.traversal.backward and (reason := beyond(task)):
            return reason
        if task.graph.phases:
            what = "a recurrent product" if task.graph.product_phases else "statistics that depend on states"
            return f"cell {task.graph.cell!r} has {what}"
        if fault := no_projection(task):
            return fault
        if all(self._first_valid(task, own) is None for own in self.more(task)):
            return f"cell {task.graph.cell!r} has too many values for the registers of a thread"
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        units = tuple(u for u in UNITS if task.workload.hidden % u == 0)
        own = {name: tuple(config[name] for config in self.more(task)) for name in next(self.more(task))}
        return self.declared.offered({"units": units, "threads": THREADS, "prefetch": PREFETCH, "group": GROUP,
                                      "hoisted": hoisted_choices(task), "math": math_choices(task), **own})

    def plan(self, task: Task, config: Config) -> OwnKnobs:
        return self.declared(config)

    def check(self, task: Task, config: Config) -> str | None:
        plan = self.plan(task, config)
        group, threads, scalars = plan.group, plan.threads, scalars_of(task, plan)
        if plan.prefetch < group:
            return f"groups of {group} steps need copies as many steps ahead, not {plan.prefetch}"
        if plan.hoisted == "same" and plan.units * len(task.graph.hoisted_outputs) % 2:
            return "an asynchronous copy needs an even number of 16-bit values per thread"
        if scalars > CODE:
            return f"the unrolled code has {scalars} scalars; at most {CODE} are allowed"
        return no_room(task.device, shared_of(task, plan), threads, self.registers(task, plan))

    def registers(self, task: Task, plan: OwnKnobs) -> int:
        """Registers of a thread, about."""
        graph, group = task.graph, plan.group
        kept = len(graph.states) + len(graph.invariant_outputs) + len(graph.hoisted_outputs) * group
        return plan.units * (kept + 2) + (3 * group if task.traversal.resets else 0) + REGISTERS

    def default(self, task: Task) -> Config:
        every = [found for own in self.more(task) if (found := self._first_valid(task, own)) is not None]
        assert every, "default() is for tasks that serves() accepts"
        found = min(every, key=lambda config: self.estimate(task, self.plan(task, config)))
        best = {**found, "hoisted": preferred(task, self.estimate(task, self.plan(task, found)))}
        pair = {**best, "units": max(2, self.plan(task, best).units)}  # of units: what an asynchronous copy serves
        return next((c for c in (best, pair) if task.workload.hidden % self.plan(task, c).units == 0
                     and self.check(task, c) is None), found)

    def _first_valid(self, task: Task, own: Config) -> Config | None:
        """The first that fits, copying as far ahead as shared memory allows; two units where threads are enough."""
        w, cores = task.workload, task.device.cores
        exact = w.dtype == "float32" or task.traversal.backward
        units = 2 if w.hidden % 2 == 0 and w.batch * w.hidden >= MANY * cores else 1
        for group in (8, 4):
            for prefetch in (64, 32, 16, 8):
                config: Config = {"units": units, "threads": 64, "prefetch": prefetch, "group": group,
                                  "hoisted": "float32", "math": "exact" if exact else "fast", **own}
                plan = self.plan(task, config)
                together = min(ceil_div(self.blocks(task, plan), cores), 16)
                fits = shared_of(task, plan) * together <= task.device.shared or prefetch == 8
                if fits and self.check(task, config) is None:
                    return config
        return None

    def expected(self, task: Task) -> float:
        return self.estimate(task, self.plan(task, self.default(task)))

    def features(self, task: Task, plan: OwnKnobs) -> dict[str, float]:
        w, threads, cores, blocks = task.workload, plan.threads, task.device.cores, self.blocks(task, plan)
        units = w.batch * w.hidden
        return {"blocks": blocks, "waves": blocks / cores, "warps": blocks * threads / 32 / cores,
                "waste": blocks_of(task, plan) * threads * plan.units / units, "bytes": step_bytes(task, plan),
                "in_flight": plan.prefetch * units * len(task.graph.hoisted_outputs) * input_bytes(task, plan),
                "registers": self.registers(task, plan), "shared": shared_of(task, plan),
                "scalars": scalars_of(task, plan), "estimate": self.estimate(task, plan)}

    def program(self, task: Task, plan: OwnKnobs) -> Program:
        layout = hoisted_of(task, plan.hoisted)
        if task.traversal.backward:
            return assemble_recurrence(task, self.recurrence(task, plan), layout)
        return assemble(task, partial(self.recurrence, task, plan), layout)


class Elementwise(UnitSchedule[ElementwiseKnobs]):
    """Serves every cell without a recurrent product, and its adjoint."""

    name = "elementwise"
    revision = 1
    declared = ElementwiseKnobs

    def blocks(self, task: Task, plan: ElementwiseKnobs) -> int:
        return blocks_of(task, plan)

    def estimate(self, task: Task, plan: ElementwiseKnobs) -> float:
        """Projection, then the longest of a warp's step, instructions, copies, memory."""
        graph, rates = task.graph, gpu_rates(task.device)
        cycles = step_cycles(task, plan, self.blocks(task, plan), len(graph.prologue), len(graph.hoisted_outputs))
        moved = step_bytes(task, plan) / (rates.memory * task.device.cores)
        return (projection_time(task) / task.device.cores - gained(task, plan.hoisted)
                + max(cycles / rates.clock, moved))

    def recurrence(self, task: Task, plan: ElementwiseKnobs, kept: Stored = NOTHING) -> Component:
        """The recurrence of a layer, which stores what is ``kept`` besides, or of an adjoint."""
        blocks, name = self.blocks(task, plan), keeping("sequence", kept)
        kernel = sequence_kernel(task, plan, kept)
        return Component({name: kernel}, calls=(Launch(name, blocks, plan.threads, shared_of(task, plan)),))


MANY = 256  # units of all rows for each multiprocessor
# instructions that are issued: of a step, an input value, a unit's step, a scalar, and of a group of steps
STEP, INPUT, UNIT, SCALAR, WAIT = 8, 5, 2, 4, 30
# cycles of a warp alone: of a dependent scalar, of a step and of a group of steps beside
CHAINED, BESIDE, WAITED = 12, 8, 60


def step_cycles(task: Task, plan: ElementwiseKnobs, blocks: int, scalars: int, inputs: int) -> float:
    """Cycles of a step of ``blocks`` blocks, with so many scalars and hoisted inputs of a unit, but for what memory's
    rate bounds."""
    units, threads, prefetch, group = plan.units, plan.threads, plan.prefetch, plan.group
    rates = gpu_rates(task.device)
    most = ceil_div(blocks, task.device.cores) * ceil_div(threads, 32)  # warps of the busiest multiprocessor
    issued = STEP + INPUT * inputs + units * (UNIT + SCALAR * scalars) + WAIT / group
    alone = CHAINED * scalars + BESIDE + WAITED / group + issued
    room = task.device.shared // max(1, shared_of(task, plan)) * (threads // 32)  # warps at once
    waves = most / max(1, min(most, room, rates.threads // 32))
    return max(waves * alone, most / 4 * issued, waves * rates.memory_latency / prefetch)


def step_bytes(task: Task, plan: ElementwiseKnobs) -> int:
    """Bytes that a step of all rows reads of hoisted values, and writes."""
    w, graph = task.workload, task.graph
    made = len(graph.outputs) if task.traversal.backward else graph.written
    return w.batch * w.hidden * (len(graph.hoisted_outputs) * input_bytes(task, plan) + made * w.itemsize)


def input_bytes(task: Task, plan: ElementwiseKnobs) -> int:
    return task.workload.itemsize if plan.hoisted == "same" else 4  # bytes of a hoisted value


def scalars_of(task: Task, plan: ElementwiseKnobs) -> int:
    return plan.units * plan.group * len(task.graph.prologue)  # scalars that are computed in unrolled code


def shared_of(task: Task, plan: ElementwiseKnobs) -> int:
    return 4 * ring_words(plan, hoisted_of(task, plan.hoisted))  # bytes of a block's shared memory
