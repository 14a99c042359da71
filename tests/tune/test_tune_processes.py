"""Worker processes: hangs, crashes, interruptions, threads, SIGKILL: at most the trial under way is lost."""

import ctypes
import os
import random
import signal
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
from unittest.mock import Mock

import psutil
import pytest
from events import LIMIT, all_end, until
from refusals import refused
from test_records import trial
from test_tune_run import HERE, TASK, searched
from tune_fakes import ENTRIES, Fake, cost, make

from ecornn.cells import get
from ecornn.schedules import all_schedules
from ecornn.task import make_task
from ecornn.tune.building import Build
from ecornn.tune.log import Journal, Line, read
from ecornn.tune.pool import YOUNG, Closed, Pool, ProcessEvaluator, Scratch
from ecornn.tune.record import Finish, Outcome, Start, Times, Trial
from ecornn.tune.search import CostModel, Search
from ecornn.tune.selection import verify
from ecornn.tune.session import Session
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.tune.tuner import Settings, Tuner
from ecornn.worker import IDLE, Worker, WorkerError
from ecornn.workload import Workload

BEHAVIOURS = "ok", "hang", "crash", "wrong", "raise", "slow_build", "bad_build"


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


def recorded(measure: ProcessEvaluator, path: Path, batch: list[Candidate]) -> tuple[Tuner, dict[Candidate, Outcome]]:
    search = Search(ConfigSpace(TASK, [Fake(BEHAVIOURS)]), CostModel(), 0)
    tuner = Tuner(search, measure, Journal.open(path, "x", True), Settings(len(batch), 0), HERE)
    tuner.begin = time.monotonic()
    found = outcomes(measure, batch)
    for one, outcome in found.items():
        tuner.learn(one, outcome.times.median if outcome.times else None)
        tuner.record(one, outcome, "search")
    return tuner, found


def test_a_hang_a_crash_and_failures_each_cost_one_trial(tmp_path, short_if_endless):
    batch = [candidate("ok", 0), *(candidate(b) for b in BEHAVIOURS[1:]), candidate("ok", 5)]
    with evaluator() as measure:
        tuner, _ = recorded(measure, tmp_path / "log.jsonl", batch)
        processes = [w.process.pid for w in measure.pool.workers if w.process]
    assert processes
    trials = {(t.config["behaviour"], t.config["a"]): t for t in read(tuner.journal.path).trials()}
    assert len(trials) == len(batch) and trials["ok", 0].times and trials["ok", 5].times
    assert trials["hang", 1].error == "run: took longer than 2 s and was stopped"
    assert "SIGSEGV" in trials["crash", 1].error and trials["crash", 1].error.startswith("run: ")
    assert "wrong output" in trials["wrong", 1].error and "ILLEGAL_ADDRESS" in trials["raise", 1].error
    assert trials["slow_build", 1].error == "build: took longer than 2 s and was stopped"
    assert trials["bad_build", 1].error == "build: BuildError: ptxas is not amused" and tuner.best == candidate("ok", 5)
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
    assert first == again and first[twin].times is not None and runs == ["ok"]


def test_code_that_the_log_has_is_not_measured_again(tmp_path):
    path, batch = tmp_path / "log.jsonl", [candidate("ok", 3), candidate("wrong", 1)]
    with evaluator() as measure:
        _, first = recorded(measure, path, batch)
    with evaluator(earlier=Journal.open(path, "x", True).search) as measure:
        assert outcomes(measure, batch) == first and not measure.answers.with_name("measured").exists()


def test_a_whole_run_in_processes_finds_a_good_candidate(tmp_path):
    path = tmp_path / "log.jsonl"
    with evaluator() as measure:
        _, finish = searched(path, Fake(("ok", "crash")), measure, Settings(40, 0))
    log = read(path)
    kinds = Counter(type(line.record).__name__ for line in log.lines)
    assert kinds["Start"] == kinds["Finish"] == 1 and not log.problems
    assert sum(t.stage == "search" for t in log.trials()) == finish.trials == 40
    assert finish.reason == "trials" and finish.best_us <= 2.0 and finish.default_us == cost({"a": 0, "b": 0})


def test_the_end_of_the_time_does_not_wait_for_what_is_under_way(tmp_path):
    with evaluator(limit=1e6, quiet=False) as measure:
        measure.submit([candidate("ok"), candidate("slow_build"), candidate("hang")], None)
        assert measure.next()[0] == candidate("ok")
        refused(TimeoutError, "no candidate finished within", measure.next, 0.3)
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


@pytest.mark.parametrize("quiet", [True, False])
def test_the_end_of_one_run_stops_nothing_of_another(quiet, monkeypatch, short_if_endless):
    monkeypatch.setattr("ecornn.tune.pool.PATIENCE", 0.5)
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


def test_a_finalist_that_fails_in_the_comparison_is_recorded_and_not_the_best(tmp_path):
    path, finalists = tmp_path / "log.jsonl", [candidate("fickle", 5), candidate("ok", 4), candidate("ok", 2)]
    with evaluator(limit=600.0) as measure:
        search = Search(ConfigSpace(TASK, [Fake(("ok", "fickle"))]), CostModel(), 0, known=finalists, defaults=False)
        finish = Tuner(search, measure, Journal.open(path, "digest", True), Settings(len(finalists), 0), HERE).run()
    assert finish.best and finish.best.config["a"] == 4
    finals = {t.config["a"]: t.error for t in read(path).trials() if t.stage == "final"}
    assert finals == {5: "run: ScheduleError: wrong output: relative error 0.5", 4: None, 2: None}


def test_where_nothing_can_be_measured_any_more_no_finalist_is_blamed(monkeypatch):
    lost = Mock(side_effect=WorkerError("the server was lost 3 times", lost=False))
    both = [candidate("ok", 5), candidate("ok", 4)]
    with evaluator(limit=600.0) as measure:
        assert all(outcome.times for outcome in outcomes(measure, both).values()) and len(measure.compare(both)) == 2
        monkeypatch.setattr(measure, "measure", lost)
        assert measure.compare(both) == []


def test_a_thread_that_comes_late_starts_nothing_after_the_end_of_a_session(tmp_path):
    with Session("cpu", entries=ENTRIES) as session:
        pool = session.pool
    assert pool.closed
    with pytest.raises(Closed, match="the session has ended"):
        session.tune("lstm", hidden=8, batch=4, seq=10, trials=3, output=tmp_path / "log.jsonl")
    assert session._pool is pool and not (tmp_path / "log.jsonl").exists()


def test_a_process_that_is_stopped_leaves_no_files_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    def littered(count: int) -> None:
        until(lambda: len(list(tmp_path.glob("ecornn-tune-*/ecornn-*/x"))) == count)
    with Pool(ENTRIES, 2) as pool:
        first, second = pool.builders
        first.wake()
        read = first.read  # whose limit is over once there is litter
        monkeypatch.setattr(first, "read", lambda count, end: (littered(1), read(count, end - 1e6))[1])
        refused(WorkerError, "took longer than 1000 s", first.call, "tune_fakes:litter", None, bool, 1000.0)
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


def test_what_a_closed_pool_fails_at_is_no_trial():
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
    def line(hidden: int) -> Line:
        work = Workload("lstm", hidden, hidden, 1, 8)
        config = dict(all_schedules()["cpu_sequence"].default(make_task(get("lstm"), work, session.device)))
        return Line(Path("x.jsonl"), hidden, trial(workload=work, device=session.device, schedule="cpu_sequence",
                                                   config=config, times=Times.of([1.0]), check=1e-7))

    with Session("cpu", entries=replace(ENTRIES, build="test_tune_processes:built_blank")) as session:
        found = list(verify([line(1 << 20), line(8)], session))
    assert ["MemoryError" in check.outcome.error for check in found] == [True, False]
    assert "ILLEGAL_ADDRESS" in found[1].outcome.error  # it came as far as the measurement


def test_the_processes_stay_from_one_workload_to_the_next():
    with Pool(ENTRIES, 2, quiet=True) as pool:
        seen = []
        for number in range(3):
            with evaluating(pool, 8 + number, LIMIT) as measure:
                assert outcomes(measure, [candidate("ok")])[candidate("ok")].times
            seen.append(sorted(w.process.pid for w in pool.workers))
        assert seen[0] == seen[1] == seen[2]


def test_a_worker_that_was_lost_is_replaced_and_one_that_was_interrupted_gives_its_next_reply(monkeypatch):
    worker = Worker("tune_fakes:ready", gpu=False)
    try:
        with pytest.raises(WorkerError, match="SIGSEGV") as caught:
            worker.call("test_tune_processes:crash", None, int, LIMIT)
        assert caught.value.lost
        with pytest.raises(WorkerError, match="no_such") as caught:
            worker.call("no_such:thing", None, int, LIMIT)
        assert not caught.value.lost and worker.call("test_tune_processes:gpus", None, str, LIMIT) == ""
        monkeypatch.setattr(worker, "read", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            worker.call("tune_fakes:nap", 0.01, bool, LIMIT)
        monkeypatch.undo()
        assert worker.call("test_tune_processes:gpus", None, str, LIMIT) == ""
    finally:
        worker.stop()
    refused(WorkerError, "stopped", worker.call, "test_tune_processes:gpus", None, str, LIMIT)


def test_a_worker_stands_behind_others_before_python_is_there():
    """Its session stands behind, too: where Linux gives each session a share, niceness counts within that share."""
    worker = Worker("tune_fakes:ready", gpu=False, niceness=7)
    try:
        own, group = worker.call("test_tune_processes:standing", None, tuple[int, str], LIMIT)
    finally:
        worker.stop()
    assert own == min(os.nice(0) + 7, 19) and (not group or group.split()[-1] == "7")


def test_a_worker_leaves_the_cores_to_others_of_its_session():
    worker = Worker("tune_fakes:ready", gpu=False, niceness=IDLE)
    try:
        policy, session, group = worker.call("test_tune_processes:placed", None, tuple[int, int, int], LIMIT)
    finally:
        worker.stop()
    assert policy == os.SCHED_IDLE and group != os.getpgrp()
    assert session == os.getsid(0) or sys.version_info < (3, 11)


def placed(_: None) -> tuple[int, int, int]:
    return os.sched_getscheduler(0), os.getsid(0), os.getpgrp()


def standing(_: None) -> tuple[int, str]:
    try:
        return os.nice(0), Path("/proc/self/autogroup").read_text()
    except OSError:
        return os.nice(0), ""


def crash(_: None) -> int:
    return len(ctypes.string_at(0))


def gpus(_: None) -> str:
    print("a print does not disturb the replies")
    return os.environ["CUDA_VISIBLE_DEVICES"]


# Ends once there are so many trials, unless it is to be killed, and then waits for that.
REAL = """
import sys, time
from pathlib import Path
from ecornn.tune import tune
def report(now):
    while now.done >= most: time.sleep(1)
path, target, trials, most = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
tune("lstm", hidden=16, batch=2, seq=8, target=target, trials=trials, output=path, report=report)
"""
STUCK = """
import sys
from ecornn.tune.pool import Entries, Pool
entries = Entries("tune_fakes:ready", "test_tune_processes:compile_for_ever", "tune_fakes:ready",
                  "test_tune_processes:hang")
pool = Pool(entries, 1)
one = pool.building.submit(pool.builders[0].call, pool.entries.build, None, int, 1e6)
two = pool.measuring.submit(pool.measurers[0].call, pool.entries.measure, sys.argv[1], int, 1e6)
print("started", flush=True)
one.result()
"""


def compile_for_ever(_: None) -> int:
    return subprocess.run(["sleep", "1000"], check=False).returncode


def hang(begun: str) -> int:
    """A kernel that does not end, in native code that holds the interpreter's lock; a file says that it runs."""
    Path(begun).touch()
    return ctypes.PyDLL(None).pause()


def below(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.fixture
def started(start) -> Callable[..., subprocess.Popen]:
    return lambda program, *arguments: start(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def kill_alone(parent: subprocess.Popen) -> None:
    processes = below(parent)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    all_end(processes)


def test_workers_and_compilers_die_with_a_killed_parent(tmp_path, started):
    parent, begun = started(STUCK, tmp_path / "begun"), tmp_path / "begun"
    assert parent.stdout.readline() == "started\n"
    # two workers, the guard of each, the compiler
    until(lambda: begun.exists() and "sleep" in {p.name() for p in below(parent)} and len(below(parent)) >= 5)
    kill_alone(parent)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_killed_again_and_again_a_run_ends_with_every_trial_made_once(target: str, tmp_path, started):
    path, rng, trials, seen = tmp_path / "log.jsonl", random.Random(0), 10, 0
    for _ in range(2):
        parent = started(REAL, path, target, trials, seen + 4)
        until(lambda: parent.poll() is not None or (path.exists() and len(read(path).trials()) > seen))  # noqa: B023
        time.sleep(rng.uniform(0, 0.3))  # any moment
        assert parent.poll() is None
        kill_alone(parent)
        log = read(path)
        assert all("torn last line" in problem for problem in log.problems)
        before, seen = seen, len(log.trials())
        assert seen > before and not any(isinstance(line.record, Finish) for line in log.lines)
    assert started(REAL, path, target, trials, trials + 1).wait() == 0
    log = read(path)
    search = [t for t in log.trials() if t.stage == "search"]
    assert len(search) == len({tuple(sorted(t.config.items())) for t in search}) == trials
    assert sorted(t.index for t in log.trials()) == list(range(len(log.trials())))
    assert sum(isinstance(line.record, Start) for line in log.lines) == 1
    assert sum(isinstance(line.record, Finish) for line in log.lines) == 1
    size = path.stat().st_size
    assert started(REAL, path, target, trials, trials + 1).wait() == 0 and path.stat().st_size == size  # adds nothing
