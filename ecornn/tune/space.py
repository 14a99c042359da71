"""The config space: every serving schedule with every combination of its knobs that can run."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from ecornn.errors import ScheduleError
from ecornn.schedules.base import AnySchedule, Config, Knob, Task, Value

PARTS = 8  # of a schedule's combinations, which processes look through side by side
ASKED = 40_000  # calls of a schedule's check for a part, a second or two
KEPT = 100_000  # of those of a part that fit, as numbers
SAMPLED = 50_000  # combinations of a schedule that has more
Scan = tuple[bool, "array[int]"]  # True where these are all that fit; numbers of combinations that fit, in order


class Candidate(NamedTuple):
    """A point of the space; hashable."""

    schedule: str
    knobs: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, schedule: str, config: Config) -> Candidate:
        return cls(schedule, tuple(sorted(config.items())))

    @property
    def config(self) -> dict[str, Value]:
        return dict(self.knobs)


class Watched(Mapping[str, Value]):
    """A configuration that remembers which of its knobs were looked at."""

    __slots__ = ("config", "read")

    def __init__(self, config: dict[str, Value]) -> None:
        self.config = config
        self.read: dict[str, None] = {}  # in the order of the first look

    def __getitem__(self, name: str) -> Value:
        value = self.config[name]
        self.read[name] = None  # not of a knob that the task has not, which is the same for all
        return value

    def __iter__(self) -> Iterator[str]:
        self.read |= dict.fromkeys(self.config)
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)


def halving(rng: random.Random, names: Sequence[str]) -> str:
    """One of the names, each twice as likely as the one after it."""
    return rng.choices(names, [0.5 ** place for place in range(len(names))])[0]


class ConfigSpace:
    """The union of the schedules' knob products, filtered by ``check``.

    A combination is a number, its position in the product. Those that fit are kept, or of too many a random sample: in
    a tight schedule one in a thousand fits, so drawing until one does would hardly ever propose it. ``check`` depends
    on the knobs that it reads alone, so one answer settles all combinations that agree in these (conflict-directed
    backjumping). ``defaults``: those of the schedules, in order, if known. ``scans`` may be set to a function that has
    others do the :meth:`scan`, which takes seconds. Raises :class:`ScheduleError` without schedules."""

    def __init__(self, task: Task, schedules: Sequence[AnySchedule],
                 defaults: Sequence[Candidate] | None = None) -> None:
        if not schedules:
            raise ScheduleError(f"no schedule serves {task.workload} on {task.device.name}")
        self.task, self._defaults = task, defaults
        self.schedules = {s.name: s for s in schedules}
        self.scans: Callable[[], Mapping[str, Scan]] = self.scan
        self.knobs: dict[str, tuple[Knob, ...]] = {s.name: s.knobs(task) for s in schedules}
        self._orders: dict[str, list[str]] = {}
        self._lines = {name: Line(knobs) for name, knobs in self.knobs.items()}
        self.whole: dict[str, frozenset[int]] = {}  # of the schedules all of whose combinations are known

    @cached_property
    def fitting(self) -> dict[str, array[int]]:
        """The numbers that fit, by schedule; found when first asked for."""
        scans = self.scans()
        self.whole = {name: frozenset(numbers) for name, (whole, numbers) in scans.items() if whole}
        return {name: scans[name][1] for name in self.schedules}

    @cached_property
    def drawable(self) -> list[str]:
        return [name for name, numbers in self.fitting.items() if numbers]

    def __len__(self) -> int:
        return sum(len(numbers) for numbers in self.fitting.values())

    def combinations(self) -> int:
        return sum(self.size(name) for name in self.schedules)

    def size(self, schedule: str) -> int:
        return math.prod(len(k.values) for k in self.knobs[schedule])

    def scan(self) -> dict[str, Scan]:
        return {name: self.join(name, [self.scan_part(name, part) for part in range(PARTS)]) for name in self.schedules}

    def join(self, schedule: str, parts: Sequence[Scan]) -> Scan:
        """The scan of a schedule from those of its parts."""
        every = sorted(n for _, numbers in parts for n in numbers)
        if all(whole for whole, _ in parts):
            return True, array("q", every)
        sampled = set(self._sampled(schedule))  # of parts that are whole no more than of the others
        return False, array("q", (n for n in every if n in sampled))

    def scan_part(self, schedule: str, part: int) -> Scan:
        """Numbers of what fits, with every ``PARTS``-th value of the first knob that ``check`` looks at."""
        order = self._order(schedule)
        if (numbers := self._walk(schedule, order, part)) is not None:
            return True, numbers
        check = self.schedules[schedule].check
        knob = next(k for k in self.knobs[schedule] if k.name == order[0])
        drawn = ((n, self.config(schedule, n)) for n in self._sampled(schedule))
        return False, array("q", (n for n, config in drawn if knob.values.index(config[knob.name]) % PARTS == part
                                  and check(self.task, config) is None))

    def _sampled(self, schedule: str) -> list[int]:
        size = self.size(schedule)
        return random.Random(size).sample(range(size), min(size, SAMPLED))

    def _order(self, schedule: str) -> list[str]:
        """Knobs in the order in which ``check`` looks at them."""
        if schedule not in self._orders:
            names = [k.name for k in self.knobs[schedule]]
            default = Watched(next(c for c in self.defaults() if c.schedule == schedule).config)
            self.schedules[schedule].check(self.task, default)
            self._orders[schedule] = [n for n in dict.fromkeys([*default.read, *names]) if n in names]
        return self._orders[schedule]

    def _walk(self, schedule: str, order: Sequence[str], part: int) -> array[int] | None:
        """Numbers of all combinations of a part that fit; None where they are too many to ask for."""
        check, knobs = self.schedules[schedule].check, {k.name: k for k in self.knobs[schedule]}
        counts = [len(knob.values) for knob in knobs.values()]
        weights = dict(zip(knobs, accumulate(counts, mul, initial=1), strict=False))  # of a knob's place in the number
        choices = [range(len(knobs[n].values)) for n in order]
        choices[0] = choices[0][part::PARTS]
        if not choices[0]:
            return array("q")
        depth = {n: i for i, n in enumerate(order)}
        rest = [[0]]  # numbers of all combinations of the knobs behind a depth
        for name, places in zip(reversed(order), reversed(choices), strict=True):
            rest.append([r + p * weights[name] for p in places for r in rest[-1]] if len(rest[-1]) < KEPT else [])
        rest.reverse()
        at, fitting = [0] * len(order), array("q")
        for _ in range(ASKED):
            chosen = [c[i] for c, i in zip(choices, at, strict=True)]
            config = Watched({n: knobs[n].values[p] for n, p in zip(order, chosen, strict=True)})
            fits = check(self.task, config) is None
            deepest = max((depth[n] for n in config.read), default=-1)
            if fits:
                base = sum(p * weights[n] for n, p in zip(order[:deepest + 1], chosen, strict=False))
                fitting.extend(base + r for r in rest[deepest + 1])
                if len(fitting) > KEPT:
                    return None
            while deepest >= 0 and at[deepest] == len(choices[deepest]) - 1:
                at[deepest] = 0
                deepest -= 1
            if deepest < 0:
                return fitting
            at[deepest] += 1
        return None

    def config(self, schedule: str, number: int) -> dict[str, Value]:
        config = {}
        for knob in self.knobs[schedule]:
            number, place = divmod(number, len(knob.values))
            config[knob.name] = knob.values[place]
        return config

    def fits(self, candidate: Candidate) -> bool:
        return self.schedules[candidate.schedule].check(self.task, candidate.config) is None

    def defaults(self) -> list[Candidate]:
        """Each schedule's heuristic, preferred schedules first."""
        if self._defaults is None:
            self._defaults = [Candidate.of(s.name, s.default(self.task)) for s in self.schedules.values()]
        return list(self._defaults)

    def sample(self, rng: random.Random, count: int) -> list[Candidate]:
        """``count`` different candidates, each schedule's share that of its candidates; all where there are no more."""
        if len(self) <= count:
            return list(self.listing())
        drawn = []
        for name, numbers in self.fitting.items():
            share = math.ceil(count * len(numbers) / len(self))
            drawn += [Candidate.of(name, self.config(name, n)) for n in rng.sample(numbers, min(share, len(numbers)))]
        return drawn

    def listing(self) -> Iterator[Candidate]:
        for name, numbers in self.fitting.items():
            for number in numbers:
                yield Candidate.of(name, self.config(name, number))

    def draw(self, rng: random.Random) -> Candidate | None:
        """A random candidate: a schedule first, each twice as likely as the one after it; None where nothing fits."""
        if not self.drawable:
            return None
        name = halving(rng, self.drawable)
        return Candidate.of(name, self.config(name, rng.choice(self.fitting[name])))

    def neighbour(self, candidate: Candidate, rng: random.Random) -> Candidate | None:
        """One knob changed, to a candidate that fits; None where there is none."""
        name, line = candidate.schedule, self._lines[candidate.schedule]
        here, whole = line.here(candidate), self.whole.get(name)
        number = line.number(here) if whole is not None else None
        left, moved = len(line.values) - len(here), dict[int, int]()
        while left:  # a shuffle of all changes, as far as it is needed
            at = rng.randrange(left)
            left -= 1
            place, moved[at] = moved.get(at, at), moved.get(left, left)
            for value in here:
                place += value <= place
            new = line.values[place]
            changed = Candidate(name, tuple([new if knob[0] == new[0] else knob for knob in candidate.knobs]))
            if (self.fits(changed) if whole is None or number is None else
                    number + line.weights[place] - line.weights[here[line.knobs[place]]] in whole):
                return changed
        return None


class Line:
    """The values of all knobs of a schedule, one behind the other."""

    def __init__(self, knobs: Sequence[Knob]) -> None:
        self.values = [(knob.name, value) for knob in knobs for value in knob.values]
        self.knobs = [number for number, knob in enumerate(knobs) for _ in knob.values]  # that a value is of
        self.weights: list[int] = []  # what a value adds to the number of a combination
        weight = 1
        for knob in knobs:
            self.weights += range(0, weight * len(knob.values), weight)
            weight *= len(knob.values)
        self.count = len(knobs)
        self.places = {value: place for place, value in enumerate(self.values)}

    def here(self, candidate: Candidate) -> list[int]:
        """The places of a candidate's values, in order; without those outside the space, as a default may have."""
        places = map(self.places.get, candidate.knobs)
        return sorted(place for place in places if place is not None)

    def number(self, here: Sequence[int]) -> int | None:
        """The number of the combination of these values; None unless it is one."""
        return sum(self.weights[place] for place in here) if len(here) == self.count else None
