"""Threads that share a session's processes; what a finalist that fails and an interruption leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from events import LIMIT, until
from test_tune_run import HERE, candidate, evaluating
from tune_fakes import ENTRIES, Fake, make

from ecornn.tune.journal import Journal, digest_of
from ecornn.tune.log import read
from ecornn.tune.model import CostModel
from ecornn.tune.pool import Closed, Pool
from ecornn.tune.record import Choice
from ecornn.tune.search import Search
from ecornn.tune.session import Session
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.tune.tuner import Settings, Tuner
from ecornn.worker import Worker, WorkerError


@pytest.mark.parametrize("quiet", [True, False])
def test_the_end_of_one_run_stops_nothing_of_another(quiet, monkeypatch, short_if_endless):
    monkeypatch.setattr("ecornn.tune.evaluate.PATIENCE", 0.5)
    mine, others = ("slow_build", "slow_build") if quiet else ("hang", "ok")
    with Pool(ENTRIES, 2, measurers=1 if quiet else 2, quiet=quiet) as pool, evaluating(pool) as one, \
            evaluating(pool, 9, 400.0) as other:
        one.submit([candidate(mine)], None)
        other.submit([candidate(others)], None)
        busy = pool.builders if quiet else pool.measurers
        until(lambda: sum(w in pool.at_work for w in busy) >= (2 if quiet else 1))
        one.drop()
        outcome = other.next()[1]
        assert outcome.error == "build: took longer than 4 s and was stopped" if quiet else outcome.times


def run(path: Path, pool: Pool, finalists: list[Candidate]):
    with evaluating(pool) as measure:
        search = Search(ConfigSpace(make(), [Fake(("ok", "fickle"))]), CostModel(), 0, known=finalists, defaults=False)
        return Tuner(search, measure, Journal.open(path, "digest", True), Settings(len(finalists), 0),
                     HERE).run()


def test_a_finalist_that_fails_in_the_comparison_is_recorded_and_not_the_best(tmp_path):
    with Pool(ENTRIES, 2, quiet=True) as pool:
        finish = run(tmp_path / "log.jsonl", pool, [candidate("fickle", 5), candidate("ok", 4), candidate("ok", 2)])
    assert finish.best and finish.best.config["a"] == 4
    finals = {t.config["a"]: t.error for t in read(tmp_path / "log.jsonl").trials() if t.stage == "final"}
    assert finals == {5: "run: ScheduleError: wrong output: relative error 0.5", 4: None, 2: None}


def test_where_nothing_can_be_measured_any_more_no_finalist_is_blamed(monkeypatch):
    def lost(*_):
        raise WorkerError("the server was lost 3 times", lost=False)

    both = [candidate("ok", 5), candidate("ok", 4)]
    with Pool(ENTRIES, 2, quiet=True) as pool, evaluating(pool) as measure:
        measure.submit(both, None)
        assert all(measure.next()[1].times for _ in both)
        assert len(measure.compare(both)) == 2
        monkeypatch.setattr(measure, "measure", lost)
        assert measure.compare(both) == []


def test_after_an_interrupted_call_the_next_has_its_own_reply(monkeypatch):
    worker = Worker("tune_fakes:ready", gpu=False)
    try:
        worker.wake()
        monkeypatch.setattr(worker, "read", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            worker.call("tune_fakes:nap", 0.01, bool, LIMIT)
        monkeypatch.undo()
        assert worker.call("test_tune_run:gpus", None, str, LIMIT) == ""
    finally:
        worker.stop()


def test_a_thread_that_comes_late_starts_nothing_after_the_end_of_a_session(tmp_path):
    with Session("cpu", entries=ENTRIES) as session:
        pool = session.pool
    assert pool.closed
    with pytest.raises(Closed, match="the session has ended"):
        session.tune("lstm", hidden=8, batch=4, seq=10, trials=3, output=tmp_path / "log.jsonl")
    assert session._pool is pool and not (tmp_path / "log.jsonl").exists()


def test_a_list_is_a_run_of_its_own():
    task = make()
    given = [Choice("fake", {"a": 1}), Choice("fake", {"a": 2})]
    names = [digest_of(task.workload, task.device, [Fake()], 0, only) for only in (None, given[:1], given, given)]
    assert len(set(names)) == 3 and names[2] == names[3]
