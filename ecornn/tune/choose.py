"""Target, schedules and configuration, where the caller leaves them open; and the device at hand, to measure on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import structs

from ecornn import host_gpu
from ecornn.build import nvcc, nvrtc
from ecornn.build.commands import ANSWER, run
from ecornn.device import Device
from ecornn.dtypes import SERVED
from ecornn.errors import ArgumentError, DeviceError, DTypeError, ScheduleError
from ecornn.host_cpu import cpuinfo
from ecornn.manifest import versions
from ecornn.schedules import all_schedules
from ecornn.schedules.base import AnySchedule, Task, Value, config_text
from ecornn.targets import default_target, resolve
from ecornn.tune.log import Log, read_all
from ecornn.tune.lookup import Found, find
from ecornn.tune.record import Clocks
from ecornn.tune.transfer import lent
from ecornn.workload import ON_GPUS, Workload

GENERAL = {"llvm": "cpu", "cuda": "cuda"}  # kind -> the target that means whatever device of it is there


def candidates(device: Device, name: str | None = None) -> list[AnySchedule]:
    """The schedules for this kind of device, or the one of that name; :class:`ArgumentError` for an unknown name."""
    every = all_schedules()
    if name is not None and name not in every:
        raise ArgumentError("schedule", name, f"one of {', '.join(every)}")
    return [every[name]] if name else [s for s in every.values() if s.kind == device.kind]


def searched(workload: Workload, device: Device, name: str | None = None) -> list[AnySchedule]:
    """The :func:`candidates` that may serve a workload; :class:`ArgumentError` for a name that is none of these."""
    asked = candidates(device, name)
    able = [s for s in asked if s.backward or not workload.backward]
    if name and asked and not able:
        others = ", ".join(s.name for s in candidates(device) if s.backward)
        raise ArgumentError("schedule", name, f"one that carries out adjoints: {others}")
    return able


def serving_or_raise(task: Task, name: str | None = None) -> list[AnySchedule]:
    """The schedules of :func:`serving`, the one that is expected to be fastest first."""
    return sorted(serving(task, name), key=lambda s: s.rank(task))


def serving(task: Task, name: str | None = None) -> list[AnySchedule]:
    """The schedules that serve the task, unranked, or the named one. Raises :class:`ArgumentError` (unknown name),
    :class:`DTypeError` (type the device has not), :class:`ScheduleError` (none serves)."""
    asked, allowed = candidates(task.device, name), SERVED[task.device.kind]
    if task.workload.dtype not in allowed:
        where = "a GPU" if task.device.kind == "cuda" else "a CPU"
        raise DTypeError("dtype", task.workload.dtype, f"one of {', '.join(allowed)} on {where}")
    if (weights := task.workload.weights) and task.device.kind == "llvm" and task.workload.dtype != "float32":
        raise DTypeError("weights", weights, f"None with dtype {task.workload.dtype} on a CPU, which rounds weights of "
                         "float32 layers alone")
    if weights and task.device.kind == "cuda":
        if weights not in ON_GPUS:
            raise DTypeError("weights", weights, f"None or {', '.join(ON_GPUS)} on a GPU")
        if (dtype := task.workload.dtype) not in ("float16", "bfloat16"):
            raise DTypeError("weights", weights, f"None with dtype {dtype} on a GPU; {weights} is for float16 and "
                             "bfloat16")
        if task.workload.backward or task.traversal.keep is not None:
            raise DTypeError("weights", weights, "None in a layer that trains")
    reasons = {schedule.name: refusal(schedule, task) for schedule in asked}
    served = [s for s in asked if reasons[s.name] is None]
    if not served:
        raise ScheduleError(f"no schedule serves {task.workload} on {task.device.name}: "
                            + "; ".join(f"{n}: {r}" for n, r in reasons.items()))
    return served


def refusal(schedule: AnySchedule, task: Task) -> str | None:
    """The reason why a schedule does not serve a task, whose data type its device has; None: it does."""
    if schedule.kind != task.device.kind:
        return f"is for {schedule.kind}, not {task.device.kind}"
    if task.workload.weights and task.workload.weights not in schedule.weights:
        return f"does not round weights to {task.workload.weights}"
    if task.workload.precision and schedule.kind != "cuda":
        return f"has no {task.workload.precision} products"
    if task.traversal.sequences and not schedule.sequences:
        return "does not serve sequences that are laid end to end in a column"
    return schedule.serves(task)


def complete(schedule: AnySchedule, task: Task, config: Mapping[str, Value]) -> dict[str, Value]:
    """The schedule's default with the given knobs changed. Raises :class:`ArgumentError` for an unknown knob or value,
    :class:`ScheduleError` where the configuration cannot run."""
    knobs = {k.name: k for k in schedule.knobs(task)}
    chosen = dict(schedule.default(task))
    for name, value in config.items():
        if name not in knobs:
            raise ArgumentError("config", name, f"a knob of {schedule.name}: {', '.join(knobs)}")
        allowed = (*knobs[name].values, chosen[name])
        if not any(type(value) is type(v) and value == v for v in allowed):
            raise ArgumentError(f"config {name}", value, f"one of {', '.join(map(str, knobs[name].values))}")
        chosen[name] = value
    if reason := schedule.check(task, chosen):
        raise ScheduleError(f"{schedule.name} cannot run with {config_text(config)}: {reason}")
    return chosen


def choose(task: Task, schedule: str | None, config: Mapping[str, Value] | None, log: Log | None = None) -> Found:
    """Schedule and configuration: as given, else of the best record in ``log`` (default: the user's folder and the
    shipped one), of this cell or else of a built-in one of the same products, else by the heuristic. Raises what
    :func:`serving` and :func:`complete` raise, and :class:`ArgumentError` for a ``config`` of no schedule."""
    schedules = serving(task, schedule)
    if config:
        if schedule is None and len(schedules) > 1:
            raise ArgumentError("config", dict(config), "a schedule beside it, one of "
                                + ", ".join(s.name for s in schedules))
        return Found(schedules[0], complete(schedules[0], task, config), "the caller gave this configuration")
    log = read_all() if log is None else log
    others = lent(task, log)
    if others is None:
        return find(task, schedules, log)
    cell, records = others
    chosen = find(task, schedules, records)
    return chosen if chosen.line is None else replace(
        chosen, provenance=f"{chosen.provenance}; the record is of {cell}, which has the same products")


def present(target: str | Device | None) -> Device:
    """The device of this machine that ``target`` means, as :func:`matched`; default: the GPU if there is one. Raises
    :class:`~ecornn.errors.DeviceError` where it is not in this machine."""
    wanted = default_target() if target is None else target
    general = wanted if wanted in GENERAL.values() else GENERAL[resolve(wanted).kind]
    here = resolve("cpu") if general == "cpu" else host_gpu.detect()
    if here is None:
        raise DeviceError("target", told(wanted), "'cpu', since this machine has no CUDA GPU with its driver. Tuning "
                          "measures, so the device must be in this machine, or behind a tracker")
    return matched(wanted, here)


def matched(target: str | Device, here: Device) -> Device:
    """``here``, the device that measures, where ``target`` means it; with ``target``'s multiprocessors, or CPU
    features, where those are fewer: a share of a GPU, as sequences that run at the same time have. Raises
    :class:`~ecornn.errors.DeviceError` where ``target`` means another device, or what this one does not have."""
    general = GENERAL[here.kind]
    if target == general:
        return here
    if target in GENERAL.values() or resolve(target).arch != here.arch:
        raise DeviceError("target", told(target), f"{general!r} or {here.arch!r} ({here.name}). Tuning measures, so "
                          "the device must be in this machine, or behind a tracker")
    if isinstance(target, str):
        return here
    if here.kind == "llvm" and target.cores != here.cores:
        raise DeviceError("target.cores", target.cores, f"{here.cores}, the cores of {here.name} that this process may "
                          "use, since all of them measure; `taskset` reduces their number")
    if missing := sorted(set(target.features) - set(here.features)):
        raise DeviceError("target.features", ", ".join(missing), f"features that {here.name} has")
    return structs.replace(here, cores=min(here.cores, target.cores), features=target.features)


def told(target: str | Device) -> str:
    return target if isinstance(target, str) else f"{target.name} ({target.arch}, {target.cores} cores)"


class Environment(msgspec.Struct, frozen=True):
    """Versions of ecornn, TVM, tvm-ffi, on a GPU of ``driver`` and ``cuda`` (the compiler), and the device's clocks."""

    versions: dict[str, str] = {}
    clocks: Clocks | None = None


def environment(device: Device) -> Environment:
    if device.kind != "cuda":
        return Environment(versions(), Clocks(cpu_clock()))
    software = versions() | {"driver": host_gpu.driver_version() or "none", "cuda": cuda_compiler() or "none"}
    return Environment(software, Clocks(*host_gpu.clocks()))


def cpu_clock() -> int:
    """The first processor's highest clock, in MHz; where the kernel does not say, its present one; 0 where unknown."""
    try:
        return int(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) // 1000  # of kHz
    except (OSError, ValueError):
        try:
            return round(float(cpuinfo().get("cpu MHz", 0)))
        except ValueError:
            return 0


def cuda_compiler() -> str | None:
    """Name and version of the CUDA compiler that builds use, such as ``nvcc 13.0``."""
    if path := nvcc.find_nvcc():
        release = re.search(r"release (\d+\.\d+)", run([path, "--version"], ANSWER)[1])
        return f"nvcc {release[1]}" if release else "nvcc"
    return f"nvrtc {version('cuda-bindings')}" if nvrtc.available() else None
