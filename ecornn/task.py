"""From a cell and sizes to the task of a schedule, and from a schedule's program to its manifest."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ecornn.cells import Cell
from ecornn.device import Device
from ecornn.manifest import Manifest, Parameter
from ecornn.program import Program
from ecornn.schedules.base import Config, Schedule, Task
from ecornn.workload import Workload

PACKAGES = {"ecornn": "ecornn", "tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}


def make_task(cell: Cell, workload: Workload, device: Device) -> Task:
    """Analyses ``cell`` at the workload's sizes.

    Raises :class:`~ecornn.errors.CellError` where the cell's step cannot be analysed.
    """
    from ecornn.analysis import analyse

    return Task(workload, analyse(cell, workload.input, workload.hidden), device)


def make_manifest(cell: Cell, task: Task, schedule: Schedule, config: Config, program: Program,
                  provenance: str) -> Manifest:
    """What the module file will say about itself."""
    work = task.workload
    parameters = []
    for key, (gates, *rest) in cell.parameters(work.input, work.hidden).items():
        shape = (gates * rest[0], *rest[1:])  # as PyTorch stores it: gates folded into the first axis
        parameters.append(Parameter(cell.parameter_name(key), key, shape, gates))
    return Manifest(
        workload=work, device=task.device, schedule=schedule.name, config=dict(config),
        provenance=provenance, states=tuple(cell.states), output=cell.output_state(),
        parameters=tuple(parameters), buffers=program.buffers, versions=versions())


def versions() -> dict[str, str]:
    """Versions of ecornn, TVM and tvm-ffi, for manifests and records."""
    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
