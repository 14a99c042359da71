"""Building one candidate, in a worker process that sees no GPU."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import msgspec

import ecornn.schedules
from ecornn import temporary
from ecornn.build import cache as modules
from ecornn.build import nvcc
from ecornn.build.module import MANIFEST, build_module
from ecornn.cells.naming import received
from ecornn.device import Device
from ecornn.errors import ScheduleError
from ecornn.manifest import versions
from ecornn.quick_tvm import import_tvm
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.task import make_manifest, make_program, make_task
from ecornn.workload import Workload


class Build(msgspec.Struct, frozen=True):
    """A candidate to build, and the path of its module file. ``cell`` is a spec for ``received``."""

    cell: str
    workload: Workload
    device: Device
    schedule: str
    config: dict[str, int | str | bool]
    out: str


@cache
def task_of(cell: str, workload: Workload, device: Device) -> Task:
    loaded = received(cell)
    if loaded.identity() != workload.cell:
        raise ScheduleError(f"{cell} is {loaded.identity()}, not {workload.cell}")
    return make_task(loaded, workload, device)


def ready(_: None) -> bool:
    """Imports what a build needs, before the clock runs; and lets measurements go before builds."""
    os.nice(10)
    import_tvm()
    return bool(all_schedules() and own_code())


def build(request: Build) -> str:
    """Generates, compiles and links one candidate, or takes it from the cache; returns a digest that is equal for equal
    generated code. Raises an :class:`~ecornn.errors.EcornnError` where it cannot be built."""
    what = msgspec.json.encode(msgspec.structs.replace(request, out="", device=request.device.identity))
    compiler = nvcc.identity() if request.device.kind == "cuda" else ""
    entry = modules.entry("module", (what, own_code(), compiler), lambda: msgspec.msgpack.encode(generate(request)))
    digest, module = msgspec.msgpack.decode(entry, type=tuple[str, bytes])
    Path(request.out).write_bytes(module)
    return digest


def generate(request: Build) -> tuple[str, bytes]:
    """The digest of the code, and the content of the module file."""
    task = task_of(request.cell, request.workload, request.device)
    schedule = all_schedules()[request.schedule]
    program = make_program(schedule, task, request.config)
    manifest = make_manifest(received(request.cell), task, schedule, request.config, program, "built while tuning")
    with temporary.folder() as folder:
        out = folder / "module.so"
        generated = build_module(program, manifest, out)
        module = out.read_bytes()
    # The packing and the sizes of buffers are code too: a loader acts on them.
    digest = hashlib.sha256(msgspec.json.encode((program.buffers, sorted(generated.sources.items()))))
    digest.update(generated.program or b"")
    if generated.objects:  # which may name temporary files
        digest.update(generated.emitted["tir"].encode())
    else:
        for name in sorted(generated.binaries.keys() - {MANIFEST}):
            digest.update(generated.binaries[name])
    return digest.hexdigest()[:32], module


# What a module is made by, besides TVM and compilers.
MAKERS = ("analysis", "build", "cells", "schedules", "compose.py", "device.py", "host_cpu.py", "manifest.py",
          "program.py", "task.py", "workload.py", "tune/building.py")


@cache
def own_code() -> str:
    """A digest of the code that makes modules."""
    digest = hashlib.sha256(msgspec.json.encode(versions()))
    root, schedules = Path(ecornn.__path__[0]), Path(ecornn.schedules.__path__[0])
    for name in MAKERS:
        place = schedules if name == "schedules" else root / name
        for path in sorted(place.rglob("*") if place.is_dir() else [place]):
            if path.suffix in (".py", ".cc", ".h"):
                digest.update(path.relative_to(place.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
