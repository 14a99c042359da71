"""The searches of a log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ecornn.tune.journal import Gain, Journal, gain_of
from ecornn.tune.log import Log
from ecornn.tune.record import Choice, Finish, Start, Trial, first_line


@dataclass
class SearchRun:
    """One run: ``search`` are its trials in order, ``finals`` those of the comparison at its end."""

    path: Path
    run: str
    start: Start | None = None
    search: list[Trial] = field(default_factory=list)
    finals: list[Trial] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def any(self) -> Trial:
        """One of the trials, which all have the same workload and device."""
        return (self.search or self.finals)[0]

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
        else:
            run.start = record
    return sorted((r for r in runs.values() if any(t.times for t in r.search)), key=lambda r: r.time, reverse=True)
