"""Tables of measured configurations, and searches that may propose these and no others.

The tuner is the real one; the time of what it proposes is looked up. `search_quality.py` sets such replays against
random search, and `search_tables.py` measures the tables.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from search_tables import task_of, trials_of

from ecornn.device import Device
from ecornn.schedules.base import Schedule, Task
from ecornn.tune.choose import Environment
from ecornn.tune.evaluate import SPARE
from ecornn.tune.journal import Journal
from ecornn.tune.log import Log, read_all, shipped_folder
from ecornn.tune.lookup import unfit, up_to_date
from ecornn.tune.model import CostModel
from ecornn.tune.record import AnyRecord, Outcome, Trial
from ecornn.tune.search import Search
from ecornn.tune.space import Candidate, ConfigSpace, halving
from ecornn.tune.transfer import borrowed, warm
from ecornn.tune.tuner import Settings, Tuner
from ecornn.workload import Workload

Times = dict[Candidate, Trial]
BUILDERS = 16


class TableSpace(ConfigSpace):
    """The configurations that were measured."""

    def __init__(self, task: Task, schedules: Sequence[Schedule], table: Times) -> None:
        super().__init__(task, schedules)
        self.table = table
        self.by_name: dict[str, list[Candidate]] = {}
        for candidate in table:
            self.by_name.setdefault(candidate.schedule, []).append(candidate)
        self.values = {name: np.array([[str(v) for _, v in c.knobs] for c in found])
                       for name, found in self.by_name.items()}

    def __len__(self) -> int:
        return len(self.table)

    def fits(self, candidate: Candidate) -> bool:
        return candidate in self.table

    def listing(self) -> Iterator[Candidate]:
        return iter(self.table)

    def sample(self, rng: random.Random, count: int) -> list[Candidate]:
        return list(self.table) if len(self) <= count else rng.sample(list(self.table), count)

    def draw(self, rng: random.Random) -> Candidate | None:
        return rng.choice(self.by_name[halving(rng, [name for name in self.schedules if name in self.by_name])])

    def neighbour(self, candidate: Candidate, rng: random.Random) -> Candidate | None:
        mine = np.array([str(v) for _, v in candidate.knobs])
        near = np.flatnonzero((self.values[candidate.schedule] != mine).sum(axis=1) == 1)
        return self.by_name[candidate.schedule][rng.choice(list(near))] if len(near) else None


class Looked:
    """The evaluator of a replay: in the order of the proposals."""

    def __init__(self, table: Times, quiet: bool) -> None:
        self.table, self.waiting = table, deque[Candidate]()
        self.spare = 0 if quiet else round(SPARE * BUILDERS)
        self.idle = 0

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def submit(self, batch: Sequence[Candidate], bound: float | None) -> None:
        self.waiting.extend(batch)

    def next(self, seconds: float | None = None) -> tuple[Candidate, Outcome]:
        candidate = self.waiting.popleft()
        trial = self.table[candidate]
        return candidate, Outcome.of(trial)

    def drop(self) -> None:
        self.waiting.clear()

    def compare(self, finalists: Sequence[Candidate], seconds: float | None = None) -> list[Outcome]:
        return []


class Unwritten(Journal):
    """A journal in memory."""

    def add(self, record: AnyRecord) -> None:
        self.take(record)


@dataclass(frozen=True)
class Table:
    """One workload's measurements on one device."""

    work: Workload
    device: Device
    trials: tuple[Trial, ...]

    @property
    def times(self) -> Times:
        """The latest trial of each configuration."""
        return {Candidate.of(t.schedule, t.config): t for t in self.trials}

    @property
    def best(self) -> float:
        """µs per step of the fastest."""
        return min(t.times.median for t in self.trials if t.times)


def tables_of(paths: Sequence[Path]) -> list[Table]:
    """The tables of logs, compressed or not."""
    found: dict[tuple[Workload, str], list[Trial]] = {}
    for path in paths:
        for trial in trials_of(path):
            if trial.stage == "search":  # of all hosts with such a GPU
                found.setdefault((trial.workload, trial.device.name), []).append(trial)
    return [Table(work, trials[0].device, tuple(usable(work, trials[0].device, trials)))
            for (work, _), trials in found.items()]


def usable(work: Workload, device: Device, trials: Sequence[Trial]) -> Iterator[Trial]:
    """The trials that can be proposed, with knobs that came later as things were before."""
    task, schedules = asked(work, device)
    by_name = {s.name: s for s in schedules}
    for trial in trials:
        now = up_to_date(trial, by_name.get(trial.schedule), task)
        if unfit(by_name.get(trial.schedule), task, now.config) is None:
            yield now


@cache
def asked(work: Workload, device: Device) -> tuple[Task, list[Schedule]]:
    """As :func:`search_tables.task_of`: each process replays many searches of a table."""
    return task_of(work, device)


@cache
def others(mine: Workload) -> Log:
    """The shipped records but those of this workload, or of this layer at less than twice or half the batch."""

    def other(work: Workload) -> bool:
        same = (work.cell, work.hidden, work.input, work.dtype) == (mine.cell, mine.hidden, mine.input, mine.dtype)
        return not same or max(work.batch, mine.batch) >= 2 * min(work.batch, mine.batch)

    log = read_all([shipped_folder()])
    return Log([line for line in log.lines if isinstance(line.record, Trial) and other(line.record.workload)])


def replay(table: Table, kind: str, seed: int, budget: int) -> list[float]:
    """Best so far after each trial, relative to the best of the table."""
    task, schedules = asked(table.work, table.device)
    times, model = table.times, CostModel(seed)
    space, lent = TableSpace(task, schedules, times), list[Candidate]()
    if kind == "random":
        order = [c for c in space.defaults() if c in times]
        rest = [c for c in times if c not in order]
        random.Random(seed).shuffle(rest)
        tried = [times[c] for c in (order + rest)[:budget]]
    else:
        if kind == "warmed":
            from ecornn.cells import get

            records = others(table.work)
            warm(model, get(table.work.cell), task, schedules, records)
            lent = borrowed(task, schedules, records)
        quiet, first = table.device.kind == "llvm", table.trials[0]
        budget = min(budget, len(times))
        settings = Settings(budget, seed, None, max(4, min(16 if quiet else 8, budget // 6)))
        journal = Unwritten(Path("replay"), "replay-1")
        Tuner(Search(space, model, seed, lent=lent), Looked(times, quiet), journal, settings,
              Environment(first.versions, first.clocks)).run()
        tried = journal.search
    found, best = [], float("inf")
    for trial in tried:
        best = min(best, trial.times.median if trial.times else best)
        found.append(best / table.best)
    return found
