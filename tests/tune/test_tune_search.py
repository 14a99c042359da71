"""Config space, cost model and search, without building anything."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_fakes import Fake, cost, make

from ecornn.errors import ScheduleError
from ecornn.schedules.base import Knob
from ecornn.tune.model import TRUST, CostModel, features
from ecornn.tune.search import OPENING, Search
from ecornn.tune.space import Candidate, ConfigSpace

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


def test_a_small_space_is_listed_with_what_fits_only():
    space = ConfigSpace(TASK, [Fake(("ok",), "ab")])
    listed = list(space.listing())
    assert space.combinations() == 64 and len(space) == len(listed) == len(set(listed)) == sum(
        1 for a in range(8) for b in range(8) if a + b <= 9)


class Tight(Fake):
    """One combination in 512 fits."""

    def check(self, task, config):
        return None if config["a"] == config["b"] == config["c"] == 1 else "too large"

    def default(self, task):
        return {**super().default(task), "a": 1, "b": 1, "c": 1}


def test_a_schedule_is_drawn_by_its_place_and_not_by_how_much_of_it_fits():
    space, rng = ConfigSpace(TASK, [Tight(("ok",), "abcde", "tight"), LARGE]), random.Random(0)
    drawn = [space.draw(rng) for _ in range(400)]
    assert all(space.fits(c) for c in drawn)
    assert 225 < sum(c.schedule == "tight" for c in drawn) < 310  # two of three, in the mean


def test_nothing_that_does_not_fit_is_proposed():
    class Never(Fake):
        def check(self, task, config):
            return "never"

    space = ConfigSpace(TASK, [Never()])
    assert len(space) == 0 and space.draw(random.Random(0)) is None
    assert Search(space, CostModel(), 0, known=space.defaults()).ask(5) == []


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.data())
def test_numbers_and_combinations_are_one_to_one(first, second, third, data):
    class Sized(Fake):
        def knobs(self, task):
            return tuple(Knob(n, tuple(range(size)), "") for n, size in
                         zip("abc", (first, second, third), strict=True))

    space = ConfigSpace(TASK, [Sized()])
    configs = [tuple(space.config("fake", n).values()) for n in range(space.size("fake"))]
    assert len(set(configs)) == len(configs) == first * second * third
    number = data.draw(st.integers(0, len(configs) - 1))
    assert all(0 <= v < size for v, size in zip(configs[number], (first, second, third), strict=True))


def test_draws_and_neighbours_fit_and_differ_in_one_knob():
    space, rng = ConfigSpace(TASK, [LARGE]), random.Random(0)
    for _ in range(200):
        one = space.draw(rng)
        other = space.neighbour(one, rng)
        assert space.fits(one) and space.fits(other)
        assert sum(a != b for a, b in zip(one.knobs, other.knobs, strict=True)) == 1


def test_no_schedule_is_an_error():
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
    assert seen[:2] == space.defaults()
    assert len(seen) == len(set(seen)) and set(seen) == set(space.listing())


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


def test_records_of_a_neighbour_help_from_the_first_batch():
    space = ConfigSpace(TASK, [LARGE])
    teacher = spend(space, 0, 96)
    model = CostModel(5)
    for candidate, time in teacher.tried.items():
        model.add("neighbour", features(LARGE, TASK, candidate), None if time is None else 7 * time)
    warm = Search(space, model, 5).ask(16)
    cold = Search(space, CostModel(5), 5).ask(16)
    knows, guesses = (statistics.median(cost(c.config) for c in batch) for batch in (warm, cold))
    assert knows < guesses / 2


def test_failures_rank_below_everything():
    model, rows = CostModel(), [{"s.k": float(i)} for i in range(12)]
    for i, row in enumerate(rows):
        model.add("", row, None if i < 6 else 100.0 - i)
    assert model.labels("")[:6] == [0.0] * 6 and min(model.labels("")[6:]) > 0
    assert model.fit()
    scores = model.score(model.table(rows))
    assert max(scores[:6]) < min(scores[6:])


def test_too_few_samples_teach_nothing():
    model = CostModel()
    model.add("", {"k": 1.0}, 1.0)
    model.add("", {"k": 2.0}, 2.0)
    assert not model.fit()


class Estimated(Fake):
    """Says of its candidates how long they take, of the knob ``f`` nothing."""

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
    for _ in range(8):
        for row, time in zip(rows, (2.0, 9.0, 1.0), strict=True):
            model.add("", row, time)
    assert model.fit()
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
