"""Config space and its scan, cost model and search, without building anything."""

import itertools
import random
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_fakes import Fake, cost, make

from ecornn.cells import get
from ecornn.errors import ScheduleError
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Knob
from ecornn.targets import KNOWN
from ecornn.task import make_task
from ecornn.tune import space as module
from ecornn.tune.search import OPENING, TRUST, CostModel, Search
from ecornn.tune.space import Candidate, ConfigSpace, Watched
from ecornn.workload import Workload

TASK = make()
LARGE = Fake(("ok",), "abcdef")  # 8**6 combinations


def spend(space: ConfigSpace, seed: int, trials: int, batch: int = 16) -> Search:
    search = Search(space, CostModel(seed), seed)
    while len(search.tried) < trials:
        proposed = search.ask(min(batch, trials - len(search.tried)))
        if not proposed:
            break
        for candidate in proposed:
            search.tell(candidate, cost(candidate.config))
    return search


class Tight(Fake):
    def check(self, task, config):
        return None if config["a"] == config["b"] == config["c"] == 1 else "too large"

    def default(self, task):
        return {**super().default(task), "a": 1, "b": 1, "c": 1}


def test_a_schedule_is_drawn_by_its_place_and_not_by_how_much_of_it_fits():
    space, rng = ConfigSpace(TASK, [Tight(("ok",), "abcde", "tight"), LARGE]), random.Random(0)
    drawn = [space.draw(rng) for _ in range(400)]
    assert all(space.fits(c) for c in drawn)
    assert 225 < sum(c.schedule == "tight" for c in drawn) < 310  # two of three, in the mean


def test_nothing_that_does_not_fit_is_proposed_and_no_schedule_is_an_error():
    space = ConfigSpace(TASK, [Rules([1], [([0], 0)])])
    assert len(space) == 0 and space.draw(random.Random(0)) is None
    assert Search(space, CostModel(), 0, known=space.defaults()).ask(5) == []
    with pytest.raises(ScheduleError, match="no schedule serves"):
        ConfigSpace(TASK, [])


def test_defaults_come_first_and_nothing_is_proposed_twice():
    space = ConfigSpace(TASK, [Fake(("ok",), "ab", "one"), Fake(("ok",), "ab", "two")])
    search = Search(space, CostModel(), 0)
    seen: list[Candidate] = []
    while batch := search.ask(10):
        seen += batch
        for candidate in batch:
            search.tell(candidate, cost(candidate.config))
    assert seen[:2] == space.defaults() and len(seen) == len(set(seen)) and set(seen) == set(space.listing())


def test_the_model_beats_random_search_in_a_large_space():
    """With every seed; and in the median it comes within one step of the best, which is 1.0."""
    space, best = ConfigSpace(TASK, [LARGE]), []
    for seed in range(8):
        best.append(min(t for t in spend(space, seed, 96).tried.values() if t is not None))
        rng = random.Random(seed)
        assert best[-1] < min(cost(space.draw(rng).config) for _ in range(96)) / 1.5
    assert statistics.median(best) <= 1.5


def test_equal_seeds_propose_equally_and_others_do_not():
    space = ConfigSpace(TASK, [LARGE])
    first, again, other = (list(spend(space, seed, 48).tried) for seed in (1, 1, 2))
    assert first == again and first != other


def test_failures_rank_below_everything():
    model, rows = CostModel(), [{"s.k": float(i)} for i in range(12)]
    for i, row in enumerate(rows):
        model.add("", row, None if i < 6 else 100.0 - i)
    assert model.labels("")[:6] == [0.0] * 6 and min(model.labels("")[6:]) > 0 and model.fit()
    scores = model.score(model.table(rows))
    assert max(scores[:6]) < min(scores[6:])


class Estimated(Fake):
    def features(self, task, plan):
        return {"estimate": 1000 * cost({**plan, "f": 0})}


def test_estimates_lead_a_search_until_times_correct_them():
    """From the first batch on, without a sample; what they are wrong about is learnt."""
    schedule = Estimated(("ok",), "abcdef")
    space, slow = ConfigSpace(TASK, [schedule]), statistics.median
    first = Search(space, CostModel(), 0).ask(12)
    blind = Search(ConfigSpace(TASK, [LARGE]), CostModel(), 0).ask(12)
    assert first[0] == space.defaults()[0] and len(set(first)) == 12
    assert slow(cost(c.config) for c in first[1:]) < slow(cost(c.config) for c in blind[1:]) / 1.3
    def best(schedule: Fake, trials: int) -> float:
        return slow(min(filter(None, spend(ConfigSpace(TASK, [schedule]), seed, trials).tried.values()))
                    for seed in range(5))
    assert best(schedule, 48) < best(LARGE, 48)


def test_what_has_no_estimate_ranks_as_the_slowest_until_it_is_measured():
    model, rows = CostModel(), [{"estimate": 1.0}, {"estimate": 3.0, "slow": 1.0}, {"other": 1.0}]
    scores = model.score(model.table(rows))
    assert scores[0] > scores[1] == scores[2]
    for turn in range(8):
        for row, time in zip(rows, (2.0, 9.0, 1.0), strict=True):
            model.add("", row, time)
        assert model.fit() or turn == 0, "few samples teach nothing"
    scores = model.score(model.table(rows))
    assert scores[2] - scores[0] > -TRUST * 2 + 1 and scores[2] > scores[1]


def test_estimates_are_doubted_until_something_is_measured():
    """The highest are alike, as many as the knobs that they do not know; once trained, scores are as the model says."""
    search = Search(ConfigSpace(TASK, [Estimated(("ok",), "abcdef")]), CostModel(), 0)
    seen = {c: -3.0 for c in search.space.sample(random.Random(0), 50)}
    search.doubt(random.Random(0), seen)
    assert 0.05 < statistics.stdev(seen.values()) / TRUST < 0.2
    for candidate in search.ask(8):
        search.tell(candidate, cost(candidate.config))
    assert search.model.fit()
    kept = dict(seen)
    search.doubt(random.Random(0), seen)
    assert seen == kept


def test_only_the_preferred_default_is_tried_whatever_it_seems_where_there_are_estimates():
    class Slow(Estimated):
        def features(self, task, plan):
            return {"estimate": 1e9}

    known = Candidate.of("fake", {**dict.fromkeys("abcdef", 1), "behaviour": "ok"})
    lent = Candidate.of("fake", {**dict.fromkeys("abcde", 2), "f": 3, "behaviour": "ok"})
    space = ConfigSpace(TASK, [Estimated(("ok",), "abcdef"), Slow(("ok",), "abcdef", "second")])
    search = Search(space, CostModel(), 0, known=[known], lent=[lent, lent])
    asked = search.ask(OPENING)
    assert asked[:2] == [space.defaults()[0], known] and space.defaults()[1] not in asked
    assert search.waiting() == 0 and "fitting" not in vars(space)  # nothing of this took a scan


def test_a_word_that_is_absent_is_zero_and_a_number_missing():
    model = CostModel()
    model.columns = {"k=x": 0, "n": 1}
    row = model.matrix([{"other": 1.0}])[0]
    assert row[0] == 0.0 and row[1] != row[1]


def test_some_of_what_is_drawn_before_the_model_is_near_a_default():
    """A default is a good guess, and what is near it is worth more than what is drawn from all that fits."""
    space = ConfigSpace(TASK, [LARGE, Fake(("ok",), "abcdef", "second"), Fake(("ok",), "abcdef", "third")])
    def changed(one: Candidate) -> int:
        default = next(d for d in space.defaults() if d.schedule == one.schedule)
        return sum(a != b for a, b in zip(one.knobs, default.knobs, strict=True))
    asked = Search(space, CostModel(), 0).ask(23)
    assert asked[:3] == space.defaults() and len(set(asked)) == 23
    close = [c for c in asked[3:] if changed(c) <= 3]
    assert 10 <= len(close) < 16 and {c.schedule for c in close[:10]} == {"fake", "second"}
    assert all(space.fits(c) for c in asked)
    late = Search(space, CostModel(), 0)
    late.proposed |= set(space.sample(random.Random(1), 24))
    assert sum(changed(c) <= 3 for c in late.ask(20)) <= 6  # the defaults and luck


class Rules(Fake):
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
    asked, every = schedule.asked, [space.config("fake", n) for n in range(space.size("fake"))]
    assert sorted(tuple(one.values()) for one in every) == [*itertools.product(*map(range, sizes))]
    fitting = [n for n, one in enumerate(every) if schedule.check(TASK, one) is None]
    assert sorted(space.fitting["fake"]) == fitting and len(space) == len(fitting)
    assert {*space.listing()} == {Candidate.of("fake", every[n]) for n in fitting}
    assert asked <= space.size("fake") + 1 == space.combinations() + 1


def test_knobs_that_no_rule_reads_cost_nothing():
    schedule = Rules([4, 4, 50, 50], [([1], 0)])
    assert len(ConfigSpace(TASK, [schedule])) == 4 * 2 * 50 * 50 and schedule.asked <= 1 + 4


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
    assert set(seen) == expected and len(expected) > 2 and all(140 < times < 260 for times in seen.values())


def test_too_many_combinations_are_sampled(monkeypatch):
    monkeypatch.setattr(module, "ASKED", 50)
    monkeypatch.setattr(module, "SAMPLED", 200)
    space = ConfigSpace(TASK, [Rules([9, 9, 9], [([0, 1, 2], 0)])])
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

    work, counted = Workload("lstm", 800, 800, 20, 300, "bfloat16"), Counted()
    task = make_task(get("lstm"), work, KNOWN["sm_90a"])
    counted.serves(task)
    calls, space = 0, ConfigSpace(task, [counted])
    assert space.combinations() > 400_000 and len(space) > 5000 and calls <= 150_000 and "persistent" in space.whole


def test_a_knob_that_a_task_has_not_may_be_asked_for():
    """Only large layers have weights that are streamed; the schedule asks small ones, too, what their knob says."""
    task = make_task(get("lstm"), Workload("lstm", 256, 256, 8, 300, "bfloat16"), KNOWN["sm_90a"])
    schedule = all_schedules()["persistent_wide"]
    space = ConfigSpace(task, [schedule])
    assert "streamed" not in {knob.name for knob in schedule.knobs(task)}
    whole, numbers = space.scan_part(schedule.name, 0)
    assert whole and all(space.fits(Candidate.of(schedule.name, space.config(schedule.name, n))) for n in numbers)


def test_what_a_schedule_reads_of_a_configuration_is_noted_and_a_copy_reads_all():
    copied, watched = Watched({"a": 1, "b": 2}), Watched({"a": 1})
    assert {**copied} == {"a": 1, "b": 2} and set(copied.read) == {"a", "b"}
    assert watched.get("b", 2) == 2 and watched.get("a") == 1 and list(watched.read) == ["a"]
