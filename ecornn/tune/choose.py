"""Target, schedules and configuration, where the caller leaves them open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ecornn.device import Device
from ecornn.dtypes import SERVED
from ecornn.errors import ArgumentError, DTypeError, ScheduleError
from ecornn.schedules.base import AnySchedule, Task, Value
from ecornn.workload import ON_GPUS

if TYPE_CHECKING:
    from ecornn.tune.log import Log
    from ecornn.tune.lookup import Found
    from ecornn.workload import Workload


def default_target() -> str:
    """``cuda`` where there is a GPU that schedules serve, else ``cpu``."""
    from ecornn.errors import DeviceError
    from ecornn.host_gpu import detect

    try:
        return "cuda" if detect() is not None else "cpu"
    except DeviceError:
        return "cpu"


def candidates(device: Device, name: str | None = None) -> list[AnySchedule]:
    """The schedules for this kind of device, or the one of that name, whatever they serve.

    Raises :class:`ArgumentError` for an unknown name."""
    from ecornn.schedules import all_schedules

    every = all_schedules()
    if name is not None and name not in every:
        raise ArgumentError("schedule", name, f"one of {', '.join(every)}")
    return [every[name]] if name else [s for s in every.values() if s.kind == device.kind]


def searched(workload: Workload, device: Device, name: str | None = None) -> list[AnySchedule]:
    """The :func:`candidates` that may serve a workload: of an adjoint those that carry adjoints out.

    Raises :class:`ArgumentError` for a name that is none of these."""
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
    """The schedules that serve the task, or the one of that name, in no order: what a schedule expects takes a search.

    Raises :class:`ArgumentError` for an unknown name, :class:`DTypeError` for a data type, or one of weights, that this
    kind of device does not have, :class:`ScheduleError` with each schedule's reason where none serves."""
    asked, allowed = candidates(task.device, name), SERVED[task.device.kind]
    if task.workload.dtype not in allowed:
        where = "a GPU" if task.device.kind == "cuda" else "a CPU"
        raise DTypeError("dtype", task.workload.dtype, f"one of {', '.join(allowed)} on {where}")
    if task.workload.weights and task.device.kind == "cuda":
        _check_weights(task)
    reasons = {schedule.name: refusal(schedule, task) for schedule in asked}
    served = [s for s in asked if reasons[s.name] is None]
    if not served:
        raise ScheduleError(f"no schedule serves {task.workload} on {task.device.name}: "
                            + "; ".join(f"{n} {r}" for n, r in reasons.items()))
    return served


def _check_weights(task: Task) -> None:
    """Raises :class:`DTypeError` where weights are rounded in a way, or in a layer, that GPUs do not have."""
    work = task.workload
    if work.weights not in ON_GPUS:
        raise DTypeError("weights", work.weights, f"None or {', '.join(ON_GPUS)} on a GPU")
    if work.dtype not in ("float16", "bfloat16"):
        raise DTypeError("weights", work.weights, f"None with dtype {work.dtype} on a GPU; {work.weights} is for "
                         "float16 and bfloat16")
    if work.backward or task.traversal.keep is not None:
        raise DTypeError("weights", work.weights, "None in a layer that trains")


def refusal(schedule: AnySchedule, task: Task) -> str | None:
    """The reason why a schedule does not serve a task, whose data type its device has; None: it does."""
    if schedule.kind != task.device.kind:
        return f"is for {schedule.kind}, not {task.device.kind}"
    if task.workload.weights and task.workload.weights not in schedule.weights:
        return f"does not round weights to {task.workload.weights}"
    if task.workload.precision and schedule.kind != "cuda":
        return f"has no {task.workload.precision} products"
    if task.traversal.sequences and not schedule.sequences:
        return "does not work on one sequence after the other in a column"
    return schedule.serves(task)


def complete(schedule: AnySchedule, task: Task, config: Mapping[str, Value]) -> dict[str, Value]:
    """The schedule's default with the given knobs changed.

    Raises :class:`ArgumentError` for an unknown knob or value, :class:`ScheduleError` where the configuration cannot
    run."""
    knobs = {k.name: k for k in schedule.knobs(task)}
    chosen = dict(schedule.default(task))
    for name, value in config.items():
        if name not in knobs:
            raise ArgumentError("config", name, f"a knob of {schedule.name}: {', '.join(knobs)}")
        allowed = (*knobs[name].values, chosen[name])
        if not any(type(value) is type(v) and value == v for v in allowed):
            raise ArgumentError(f"config {name}", value,
                                f"one of {', '.join(map(str, knobs[name].values))}")
        chosen[name] = value
    reason = schedule.check(task, chosen)
    if reason:
        raise ScheduleError(f"{schedule.name} cannot run with {chosen}: {reason}")
    return chosen


def choose(task: Task, schedule: str | None, config: Mapping[str, Value] | None,
           log: Log | None = None) -> Found:
    """Schedule and configuration: as given, else of the best record, of this cell or else of a built-in one of the same
    products, else by the heuristic. ``log``: the records to look in; default: the user's folder and the shipped ones.

    Raises what :func:`serving` and :func:`complete` raise, and :class:`ArgumentError` for a ``config`` of no schedule.
    """
    from ecornn.tune.folders import read_all
    from ecornn.tune.lookup import Found, find
    from ecornn.tune.similar_cells import lent

    schedules = serving(task, schedule)
    if config:
        if schedule is None and len(schedules) > 1:
            raise ArgumentError("config", dict(config), "a schedule beside it, one of "
                                + ", ".join(s.name for s in schedules))
        return Found(schedules[0], complete(schedules[0], task, config), "configuration given by the caller")
    log = read_all() if log is None else log
    others = lent(task, log)
    if others is None:
        return find(task, schedules, log)
    cell, records = others
    chosen = find(task, schedules, records)
    return chosen if chosen.line is None else replace(
        chosen, provenance=f"{chosen.provenance}; of {cell}, which has the same products")
