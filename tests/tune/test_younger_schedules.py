"""A schedule that is younger than a record competes with it."""

from __future__ import annotations

from test_tune_lookup import SCHEDULE, TASK, log_of, trial
from tune_fakes import Fake

from ecornn.schedules.base import Task
from ecornn.tune.lookup import find
from ecornn.tune.record import Trial


class Young(Fake):
    """It came after some records."""

    def generation(self, task: Task) -> int:
        return 2

    def expected(self, task: Task) -> float:
        return 4000.0

    def beside(self, task: Task) -> float:
        return 5000.0  # of a sequence of ten steps


def test_a_schedule_that_is_younger_than_the_record_competes_by_what_it_expects():
    young = Young(name="young")

    def chosen(*trials: Trial):
        return find(TASK, [SCHEDULE, young], log_of(*trials))

    result = chosen(trial(4.9, a=2))
    assert result.schedule is young and result.config == young.default(TASK)
    assert "faster than fake, of which record log.jsonl:1 of 2026-01-31T12:00:00Z says 5.047" in result.provenance
    assert chosen(trial(4.6, a=2)).config["a"] == 2, "with a doubt, and beside its steps"
    assert chosen(trial(4.9, a=2, generation=2)).config["a"] == 2, "it was there"
    tried = trial(5.0, a=3, schedule="young", generation=2, time="2026-02-02T12:00:00Z")
    assert chosen(trial(4.9, a=2), tried).config["a"] == 2, "it was tried"
    wrong = trial(schedule="young", a=3, times=None, check=None, error="run: wrong")
    assert chosen(trial(4.9, a=2), wrong).schedule is young, "what failed says nothing of its default"
