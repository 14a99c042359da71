"""The cost model: gradient-boosted trees that rank candidates by throughput.

Where schedules estimate how long a candidate takes, the trees start from that order and learn where it is wrong, which
is the same for many workloads; from nothing they would have to learn anew in each what is fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ecornn.schedules.base import AnySchedule, Task
from ecornn.tune.space import Candidate

ESTIMATE = "estimate"  # the column that all schedules share: log of nanoseconds a step
PARAMETERS = {
    "objective": "rank:pairwise",  # only the order matters, so times of other workloads teach too
    "lambdarank_pair_method": "mean",
    "lambdarank_num_pair_per_sample": 8,
    "max_depth": 4, "eta": 0.1, "min_child_weight": 0.1, "gamma": 1e-4, "subsample": 0.9,
    "tree_method": "hist",
    "nthread": 1,  # the data is small, and one thread gives the same model every time
    "verbosity": 0,
}
ROUNDS = 80
TRUST = 8.0  # in an estimate: what a score falls by where it is e times as long
FEWEST = 4  # samples of this workload, or of others, before the model says anything

Table = tuple[Any, Any]  # features of candidates, a row each, and their scores by estimates


def features(schedule: AnySchedule, task: Task, candidate: Candidate) -> dict[str, float]:
    """Named features. Numbers are themselves (sizes on a log scale), words one-hot.

    Knobs carry their schedule's name: equal names of two schedules mean different things. An ``estimate`` of the time
    means the same in all."""
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
            continue
        row[f"{name}:{key}"] = math.log2(number) if number > 64 else float(number)
    return row


class CostModel:
    """Ranks candidates. Samples come in groups, one for each workload and device: times are compared within a group
    only."""

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
        good = [t for t in self.times[group] if t is not None]
        best = min(good, default=1.0)
        return [0.0 if t is None else 1.0 + 30.0 * best / t for t in self.times[group]]

    def fit(self) -> bool:
        """Trains on all samples; False where there are too few to learn from."""
        groups = [g for g in self.rows if len(set(self.labels(g))) > 1]
        if sum(len(self.rows[g]) for g in groups) < FEWEST:
            return False
        import numpy as np
        import xgboost

        for row in (row for g in groups for row in self.rows[g][len(self._learnt.get(g, ())):]):
            for name in row:
                self.columns.setdefault(name, len(self.columns))
        rows = [row for g in groups for row in self.rows[g]]
        self._slowest = max(row.get(ESTIMATE, 0.0) for row in rows)
        data = xgboost.DMatrix(np.concatenate([self._matrix(g) for g in groups]), base_margin=self._margins(rows),
                               label=np.array([v for g in groups for v in self.labels(g)]),
                               missing=float("nan"), nthread=1)
        data.set_group([len(self.rows[g]) for g in groups])
        self._booster = xgboost.train({**PARAMETERS, "seed": self.seed}, data, ROUNDS)
        return True

    def matrix(self, rows: Sequence[dict[str, float]]) -> Any:
        """Float32 array (rows, columns). What a row lacks is missing (NaN) or, for words, zero; names never learnt are
        left out."""
        import numpy as np

        blank = np.array([0.0 if "=" in n else np.nan for n in self.columns], dtype=np.float32)
        data = np.tile(blank, (len(rows), 1))
        for i, row in enumerate(rows):
            for name, value in row.items():
                if name in self.columns:
                    data[i, self.columns[name]] = value
        return data

    def _matrix(self, group: str) -> Any:
        """The rows of a group as a matrix, to which new rows are added for as long as :attr:`width` stays."""
        import numpy as np

        matrix, rows = self._learnt.get(group), self.rows[group]
        if matrix is None or matrix.shape[1] != self.width:
            matrix = self.matrix(rows)
        elif len(matrix) < len(rows):
            matrix = np.concatenate([matrix, self.matrix(rows[len(matrix):])])
        self._learnt[group] = matrix
        return matrix

    @property
    def trained(self) -> bool:
        """True once scores are more than estimates."""
        return self._booster is not None

    def table(self, rows: Sequence[dict[str, float]]) -> Table:
        """The rows as :meth:`score` takes them; good for as long as :attr:`width` stays."""
        return self.matrix(rows), self._margins(rows)

    def _margins(self, rows: Sequence[dict[str, float]]) -> Any:
        """The scores that the trees correct; without an estimate that of the slowest."""
        import numpy as np

        slowest = max((row[ESTIMATE] for row in rows if ESTIMATE in row), default=0.0)
        return np.array([-TRUST * row.get(ESTIMATE, max(slowest, self._slowest)) for row in rows])

    @property
    def width(self) -> int:
        """Number of features that the model knows of."""
        return len(self.columns)

    def score(self, table: Table) -> list[float]:
        """Predicted order of the rows of a table, higher is faster: the estimates' until :meth:`fit` has trained."""
        matrix, margins = table
        if self._booster is not None:
            import xgboost

            data = xgboost.DMatrix(matrix, base_margin=margins, missing=float("nan"), nthread=1)
            margins = self._booster.predict(data)
        scores: list[float] = margins.tolist()
        return scores

    def gains(self) -> dict[str, float]:
        """The total gain of the trees by each feature, by its name; {} where there is too little to learn from."""
        if not self.fit():
            return {}
        names = list(self.columns)
        return {names[int(column[1:])]: gain
                for column, gain in self._booster.get_score(importance_type="total_gain").items()}
