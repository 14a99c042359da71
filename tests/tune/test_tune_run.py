"""Whole runs in real worker processes: hangs, crashes, resuming, and what the log says."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from events import LIMIT, Clock, until
from msgspec import structs
from tune_fakes import ENTRIES, Fake, cost, make

import ecornn.tune.tuner as tuner_module
from ecornn.cells import get
from ecornn.schedules import all_schedules
from ecornn.task import make_task
from ecornn.tune.building import Build
from ecornn.tune.choose import Environment
from ecornn.tune.evaluate import ProcessEvaluator
from ecornn.tune.journal import RESERVED, Journal, digest_of
from ecornn.tune.log import Line, read
from ecornn.tune.model import CostModel
from ecornn.tune.pool import YOUNG, Closed, Pool, Scratch
from ecornn.tune.record import Finish, Outcome, Start, Times, Trial
from ecornn.tune.search import Search
from ecornn.tune.session import Session
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.tune.tuner import CONFIDENCE, RATE, Settings, Tuner, stop_after
from ecornn.tune.verify import verify
from ecornn.worker import Worker, WorkerError
from ecornn.workload import Workload

TASK = make()
HERE = Environment({"ecornn": "test"})


def candidate(behaviour: str, a: int = 1) -> Candidate:
    return Candidate.of("fake", {"a": a, "b": 0, "behaviour": behaviour})


def evaluating(pool: Pool, hidden: int = 8, limit: float = 600.0,
               oracle: Callable[[Path], object] = Path.touch, earlier: Sequence[Trial] = ()) -> ProcessEvaluator:
    return ProcessEvaluator(make(hidden=hidden), "lstm", oracle, pool, limit=limit, seed=0, earlier=earlier)


@contextmanager
def evaluator(limit: float = 200.0, builders: int = 2, quiet: bool = True,
              earlier: Sequence[Trial] = ()) -> Iterator[ProcessEvaluator]:
    with Pool(ENTRIES, builders, quiet=quiet) as pool, evaluating(pool, limit=limit, earlier=earlier) as made:
        yield made


def outcomes(measure, batch: list[Candidate]) -> dict[Candidate, Outcome]:
    measure.submit(batch, None)
    return dict(measure.next() for _ in batch)


def start(path: Path, schedule: Fake, measure, settings: Settings,
          resume: bool = True) -> tuple[Tuner, Finish]:
    journal = Journal.open(path, digest_of(TASK.workload, TASK.device, [schedule], settings.seed), resume)
    search = Search(ConfigSpace(TASK, [schedule]), CostModel(settings.seed), settings.seed)
    tuner = Tuner(search, measure, journal, settings, HERE)
    return tuner, tuner.run()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tuner_module, "time", made)
    return made


class Instant:
    """Measures nothing: times are computed. Stops with KeyboardInterrupt after ``stop`` trials."""

    def __init__(self, stop: int | None = None) -> None:
        self.seen: list[Candidate] = []
        self.stop = stop

        self.waiting: list[Candidate] = []
        self.spare = self.idle = 0

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def submit(self, batch, bound):
        self.waiting += batch

    def drop(self):
        self.waiting.clear()

    def next(self, seconds=None):
        if self.stop is not None and len(self.seen) >= self.stop:
            raise KeyboardInterrupt
        one = self.waiting.pop(0)
        self.seen.append(one)
        return one, Outcome(Times.of([cost(one.config)]), 1e-7, "digest")

    def compare(self, finalists, seconds=None):
        return [Outcome(Times.of([cost(one.config) + 0.25]), 1e-7, "digest") for one in finalists]


def test_a_hang_a_crash_and_failures_each_cost_one_trial(tmp_path, short_if_endless):
    behaviours = ("ok", "hang", "crash", "wrong", "raise", "slow_build", "bad_build")
    schedule = Fake(behaviours, "ab")
    batch = [candidate("ok", 0), *(candidate(b) for b in behaviours[1:]), candidate("ok", 5)]
    with evaluator() as measure:
        journal = Journal.open(tmp_path / "log.jsonl", "x", True)
        search = Search(ConfigSpace(TASK, [schedule]), CostModel(), 0)
        tuner = Tuner(search, measure, journal, Settings(len(batch), 0), HERE)
        tuner.begin = time.monotonic()
        for one, outcome in outcomes(measure, batch).items():
            tuner.learn(one, outcome.times.median if outcome.times else None)
            tuner.record(one, outcome, "search")
        processes = [w.process.pid for w in measure.pool.workers if w.process]
    assert processes
    trials = {(t.config["behaviour"], t.config["a"]): t for t in read(journal.path).trials()}
    assert len(trials) == len(batch)
    assert trials["ok", 0].times and trials["ok", 5].times
    assert trials["hang", 1].error == "run: took longer than 2 s and was stopped"
    assert "SIGSEGV" in trials["crash", 1].error and trials["crash", 1].error.startswith("run: ")
    assert "wrong output" in trials["wrong", 1].error
    assert "ILLEGAL_ADDRESS" in trials["raise", 1].error
    assert trials["slow_build", 1].error == "build: took longer than 2 s and was stopped"
    assert trials["bad_build", 1].error == "build: BuildError: ptxas is not amused"
    assert tuner.best == candidate("ok", 5)
    for pid in processes:  # nothing is left behind
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_equal_code_is_measured_once():
    twin = Candidate.of("fake", {"behaviour": "ok", "b": 0, "a": 3})
    with evaluator(builders=1) as measure:
        first = outcomes(measure, [candidate("ok", 3)])
        measure.modules.clear()  # built again, to the same digest
        again = outcomes(measure, [twin])
        runs = measure.answers.with_name("measured").read_text().split()
    assert first == again and first[twin].times is not None
    assert runs == ["ok"]


def test_code_that_the_log_has_is_not_measured_again(tmp_path):
    path, batch = tmp_path / "log.jsonl", [candidate("ok", 3), candidate("wrong", 1)]
    with evaluator() as measure:
        tuner = Tuner(Search(ConfigSpace(TASK, [Fake(("ok", "wrong"), "ab")]), CostModel(), 0), measure,
                      Journal.open(path, "x", True), Settings(2, 0), HERE)
        tuner.begin = time.monotonic()
        first = outcomes(measure, batch)
        for one, outcome in first.items():
            tuner.record(one, outcome, "search")
    with evaluator(earlier=Journal.open(path, "x", True).search) as measure:
        assert outcomes(measure, batch) == first
        assert not measure.answers.with_name("measured").exists()


def test_where_a_batch_is_built_before_it_is_measured_the_default_comes_first_alone(tmp_path):
    sizes: list[int] = []

    class Batches(Instant):
        def submit(self, batch, bound):
            sizes.append(len(batch))
            super().submit(batch, bound)

    fake, path, stopped = Fake(("ok",), "ab"), tmp_path / "log.jsonl", Batches(stop=3)
    with pytest.raises(KeyboardInterrupt):
        start(path, fake, stopped, Settings(12, 0))
    assert sizes == [1, 8] and stopped.seen[0].config == fake.default(TASK)
    start(path, fake, Batches(), Settings(12, 0))
    assert sizes == [1, 8, 8, 1], "a run that goes on has the default's time"


def test_a_whole_run_in_processes_finds_a_good_candidate(tmp_path):
    path = tmp_path / "log.jsonl"
    with evaluator() as measure:
        _, finish = start(path, Fake(("ok", "crash"), "ab"), measure, Settings(40, 0))
    log = read(path)
    kinds = Counter(type(line.record).__name__ for line in log.lines)
    assert kinds["Start"] == kinds["Finish"] == 1 and not log.problems
    assert sum(t.stage == "search" for t in log.trials()) == finish.trials == 40
    assert finish.reason == "trials" and finish.best_us <= 2.0
    assert finish.default_us == cost({"a": 0, "b": 0})


def test_an_interrupted_run_goes_on_and_measures_nothing_twice(tmp_path):
    path, schedule = tmp_path / "log.jsonl", Fake(("ok",), "abc")
    first = Instant(stop=13)
    with pytest.raises(KeyboardInterrupt):
        start(path, schedule, first, Settings(30, 0))
    assert len(read(path).trials()) == 13 and not any(
        isinstance(line.record, Finish) for line in read(path).lines)
    second = Instant()
    tuner, finish = start(path, schedule, second, Settings(30, 0))
    assert finish.trials == 30 and len(second.seen) == 17
    assert not set(first.seen) & set(second.seen)
    assert tuner.journal.finished(30, None) and not tuner.journal.finished(31, None)
    assert sum(isinstance(line.record, Start) for line in read(path).lines) == 1
    third = Instant()
    start(path, schedule, third, Settings(36, 0))  # more trials: goes on from there
    assert len(third.seen) == 6


def test_without_resume_a_run_of_its_own_begins(tmp_path):
    path, schedule = tmp_path / "log.jsonl", Fake(("ok",), "ab")
    start(path, schedule, Instant(), Settings(8, 0))
    again = Instant()
    start(path, schedule, again, Settings(8, 0), resume=False)
    assert len(again.seen) == 8
    assert len({t.run for t in read(path).trials()}) == 2


def test_a_search_that_finds_nothing_better_stops_early_and_says_so(tmp_path):
    path, schedule = tmp_path / "log.jsonl", Fake(("ok",), "abc")

    class Flat(Instant):
        def next(self, seconds=None):
            one, outcome = super().next(seconds)
            return one, structs.replace(outcome, times=Times.of([7.0 if len(self.seen) > 3 else 9.0]))

    flat = Flat()
    tuner, finish = start(path, schedule, flat, Settings(300, 0, early_stop=True))
    assert finish.reason == "converged" and stop_after() == 59
    assert finish.trials == len(flat.seen) == 4 + 59
    assert tuner.journal.finished(300, None, early_stop=True) and not tuner.journal.finished(300, None)
    again = Flat()
    _, finish = start(path, schedule, again, Settings(80, 0))  # and goes on where asked to
    assert finish.reason == "trials" and len(again.seen) == 80 - 63


def test_the_bound_of_early_stopping_is_what_it_says():
    """Where one in twenty trials is a gain, a run of failures that stops is one in twenty at most."""
    rng = random.Random(0)
    stops = sum(all(rng.random() > RATE for _ in range(stop_after())) for _ in range(20_000))
    assert stops / 20_000 <= 1 - CONFIDENCE + 0.005


def test_builds_go_on_while_something_is_measured(tmp_path):
    """With processes that do not disturb each other, new candidates come before the last are done."""

    class Busy(Instant):
        lowest = 99

        def __init__(self) -> None:
            super().__init__()
            self.spare = 4

        def next(self, seconds=None):
            if len(self.seen) + self.pending < 40:
                self.lowest = min(self.lowest, self.pending)
            return super().next(seconds)

    busy = Busy()
    _, finish = start(tmp_path / "log.jsonl", Fake(("ok",), "abc"), busy, Settings(40, 0))
    assert finish.trials == 40 and busy.lowest > 4
    assert len(set(busy.seen)) == 40


def test_the_end_of_the_time_does_not_wait_for_what_is_under_way(tmp_path):
    with evaluator(limit=1e6, quiet=False) as measure:
        measure.submit([candidate("ok"), candidate("slow_build"), candidate("hang")], None)
        assert measure.next()[0] == candidate("ok")
        with pytest.raises(TimeoutError, match="no candidate was done within"):
            measure.next(0.3)
        assert measure.pending == 2
        measure.drop()
        assert measure.pending == 0
        measure.submit([candidate("ok", 3)], None)  # and the processes serve on
        assert measure.next()[1].times is not None


def test_threads_share_the_processes_and_no_measurement_waits_for_another_oracle(tmp_path):
    ready = threading.Event()

    def slow(path: Path) -> None:
        ready.wait()
        path.write_bytes(b"")

    with Pool(ENTRIES, 2, quiet=False) as pool, evaluating(pool, limit=LIMIT, oracle=slow) as late, \
            evaluating(pool, 9, LIMIT) as other:
        late.submit([candidate("ok")], None)
        assert outcomes(other, [candidate("ok")])[candidate("ok")].times and not ready.is_set()
        ready.set()
        assert late.next()[1].times


def test_a_process_that_is_stopped_leaves_no_files_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def littered(count: int) -> None:
        until(lambda: len(list(tmp_path.glob("ecornn-tune-*/ecornn-*/x"))) == count)

    with Pool(ENTRIES, 2) as pool:
        first, second = pool.builders
        first.wake()
        read = first.read  # whose limit is over once there is litter
        monkeypatch.setattr(first, "read", lambda count, end: (littered(1), read(count, end - 1e6))[1])
        with pytest.raises(WorkerError, match="took longer than 1000 s"):
            first.call("tune_fakes:litter", None, bool, 1000.0)
        call = partial(second.call, "tune_fakes:litter", None, bool, 1e6)
        threading.Thread(target=pytest.raises, args=(WorkerError, call)).start()
        littered(2)
    assert not list(tmp_path.iterdir())


def test_the_files_of_a_run_that_was_killed_are_removed_by_a_later_one(tmp_path, monkeypatch):
    def old(folder: Path) -> None:
        os.utime(folder, (time.time() - 2 * YOUNG,) * 2)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", "import os; from ecornn.tune.pool import Scratch; "
                             "s = Scratch(); print(s.name, flush=True); os.kill(os.getpid(), 9)"],
                            env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True)
    left = Path(killed.stdout.strip())
    (left / "module.so").write_bytes(b"x")
    foreign = tmp_path / "ecornn-tune-of-mine"  # no run's
    foreign.mkdir()
    alive = Scratch()
    assert killed.returncode == -9 and left.is_dir()  # just written to
    for folder in (left, foreign, Path(alive.name)):
        old(folder)
    last = Scratch()
    assert sorted(tmp_path.iterdir()) == sorted([foreign, Path(alive.name), Path(last.name)])
    for scratch in (alive, last):
        scratch.cleanup()
    assert list(tmp_path.iterdir()) == [foreign]


def test_what_a_closed_pool_fails_at_is_no_trial(tmp_path):
    with Pool(ENTRIES, 1) as pool, evaluating(pool, limit=1e6) as measure:
        measure.submit([candidate("hang")], None)
        ran = measure.answers.with_name("measured")
        threading.Thread(target=lambda: (until(ran.exists), pool.close())).start()
        with pytest.raises(Closed):
            measure.next()


def test_who_waits_for_what_a_closed_pool_will_never_do_is_told():
    with Pool(ENTRIES, 1) as pool, evaluating(pool, limit=1e6) as measure:
        measure.pending = 1  # a build that was given up before it began
        threading.Timer(0.5, pool.close).start()
        with ThreadPoolExecutor(1) as thread, pytest.raises(Closed):
            asked = thread.submit(measure.next)
            try:
                asked.result()
            finally:
                measure.done.put((candidate("ok"), Outcome()))  # or the thread would wait for ever


def built_blank(request: Build) -> str:
    Path(request.out).write_text('{"behaviour": "raise"}')
    return "blank"


def test_a_record_that_needs_too_much_memory_fails_alone():
    """In `ecornn log verify`: the arrays of its answers do not fit anywhere."""
    def line(hidden: int) -> Line:
        work = Workload("lstm", hidden, hidden, 1, 8)
        config = dict(all_schedules()["cpu_sequence"].default(make_task(get("lstm"), work, session.device)))
        return Line(Path("x.jsonl"), hidden, Trial(
            run="a-1", index=0, stage="search", workload=work, device=session.device, schedule="cpu_sequence",
            revision=1, generation=0, config=config, versions={}, seed=0, seconds=1.0, times=Times.of([1.0]),
            check=1e-7))

    with Session("cpu", entries=replace(ENTRIES, build="test_tune_run:built_blank")) as session:
        found = list(verify([line(1 << 20), line(8)], session))
    assert ["MemoryError" in check.outcome.error for check in found] == [True, False]
    assert "ILLEGAL_ADDRESS" in found[1].outcome.error  # it came as far as the measurement


def test_given_configurations_are_tried_and_no_others(tmp_path):
    schedule = Fake(("ok",), "abc")
    journal = Journal.open(tmp_path / "log.jsonl", "digest", True)
    space = ConfigSpace(TASK, [schedule])
    given = [Candidate.of("fake", {"a": a, "b": 1, "c": 0, "behaviour": "ok"}) for a in (1, 5, 9, 1)]
    search = Search(space, CostModel(), 0, known=given, defaults=False)
    finish = Tuner(search, Instant(), journal, Settings(len(search.first), 0), HERE).run()
    assert [t.config["a"] for t in journal.search] == [1, 5]  # 9 does not fit
    assert finish.best and finish.best.config["a"] == 5 and "fitting" not in vars(space)  # nothing was scanned


def test_the_processes_stay_from_one_workload_to_the_next(tmp_path):
    with Pool(ENTRIES, 2, quiet=True) as pool:
        seen = []
        for number in range(3):
            with evaluating(pool, 8 + number, LIMIT) as measure:
                assert outcomes(measure, [candidate("ok")])[candidate("ok")].times
            seen.append(sorted(w.process.pid for w in pool.workers))
        assert seen[0] == seen[1] == seen[2]


def test_other_seeds_and_revisions_are_other_runs():
    newer = Fake()
    newer.revision = 4
    work, device = TASK.workload, TASK.device
    assert len({digest_of(work, device, [Fake()], 0), digest_of(work, device, [Fake()], 1),
                digest_of(work, device, [newer], 0)}) == 3


def test_a_space_that_is_used_up_ends_the_run(tmp_path):
    tuner, finish = start(tmp_path / "log.jsonl", Fake(("ok",), "ab"), Instant(), Settings(500, 0))
    fitting = len(list(tuner.space.listing()))
    assert (finish.reason, finish.trials) == ("space", fitting)
    assert finish.best.config == {"a": 5, "b": 2, "behaviour": "ok"}
    assert tuner.journal.finished(500, None)


def test_the_time_limit_counts_earlier_sessions(tmp_path, clock):
    path, schedule = tmp_path / "log.jsonl", Fake(("ok",), "ab")

    class Slow(Instant):
        def next(self, seconds=None):
            clock.sleep(0.3)
            return super().next(seconds)

    tuner, finish = start(path, schedule, Slow(), Settings(40, 0, time_limit=1.0))
    assert finish.reason == "time" and 1 <= finish.trials <= 5
    assert tuner.journal.finished(40, 1.0) and not tuner.journal.finished(40, 2.0)
    more = Slow()
    _, finish = start(path, schedule, more, Settings(40, 0, time_limit=2.0))
    assert finish.reason == "time" and len(more.seen) <= 5


def test_the_time_limit_ends_a_wait_but_not_that_for_the_first_result(tmp_path, clock):
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
    _, finish = start(tmp_path / "a.jsonl", Fake(("ok",), "ab"), Stuck(), Settings(40, 0, time_limit=2.0))
    assert finish.reason == "time" and finish.trials == 1 and finish.best and clock.now - began <= 2.0
    assert waited[0] is None and 0.05 < waited[1] < 0.4, "half a second is for the comparison"
    _, finish = start(tmp_path / "b.jsonl", Fake(("ok",), "ab"), Stuck(), Settings(40, 0, time_limit=1.0))
    assert finish.reason == "time" and finish.trials == 1 and finish.best


def test_all_of_a_run_is_within_the_time_limit(tmp_path, clock):
    """The search ends early enough for the comparison, which is told what is left; and what came before counts, but for
    one result."""
    left = []

    class Slow(Instant):
        def next(self, seconds=None):
            clock.sleep(0.05)
            return super().next(seconds)

        def compare(self, finalists, seconds=None):
            left.append(seconds)
            clock.sleep(seconds)
            return super().compare(finalists)

    path, limit = tmp_path / "log.jsonl", 1.2
    tuner, finish = start(path, Fake(("ok",), "ab"), Slow(), Settings(500, 0, time_limit=limit))
    assert finish.reason == "time" and finish.trials > 3
    assert 0.5 * RESERVED * limit < left[0] <= RESERVED * limit
    assert finish.seconds == pytest.approx(limit, abs=0.06)
    assert tuner.journal.finished(500, limit) and not tuner.journal.finished(500, 2 * limit)
    began = clock.now - 10
    _, finish = start(tmp_path / "b.jsonl", Fake(("ok",), "ab"), Slow(), Settings(500, 0, time_limit=5, started=began))
    assert (finish.reason, finish.trials) == ("time", 1) and finish.best and finish.seconds >= 10


def test_the_gain_is_taken_from_the_final_comparison(tmp_path):
    _, finish = start(tmp_path / "log.jsonl", Fake(("ok",), "ab"), Instant(), Settings(40, 0))
    finals = [t for t in read(tmp_path / "log.jsonl").trials() if t.stage == "final"]
    assert len(finals) == 4
    assert finish.best_us == min(t.times.median for t in finals)
    assert finish.default_us == cost({"a": 0, "b": 0}) + 0.25


def test_a_worker_that_was_lost_is_replaced():
    worker = Worker("tune_fakes:ready", gpu=False)
    try:
        with pytest.raises(WorkerError, match="SIGSEGV") as caught:
            worker.call("test_tune_run:crash", None, int, LIMIT)
        assert caught.value.lost
        with pytest.raises(WorkerError, match="no_such") as caught:
            worker.call("no_such:thing", None, int, LIMIT)
        assert not caught.value.lost
        assert worker.call("test_tune_run:gpus", None, str, LIMIT) == ""
    finally:
        worker.stop()
    with pytest.raises(WorkerError, match="stopped"):
        worker.call("test_tune_run:gpus", None, str, LIMIT)


def crash(_: None) -> int:
    import ctypes

    return len(ctypes.string_at(0))


def gpus(_: None) -> str:
    print("a print does not disturb the replies")
    return os.environ["CUDA_VISIBLE_DEVICES"]


class Ahead(Instant):
    """Notes how many were told of when each batch was proposed, and how many were pending then."""

    def __init__(self, spare: int) -> None:
        super().__init__()
        self.spare, self.batches = spare, []

    def submit(self, batch, bound):
        self.batches.append((len(self.seen), self.pending, len(batch)))
        super().submit(batch, bound)


def test_every_process_gets_something_before_the_first_is_done(tmp_path):
    ahead = Ahead(20)
    start(tmp_path / "log.jsonl", Fake(("ok",), "abc"), ahead, Settings(128, 0))
    assert ahead.batches[0] == (0, 0, 1)  # the default alone: it needs no scan of the space
    at_first = sum(count for told, _, count in ahead.batches if told == 0)
    assert at_first > 20 and max(pending for _, pending, _ in ahead.batches) <= 20


def test_no_search_waits_for_the_slowest_build(tmp_path):
    """Of four processes two never come to an end; the other two make all trials, and nothing is asked for that they
    have no time for."""

    class Slow(Ahead):
        idle = property(lambda self: max(0, 4 - self.pending), lambda self, _: None)

        def next(self, seconds=None):
            one = self.waiting.pop(2 if len(self.seen) else 0)  # after the default two stay at the front
            self.seen.append(one)
            return one, Outcome(Times.of([cost(one.config)]), 1e-7, "digest")

    slow = Slow(4)
    _, finish = start(tmp_path / "log.jsonl", Fake(("ok",), "abc"), slow, Settings(40, 0))
    assert finish.trials == 40 == len(slow.seen) and finish.reason == "trials"
    assert sum(count for _, _, count in slow.batches) - 40 <= 4 and not slow.waiting


def test_a_small_search_learns_before_it_proposes_more_than_a_quarter(tmp_path):
    ahead = Ahead(20)
    start(tmp_path / "log.jsonl", Fake(("ok",), "abc"), ahead, Settings(32, 0, batch=5))
    assert max(pending + count for _, pending, count in ahead.batches) <= 8 + 5
    ahead = Ahead(20)  # but what is known beforehand needs nothing learnt
    schedule = Fake(("ok",), "abc")
    given = [Candidate.of("fake", {"a": a, "b": 1, "c": 0, "behaviour": "ok"}) for a in range(8)]
    search = Search(ConfigSpace(TASK, [schedule]), CostModel(), 0, known=given)
    Tuner(search, ahead, Journal.open(tmp_path / "other.jsonl", "digest", True), Settings(16, 0, batch=4), HERE).run()
    assert ahead.batches[0] == (0, 0, 9)
