"""The config space: every serving schedule with every combination of its knobs that can run."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ecornn.errors import ScheduleError
from ecornn.schedules.base import Config, Knob, Schedule, Task, Value

LISTED = 4096  # spaces with no more combinations are listed in full
TRIES = 2000  # combinations drawn before a random pick is given up


@dataclass(frozen=True)
class Candidate:
    """A point of the space; hashable."""

    schedule: str
    knobs: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, schedule: str, config: Config) -> Candidate:
        """The candidate of a configuration, whatever the order of its knobs."""
        return cls(schedule, tuple(sorted(config.items())))

    @property
    def config(self) -> dict[str, Value]:
        """Knob -> value."""
        return dict(self.knobs)


class ConfigSpace:
    """The union of the schedules' knob products, filtered by ``check``, never materialised unless
    it is small.

    Raises :class:`ScheduleError` without schedules.
    """

    def __init__(self, task: Task, schedules: Sequence[Schedule]) -> None:
        if not schedules:
            raise ScheduleError(f"no schedule serves {task.workload} on {task.device.name}")
        self.task = task
        self.schedules = {s.name: s for s in schedules}
        self.knobs: dict[str, tuple[Knob, ...]] = {s.name: s.knobs(task) for s in schedules}
        self._checked: dict[Candidate, bool] = {}

    def __len__(self) -> int:
        """Number of combinations, before ``check``."""
        return sum(self.size(name) for name in self.schedules)

    def size(self, schedule: str) -> int:
        """Number of combinations of one schedule, before ``check``."""
        return math.prod(len(k.values) for k in self.knobs[schedule])

    def fits(self, candidate: Candidate) -> bool:
        """Whether the schedule's ``check`` accepts the candidate."""
        if candidate not in self._checked:
            schedule = self.schedules[candidate.schedule]
            self._checked[candidate] = schedule.check(self.task, candidate.config) is None
        return self._checked[candidate]

    def defaults(self) -> list[Candidate]:
        """Each schedule's heuristic, preferred schedules first."""
        return [Candidate.of(s.name, s.default(self.task)) for s in self.schedules.values()]

    def small(self) -> bool:
        """Whether :meth:`listing` is meant to be used."""
        return len(self) <= LISTED

    def listing(self) -> Iterator[Candidate]:
        """Every candidate that fits, lazily."""
        for name, knobs in self.knobs.items():
            names = [k.name for k in knobs]
            for values in itertools.product(*(k.values for k in knobs)):
                candidate = Candidate.of(name, dict(zip(names, values, strict=True)))
                if self.fits(candidate):
                    yield candidate

    def draw(self, rng: random.Random, schedule: str | None = None) -> Candidate | None:
        """A random candidate that fits: a schedule first, each as likely, then its knobs.

        None where nothing fits within a bounded number of draws.
        """
        for _ in range(TRIES):
            name = schedule or rng.choice(list(self.schedules))
            config = {k.name: rng.choice(k.values) for k in self.knobs[name]}
            candidate = Candidate.of(name, config)
            if self.fits(candidate):
                return candidate
        return None

    def neighbour(self, candidate: Candidate, rng: random.Random) -> Candidate | None:
        """One knob changed, to a candidate that fits; None where there is none at hand."""
        knobs = [k for k in self.knobs[candidate.schedule] if len(k.values) > 1]
        rng.shuffle(knobs)
        for knob in knobs:
            config = candidate.config
            others = [v for v in knob.values if v != config.get(knob.name)]
            config[knob.name] = rng.choice(others)
            changed = Candidate.of(candidate.schedule, config)
            if self.fits(changed):
                return changed
        return None
