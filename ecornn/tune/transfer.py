"""What records that do not apply are still good for: warming the cost model, and seeds to re-check."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ecornn.cells import Cell
from ecornn.schedules.base import Schedule, Task
from ecornn.task import make_task
from ecornn.tune.features import features
from ecornn.tune.log import Log
from ecornn.tune.lookup import unusable
from ecornn.tune.model import CostModel
from ecornn.tune.record import Trial
from ecornn.tune.space import Candidate
from ecornn.workload import Workload

NEIGHBOURS = 6  # workloads
SEEDS = 8  # configurations to re-check
SAMPLES = 256  # records of each


def distance(a: Workload, b: Workload) -> float:
    """How unlike two workloads are, in octaves of their sizes."""
    return sum(abs(math.log2(getattr(a, n) / getattr(b, n))) for n in ("hidden", "input", "batch"))


def warm(model: CostModel, cell: Cell, task: Task, schedules: Sequence[Schedule], log: Log) -> int:
    """Adds records of the same cell, data type and architecture at other sizes; returns how many."""
    by_name = {s.name: s for s in schedules}
    groups: dict[tuple[Workload, str], list[Trial]] = {}
    for trial in log.trials():
        of = trial.workload
        if (of.cell == task.workload.cell and of != task.workload
                and (of.dtype, of.weights) == (task.workload.dtype, task.workload.weights)
                and trial.device.arch == task.device.arch and trial.stage == "search"):
            groups.setdefault((of, trial.device.name), []).append(trial)
    near = sorted(groups, key=lambda g: (distance(g[0], task.workload), g[1]))[:NEIGHBOURS]
    added = 0
    for group in near:
        trials = groups[group][-SAMPLES:]
        other = make_task(cell, group[0], trials[0].device)
        for trial in trials:
            schedule = by_name.get(trial.schedule)
            if schedule is None or unusable(schedule, other, trial):
                continue
            row = features(schedule, other, Candidate.of(trial.schedule, trial.config))
            model.add(f"{group[0]} {group[1]}", row, trial.times.median if trial.times else None)
            added += 1
    return added


def seeds(task: Task, schedules: Sequence[Schedule], log: Log) -> list[Candidate]:
    """The fastest configurations that any record of this workload has, best first.

    Records of another GPU, or of another revision of the schedule, prove nothing here; what they
    found is worth a trial each. Whether a configuration fits is for the config space to say.
    """
    names = {s.name for s in schedules}
    best: dict[Candidate, float] = {}
    for trial in log.trials():
        of = trial.workload
        same = all(getattr(of, name) == getattr(task.workload, name)
                   for name in ("cell", "hidden", "input", "batch", "dtype", "weights"))
        if same and trial.schedule in names and trial.times is not None and trial.device.kind == task.device.kind:
            candidate = Candidate.of(trial.schedule, trial.config)
            best[candidate] = min(best.get(candidate, math.inf), trial.times.median)
    return sorted(best, key=lambda c: best[c])[:SEEDS]
