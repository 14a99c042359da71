"""The effect of each knob of a search: times by its values, and its share of the cost model."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from ecornn.errors import EcornnError
from ecornn.report.searches import SearchRun
from ecornn.schedules.base import Task, Value
from ecornn.tune.record import Trial


@dataclass(frozen=True)
class AtValue:
    """Trials with one value of a knob, µs a step; ``chosen``: the best has it."""

    value: Value
    count: int
    fastest: float
    median: float
    chosen: bool


@dataclass(frozen=True)
class Effect:
    """A knob of the best's schedule.

    ``share`` of the variance of log times that its values alone explain (between values / total); ``importance``: its
    share of what the trees of the cost model gain, None without one; ``trades``: the schedule's own line about it.
    """

    knob: str
    share: float
    importance: float | None
    trades: str
    values: list[AtValue]


def effects(run: SearchRun, task: Task | None) -> list[Effect]:
    """The effects of knobs that took more than one value, the one that explains most first."""
    best = run.best
    if best is None:
        return []
    timed = [t for t in run.search if t.times is not None and t.schedule == best.schedule]
    weights, lines = importance(run, task), trades(best, task)
    every = []
    for knob in best.config:
        groups: dict[tuple[str, Value], list[float]] = {}  # True is 1, as a key
        for trial in timed:
            if knob in trial.config and trial.times is not None:
                value = trial.config[knob]
                groups.setdefault((type(value).__name__, value), []).append(trial.times.median)
        if len(groups) < 2:
            continue
        values = [AtValue(value, len(times), min(times), statistics.median(times), value == best.config[knob])
                  for (_, value), times in sorted(groups.items(), key=lambda g: (g[0][0], g[0][1]))]
        every.append(Effect(knob, explained(list(groups.values())), weights.get(knob), lines.get(knob, ""), values))
    return sorted(every, key=lambda e: (-(e.importance or 0.0), -e.share, e.knob))


def explained(groups: list[list[float]]) -> float:
    """The share of the groups in the total sum of squares of the logs; 0 where all are equal."""
    logs = [[math.log(t) for t in group] for group in groups]
    mean = statistics.fmean(v for group in logs for v in group)
    total = sum((v - mean) ** 2 for group in logs for v in group)
    between = sum(len(group) * (statistics.fmean(group) - mean) ** 2 for group in logs)
    return between / total if total > 0 else 0.0


def importance(run: SearchRun, task: Task | None) -> dict[str, float]:
    """Knobs of the best's schedule by their share of the total gain of the cost model's trees, trained on this run
    alone. A schedule's other features of a candidate have the rest. {} where there is too little to learn."""
    from ecornn.schedules import all_schedules
    from ecornn.tune.model import CostModel, features
    from ecornn.tune.space import Candidate

    if task is None or run.best is None:
        return {}
    model, known = CostModel(), all_schedules()
    for trial in run.search:
        schedule = known.get(trial.schedule)
        if schedule is None or schedule.revision != trial.revision:
            continue
        try:
            row = features(schedule, task, Candidate.of(trial.schedule, trial.config))
        except (EcornnError, KeyError, ValueError):  # of a knob, or a value of one, that there is no more
            continue
        model.add("run", row, trial.times.median if trial.times else None)
    gains: dict[str, float] = {}
    for column, gain in model.gains().items():
        name = column.partition("=")[0]
        gains[name] = gains.get(name, 0.0) + gain
    total, prefix = sum(gains.values()), f"{run.best.schedule}."
    if not total:
        return {}
    return {name[len(prefix):]: gain / total for name, gain in gains.items() if name.startswith(prefix)}


def trades(best: Trial, task: Task | None) -> dict[str, str]:
    """The schedule's lines about its knobs."""
    from ecornn.schedules import all_schedules

    schedule = all_schedules().get(best.schedule)
    if task is None or schedule is None:
        return {}
    return {knob.name: knob.trades for knob in schedule.knobs(task)}
