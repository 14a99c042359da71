"""Which record applies to a task, and why.

In order: this device before another of the same architecture that has no more cores; the same
batch before the nearest larger one; the user's folder before the shipped one; measured again at
the end of a run before measured once; the fastest. The sequence length plays no part: a module
serves every T. Where only records of another revision of a schedule are left, the configuration of
the best one is used before the heuristic, and the provenance says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecornn.device import Device
from ecornn.schedules.base import Config, Schedule, Task, Value
from ecornn.tune.log import Line, Log
from ecornn.tune.record import Trial
from ecornn.workload import Workload

STALE = "stale (another revision of their schedule)"


@dataclass(frozen=True)
class Found:
    """A schedule and its configuration; ``provenance`` says in one line where they come from."""

    schedule: Schedule
    config: Config
    provenance: str
    line: Line | None = None  # None: no record applies


def rank(trial: Trial, workload: Workload, device: Device) -> tuple[int, int, int] | None:
    """How far a trial is from a task, small is near: (device, cores, batch); None: not applicable."""
    of, on = trial.workload, trial.device
    if trial.times is None or on.kind != device.kind or on.arch != device.arch:
        return None
    same = all(getattr(of, name) == getattr(workload, name) for name in ("cell", "hidden", "input", "dtype", "weights"))
    if not same or of.batch < workload.batch:
        return None
    if on.cores > device.cores:  # its blocks would not all be resident
        return None
    here = on.name == device.name and on.cores == device.cores
    return (0 if here else 1, device.cores - on.cores, of.batch - workload.batch)


def unusable(schedule: Schedule | None, task: Task, trial: Trial) -> str | None:
    """Why a trial that matches the task cannot be used; None: it can."""
    if schedule is None:
        return "of schedules that do not serve this"
    if trial.revision != schedule.revision:
        return STALE
    return unfit(schedule, task, trial)


def unfit(schedule: Schedule, task: Task, trial: Trial) -> str | None:
    """Why the configuration of a trial cannot be used, whatever its revision; None: it can."""
    if not same_config(trial.config, schedule.default(task)):
        values = {knob.name: knob.values for knob in schedule.knobs(task)}
        if set(trial.config) != set(values) or not all(
                any(same_value(value, v) for v in values[name]) for name, value in trial.config.items()):
            return "with knobs or values that the schedule no longer has here"
    return "of configurations that do not fit here" if schedule.check(task, trial.config) else None


def same_value(a: Value, b: Value) -> bool:
    """Equal, with True and 1 told apart."""
    return type(a) is type(b) and a == b


def same_config(a: Config, b: Config) -> bool:
    """Equal knobs and values."""
    return set(a) == set(b) and all(same_value(a[k], b[k]) for k in a)


def find(task: Task, schedules: Sequence[Schedule], log: Log) -> Found:
    """The best record for the task among ``schedules`` (preferred ones first), else the heuristic:
    the default of the first. ``log`` holds the user's lines first.
    """
    by_name = {s.name: s for s in schedules}
    folders: dict[object, int] = {}  # folder -> its place in the order of reading
    candidates = []
    for line in log.lines:
        folder = folders.setdefault(line.path.parent, len(folders))
        if isinstance(line.record, Trial):
            distance = rank(line.record, task.workload, task.device)
            if distance is not None and line.record.times is not None:
                candidates.append(((*distance, folder, line.record.stage != "final",
                                    line.record.times.median), line.record, line))
    ignored: dict[str, int] = {}
    outdated: Found | None = None
    for key, trial, line in sorted(candidates, key=lambda c: c[0]):
        schedule = by_name.get(trial.schedule)
        reason = unusable(schedule, task, trial)
        if reason is None and schedule is not None:
            text = describe(trial, line, key[0] == 0, task) + said(ignored)
            return Found(schedule, trial.config, text, line)
        if outdated is None and schedule is not None and reason == STALE and not unfit(schedule, task, trial):
            outdated = Found(schedule, trial.config, describe(trial, line, key[0] == 0, task)
                             + f" with revision {trial.revision} of {schedule.name}, now {schedule.revision}: "
                             "its configuration is likely still good, its time is not known", line)
        ignored[str(reason)] = ignored.get(str(reason), 0) + 1
    if outdated is not None:
        return outdated
    first = schedules[0]
    why = "no record applies" if not ignored else "no usable record"
    return Found(first, first.default(task), f"untuned default of {first.name}: {why}" + said(ignored))


def describe(trial: Trial, line: Line, same_device: bool, task: Task) -> str:
    """A record that was chosen, in one line."""
    assert trial.times is not None
    device = "this device" if same_device else f"{trial.device.name} (same architecture)"
    batch = "same batch" if trial.workload.batch == task.workload.batch else f"batch {trial.workload.batch}"
    return f"record {line.place} of {trial.time}: {device}, {batch}, {trial.times.median:g} µs per step"


def said(ignored: dict[str, int]) -> str:
    """The ignored records, as the end of a line."""
    return "".join(f"; {n} ignored, {reason}" for reason, n in ignored.items())
