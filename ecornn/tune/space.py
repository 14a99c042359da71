"""The config space: every serving schedule with every combination of its knobs that can run."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ecornn.errors import ScheduleError
from ecornn.schedules.base import Config, Knob, Schedule, Task, Value

SCANNED = 600_000  # combinations of one schedule whose check is asked, a few seconds in all
KEPT = 200_000  # of those that fit, as numbers


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
    """The union of the schedules' knob products, filtered by ``check``.

    A combination is a number, the position in the product of its schedule's knobs. Of each schedule
    the numbers that fit are kept; where there are too many to ask for all, those of a random sample.
    Few combinations of a tight schedule fit (one in a thousand), so drawing until one does would
    hardly ever propose that schedule.

    Raises :class:`ScheduleError` without schedules.
    """

    def __init__(self, task: Task, schedules: Sequence[Schedule]) -> None:
        if not schedules:
            raise ScheduleError(f"no schedule serves {task.workload} on {task.device.name}")
        self.task = task
        self.schedules = {s.name: s for s in schedules}
        self.knobs: dict[str, tuple[Knob, ...]] = {s.name: s.knobs(task) for s in schedules}
        self.fitting: dict[str, array[int]] = {s.name: self.scan(s) for s in schedules}
        self.drawable = [n for n, numbers in self.fitting.items() if numbers]

    def __len__(self) -> int:
        """Number of candidates to choose from."""
        return sum(len(numbers) for numbers in self.fitting.values())

    def combinations(self) -> int:
        """Number of combinations of knobs, before ``check``."""
        return sum(self.size(name) for name in self.schedules)

    def size(self, schedule: str) -> int:
        """Number of combinations of one schedule."""
        return math.prod(len(k.values) for k in self.knobs[schedule])

    def scan(self, schedule: Schedule) -> array[int]:
        """Numbers of the combinations that fit."""
        size = self.size(schedule.name)
        numbers: Sequence[int] = range(size)
        if size > KEPT:
            numbers = random.Random(size).sample(numbers, min(size, SCANNED))
        found = array("q")
        for number in numbers:
            if schedule.check(self.task, self.config(schedule.name, number)) is None:
                found.append(number)
                if len(found) == KEPT:
                    break
        return found

    def config(self, schedule: str, number: int) -> dict[str, Value]:
        """The combination of that number."""
        config = {}
        for knob in self.knobs[schedule]:
            number, place = divmod(number, len(knob.values))
            config[knob.name] = knob.values[place]
        return config

    def fits(self, candidate: Candidate) -> bool:
        """Whether the schedule's ``check`` accepts the candidate."""
        return self.schedules[candidate.schedule].check(self.task, candidate.config) is None

    def defaults(self) -> list[Candidate]:
        """Each schedule's heuristic, preferred schedules first."""
        return [Candidate.of(s.name, s.default(self.task)) for s in self.schedules.values()]

    def listing(self) -> Iterator[Candidate]:
        """Every candidate, lazily."""
        for name, numbers in self.fitting.items():
            for number in numbers:
                yield Candidate.of(name, self.config(name, number))

    def draw(self, rng: random.Random) -> Candidate | None:
        """A random candidate: a schedule first, each as likely; None where nothing fits."""
        if not self.drawable:
            return None
        name = rng.choice(self.drawable)
        return Candidate.of(name, self.config(name, rng.choice(self.fitting[name])))

    def neighbour(self, candidate: Candidate, rng: random.Random) -> Candidate | None:
        """One knob changed, to a candidate that fits; None where there is none."""
        knobs = [k for k in self.knobs[candidate.schedule] if len(k.values) > 1]
        changes = [(k.name, v) for k in rng.sample(knobs, len(knobs))
                   for v in rng.sample(k.values, len(k.values))]
        for name, value in changes:
            changed = Candidate.of(candidate.schedule, {**candidate.config, name: value})
            if changed != candidate and self.fits(changed):
                return changed
        return None
