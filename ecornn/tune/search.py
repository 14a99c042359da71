"""Which candidates to try next.

This is AutoTVM's method (a config space of named knobs, a ranking cost model over it, batches
found by simulated annealing with some random picks); AutoTVM itself has left TVM, its method is
kept here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ecornn.tune.features import features
from ecornn.tune.model import CostModel
from ecornn.tune.space import Candidate, ConfigSpace

EPSILON = 0.15  # share of a batch that is drawn at random, whatever the model says
SCORED = 20_000  # spaces with no more candidates are ranked whole
CHAINS, SWEEPS = 64, 40  # annealing: points that move at the same time, and moves of each
HOT, COLD = 1.0, 0.05  # temperatures, in units of the spread of the scores


class Search:
    """Proposes batches; learns from what they cost.

    ``seed`` makes the proposals repeatable: they depend on it and on the samples told so far.
    ``known`` are candidates worth a trial at once, such as the best of another GPU.
    """

    def __init__(self, space: ConfigSpace, model: CostModel, seed: int, group: str = "",
                 known: Sequence[Candidate] = ()) -> None:
        self.space, self.model, self.seed, self.group = space, model, seed, group
        self.first = [c for c in (*space.defaults(), *known) if space.fits(c)]
        self.tried: dict[Candidate, float | None] = {}
        self.proposed: set[Candidate] = set()  # and not told of yet
        self._rows: dict[Candidate, dict[str, float]] = {}
        self._table: tuple[int, Any] | None = None  # and the model's width when it was made

    def tell(self, candidate: Candidate, time: float | None) -> None:
        """``candidate`` took ``time`` µs per step, or failed (None)."""
        self.tried[candidate] = time
        self.proposed.discard(candidate)
        self.model.add(self.group, self.row(candidate), time)

    def row(self, candidate: Candidate) -> dict[str, float]:
        """The candidate's features."""
        if candidate not in self._rows:
            schedule = self.space.schedules[candidate.schedule]
            self._rows[candidate] = features(schedule, self.space.task, candidate)
        return self._rows[candidate]

    def ask(self, count: int) -> list[Candidate]:
        """Up to ``count`` new candidates; fewer where the space has no more, [] where it has none.

        The schedules' defaults come first and then the ``known`` candidates; after them what the
        model ranks highest, mixed with random picks.
        """
        rng = random.Random(f"{self.seed}/{len(self.tried) + len(self.proposed)}")
        batch = [c for c in dict.fromkeys(self.first) if self.fresh(c, ())][:count]
        room = count - len(batch)
        if room and self.model.fit():
            batch += self.ranked(rng, math.ceil(room * (1 - EPSILON)), batch)
        batch += self.draw(rng, count - len(batch), batch)
        self.proposed.update(batch)
        return batch

    def fresh(self, candidate: Candidate, batch: Sequence[Candidate]) -> bool:
        """Neither tried nor proposed, and not in the batch."""
        return candidate not in self.tried and candidate not in self.proposed and candidate not in batch

    def draw(self, rng: random.Random, count: int, batch: Sequence[Candidate]) -> list[Candidate]:
        """Random new candidates, each schedule as likely."""
        found: list[Candidate] = []
        for _ in range(20 * count):
            drawn = self.space.draw(rng)
            if drawn is not None and self.fresh(drawn, [*batch, *found]):
                found.append(drawn)
            if len(found) == count:
                return found
        if count and len(self.space) <= SCORED:  # nearly all were tried
            left = [c for c in self.listed if self.fresh(c, [*batch, *found])]
            found += rng.sample(left, min(count - len(found), len(left)))
        return found

    def ranked(self, rng: random.Random, count: int, batch: Sequence[Candidate]) -> list[Candidate]:
        """The new candidates that the model ranks highest."""
        if len(self.space) > SCORED:
            return self.anneal(rng, count, batch)
        scores = self.model.score(self.table()) if self.listed else []
        pool = [(c, score) for c, score in zip(self.listed, scores, strict=True) if self.fresh(c, batch)]
        return [c for c, _ in self.top(pool, count)]

    def table(self) -> Any:
        """The features of every candidate of a space that is ranked whole, as the model takes them."""
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
        """The candidates of a space that is ranked whole."""
        return list(self.space.listing()) if len(self.space) <= SCORED else []

    @staticmethod
    def top(pool: Sequence[tuple[Candidate, float]], count: int) -> list[tuple[Candidate, float]]:
        """The ``count`` highest scores; equal scores in the order of the pool."""
        return sorted(pool, key=lambda p: -p[1])[:count]

    def anneal(self, rng: random.Random, count: int, batch: Sequence[Candidate]) -> list[Candidate]:
        """Simulated annealing on the model's score, from the best so far and random points."""
        best = sorted((c for c, t in self.tried.items() if t is not None and self.space.fits(c)),
                      key=lambda c: self.tried[c] or math.inf)[:CHAINS // 4]
        points = best + [c for c in (self.space.draw(rng) for _ in range(CHAINS - len(best))) if c]
        if not points:
            return []
        scores = self.model.score(self.model.table([self.row(c) for c in points]))
        seen = dict(zip(points, scores, strict=True))
        for sweep in range(SWEEPS):
            spread = max(scores) - min(scores) or 1.0
            heat = spread * HOT * (COLD / HOT) ** (sweep / (SWEEPS - 1))
            moved = [self.space.neighbour(c, rng) or c for c in points]
            for i, score in enumerate(self.model.score(self.model.table([self.row(c) for c in moved]))):
                seen[moved[i]] = score
                if score >= scores[i] or rng.random() < math.exp((score - scores[i]) / heat):
                    points[i], scores[i] = moved[i], score
        return [c for c, _ in self.top([(c, v) for c, v in seen.items() if self.fresh(c, batch)], count)]
