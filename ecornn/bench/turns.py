"""Sides that take turns on one input, which is new in each round; and what a list of times comes to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

Run = Callable[[], object]
FEWEST, WARM = 7, 3  # rounds


def take_turns(sides: Mapping[str, Run], fresh: Callable[[], object], repeats: int, seconds: float,
               clock: Callable[[Run], float]) -> dict[str, list[float]]:
    """What ``clock`` says of every run; ``repeats`` of each side after ``WARM`` that do not count, or as many as
    ``seconds`` allow, ``FEWEST`` at least. ``fresh`` makes the next input."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = float("inf")
    for count in range(WARM + repeats):
        if count == WARM:
            end = time.monotonic() + seconds
        if count >= WARM + FEWEST and time.monotonic() > end:
            break
        fresh()
        for name, run in sides.items():
            taken = clock(run)
            if count >= WARM:
                times[name].append(taken)
    return times


class Times(msgspec.Struct, frozen=True):
    """Percentiles of a side's runs, in microseconds a step; ``p50`` is the median, ``runs`` how many there were.

    A percentile between two runs is interpolated: of fewer than a hundred runs p99 is near the slowest.
    """

    median: float
    p20: float
    p80: float
    p50: float
    p95: float
    p99: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float], steps: int) -> Times:
        """Of runs of ``steps`` steps."""
        import numpy as np

        p20, p50, p80, p95, p99 = (float(v) for v in np.percentile(seconds, (20, 50, 80, 95, 99)) * 1e6 / steps)
        return cls(p50, p20, p80, p50, p95, p99, len(seconds))
