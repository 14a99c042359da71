"""From a cell and sizes to the tasks of schedules, and from schedules' programs to the manifest."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ecornn.cells import Cell
from ecornn.compose import parameter_prefix
from ecornn.device import Device
from ecornn.manifest import Manifest, Parameter
from ecornn.program import Program
from ecornn.schedules.base import Config, Schedule, Task
from ecornn.workload import ALONE, SERIAL, SINGLE, Overlap, Stack, Traversal, Workload

PACKAGES = {"ecornn": "ecornn", "tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}


def make_task(cell: Cell, workload: Workload, device: Device, traversal: Traversal = ALONE) -> Task:
    """Analyses ``cell`` at the workload's sizes.

    Raises :class:`~ecornn.errors.CellError` where the cell's step cannot be analysed.
    """
    from ecornn.analysis import analyse

    return Task(workload, analyse(cell, workload.input, workload.hidden), device, traversal)


def make_program(schedule: Schedule, task: Task, config: Config, overlap: Overlap = SERIAL) -> Program:
    """The program of a configuration, with a backward pass where the task has one; ``overlap``: of its stack.

    Raises :class:`~ecornn.errors.ScheduleError` where no schedule carries that out.
    """
    program = schedule.program(task, config)
    if task.traversal.keep is None or task.device.kind != "cuda":
        return program
    from ecornn.schedules.training import with_backward

    return with_backward(task, program, beside=overlap.kind == "directions")


def expected_backward(task: Task) -> float:
    """Nanoseconds of a step of the recurrence that a task's backward pass will have, as its schedule expects."""
    from ecornn.schedules.training import expected_backward

    return expected_backward(task)


def make_manifest(cell: Cell, task: Task, schedule: Schedule, config: Config, program: Program,
                  provenance: str, stack: Stack = SINGLE, overlap: Overlap = SERIAL) -> Manifest:
    """What the module file will say about itself; ``task`` is of the first part of the stack, on the whole device."""
    parameters = []
    for part in stack.parts(task.workload):
        prefix = parameter_prefix(stack, part)
        for key, (gates, *rest) in cell.parameters(part.workload.input, part.workload.hidden).items():
            shape = (gates * rest[0], *rest[1:])  # as PyTorch stores it: gates folded into the first axis
            name = cell.parameter_name(key, part.layer, part.second)
            parameters.append(Parameter(name, prefix + key, shape, gates))
    return Manifest(
        workload=task.workload, device=task.device, schedule=schedule.name, config=dict(config),
        provenance=provenance, states=tuple(cell.states), output=cell.output_state(),
        parameters=tuple(parameters), buffers=program.buffers,
        entries={name: entry.takes for name, entry in program.entries.items()}, versions=versions(), stack=stack,
        overlap=overlap, together=program.together or task.workload.batch)


def versions() -> dict[str, str]:
    """Versions of ecornn, TVM and tvm-ffi, for manifests and records."""
    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
