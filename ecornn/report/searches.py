"""The searches of a log, and the effect of each knob of one: times by its values, and its share of the cost model."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ecornn.errors import EcornnError
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task, Value
from ecornn.tune.log import Gain, Journal, Log, gain_of
from ecornn.tune.record import Choice, Finish, Trial, first_line


@dataclass
class SearchRun:
    """One run: ``search`` are its trials in order, ``finals`` those of the comparison at its end."""

    path: Path
    run: str
    search: list[Trial] = field(default_factory=list)
    finals: list[Trial] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def time(self) -> str:
        """The time at which its last record was written."""
        return max(r.time for r in (*self.search, *self.finals, *([self.finish] if self.finish else [])))

    @property
    def best(self) -> Trial | None:
        """The last trial of the configuration that the run found best; where the log no longer has that, as after
        ``ecornn log prune``, and of a run that was stopped, the fastest that it has."""
        if self.finish is not None and (best := self.last(self.finish.best)) is not None:
            return best
        return min((t for t in self.search if t.times), key=lambda t: t.times.median, default=None)  # type: ignore[union-attr]

    @property
    def default(self) -> Trial | None:
        """The last trial of the untuned default; None in a run that was stopped, which does not name it."""
        return self.last(self.finish.default) if self.finish is not None else None

    def last(self, choice: Choice | None) -> Trial | None:
        """The last trial of a configuration that has a time."""
        same = [t for t in (*self.search, *self.finals) if t.times is not None and t.choice == choice]
        return same[-1] if same else None

    @property
    def gain(self) -> Gain | None:
        """The gain of the best over the default."""
        return gain_of(Journal(self.path, self.run, [*self.search, *self.finals], self.finish))

    @property
    def failures(self) -> list[tuple[str, int]]:
        """Reasons and how many trials failed for each, the most frequent first."""
        return Counter(first_line(t.error, 90) for t in self.search if t.error).most_common()

    def curve(self) -> list[tuple[int, float, float]]:
        """(number, µs a step, the best until then) of each trial that ran."""
        points, best = [], float("inf")
        for number, trial in enumerate(self.search, 1):
            if trial.times is not None:
                best = min(best, trial.times.median)
                points.append((number, trial.times.median, best))
        return points


def searches(log: Log) -> list[SearchRun]:
    """The runs of a log that measured anything, the latest first."""
    runs: dict[tuple[Path, str], SearchRun] = {}
    for line in log.lines:
        record = line.record
        run = runs.setdefault((line.path, record.run), SearchRun(line.path, record.run))
        if isinstance(record, Trial):
            (run.finals if record.stage == "final" else run.search).append(record)
        elif isinstance(record, Finish):
            run.finish = record
    return sorted((r for r in runs.values() if any(t.times for t in r.search)), key=lambda r: r.time, reverse=True)


@dataclass(frozen=True)
class AtValue:
    """Trials with one value of a knob, µs a step; ``chosen``: the best has it."""

    value: Value
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
    schedule = all_schedules().get(best.schedule)
    trades = {knob.name: knob.trades for knob in schedule.knobs(task)} if task is not None and schedule else {}
    timed = [t for t in run.search if t.times is not None and t.schedule == best.schedule]
    weights, every = importance(run, task), []
    for knob in best.config:
        groups: dict[tuple[str, Value], list[float]] = {}  # True is 1, as a key
        for trial in timed:
            if knob in trial.config and trial.times is not None:
                value = trial.config[knob]
                groups.setdefault((type(value).__name__, value), []).append(trial.times.median)
        if len(groups) < 2:
            continue
        values = [AtValue(value, min(times), statistics.median(times), value == best.config[knob])
                  for (_, value), times in sorted(groups.items(), key=lambda g: (g[0][0], g[0][1]))]
        every.append(Effect(knob, explained(list(groups.values())), weights.get(knob), trades.get(knob, ""), values))
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
    from ecornn.tune.search import CostModel, features
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
