"""Timing takes turns, spends little on hopeless candidates, and counts runs right."""

from __future__ import annotations

from ecornn.tune.timing import Contestant, race


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


def test_short_runs_are_timed_several_at_once_and_reported_one_by_one():
    times, order = contest(1e-4)
    assert len(order) == 2 + 20 * len(times[0])
    assert all(abs(t - 1e-4) < 1e-9 for t in times[0])


def test_a_hopeless_candidate_is_timed_once():
    times, order = contest(4.0, 1.0, bound=1.0)
    assert times[0] == [4.0] and order.count("0") == 1
    assert times[1] == [1.0] * 3 and order.count("1") == 4
