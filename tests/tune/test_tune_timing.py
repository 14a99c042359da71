"""Times take turns, spend little on hopeless candidates, and count runs right; and what gain they show, as far as that
is known."""

from __future__ import annotations

import math
import sys
import types
from statistics import NormalDist, median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_records import finish, trial
from tune_fakes import DEVICE

from ecornn.cli.progress import torch_us
from ecornn.tune import timing
from ecornn.tune.journal import Gain, Journal, gain_of, words
from ecornn.tune.record import Choice, Times, Trial
from ecornn.tune.timing import EARLY, FEWEST, LONGER, SPAN, Contestant, bounds, event_clock, interval, race, settled
from ecornn.workload import Workload


class Clocked:
    """A run that takes ``seconds`` on a clock of its own."""

    def __init__(self, seconds: float, order: list[str], name: str) -> None:
        self.seconds, self.order, self.name, self.now = seconds, order, name, 0.0

    def __call__(self) -> None:
        self.now += self.seconds
        self.order.append(self.name)

    def clock(self, run) -> float:
        before = self.now
        run()
        return self.now - before


class Noisy(Clocked):
    """Alternates between two speeds."""

    def __call__(self) -> None:
        super().__call__()
        self.now += self.seconds * (len(self.order) // 2 % 2)


def contest(*runs: float, second: type[Clocked] = Clocked, **limits: float) -> tuple[list[list[float]], list[str]]:
    order: list[str] = []
    made = [(second if i else Clocked)(seconds, order, str(i)) for i, seconds in enumerate(runs)]
    return race([Contestant(m, m.clock) for m in made], **limits), order


def test_contestants_take_turns_after_the_warm_up():
    times, order = contest(0.04, 0.04)
    assert order == ["0", "0", "1", "1"] + ["0", "1"] * len(times[0])  # short: a second warm run
    assert len(times[0]) == len(times[1]) == 7


def test_once_the_time_is_over_each_has_the_fewest_samples():
    times, _ = contest(0.04, 0.04, seconds=0.0)
    assert [len(t) for t in times] == [FEWEST, FEWEST]


def test_short_runs_are_timed_several_at_once_and_reported_one_by_one():
    times, order = contest(1e-4)
    assert len(order) == 2 + 20 * len(times[0])
    assert all(abs(t - 1e-4) < 1e-9 for t in times[0])


def test_a_hopeless_candidate_is_timed_once():
    times, order = contest(4.0, 1.0, bound=1.0)
    assert times[0] == [4.0] and order.count("0") == 1
    assert times[1] == [1.0] * 3 and order.count("1") == 4


def test_a_device_that_does_not_hold_still_is_asked_more_often_and_found_out():
    (steady, noisy), _ = contest(0.02, 0.02, second=Noisy)
    assert settled(steady) and not settled(noisy)
    assert len(steady) == EARLY and len(noisy) == LONGER * int(SPAN / 0.02)


def test_a_candidate_that_is_behind_gets_the_fewest_samples():
    times, _ = contest(1.2e-2, 1.1e-2, bound=1e-2)
    assert [len(t) for t in times] == [FEWEST, EARLY]


@given(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=80))
def test_the_interval_of_the_median_is_that_of_order_statistics(times):
    ordered, n = sorted(times), len(times)
    reach = NormalDist().inv_cdf(0.975) * n ** 0.5 / 2
    low, high = ordered[max(0, math.floor((n - 1) / 2 - reach))], ordered[min(n - 1, math.ceil((n - 1) / 2 + reach))]
    assert bounds(times) == (low, high)
    assert interval(times) == pytest.approx((high - low) / 2 / median(times))


def test_a_twentieth_of_medians_lies_outside_the_interval():
    """Of 20 values it is from the 6th to the 15th."""
    assert bounds(range(1, 21)) == (6, 15) and bounds([3.0, 1.0]) == (1.0, 3.0)  # type: ignore[arg-type]
    draws = np.random.default_rng(0).exponential(size=(2000, 20))
    inside = [low <= np.log(2) <= high for low, high in map(bounds, draws)]
    assert 0.93 < np.mean(inside) < 0.98


def test_a_gain_is_a_figure_where_times_settled_and_an_interval_elsewhere():
    def of(runs: list[float], config: int, noisy: bool = False, stage: str = "final") -> Trial:
        return trial(schedule="fake", config={"a": config}, times=Times.of(runs), noisy=noisy, stage=stage)

    def gain(*trials: Trial, best: int = 1) -> Gain | None:
        ended = structs.replace(finish(), best=Choice("fake", {"a": best}), default=Choice("fake", {"a": 0}))
        return gain_of(Journal(None, "ab-1", list(trials), ended))  # type: ignore[arg-type]

    first = [of([9.0] * 8, 1, stage="search"), of([9.0] * 8, 0, stage="search")]  # the comparison counts
    known = gain(*first, of([1.0, 1.01, 1.02], 1), of([2.0, 2.02, 2.04], 0))
    assert known and known.settled and known.ratio == pytest.approx(2.0, abs=1e-3)
    assert words(known, 2.02) == "2.00 times as fast as the untuned default (2.02 µs)"
    open_ = gain(of([1.0, 1.2, 1.5], 1, noisy=True), of([2.0, 10.0, 12.0], 0))
    assert open_ and not open_.settled and (open_.low, open_.high) == pytest.approx((2 / 1.5, 12.0), rel=1e-4)
    assert words(open_, 10.0) == "1.33 to 12.00 times as fast as the untuned default; times did not settle"
    assert words(Gain(9.0, 0.8, 10.0, False), 10.0).endswith("times did not settle, and it may be no faster")
    assert gain(*first, best=0) is None and gain(of([1.0], 1)) is None


@pytest.mark.slow
def test_pytorchs_layer_is_timed_where_there_is_one():
    assert 0.1 < torch_us(Workload("lstm", 64, 64, 2, 10, "float32"), DEVICE) < 1e5  # type: ignore[operator]
    assert torch_us(Workload("indrnn", 64, 64, 2, 10, "float32"), DEVICE) is None


class Simulated:
    """A host that asks for work, and a GPU that does it in order, at 2 GHz, each with a time of its own; stands in for
    ``torch.cuda`` and for the host's clock."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0
        self.cuda = self

    def work(self, asking: float, seconds: float) -> None:
        self.host += asking
        self.gpu = max(self.gpu, self.host) + seconds

    def _sleep(self, cycles: int) -> None:
        self.work(0.0, cycles / 2e9)

    def Event(self, enable_timing: bool) -> types.SimpleNamespace:
        event = types.SimpleNamespace(at=math.nan)

        def record() -> None:
            self.work(0.0, 0.0)
            event.at = self.gpu

        def synchronize() -> None:
            self.host = max(self.host, event.at)

        event.record, event.synchronize = record, synchronize
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        return event


@pytest.mark.parametrize(("asking", "seconds"), [(48e-6, 5e-6), (20e-6, 18e-6), (20e-6, 25e-6), (48e-6, 3e-3)])
@pytest.mark.parametrize("launches", [1, 100])
def test_a_gpu_is_timed_alone_whatever_the_host_takes(monkeypatch, asking, seconds, launches):
    torch = Simulated()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: torch.host)

    def run() -> None:
        for _ in range(launches):
            torch.work(asking, seconds)

    alone = launches * seconds
    assert event_clock(run) == pytest.approx(alone, abs=1.01 * asking if seconds > asking else 1e-9)
