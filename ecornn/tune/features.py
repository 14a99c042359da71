"""What the cost model sees of a candidate: its knobs, and what the schedule says of it."""

from __future__ import annotations

import math
from typing import Any

from ecornn.schedules.base import Schedule, Task
from ecornn.tune.space import Candidate

ESTIMATE = "estimate"  # the column that all schedules share: log of nanoseconds a step


def features(schedule: Schedule, task: Task, candidate: Candidate) -> dict[str, float]:
    """Named features. Numbers are themselves (sizes on a log scale), words one-hot.

    Knobs carry their schedule's name: equal names of two schedules mean different things. An ``estimate`` of the time
    means the same in all.
    """
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


class Columns:
    """Gives every feature name a column; a feature that a row lacks is missing (NaN) or, for
    words, zero."""

    def __init__(self) -> None:
        self.place: dict[str, int] = {}

    def learn(self, rows: list[dict[str, float]]) -> None:
        """Adds the names of these rows."""
        for row in rows:
            for name in row:
                self.place.setdefault(name, len(self.place))

    def matrix(self, rows: list[dict[str, float]]) -> Any:
        """Float32 array (rows, columns); names never learnt are left out."""
        import numpy as np

        blank = np.array([0.0 if "=" in n else np.nan for n in self.place], dtype=np.float32)
        data = np.tile(blank, (len(rows), 1))
        for i, row in enumerate(rows):
            for name, value in row.items():
                if name in self.place:
                    data[i, self.place[name]] = value
        return data
