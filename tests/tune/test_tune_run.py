"""A run: how candidates are timed, what is tried, when it ends, what the log has, and what a person sees."""

import io
import math
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, median

import numpy as np
import pytest
import test_records
from events import Clock, until
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console
from tune_fakes import DEVICE, Fake, cost, make

import ecornn.tune.tuner as tuner_module
from ecornn import heartbeat
from ecornn.cli import torch_time
from ecornn.schedules import generation
from ecornn.tune import timing
from ecornn.tune.choose import Environment
from ecornn.tune.log import RESERVED, Gain, Journal, digest_of, gain_of, read, words
from ecornn.tune.meter import Meter, duration, standing
from ecornn.tune.record import Choice, Finish, Outcome, Start, Times, Trial
from ecornn.tune.search import CostModel, Search
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.tune.timing import EARLY, FEWEST, LONGER, SPAN, Contestant, bounds, event_clock, interval, race, settled
from ecornn.tune.tuner import CONFIDENCE, RATE, Progress, Settings, Tuner, stop_after
from ecornn.workload import Workload

TASK = make()
HERE = Environment({"ecornn": "test"})
WIDE = Fake(("ok",), "abc")


def tried(*values: int) -> list[Candidate]:
    return [Candidate.of("fake", {"a": a, "b": 1, "c": 0, "behaviour": "ok"}) for a in values]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tuner_module, "time", made)
    return made


def searched(path: Path, schedule: Fake, measure, settings: Settings, resume: bool = True) -> tuple[Tuner, Finish]:
    journal = Journal.open(path, digest_of(TASK.workload, TASK.device, [schedule], settings.seed), resume)
    search = Search(ConfigSpace(TASK, [schedule]), CostModel(settings.seed), settings.seed)
    tuner = Tuner(search, measure, journal, settings, HERE)
    return tuner, tuner.run()


class Instant:
    """Times are computed, after ``pause``; stops after ``stop`` trials; notes batches, pending ones and waits."""

    idle = 0

    def __init__(self, stop: int | None = None, spare: int = 0, pause: Callable[[], object] = lambda: None) -> None:
        self.stop, self.spare, self.pause = stop, spare, pause
        self.seen: list[Candidate] = []
        self.waiting: list[Candidate] = []
        self.batches: list[tuple[int, int, int]] = []
        self.waits: list[int] = []

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def submit(self, batch, bound):
        self.batches.append((len(self.seen), self.pending, len(batch)))
        self.waiting += batch

    def drop(self):
        self.waiting.clear()

    def next(self, seconds=None, place=0):
        if len(self.seen) == self.stop:
            raise KeyboardInterrupt
        self.pause()
        self.waits.append(self.pending)
        self.seen.append(one := self.waiting.pop(place))
        return one, Outcome(Times.of([cost(one.config)]), 1e-7, "digest")

    def compare(self, finalists, seconds=None):
        return [Outcome(Times.of([cost(one.config) + 0.25]), 1e-7, "digest") for one in finalists]


def test_where_a_batch_is_built_before_it_is_measured_the_default_comes_first_alone(path):
    stopped, again = Instant(stop=3), Instant()
    with pytest.raises(KeyboardInterrupt):
        searched(path, Fake(), stopped, Settings(12, 0))
    assert [count for *_, count in stopped.batches] == [1, 8] and stopped.seen[0].config == Fake().default(TASK)
    searched(path, Fake(), again, Settings(12, 0))
    assert [count for *_, count in again.batches] == [8, 1], "a run that goes on has the default's time"


def test_an_interrupted_run_goes_on_and_measures_nothing_twice(path):
    first, second, third, anew = Instant(stop=13), Instant(), Instant(), Instant()
    with pytest.raises(KeyboardInterrupt):
        searched(path, WIDE, first, Settings(30, 0))
    assert len(read(path).trials()) == 13 and not any(isinstance(line.record, Finish) for line in read(path).lines)
    tuner, finish = searched(path, WIDE, second, Settings(30, 0))
    assert finish.trials == 30 and len(second.seen) == 17 and not set(first.seen) & set(second.seen)
    assert tuner.journal.finished(30, None) and not tuner.journal.finished(31, None)
    assert sum(isinstance(line.record, Start) for line in read(path).lines) == 1
    searched(path, WIDE, third, Settings(36, 0))  # more trials: goes on from there
    assert len(third.seen) == 6
    searched(path, WIDE, anew, Settings(8, 0), resume=False)  # a run of its own
    assert len(anew.seen) == 8 and len({t.run for t in read(path).trials()}) == 2


def test_a_search_that_finds_nothing_better_stops_early_and_says_so(path):
    class Flat(Instant):
        def next(self, seconds=None):
            one, outcome = super().next(seconds)
            return one, structs.replace(outcome, times=Times.of([7.0 if len(self.seen) > 3 else 9.0]))

    flat, again = Flat(), Flat()
    tuner, finish = searched(path, WIDE, flat, Settings(300, 0, early_stop=True))
    assert finish.reason == "converged" and stop_after() == 59
    # where one in twenty trials is a gain, a run of failures that stops is one in twenty at most
    assert (1 - RATE) ** 59 <= 1 - CONFIDENCE < (1 - RATE) ** 58 and finish.trials == len(flat.seen) == 4 + 59
    assert tuner.journal.finished(300, None, early_stop=True) and not tuner.journal.finished(300, None)
    _, finish = searched(path, WIDE, again, Settings(80, 0))  # and goes on where asked to
    assert finish.reason == "trials" and len(again.seen) == 80 - 63


def test_builds_go_on_while_something_is_measured(path):
    busy = Instant(spare=4)
    _, finish = searched(path, WIDE, busy, Settings(40, 0))
    assert finish.trials == 40 == len(set(busy.seen))
    assert min(pending for told, pending in enumerate(busy.waits) if told + pending < 40) > 4


def test_every_process_gets_something_before_the_first_is_done(path):
    ahead = Instant(spare=20)
    searched(path, WIDE, ahead, Settings(128, 0))
    assert ahead.batches[0] == (0, 0, 1)  # the default alone: it needs no scan of the space
    at_first = sum(count for told, _, count in ahead.batches if told == 0)
    assert at_first > 20 and max(pending for _, pending, _ in ahead.batches) <= 20


def test_no_search_waits_for_the_slowest_build(path):
    """Two of four processes never end; the others make all trials, and are asked for nothing they have no time for."""
    class Slow(Instant):
        idle = property(lambda self: max(0, 4 - self.pending))

        def next(self, seconds=None):
            return super().next(place=2 if self.seen else 0)  # after the default two stay at the front

    slow = Slow(spare=4)
    _, finish = searched(path, WIDE, slow, Settings(40, 0))
    assert finish.trials == 40 == len(slow.seen) and finish.reason == "trials"
    assert sum(count for _, _, count in slow.batches) - 40 <= 4 and not slow.waiting


def test_a_small_search_learns_before_it_proposes_more_than_a_quarter(path):
    ahead, known = Instant(spare=20), Instant(spare=20)
    searched(path, WIDE, ahead, Settings(32, 0, batch=5))
    assert max(pending + count for _, pending, count in ahead.batches) <= 8 + 5
    search = Search(ConfigSpace(TASK, [WIDE]), CostModel(), 0, known=tried(*range(8)))
    Tuner(search, known, Journal.open(path, "digest", True), Settings(16, 0, batch=4), HERE).run()
    assert known.batches[0] == (0, 0, 9)  # what is known beforehand needs nothing learnt


def test_given_configurations_are_tried_and_no_others(path):
    space, journal = ConfigSpace(TASK, [WIDE]), Journal.open(path, "digest", True)
    search = Search(space, CostModel(), 0, known=tried(1, 5, 9, 1), defaults=False)
    finish = Tuner(search, Instant(), journal, Settings(len(search.first), 0), HERE).run()
    assert [t.config["a"] for t in journal.search] == [1, 5]  # 9 does not fit
    assert finish.best and finish.best.config["a"] == 5 and "fitting" not in vars(space)  # nothing was scanned


def test_a_space_that_is_used_up_ends_the_run(path):
    tuner, finish = searched(path, Fake(), Instant(), Settings(500, 0))
    assert (finish.reason, finish.trials) == ("space", len(list(tuner.space.listing())))
    assert finish.best.config == {"a": 5, "b": 2, "behaviour": "ok"} and tuner.journal.finished(500, None)


def test_the_time_limit_counts_earlier_sessions(path, clock):
    first, more = (Instant(pause=lambda: clock.sleep(0.3)) for _ in range(2))
    tuner, finish = searched(path, Fake(), first, Settings(40, 0, time_limit=1.0))
    assert finish.reason == "time" and 1 <= finish.trials <= 5
    assert tuner.journal.finished(40, 1.0) and not tuner.journal.finished(40, 2.0)
    _, finish = searched(path, Fake(), more, Settings(40, 0, time_limit=2.0))
    assert finish.reason == "time" and len(more.seen) <= 5


def test_the_time_limit_ends_a_wait_but_not_that_for_the_first_result(path, tmp_path, clock):
    waited = []
    class Stuck(Instant):
        def next(self, seconds=None):
            waited.append(seconds)
            if seconds is not None:
                clock.sleep(seconds)
                raise TimeoutError
            clock.sleep(1.2)
            return super().next()

    began = clock.now
    _, finish = searched(path, Fake(), Stuck(), Settings(40, 0, time_limit=2.0))
    assert finish.reason == "time" and finish.trials == 1 and finish.best and clock.now - began <= 2.0
    assert waited[0] is None and 0.05 < waited[1] < 0.4, "half a second is for the comparison"
    _, finish = searched(tmp_path / "b.jsonl", Fake(), Stuck(), Settings(40, 0, time_limit=1.0))
    assert finish.reason == "time" and finish.trials == 1 and finish.best


def test_all_of_a_run_is_within_the_time_limit(path, tmp_path, clock):
    """The search ends early enough for the comparison, which is told what is left."""
    left = []
    class Slow(Instant):
        def compare(self, finalists, seconds=None):
            left.append(seconds)
            clock.sleep(seconds)
            return super().compare(finalists)

    slow, limit = Slow(pause=lambda: clock.sleep(0.05)), 1.2
    tuner, finish = searched(path, Fake(), slow, Settings(500, 0, time_limit=limit))
    assert finish.reason == "time" and finish.trials > 3 and 0.5 * RESERVED * limit < left[0] <= RESERVED * limit
    assert finish.seconds == pytest.approx(limit, abs=0.06)
    assert tuner.journal.finished(500, limit) and not tuner.journal.finished(500, 2 * limit)
    _, finish = searched(tmp_path / "b.jsonl", Fake(), slow, Settings(500, 0, time_limit=5, started=clock.now - 10))
    assert (finish.reason, finish.trials) == ("time", 1) and finish.best and finish.seconds >= 10


def test_the_gain_is_taken_from_the_final_comparison(path):
    _, finish = searched(path, Fake(), Instant(), Settings(40, 0))
    finals = [t for t in read(path).trials() if t.stage == "final"]
    assert len(finals) == 4 and finish.best_us == min(t.times.median for t in finals)
    assert finish.default_us == cost({"a": 0, "b": 0}) + 0.25


def test_progress_knows_the_default_and_how_long_it_takes_at_most(path, clock):
    seen, stages = list[Progress](), list[str]()
    tuner = Tuner(Search(ConfigSpace(TASK, [Fake()]), CostModel(0), 0), Instant(pause=lambda: clock.sleep(0.02)),
                  Journal.open(path, "x", True), Settings(30, 0), HERE, seen.append, stages.append)
    tuner.run()
    assert {trial.generation for trial in tuner.journal.trials} == {generation()}
    assert seen[-1].default_us == cost({"a": 0, "b": 0}) and len(seen) == 30
    assert all(now.left_s == pytest.approx(0.02 * (30 - now.done)) for now in seen)
    tuner.settings = Settings(50, 0)
    assert tuner.expected(10, 5.0) == 20 * 0.5 and tuner.expected(0, 5.0) is None
    tuner.settings = Settings(50, 0, time_limit=1e-3)  # over by now
    assert tuner.expected(10, 5.0) == tuner.expected(0, 5.0) == 0
    assert stages == ["building and measuring candidates", "comparing the fastest 4 in turns"]
    assert re.fullmatch(rf"best so far {seen[9].best_us:.4g} µs per step, at most [\d:]+( s)? left",
                        standing(seen[9]))
    assert " left" not in standing(seen[-1])
    narrow = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with Meter(narrow) as meter, meter.layer("") as one:
        one.stage("building and measuring candidates")
        one.report(seen[9])
        meter.bar.refresh()
        shown = narrow.file.getvalue()
    assert "10/30" in shown and standing(seen[9]) in shown
    assert [duration(s) for s in (7.4, 59.6, 125, 3600)] == ["7 s", "1:00", "2:05", "1:00:00"]


def test_no_silence_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(heartbeat, "EVERY", 0.1)
    out = io.StringIO()
    with Meter(Console(file=out), 2) as meter, meter.layer("[1/2]"), meter.layer("[2/2]") as one:
        until(lambda: "[2/2] starting" in out.getvalue())
        one.stage("listing what can be tried")
        until(lambda: "[2/2] listing" in out.getvalue())
        clock = meter.clock.thread
    assert re.search(r"\[2/2\] starting, and 1 more, \d+ s so far", out.getvalue())
    assert re.search(r"\[2/2\] listing what can be tried, and 1 more, \d+ s so far", out.getvalue())
    assert not clock.is_alive()


class Clocked:
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
    assert len(order) == 2 + 20 * len(times[0]) and all(abs(t - 1e-4) < 1e-9 for t in times[0])


def test_a_hopeless_candidate_is_timed_once():
    times, order = contest(4.0, 1.0, bound=1.0)
    assert times[0] == [4.0] and order.count("0") == 1 and times[1] == [1.0] * 3 and order.count("1") == 4


def test_a_device_that_does_not_hold_still_is_asked_more_often_and_found_out():
    (steady, noisy), _ = contest(0.02, 0.02, second=Noisy)
    assert settled(steady) and not settled(noisy) and len(steady) == EARLY and len(noisy) == LONGER * int(SPAN / 0.02)


def test_a_candidate_that_is_behind_gets_the_fewest_samples():
    times, _ = contest(1.2e-2, 1.1e-2, bound=1e-2)
    assert [len(t) for t in times] == [FEWEST, EARLY]


@given(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=80))
def test_the_interval_of_the_median_is_that_of_order_statistics(times):
    ordered, n = sorted(times), len(times)
    reach = NormalDist().inv_cdf(0.975) * n ** 0.5 / 2
    low, high = ordered[max(0, math.floor((n - 1) / 2 - reach))], ordered[min(n - 1, math.ceil((n - 1) / 2 + reach))]
    assert bounds(times) == (low, high) and interval(times) == pytest.approx((high - low) / 2 / median(times))


def test_a_twentieth_of_medians_lies_outside_the_interval():
    """Of 20 values it is from the 6th to the 15th."""
    assert bounds(range(1, 21)) == (6, 15) and bounds([3.0, 1.0]) == (1.0, 3.0)  # type: ignore[arg-type]
    draws = np.random.default_rng(0).exponential(size=(2000, 20))
    assert 0.93 < np.mean([low <= np.log(2) <= high for low, high in map(bounds, draws)]) < 0.98


def test_a_gain_is_a_figure_where_times_settled_and_an_interval_elsewhere():
    def of(runs: list[float], config: int, noisy: bool = False, stage: str = "final") -> Trial:
        return test_records.trial(schedule="fake", config={"a": config}, times=Times.of(runs), noisy=noisy, stage=stage)

    def gain(*trials: Trial, best: int = 1) -> Gain | None:
        best_of, default = Choice("fake", {"a": best}), Choice("fake", {"a": 0})
        finish = structs.replace(test_records.finish(), best=best_of, default=default)
        return gain_of(Journal(None, "ab-1", list(trials), finish))  # type: ignore[arg-type]
    first = [of([9.0] * 8, 1, stage="search"), of([9.0] * 8, 0, stage="search")]  # the comparison counts
    known = gain(*first, of([1.0, 1.01, 1.02], 1), of([2.0, 2.02, 2.04], 0))
    assert known and known.settled and known.ratio == pytest.approx(2.0, abs=1e-3)
    assert words(known, 2.02) == "2.00 times as fast as the untuned default (2.02 µs)"
    open_ = gain(of([1.0, 1.2, 1.5], 1, noisy=True), of([2.0, 10.0, 12.0], 0))
    assert open_ and not open_.settled and (open_.low, open_.high) == pytest.approx((2 / 1.5, 12.0), rel=1e-4)
    assert words(open_, 10.0) == "1.33 to 12.00 times as fast as the untuned default; the timings were noisy"
    assert words(Gain(9.0, 0.8, 10.0, False), 10.0).endswith("the timings were noisy, so the default may be as fast")
    assert gain(*first, best=0) is None and gain(of([1.0], 1)) is None


@pytest.mark.slow
def test_pytorchs_layer_is_timed_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_time, "PATIENCE", None)
    assert torch_time.torch_us(Workload("lstm", 64, 64, 2, 10, "float32"), DEVICE) > 0.1  # type: ignore[operator]
    assert torch_time.torch_us(Workload("indrnn", 64, 64, 2, 10, "float32"), DEVICE) is None


class Simulated:
    """A host that asks for work, and a GPU of 2 GHz that does it in order, in place of ``torch.cuda`` and clocks."""

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
