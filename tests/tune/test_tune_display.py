"""What a person sees of a search: how it stands, that it goes on, and what was gained as far as that is known."""

from __future__ import annotations

import io
import re
import time

import pytest
from events import until
from rich.console import Console
from test_tune_run import HERE, TASK, ConfigSpace, CostModel, Instant, Search, Tuner
from tune_fakes import DEVICE, Fake, cost

from ecornn.cli import common, progress
from ecornn.cli.progress import torch_us
from ecornn.schedules import generation
from ecornn.tune.journal import Gain, Journal, gain_of, words
from ecornn.tune.record import Choice, Finish, Times, Trial
from ecornn.tune.timing import bounds
from ecornn.tune.tuner import Progress, Settings
from ecornn.workload import Workload

WORK = Workload("lstm", 64, 64, 2, 10, "float32")


def trial(runs: list[float], config: int, noisy: bool = False, stage: str = "final") -> Trial:
    return Trial(run="ab-1", index=0, stage=stage, workload=WORK, device=DEVICE, schedule="fake", revision=1,
                 generation=0, config={"a": config}, versions={}, seed=0, seconds=1.0, times=Times.of(runs), check=1e-7,
                 source="00", noisy=noisy)


def journal(*trials: Trial, best: int = 1) -> Journal:
    finish = Finish(run="ab-1", reason="trials", trials=2, seconds=1.0, best=Choice("fake", {"a": best}), best_us=1.0,
                    default=Choice("fake", {"a": 0}), default_us=2.0)
    return Journal(None, "ab-1", list(trials), finish)  # type: ignore[arg-type]


def test_the_interval_of_a_median_is_that_of_the_binomial():
    """Of 20 values the 6th and the 15th; a twentieth of medians lies outside."""
    import numpy as np

    assert bounds(range(1, 21)) == (6, 15) and bounds([3.0, 1.0]) == (1.0, 3.0)  # type: ignore[arg-type]
    draws = np.random.default_rng(0).exponential(size=(2000, 20))
    inside = [low <= np.log(2) <= high for low, high in map(bounds, draws)]
    assert 0.93 < np.mean(inside) < 0.98


def test_a_gain_is_a_figure_where_times_settled_and_an_interval_elsewhere():
    first = [trial([9.0] * 8, 1, stage="search"), trial([9.0] * 8, 0, stage="search")]  # the comparison counts
    gain = gain_of(journal(*first, trial([1.0, 1.01, 1.02], 1), trial([2.0, 2.02, 2.04], 0)))
    assert gain and gain.settled and gain.ratio == pytest.approx(2.0, abs=1e-3)
    assert words(gain, 2.02) == "2.00 times as fast as the untuned default (2.02 µs)"
    gain = gain_of(journal(trial([1.0, 1.2, 1.5], 1, noisy=True), trial([2.0, 10.0, 12.0], 0)))
    assert gain and not gain.settled and (gain.low, gain.high) == pytest.approx((2 / 1.5, 12.0), rel=1e-4)
    assert words(gain, 10.0) == "1.33 to 12.00 times as fast as the untuned default; times did not settle"
    assert words(Gain(9.0, 0.8, 10.0, False), 10.0).endswith("times did not settle, and it may be no faster")
    assert gain_of(journal(*first, best=0)) is None and gain_of(journal(trial([1.0], 1))) is None


def test_progress_knows_the_default_and_how_long_it_takes_at_most(tmp_path):
    seen: list[Progress] = []
    stages: list[str] = []

    class Slow(Instant):
        def next(self, seconds=None):
            time.sleep(0.02)
            return super().next(seconds)

    search = Search(ConfigSpace(TASK, [Fake(("ok",), "ab")]), CostModel(0), 0)
    tuner = Tuner(search, Slow(), Journal.open(tmp_path / "log.jsonl", "x", True), Settings(30, 0), HERE,
                  seen.append, stages.append)
    tuner.run()
    assert {trial.generation for trial in tuner.journal.trials} == {generation()}
    assert seen[-1].default_us == cost({"a": 0, "b": 0}) and len(seen) == 30
    assert all(now.left_s >= 0.02 * (30 - now.done) for now in seen)
    tuner.settings = Settings(50, 0)
    assert tuner.expected(10, 5.0) == 20 * 0.5 and tuner.expected(0, 5.0) is None
    tuner.settings = Settings(50, 0, time_limit=1e-3)  # over by now
    assert tuner.expected(10, 5.0) == tuner.expected(0, 5.0) == 0
    assert stages == ["building and measuring candidates", "comparing the fastest 4 in turns"]
    said = progress.standing(seen[9], torch_us=2 * seen[9].best_us)
    assert f"{seen[9].default_us / seen[9].best_us:.2f}x the default, 2.00x PyTorch, at most " in said
    assert " left" not in progress.standing(seen[-1])
    assert [progress.duration(s) for s in (7.4, 59.6, 125, 3600)] == ["7 s", "1:00", "2:05", "1:00:00"]


def test_no_silence_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(common, "EVERY", 0.1)
    out = io.StringIO()
    with progress.Meter(Console(file=out), 2) as meter, meter.layer("[1/2]"), meter.layer("[2/2]") as one:
        until(lambda: "[2/2] starting" in out.getvalue())
        one.stage("listing what can be tried")
        until(lambda: "[2/2] listing" in out.getvalue())
        clock = meter.clock.thread
    assert re.search(r"\[2/2\] starting, and 1 more, \d+ s so far", out.getvalue())
    assert re.search(r"\[2/2\] listing what can be tried, and 1 more, \d+ s so far", out.getvalue())
    assert not clock.is_alive()


@pytest.mark.slow
def test_pytorchs_layer_is_timed_where_there_is_one():
    assert 0.1 < torch_us(WORK, DEVICE) < 1e5  # type: ignore[operator]
    assert torch_us(Workload("indrnn", 64, 64, 2, 10, "float32"), DEVICE) is None
