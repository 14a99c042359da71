"""What records that do not apply are still good for: warming the cost model, and seeds to re-check."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ecornn.cells import Cell
from ecornn.device import Device
from ecornn.errors import ArgumentError
from ecornn.schedules.base import Schedule, Task
from ecornn.task import make_task
from ecornn.tune.features import features
from ecornn.tune.log import Log
from ecornn.tune.lookup import carried, how_far, listed, moved, unfit, up_to_date
from ecornn.tune.model import CostModel
from ecornn.tune.record import Trial
from ecornn.tune.space import Candidate
from ecornn.tune.tolerance import proven
from ecornn.workload import Workload

NEIGHBOURS = 6  # runs
SURVEYS, BROAD = 12, 60  # runs that have so many trials, of which so many teach
SEEDS = 12  # configurations to re-check
LENT = 2  # configurations of each workload that is near
SAMPLES = 256  # records of each run

Run = tuple[str, Workload, Device]


def distance(a: Workload, b: Workload) -> float:
    """How unlike two workloads are, in octaves of their sizes."""
    return sum(abs(math.log2(getattr(a, n) / getattr(b, n))) for n in ("hidden", "input", "batch"))


def alike(work: Workload) -> tuple[str, str, str | None, str | None]:
    """What runs must have in common to teach one another."""
    return work.cell, work.dtype, work.weights, work.precision


def warm(model: CostModel, cell: Cell, task: Task, schedules: Sequence[Schedule], log: Log, run: str = "") -> int:
    """Adds the nearest runs of the same cell, data type and architecture, and of whatever cell and data type those that
    have seen a good part of a space, slow configurations too; returns how many trials.

    ``run`` is left out: the search is told of its own trials. The model compares times within a run
    only, so runs of other sizes, of other products and of older revisions teach as well.
    """
    runs: dict[Run, list[Trial]] = {}
    for trial in log.trials():
        if trial.run != run and trial.device.arch == task.device.arch and trial.stage == "search":
            runs.setdefault((trial.run, trial.workload, trial.device), []).append(trial)

    def order(one: Run) -> tuple[object, ...]:
        unlike = sum(a != b for a, b in zip(alike(one[1]), alike(task.workload), strict=True))
        return unlike, distance(one[1], task.workload), one[0], one[2].name

    ordered = sorted(runs, key=order)
    near = [one for one in ordered if alike(one[1]) == alike(task.workload)][:NEIGHBOURS]
    broad = [one for one in ordered if one not in near and len(runs[one]) >= BROAD][:SURVEYS]
    added = 0
    for one in (*near, *broad):
        name, of, on = one
        known = cell if of.cell == task.workload.cell else built_in(of)
        if known is None:
            continue
        other, trials = make_task(known, of, on), runs[one][-SAMPLES:]
        serving = {s.name: s for s in schedules if s.serves(other) is None}
        for trial in trials if one in near else trials[::math.ceil(len(trials) / BROAD)]:
            schedule = serving.get(trial.schedule)
            config = up_to_date(trial, schedule, other).config
            if schedule is None or unfit(schedule, other, config):
                continue
            row = features(schedule, other, Candidate.of(trial.schedule, config))
            model.add(f"{name} {of} {on.name}", row, trial.times.median if proven(trial) and trial.times else None)
            added += 1
    return added


def built_in(work: Workload) -> Cell | None:
    """The cell of a workload, where it is one of ours."""
    from ecornn.cells import get

    try:
        return get(work.cell)
    except ArgumentError:
        return None


def seeds(task: Task, schedules: Sequence[Schedule], log: Log) -> list[Candidate]:
    """The fastest configurations that any record of this workload has, best first; where these are
    few, those of the nearest batches too.

    Records of another GPU, or of another revision of the schedule, prove nothing here; what they
    found is worth a trial each, with knobs that they did not have as things were before. Whether a
    configuration fits is for the config space to say.
    """
    by_name = {s.name: s for s in schedules}
    knobs = {s.name: s.knobs(task) for s in schedules}
    best: dict[Candidate, tuple[float, float, float]] = {}
    for trial in log.trials():
        far = how_far(trial, task.workload, task.device)
        if far is None or not proven(trial) or trial.schedule not in knobs:
            continue
        assert trial.times is not None
        config = carried(up_to_date(trial, by_name[trial.schedule], task), by_name, task).config
        if listed(config, knobs[trial.schedule]):
            candidate, rank = Candidate.of(trial.schedule, config), (*far[1:3], trial.times.median)
            best[candidate] = min(best.get(candidate, rank), rank)
    found = sorted(best, key=lambda c: best[c])[:SEEDS]
    if len(found) < SEEDS:
        found += [c for c in borrowed(task, schedules, log) if c not in best]
    return found[:SEEDS]


def borrowed(task: Task, schedules: Sequence[Schedule], log: Log) -> list[Candidate]:
    """The fastest configurations of the nearest workloads of the same cell, data type and architecture, as they are for
    this task, where they fit; the fastest of each first."""
    by_name = {s.name: s for s in schedules}
    times: dict[Workload, dict[Candidate, float]] = {}
    for trial in log.trials():
        if (alike(trial.workload) == alike(task.workload) and trial.device.arch == task.device.arch
                and proven(trial) and trial.schedule in by_name and trial.workload != task.workload):
            assert trial.times is not None
            one, of = Candidate.of(trial.schedule, trial.config), times.setdefault(trial.workload, {})
            of[one] = min(of.get(one, math.inf), trial.times.median)
    near = sorted(times, key=lambda work: (distance(work, task.workload), str(work)))[:NEIGHBOURS]
    ranked = [sorted(times[work], key=lambda c: times[work][c])[:LENT] for work in near]
    found: dict[Candidate, None] = {}
    for place in range(LENT):
        for work, best in zip(near, ranked, strict=True):
            for one in best[place:place + 1]:
                schedule = by_name[one.schedule]
                config = {k.name: k.before for k in schedule.knobs(task) if k.before is not None} | one.config
                config = dict(moved(config, schedule, work, task))
                if unfit(schedule, task, config) is None:
                    found[Candidate.of(one.schedule, config)] = None
    return list(found)
