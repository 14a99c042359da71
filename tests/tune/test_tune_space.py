"""The scan of the config space: all that fits, without asking for all."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_fakes import Fake, make

from ecornn.cells import get
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Knob
from ecornn.targets import KNOWN
from ecornn.task import make_task
from ecornn.tune import space as module
from ecornn.tune.space import Candidate, ConfigSpace, Watched
from ecornn.workload import Workload

TASK = make()


class Rules(Fake):
    """Knobs of these sizes, and rules: (knobs that are read, in order, and the sum that must not be)."""

    def __init__(self, sizes: list[int], rules: list[tuple[list[int], int]]) -> None:
        super().__init__()
        self.sizes, self.rules, self.asked = sizes, rules, 0

    def knobs(self, task):
        return tuple(Knob(f"k{i}", tuple(range(size)), "") for i, size in enumerate(self.sizes))

    def default(self, task):
        return {f"k{i}": 0 for i in range(len(self.sizes))}

    def check(self, task, config):
        self.asked += 1
        for read, residue in self.rules:
            if sum(int(config[f"k{i % len(self.sizes)}"]) for i in read) % 3 == residue:
                return "no"
        return None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5),
       st.lists(st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 2)), max_size=4))
def test_the_scan_finds_exactly_what_fits(sizes, rules):
    schedule = Rules(sizes, rules)
    space = ConfigSpace(TASK, [schedule])
    asked = schedule.asked
    every = [n for n in range(space.size("fake")) if schedule.check(TASK, space.config("fake", n)) is None]
    assert sorted(space.fitting["fake"]) == every
    assert asked <= space.size("fake") + 1


def test_knobs_that_no_rule_reads_cost_nothing():
    schedule = Rules([4, 4, 50, 50], [([1], 0)])
    space = ConfigSpace(TASK, [schedule])
    assert len(space) == 4 * 2 * 50 * 50 and schedule.asked <= 1 + 4


def test_a_schedule_that_copies_the_configuration_has_read_all_of_it():
    config = Watched({"a": 1, "b": 2})
    assert {**config} == {"a": 1, "b": 2} and set(config.read) == {"a", "b"}
    assert Watched({"a": 1}).get("b", 3) == 3


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("start", [{"k0": 1, "k1": 2, "k2": 0}, {"k0": 1, "k1": 7, "k2": 0}], ids=["inside", "outside"])
def test_neighbours_are_all_single_changes_that_fit_each_as_often(start, whole):
    schedule = Rules([3, 4, 2], [([0, 1], 0)])
    space, rng = ConfigSpace(TASK, [schedule]), random.Random(1)
    assert len(space) and space.whole
    space.whole = space.whole if whole else {}
    changed = [{**start, knob.name: value} for knob in schedule.knobs(TASK) for value in knob.values]
    expected = {Candidate.of("fake", c) for c in changed if c != start and schedule.check(TASK, c) is None}
    seen = Counter(space.neighbour(Candidate.of("fake", start), rng) for _ in range(200 * len(expected)))
    assert set(seen) == expected and len(expected) > 2
    assert all(140 < times < 260 for times in seen.values())


def test_too_many_combinations_are_sampled(monkeypatch):
    monkeypatch.setattr(module, "ASKED", 50)
    monkeypatch.setattr(module, "SAMPLED", 200)
    schedule = Rules([9, 9, 9], [([0, 1, 2], 0)])
    space = ConfigSpace(TASK, [schedule])
    assert 80 < len(space) < 200 and all(space.fits(c) for c in space.listing())


@pytest.mark.parametrize("work", [
    Workload("rnn_tanh", 2048, 2048, 16, 300, "float16"),
    pytest.param(Workload("lstm", 512, 512, 8, 300, "float32"), marks=pytest.mark.exhaustive)])
def test_the_persistent_space_of_an_h100_is_whole(work):
    schedule = all_schedules()["persistent"]
    task = make_task(get(work.cell), work, KNOWN["sm_90a"])
    space = ConfigSpace(task, [schedule])
    found = set(space.fitting["persistent"])
    for number in random.Random(0).sample(range(space.size("persistent")), 8000):
        fits = schedule.check(task, space.config("persistent", number)) is None
        assert fits == (number in found)


def test_few_calls_of_check_settle_the_space_of_an_h100():
    """Millions of combinations, of which one in 60 fits."""
    schedule, calls = all_schedules()["persistent"], 0

    class Counted(type(schedule)):  # type: ignore[misc]
        def check(self, task, config):
            nonlocal calls
            calls += 1
            return super().check(task, config)

    work = Workload("lstm", 800, 800, 20, 300, "bfloat16")
    counted = Counted()
    task = make_task(get("lstm"), work, KNOWN["sm_90a"])
    counted.serves(task)
    calls = 0
    space = ConfigSpace(task, [counted])
    assert space.combinations() > 400_000 and len(space) > 5000 and calls <= 150_000
    assert "persistent" in space.whole


def test_a_knob_that_a_task_has_not_may_be_asked_for():
    """Only large layers have weights that are streamed; the schedule asks small ones, too, what their knob says."""
    task = make_task(get("lstm"), Workload("lstm", 256, 256, 8, 300, "bfloat16"), KNOWN["sm_90a"])
    schedule = all_schedules()["persistent_wide"]
    space = ConfigSpace(task, [schedule])
    assert "streamed" not in {knob.name for knob in schedule.knobs(task)}
    whole, numbers = space.scan_part(schedule.name, 0)
    assert whole and all(space.fits(Candidate.of(schedule.name, space.config(schedule.name, n))) for n in numbers)
    watched = Watched({"a": 1})
    assert watched.get("b", 2) == 2 and watched.get("a") == 1 and list(watched.read) == ["a"]
