"""How many times as fast as the untuned default the best of a run is, and how surely."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.tune.journal import Journal
from ecornn.tune.record import Trial
from ecornn.tune.timing import bounds


@dataclass(frozen=True)
class Gain:
    """The ratio of both medians, ``low`` and ``high`` at 95% confidence for each of them; ``settled``: both were
    known to a few percent, so that the ratio itself may be said."""

    ratio: float
    low: float
    high: float
    settled: bool


def gain_of(run: Journal) -> Gain | None:
    """Of a finished run, by the last times of both; None where one of them has none, or where they are the same."""
    if run.finish is None or run.finish.best == run.finish.default:
        return None
    last: dict[bool, Trial] = {}
    for trial in run.trials:  # the comparison comes last
        for is_best, choice in ((True, run.finish.best), (False, run.finish.default)):
            if trial.times is not None and trial.choice == choice:
                last[is_best] = trial
    if len(last) < 2:
        return None
    (best_low, best_high), (low, high) = (bounds(last[which].times.runs) for which in (True, False))  # type: ignore[union-attr]
    ratio = last[False].times.median / last[True].times.median  # type: ignore[union-attr]
    return Gain(ratio, low / best_high, high / best_low, not any(t.noisy for t in last.values()))


def words(gain: Gain, default_us: float) -> str:
    """Said of a gain: the ratio where it is known, otherwise what is."""
    if gain.settled:
        return f"{gain.ratio:.2f} times as fast as the untuned default ({default_us:.4g} µs)"
    said = f"{gain.low:.2f} to {gain.high:.2f} times as fast as the untuned default; times did not settle"
    return said if gain.low > 1 else f"{said}, and it may be no faster"
