"""SIGKILL at any moment: at most the trial under way is lost, and no process stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from events import all_end, until

from ecornn.tune.log import read
from ecornn.tune.record import Finish, Start

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
entries = Entries("tune_fakes:ready", "test_tune_kill:compile_for_ever", "tune_fakes:ready", "test_tune_kill:hang")
pool = Pool(entries, 1)
one = pool.building.submit(pool.builders[0].call, pool.entries.build, None, int, 1e6)
two = pool.measuring.submit(pool.measurers[0].call, pool.entries.measure, sys.argv[1], int, 1e6)
print("started", flush=True)
one.result()
"""


def compile_for_ever(_: None) -> int:
    """A builder whose compiler, a process of its own, does not end."""
    return subprocess.run(["sleep", "1000"], check=False).returncode


def hang(begun: str) -> int:
    """A kernel that does not end, in native code that holds the interpreter's lock; a file says that it runs."""
    import ctypes

    Path(begun).touch()
    return ctypes.PyDLL(None).pause()


def started(program: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def below(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_workers_and_compilers_die_with_a_killed_parent(tmp_path):
    parent, begun = started(STUCK, tmp_path / "begun"), tmp_path / "begun"
    assert parent.stdout.readline() == "started\n"
    until(lambda: begun.exists() and "sleep" in {p.name() for p in below(parent)} and len(below(parent)) >= 5)
    processes = below(parent)  # two workers, the guard of each, the compiler
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    all_end(processes)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_killed_again_and_again_a_run_ends_with_every_trial_made_once(target: str, tmp_path):
    path, rng, trials, seen = tmp_path / "log.jsonl", random.Random(0), 10, 0
    for _ in range(2):
        parent = started(REAL, path, target, trials, seen + 4)
        until(lambda: parent.poll() is not None or (path.exists() and len(read(path).trials()) > seen))  # noqa: B023
        time.sleep(rng.uniform(0, 0.3))  # any moment
        assert parent.poll() is None
        processes = below(parent)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        all_end(processes)
        log = read(path)
        assert all("torn last line" in problem for problem in log.problems)
        before, seen = seen, len(log.trials())
        assert seen > before and not any(isinstance(line.record, Finish) for line in log.lines)
    done = started(REAL, path, target, trials, trials + 1)
    assert done.wait() == 0
    done.stdout.close()
    log = read(path)
    search = [t for t in log.trials() if t.stage == "search"]
    assert len(search) == len({tuple(sorted(t.config.items())) for t in search}) == trials
    assert sorted(t.index for t in log.trials()) == list(range(len(log.trials())))
    assert sum(isinstance(line.record, Start) for line in log.lines) == 1
    assert sum(isinstance(line.record, Finish) for line in log.lines) == 1
    size = path.stat().st_size
    again = started(REAL, path, target, trials, trials + 1)
    assert again.wait() == 0 and path.stat().st_size == size  # adds nothing
    again.stdout.close()
