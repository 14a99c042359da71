"""Building one candidate, in a worker process that sees no GPU."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import msgspec

from ecornn.device import Device
from ecornn.errors import ScheduleError
from ecornn.schedules.base import Task
from ecornn.task import make_manifest, make_task
from ecornn.tune.cell_spec import load_cell
from ecornn.workload import Workload


class Build(msgspec.Struct, frozen=True):
    """What to build, and where to write the module file. ``cell`` is a spec for ``load_cell``."""

    cell: str
    workload: Workload
    device: Device
    schedule: str
    config: dict[str, int | str | bool]
    out: str


class Built(msgspec.Struct, frozen=True):
    """``digest`` is equal for equal generated code."""

    digest: str


@cache
def task_of(cell: str, workload: Workload, device: Device) -> Task:
    """The task, analysed once in each process."""
    found = load_cell(cell)
    if found.identity() != workload.cell:
        raise ScheduleError(f"{cell} is {found.identity()}, not {workload.cell}")
    return make_task(found, workload, device)


def ready(_: None) -> bool:
    """Imports what a build needs, before the clock runs; and lets measurements go before builds."""
    os.nice(5)
    from ecornn.tune.quick_tvm import import_tvm

    import_tvm()
    import ecornn.build.module
    from ecornn.schedules import all_schedules

    return bool(all_schedules() and ecornn.build.module)


def build(request: Build) -> Built:
    """Generates, compiles and links one candidate.

    Raises an :class:`~ecornn.errors.EcornnError` where it cannot be built.
    """
    from ecornn.build.module import build_module
    from ecornn.schedules import all_schedules

    task = task_of(request.cell, request.workload, request.device)
    schedule = all_schedules()[request.schedule]
    program = schedule.program(task, request.config)
    manifest = make_manifest(load_cell(request.cell), task, schedule, request.config, program,
                             "built while tuning")
    generated = build_module(program, manifest, Path(request.out))
    # The packing and the sizes of buffers are code too: a loader acts on them.
    digest = hashlib.sha256(msgspec.json.encode((program.buffers, sorted(generated.sources.items()))))
    texts = generated.emitted.get("cuda") or generated.emitted.get("tir")
    if texts:
        digest.update(texts.encode())
    else:
        for name in sorted(generated.objects):
            digest.update(generated.objects[name])
    return Built(digest.hexdigest()[:32])
