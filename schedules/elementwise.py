"""Elementwise: one launch for the sequence of a cell without recurrent products, such as IndRNN and SRU.

Every unit of every batch row is then a recurrence of its own. A thread keeps the states of a few neighbouring units
in registers from the first step to the last, and loads the inputs of steps to come meanwhile. Input products are
hoisted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as combinations

from ecornn.program import Buffer, Launch, Program
from ecornn.schedules.base import Config, Knob, Schedule, Task
from ecornn.schedules.elementwise_kernel import sequence_kernel
from ecornn.schedules.pointwise import MATH_FOR, MATH_TRADES
from ecornn.schedules.projection import project, projection_time, shape_of
from ecornn.schedules.timeline import row_buffers

UNITS, THREADS, PREFETCH = (1, 2, 4), (32, 64, 128, 256), (4, 8, 16, 32)
REGISTERS = 40  # of a thread, beside states, constants and inputs: addresses and a step's scalars
UNROLLED = 8192  # scalars of the code at most: of so many steps and units


class Elementwise(Schedule):
    """Serves every cell without a recurrent product."""

    name = "elementwise"
    revision = 1
    kind = "cuda"

    def serves(self, task: Task) -> str | None:
        if task.graph.phases:
            return f"cell {task.graph.cell!r} has a recurrent product"
        if task.device.capability < 80:
            return "needs tensor cores of compute capability 8.0"
        if task.graph.hoisted_rows and shape_of(task).shared > task.device.shared:
            return (f"the projection needs {shape_of(task).shared} bytes of shared memory, "
                    f"{task.device.shared} available")
        if next(self._candidates(task), None) is None:
            return f"cell {task.graph.cell!r} has too many values for the registers of a thread"
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        w = task.workload
        return (
            Knob("units", tuple(u for u in UNITS if w.hidden % u == 0),
                 "more units a thread: fewer and wider loads and stores; fewer: more threads"),
            Knob("threads", THREADS, "smaller blocks: spread over more multiprocessors; larger: fewer to start"),
            Knob("prefetch", PREFETCH, "steps that inputs are loaded ahead: hides more of memory's latency, for "
                 "registers and code"),
            Knob("math", MATH_FOR[w.dtype], MATH_TRADES),
        )

    def check(self, task: Task, config: Config) -> str | None:
        registers, threads = _registers(task, config), int(config["threads"])
        limit = min(255, task.device.registers // threads // 8 * 8)
        if registers > limit:
            return f"about {registers} registers a thread, {limit} available"
        scalars = int(config["units"]) * int(config["prefetch"]) * len(task.graph.prologue)
        if scalars > UNROLLED:
            return f"{scalars} scalars of unrolled code"
        return None

    def default(self, task: Task) -> Config:
        best = min(self._candidates(task), key=lambda c: estimate(task, c), default=None)
        assert best is not None, "default() is for tasks that serves() accepts"
        return best

    def expected(self, task: Task) -> float:
        return estimate(task, self.default(task))

    def _candidates(self, task: Task) -> Iterator[Config]:
        knobs = {k.name: k.values for k in self.knobs(task)}
        knobs["math"] = ("exact",) if task.workload.dtype == "float32" else ("fast",)
        for values in combinations(*knobs.values()):
            config = dict(zip(knobs, values, strict=True))
            if self.check(task, config) is None:
                yield config

    def features(self, task: Task, config: Config) -> dict[str, float]:
        w, threads, blocks = task.workload, int(config["threads"]), _blocks(task, config)
        return {
            "blocks": blocks, "waves": blocks / task.device.cores, "warps": blocks * threads / 32 / task.device.cores,
            "waste": blocks * threads * int(config["units"]) / (w.batch * w.hidden),
            "bytes": _step_bytes(task), "registers": _registers(task, config),
            "in_flight": int(config["prefetch"]) * w.batch * w.hidden * len(task.graph.hoisted_outputs) * 4,
            "scalars": int(config["units"]) * int(config["prefetch"]) * len(task.graph.prologue),
            "estimate": estimate(task, config)}

    def program(self, task: Task, config: Config) -> Program:
        w, graph, hoisted = task.workload, task.graph, project(task)
        blocks, threads = _blocks(task, config), int(config["threads"])
        buffers = [Buffer("x", "x", w.dtype), Buffer("y", "y", w.dtype)]
        for name in graph.states:
            buffers += [Buffer(f"{name}_in", "state_in", w.dtype), Buffer(f"{name}_out", "state_out", w.dtype)]
        buffers += [*row_buffers(task.place), *hoisted.buffers]
        kernel = sequence_kernel(task, int(config["units"]), threads, blocks, int(config["prefetch"]),
                                 str(config["math"]))
        return Program({**hoisted.functions, "sequence": kernel}, tuple(buffers),
                       (*hoisted.calls, Launch("sequence", blocks, threads)))


def estimate(task: Task, config: Config) -> float:
    """Nanoseconds of a step, roughly: a model for ordering configurations, not for reporting."""
    units, threads, prefetch = (int(config[name]) for name in ("units", "threads", "prefetch"))
    graph, cores = task.graph, task.device.cores
    most = -(-_blocks(task, config) // cores) * -(-threads // 32)  # warps of the busiest multiprocessor
    resident = min(most, 64, task.device.registers // (_registers(task, config) * 32))
    issued = 8 + len(graph.hoisted_outputs) * 2 + units * (3 + 3 * len(graph.prologue))  # instructions of a warp
    alone = 20 + 12 * len(graph.prologue) + issued  # cycles of a step, one after the other
    cycles = max(alone * most / resident, most / 4 * issued, LATENCY / prefetch * most / resident)
    moved = _step_bytes(task) / (BYTES * cores)
    return projection_time(task) / cores + max(cycles / 1.7, moved)


LATENCY = 900.0  # cycles until what is loaded from memory is there
BYTES = 20.0  # that a multiprocessor reads and writes of memory in a nanosecond


def _step_bytes(task: Task) -> int:
    """Bytes of a step that are read and written."""
    w = task.workload
    return w.batch * w.hidden * (len(task.graph.hoisted_outputs) * 4 + w.itemsize)


def _registers(task: Task, config: Config) -> int:
    """Estimate of a thread's registers."""
    graph, units, prefetch = task.graph, int(config["units"]), int(config["prefetch"])
    kept = len(graph.states) + len(graph.invariant_outputs) + len(graph.hoisted_outputs) * prefetch
    return units * (kept + 2) + (prefetch if task.place.resets else 0) + REGISTERS


def _blocks(task: Task, config: Config) -> int:
    w = task.workload
    return -(-w.batch * w.hidden // (int(config["units"]) * int(config["threads"])))
