"""benchmarks/soak.py for some seconds, of few kinds of calls; and that it sees what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soak
from events import until

from ecornn.runtime.memory import HostMemory, Pool

SCRIPT = Path(soak.__file__)


@pytest.mark.slow
def test_sixteen_threads_on_busy_cores(tmp_path: Path):
    """Sharp only of wrong results and of threads that hang: memory is flat after minutes, not after seconds."""
    file = tmp_path / "soak.json"
    done = subprocess.run([sys.executable, str(SCRIPT), "1", "--few", "--each", "2", "--busy", "1", "--growth", "100",
                           "--output", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["wrong"] == 0 and found["threads"] == 16
    assert all(kind["calls"] >= 2 for kind in found["kinds"].values())
    assert {kind.partition(": ")[2] for kind in found["kinds"]} == {
        "shared", "bound", "loaded", "called", "packed", "other weights", "trained", "copied"}


def case(found: float, limit: float = 1e-5) -> soak.Case:
    return soak.Case("one", lambda: [np.float32([found])], [np.float64([1.0])], limit)


def soaked(monkeypatch: pytest.MonkeyPatch, cases: list[soak.Case], threads: int,
           seen: Callable[[soak.Soak], object]) -> soak.Soak:
    """A run whose waits between two looks wait until something is ``seen``; no time passes."""
    one = soak.Soak(cases, threads)
    monkeypatch.setattr(soak, "time", SimpleNamespace(
        monotonic=lambda: 0.0, sleep=lambda seconds: until(lambda: seen(one))))
    one.run(30)
    return one


def test_a_wrong_result_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    one = soaked(monkeypatch, [case(1.0), case(1.01)], 2, lambda one: one.faults)
    assert one.faults and "an error of 0.01" in one.faults[0] and one.calls["one"] > 0


def test_an_error_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    one = soaked(monkeypatch, [soak.Case("other", lambda: [1 / 0], [])], 1, lambda one: one.faults)
    assert "ZeroDivisionError" in one.faults[0]


def test_threads_that_stand_still_are_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "STILL", 0.2)
    go_on = threading.Event()
    waits = soak.Case("slow", lambda: go_on.wait() and [], [])
    one = soaked(monkeypatch, [waits], 1, lambda one: one.doing == ["slow"])
    go_on.set()
    assert one.faults == ["a thread has stood still for 0.2 seconds in slow"]


def measured(process: float = 600.0, given: float = 150.0, pieces: int = 16) -> soak.Memory:
    return soak.Memory(process, given, 10.0, pieces)


def test_memory_that_grows_is_a_fault():
    """In use, or of the process where all threads share a heap; and no workspaces more than there are threads."""
    flat = [measured()] * 20
    assert not soak.not_flat(flat, 4, 16, True)
    more = [measured(process=600 + n) for n in range(20)]
    assert soak.not_flat(more, 4, 16, True) == ["memory has grown by 10.0 MB"] and not soak.not_flat(more, 4, 16, False)
    leaks = [measured(given=150 + n / 5) for n in range(20)]
    assert soak.not_flat(leaks, 4, 16, False) == ["what malloc() has given has grown by 2.0 MB"]
    assert soak.not_flat([*flat, measured(pieces=17)], 4, 16, True) == ["a layer keeps 17 workspaces"]


def test_what_is_kept_is_seen():
    """What malloc() has given counts without the workspaces of layers, which are counted apart."""
    before = soak.Memory.now()
    pool, kept = Pool(), [HostMemory(3_000_000) for _ in range(25)]
    for memory in kept:
        pool.give("here", memory)
    after = soak.Memory.now()
    assert after.workspaces - before.workspaces == pytest.approx(75, abs=0.1) and after.pieces == 25
    assert abs(after.given - before.given) < 1
    for key in ("here",) * 25:
        pool.take(key, 0)
    assert soak.Memory.now().given - before.given == pytest.approx(75, abs=1) and len(kept) == 25


def test_no_number_is_an_error_and_growth_is_seen():
    assert soak.error([np.float32([np.nan])], [np.float64([1.0])]) == float("inf")
    assert soak.growth([10.0] * 20) == 0 and soak.growth([*range(20)]) == 10 and soak.growth([5.0]) == 0
