"""Timing takes turns, spends little on hopeless candidates, and counts runs right."""

from __future__ import annotations

import math
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecornn.tune import timing
from ecornn.tune.timing import EARLY, FEWEST, LONGER, SPAN, Contestant, event_clock, interval, race, settled


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


def contest(*seconds: float, bound: float | None = None) -> tuple[list[list[float]], list[str]]:
    order: list[str] = []
    made = [Clocked(s, order, str(i)) for i, s in enumerate(seconds)]
    return race([Contestant(m, m.clock) for m in made], bound), order


def test_contestants_take_turns_after_the_warm_up():
    times, order = contest(0.04, 0.04)
    assert order == ["0", "0", "1", "1"] + ["0", "1"] * len(times[0])  # short: a second warm run
    assert len(times[0]) == len(times[1]) == 7


def test_once_the_time_is_over_each_has_the_fewest_samples():
    order: list[str] = []
    made = [Clocked(0.04, order, str(i)) for i in range(2)]
    times = race([Contestant(m, m.clock) for m in made], seconds=0.0)
    assert [len(t) for t in times] == [FEWEST, FEWEST]


def test_short_runs_are_timed_several_at_once_and_reported_one_by_one():
    times, order = contest(1e-4)
    assert len(order) == 2 + 20 * len(times[0])
    assert all(abs(t - 1e-4) < 1e-9 for t in times[0])


def test_a_hopeless_candidate_is_timed_once():
    times, order = contest(4.0, 1.0, bound=1.0)
    assert times[0] == [4.0] and order.count("0") == 1
    assert times[1] == [1.0] * 3 and order.count("1") == 4


class Noisy(Clocked):
    """Alternates between two speeds."""

    def __call__(self) -> None:
        super().__call__()
        self.now += self.seconds * (len(self.order) // 2 % 2)


def test_a_device_that_does_not_hold_still_is_asked_more_often_and_found_out():
    order: list[str] = []
    steady, noisy = Clocked(0.02, order, "steady"), Noisy(0.02, order, "noisy")
    times = race([Contestant(steady, steady.clock), Contestant(noisy, noisy.clock)])
    assert settled(times[0]) and not settled(times[1])
    assert len(times[0]) == EARLY and len(times[1]) == LONGER * int(SPAN / 0.02)


def test_a_candidate_that_is_behind_gets_the_fewest_samples():
    times, _ = contest(1.2e-2, 1.1e-2, bound=1e-2)
    assert [len(t) for t in times] == [FEWEST, EARLY]


@given(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=80))
def test_the_interval_of_the_median_is_that_of_order_statistics(times):
    from statistics import NormalDist, median

    ordered, n = sorted(times), len(times)
    reach = NormalDist().inv_cdf(0.975) * n ** 0.5 / 2
    low, high = ordered[max(0, math.floor((n - 1) / 2 - reach))], ordered[min(n - 1, math.ceil((n - 1) / 2 + reach))]
    assert interval(times) == pytest.approx((high - low) / 2 / median(times))


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
