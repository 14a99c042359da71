"""The search, which says what candidates to try next, and the cost model that ranks them by throughput.

The method is AutoTVM's: gradient-boosted trees rank a space of named knobs; batches hold what they rank highest, and
random picks. Instead of annealing, a sample of the space is scored whole and climbed from. Where schedules estimate
times, the trees start from that order and learn where it is wrong, which is the same for many workloads."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np

from ecornn.errors import MissingPackageError
from ecornn.schedules.base import AnySchedule, Task
from ecornn.tune.space import Candidate, ConfigSpace

ESTIMATE = "estimate"  # the column that all schedules share: log of nanoseconds a step
PARAMETERS = {
    "objective": "rank:pairwise",  # only the order matters, so times of other workloads teach too
    "lambdarank_pair_method": "mean", "lambdarank_num_pair_per_sample": 8, "tree_method": "hist", "verbosity": 0,
    "max_depth": 4, "eta": 0.1, "min_child_weight": 0.1, "gamma": 1e-4, "subsample": 0.9,
    "nthread": 1}  # the data is small, and one thread gives the same model every time
ROUNDS = 80
TRUST = 8.0  # in an estimate: what a score falls by where it is e times as long
FEWEST = 4  # samples of this workload, or of others, before the model says anything
EPSILON = 0.15  # share of a batch that is drawn at random, whatever the model says
BLIND = 24  # trials before the model has learnt much,
NEARBY = 0.5  # and the share of what is drawn until then that is near a default,
STEPS = 3  # this many knobs away, at most
SCORED = 4096  # spaces with no more candidates are ranked whole; of others a random sample of so many
CLIMBERS, SWEEPS, TURNS = 32, 6, 8  # from the best of the sample: points, moves of all, neighbours seen of each
LOCAL = 0.75  # share of what is ranked that is near the fastest: far from what was tried the model errs most
LEADERS, RADIUS, WALKS = 5, 2, 100  # the fastest: so many, knobs away at most, candidates looked at near each
DOUBT = 0.1  # of estimates: of those of persistent half are within 7%, nine in ten within 18%
OPENING, STROLLS = 12, 600  # candidates that are built while the space is scanned, and looked at for them
SCORE = itemgetter(1)  # of a candidate and its score

Table = tuple[Any, Any]  # features of candidates, a row each, and their scores by estimates


def features(schedule: AnySchedule, task: Task, candidate: Candidate) -> dict[str, float]:
    """Named features. Numbers are themselves (sizes on a log scale), words one-hot. Knobs carry their schedule's name:
    equal names of two schedules mean different things. An ``estimate`` of the time means the same in all."""
    name = schedule.name
    row = {f"schedule={name}": 1.0}
    for knob, value in candidate.knobs:
        if isinstance(value, str):
            row[f"{name}.{knob}={value}"] = 1.0
        else:
            row[f"{name}.{knob}"] = float(value)
    for key, number in schedule.features(task, schedule.plan(task, candidate.config)).items():
        if key == ESTIMATE:
            row[ESTIMATE] = math.log(max(1.0, number))
        else:
            row[f"{name}:{key}"] = math.log2(number) if number > 64 else float(number)
    return row


def require_xgboost() -> None:
    """Raises :class:`~ecornn.errors.MissingPackageError` without XGBoost, whichever package brings it."""
    if find_spec("xgboost") is None:
        raise MissingPackageError("XGBoost is not installed, which the search needs to rank candidates: pip install "
                                  "\".[tune]\" in the checkout, or pip install xgboost-cpu")


class CostModel:
    """Ranks candidates. Samples come in groups, of a workload and device each, within which times are compared."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.columns: dict[str, int] = {}  # feature -> its place
        self.rows: dict[str, list[dict[str, float]]] = {}
        self.times: dict[str, list[float | None]] = {}
        self._booster: Any = None
        self._slowest = 0.0  # of all estimates
        self._learnt: dict[str, Any] = {}  # of each group, the matrix of the rows that columns were learnt from

    def add(self, group: str, row: dict[str, float], time: float | None) -> None:
        """A sample; ``time`` in µs per step, None where the candidate failed."""
        self.rows.setdefault(group, []).append(row)
        self.times.setdefault(group, []).append(time)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.rows.values())

    def labels(self, group: str) -> list[float]:
        """Relevance of a group's samples: 0 for failures, up to 31 for the fastest."""
        best = min((t for t in self.times[group] if t is not None), default=1.0)
        return [0.0 if t is None else 1.0 + 30.0 * best / t for t in self.times[group]]

    def fit(self) -> bool:
        """Trains on all samples; False where there are too few to learn from."""
        groups = [g for g in self.rows if len(set(self.labels(g))) > 1]
        if sum(len(self.rows[g]) for g in groups) < FEWEST:
            return False
        import xgboost

        for row in (row for g in groups for row in self.rows[g][len(self._learnt.get(g, ())):]):
            for name in row:
                self.columns.setdefault(name, len(self.columns))
        rows = [row for g in groups for row in self.rows[g]]
        self._slowest = max(row.get(ESTIMATE, 0.0) for row in rows)
        data = xgboost.DMatrix(np.concatenate([self._matrix(g) for g in groups]), base_margin=self._margins(rows),
                               label=np.array([v for g in groups for v in self.labels(g)]), missing=math.nan, nthread=1)
        data.set_group([len(self.rows[g]) for g in groups])
        self._booster = xgboost.train({**PARAMETERS, "seed": self.seed}, data, ROUNDS)
        return True

    def matrix(self, rows: Sequence[dict[str, float]]) -> Any:
        """Float32 array (rows, columns); what a row lacks is NaN or, for words, zero; names not learnt are left out."""
        blank = np.array([0.0 if "=" in n else np.nan for n in self.columns], dtype=np.float32)
        data = np.tile(blank, (len(rows), 1))
        for i, row in enumerate(rows):
            for name, value in row.items():
                if name in self.columns:
                    data[i, self.columns[name]] = value
        return data

    def _matrix(self, group: str) -> Any:
        """The rows of a group as a matrix, to which new rows are added for as long as :attr:`width` stays."""
        matrix, rows = self._learnt.get(group), self.rows[group]
        if matrix is None or matrix.shape[1] != self.width:
            matrix = self.matrix(rows)
        elif len(matrix) < len(rows):
            matrix = np.concatenate([matrix, self.matrix(rows[len(matrix):])])
        self._learnt[group] = matrix
        return matrix

    @property
    def trained(self) -> bool:
        return self._booster is not None

    def table(self, rows: Sequence[dict[str, float]]) -> Table:
        """The rows as :meth:`score` takes them; good for as long as :attr:`width` stays."""
        return self.matrix(rows), self._margins(rows)

    def _margins(self, rows: Sequence[dict[str, float]]) -> Any:
        """The scores that the trees correct; without an estimate that of the slowest."""
        slowest = max((row[ESTIMATE] for row in rows if ESTIMATE in row), default=0.0)
        return np.array([-TRUST * row.get(ESTIMATE, max(slowest, self._slowest)) for row in rows])

    @property
    def width(self) -> int:
        return len(self.columns)

    def score(self, table: Table) -> list[float]:
        """Predicted order of the rows of a table, higher is faster: the estimates' until :meth:`fit` has trained."""
        matrix, margins = table
        if self._booster is not None:
            import xgboost

            margins = self._booster.predict(xgboost.DMatrix(matrix, base_margin=margins, missing=math.nan, nthread=1))
        scores: list[float] = margins.tolist()
        return scores

    def gains(self) -> dict[str, float]:
        """The total gain of the trees by each feature, by its name; {} where there is too little to learn from."""
        if not self.fit():
            return {}
        names, scores = list(self.columns), self._booster.get_score(importance_type="total_gain")
        return {names[int(column[1:])]: gain for column, gain in scores.items()}


class Search:
    """Proposes batches, repeatably by ``seed`` and the samples told so far. ``known`` are worth a trial at once; with
    ``defaults`` those of the schedules (the preferred one where there are estimates) and what seems fastest near all of
    these come first. ``lent`` are only ranked, beside the space."""

    def __init__(self, space: ConfigSpace, model: CostModel, seed: int,
                 known: Sequence[Candidate] = (), lent: Sequence[Candidate] = (), defaults: bool = True) -> None:
        self.space, self.model, self.seed = space, model, seed
        self.tried: dict[Candidate, float | None] = {}
        self.proposed: set[Candidate] = set()  # and not told of yet
        self._rows: dict[Candidate, dict[str, float]] = {}
        self._table: tuple[int, Any] | None = None  # and the model's width when it was made
        guesses = [c for c in space.defaults() if space.fits(c)]
        self.lent = [*guesses, *(c for c in lent if space.fits(c))]
        self.estimated = defaults and any(ESTIMATE in self.row(c) for c in guesses)
        first = (*guesses[:1 if self.estimated else None], *known) if defaults else known
        self.first = [c for c in dict.fromkeys(first) if space.fits(c)]
        if self.estimated:
            self.first += self.opening([*self.first, *self.lent])

    def tell(self, candidate: Candidate, time: float | None) -> None:
        """Learns that ``candidate`` took ``time`` µs per step, or failed (None)."""
        self.tried[candidate] = time
        self.proposed.discard(candidate)
        self.model.add("", self.row(candidate), time)  # "": the group of this run

    def row(self, candidate: Candidate) -> dict[str, float]:
        if candidate not in self._rows:
            schedule = self.space.schedules[candidate.schedule]
            self._rows[candidate] = features(schedule, self.space.task, candidate)
        return self._rows[candidate]

    def ask(self, count: int) -> list[Candidate]:
        """Up to ``count`` new candidates: those chosen at the beginning, then the highest ranked with random picks."""
        rng = random.Random(f"{self.seed}/{len(self.tried) + len(self.proposed)}")
        batch = [c for c in self.first if self.fresh(c, ())][:count]
        room = count - len(batch)
        if room and (self.model.fit() or self.estimated):
            batch += self.ranked(rng, math.ceil(room * (1 - EPSILON)), batch)
        if len(self.tried) + len(self.proposed) + len(batch) < BLIND:  # also near the two preferred defaults
            defaults = [c for c in self.space.defaults() if self.space.fits(c)][:2]
            near = math.ceil(NEARBY * (count - len(batch))) if defaults else 0
            batch += self.gather(near, 4, batch, lambda: self.walk(rng, rng.choice(defaults), STEPS))
        batch += self.draw(rng, count - len(batch), batch)
        self.proposed.update(batch)
        return batch

    def opening(self, known: Sequence[Candidate]) -> list[Candidate]:
        """The most promising candidates near ``known``, besides the first, without a scan, which takes seconds."""
        rng, seen = random.Random(f"{self.seed}/opening"), dict[Candidate, float]()
        self.model.fit()
        self.look((*known, *(self.walk(rng, rng.choice(known), STEPS) for _ in range(STROLLS))), seen)
        self.doubt(rng, seen)
        new = ((c, score) for c, score in seen.items() if c not in self.first)
        return self.top(new, OPENING - len(self.first))

    def waiting(self) -> int:
        """The number of candidates that will be proposed whatever the model says."""
        return sum(self.fresh(c, ()) for c in self.first)

    def fresh(self, candidate: Candidate, batch: Sequence[Candidate]) -> bool:
        """True for a candidate that was neither tried nor proposed, and is not in the batch."""
        return candidate not in self.tried and candidate not in self.proposed and candidate not in batch

    def gather(self, count: int, tries: int, batch: Sequence[Candidate],
               propose: Callable[[], Candidate | None]) -> list[Candidate]:
        """Up to ``count`` new candidates, of so many ``tries`` for each."""
        found: list[Candidate] = []
        for _ in range(tries * count):
            one = propose()
            if one is not None and self.fresh(one, [*batch, *found]):
                found.append(one)
            if len(found) == count:
                break
        return found

    def draw(self, rng: random.Random, count: int, batch: Sequence[Candidate]) -> list[Candidate]:
        """Random new candidates, preferred schedules more often."""
        drawn = self.gather(count, 20, batch, lambda: self.space.draw(rng))
        if len(drawn) < count and len(self.space) <= SCORED:  # nearly all were tried
            left = [c for c in self.listed if self.fresh(c, [*batch, *drawn])]
            drawn += rng.sample(left, min(count - len(drawn), len(left)))
        return drawn

    def walk(self, rng: random.Random, one: Candidate, steps: int) -> Candidate:
        for _ in range(rng.randint(1, steps)):
            one = self.space.neighbour(one, rng) or one
        return one

    def ranked(self, rng: random.Random, count: int, batch: Sequence[Candidate]) -> list[Candidate]:
        """The new candidates that the model ranks highest, most of them near the fastest so far."""
        scores = self.model.score(self.table()) if self.listed else []
        seen = dict(zip(self.listed, scores, strict=True))
        leaders = self.fastest(LEADERS)
        if len(self.space) > SCORED:
            self.look(self.lent, seen)
            self.climb(rng, seen)
            self.look([self.walk(rng, one, RADIUS) for one in leaders for _ in range(WALKS)], seen)
        self.doubt(rng, seen)
        order = [c for c, _ in sorted(seen.items(), key=SCORE, reverse=True)]
        near = (c for c in order if any(apart(c, one) <= RADIUS for one in leaders) and self.fresh(c, batch))
        close = list(islice(near, round(LOCAL * count)))
        return close + list(islice((c for c in order if self.fresh(c, [*batch, *close])), count - len(close)))

    def doubt(self, rng: random.Random, seen: dict[Candidate, float]) -> None:
        """Blurs scores that are estimates, whose highest are alike: as much as these err."""
        if not self.model.trained:
            for candidate in seen:
                seen[candidate] += rng.gauss(0.0, TRUST * DOUBT)

    def look(self, candidates: Iterable[Candidate | None], seen: dict[Candidate, float]) -> list[Candidate]:
        new = [c for c in dict.fromkeys(candidates) if c is not None and c not in seen]
        if new:
            seen.update(zip(new, self.model.score(self.model.table([self.row(c) for c in new])), strict=True))
        return new

    def fastest(self, count: int) -> list[Candidate]:
        """The ``count`` fastest candidates that were tried and fit, fastest first."""
        good = sorted(((c, time) for c, time in self.tried.items() if time is not None), key=SCORE)
        return list(islice((c for c, _ in good if self.space.fits(c)), count))

    def climb(self, rng: random.Random, seen: dict[Candidate, float]) -> None:
        """Beam search by single knobs from the best of the sample, the fastest and random points; adds what it sees."""
        drawn = [c for c in (self.space.draw(rng) for _ in range(CLIMBERS)) if c]
        points = list(dict.fromkeys([*self.fastest(CLIMBERS), *self.top(seen.items(), CLIMBERS), *drawn]))
        for _ in range(SWEEPS):
            new = self.look((self.space.neighbour(c, rng) for c in points for _ in range(TURNS)), seen)
            if not new:
                return
            points = self.top(((c, seen[c]) for c in dict.fromkeys([*points, *new]) if c in seen), CLIMBERS)

    def table(self) -> Any:
        if self._table is None or self._table[0] != self.model.width:
            self._table = self.model.width, self.model.table([self.row(c) for c in self.listed])
        return self._table[1]

    def prepare(self) -> None:
        """Does what the first ranking needs, while there is nothing else to do."""
        import xgboost  # noqa: F401  (takes a second)

        for candidate in self.listed:
            self.row(candidate)

    @cached_property
    def listed(self) -> list[Candidate]:
        """The candidates of a space that is ranked whole, or the sample of a larger one."""
        return self.space.sample(random.Random(self.seed), SCORED)

    @staticmethod
    def top(pool: Iterable[tuple[Candidate, float]], count: int) -> list[Candidate]:
        """The ``count`` candidates of the highest scores; equal scores in the order of the pool."""
        return [c for c, _ in heapq.nlargest(count, pool, key=SCORE)]


def apart(a: Candidate, b: Candidate) -> float:
    """The number of knobs in which two candidates differ; infinity where they are of different schedules."""
    return sum(x != y for x, y in zip(a.knobs, b.knobs, strict=True)) if a.schedule == b.schedule else math.inf
