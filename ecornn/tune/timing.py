"""Timing layers: several at once, taking turns, so that a drifting clock is fair to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Run = Callable[[], Any]  # starts one sequence; on a GPU it may return before it is done
Clock = Callable[[Run], float]  # one run, seconds

SPAN = 0.3  # seconds of runs that each contestant gets
FEWEST, MOST = 3, 50  # samples, whatever SPAN says
SAMPLE = 2e-3  # seconds: shorter runs are timed several at once, back to back
HOPELESS = 2.0  # slower than the best so far by this factor: one run is enough
LONG = 0.05  # seconds: of a longer run, loading code and touching memory is a small part


@dataclass(frozen=True)
class Contestant:
    """Something to time: ``run`` is one sequence, ``clock`` times it in seconds."""

    run: Run
    clock: Clock


def wall_clock(run: Run) -> float:
    """Seconds of one synchronous run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def event_clock(run: Run) -> float:
    """Seconds of one run on torch's current CUDA stream, between events."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def several(run: Run, count: int) -> Run:
    """``count`` runs, back to back."""
    if count == 1:
        return run

    def runs() -> None:
        for _ in range(count):
            run()

    return runs


def race(contestants: Sequence[Contestant], bound: float | None = None, span: float = SPAN,
         fewest: int = FEWEST) -> list[list[float]]:
    """Seconds of one run, several samples of each contestant, after a warm-up, taking turns.

    A contestant whose warm-up takes longer than ``HOPELESS * bound`` seconds keeps that one time.
    """
    times: list[list[float]] = []
    for one in contestants:
        warm = one.clock(one.run)
        times.append([warm if warm > LONG else one.clock(one.run)])
    racing = [i for i, t in enumerate(times) if bound is None or t[0] <= HOPELESS * bound]
    plans = {}  # contestant -> (samples, runs of one sample, those runs)
    for i in racing:
        first = max(times[i].pop(), 1e-7)
        count = max(1, min(100, int(SAMPLE / first)))
        samples = min(MOST, max(fewest, int(span / (first * count))))
        plans[i] = samples, count, several(contestants[i].run, count)
    for number in range(max((samples for samples, _, _ in plans.values()), default=0)):
        for i, (samples, count, runs) in plans.items():
            if number < samples:
                times[i].append(contestants[i].clock(runs) / count)
    return times
