"""Processes that are stopped while they hold a lock: others say that they wait, and not for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from events import LIMIT, Clock

from ecornn import file_locks
from ecornn.build import cache
from ecornn.errors import RecordError
from ecornn.tune import log
from ecornn.tune.record import Finish

CACHE = """
from ecornn.build import cache
def make():
    print("holds", flush=True)
    input()
    return b"theirs"
cache.entry("cubin", ("a",), make)
"""
LOG = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1] + ".lock"):
    print("holds", flush=True)
    input()
"""
RECORD = Finish(run="a-1", time="2026-11-21T20:00:00Z", reason="trials", trials=0, seconds=1.0, best=None, best_us=None,
                default=None, default_us=None)


@contextmanager
def stopped(program: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A process that is stopped as soon as it says that it holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", program, *map(str, words)], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(file_locks, "SAID", 0.05)
    monkeypatch.setattr(file_locks, "LOOK", 0.05)
    monkeypatch.setattr(file_locks, "time", Clock(tick=0.02))  # told of before it ends, however slowly that goes
    return tmp_path / "cache"


def test_what_a_stopped_process_compiles_is_compiled_here_too(root: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    monkeypatch.setattr(cache, "LIMIT", 0.3)
    with stopped(CACHE) as other:
        assert cache.entry("cubin", ("a",), lambda: b"ours") == b"ours"
        said = [record.getMessage() for record in caplog.records if record.name == "ecornn"]
        assert said[0].startswith("waiting for another process, which may be stopped (fuser -v ")
        assert said[-1].startswith("waited ") and said[-1].endswith("compiling here what it compiles")
        other.send_signal(signal.SIGCONT)  # what it makes takes the place of ours
        other.communicate("go on\n")
    assert cache.entry("cubin", ("a",), lambda: b"other") == b"theirs"


def test_who_waits_takes_what_a_third_process_has_made(root: Path, monkeypatch: pytest.MonkeyPatch):
    looks = threading.Event()

    def waits(*args: Any) -> None:
        looks.set()

    monkeypatch.setattr(file_locks.logging.getLogger("ecornn"), "warning", waits)
    monkeypatch.setattr(cache, "LIMIT", float("inf"))
    found: list[bytes] = []
    with stopped(CACHE):
        waiting = threading.Thread(target=lambda: found.append(cache.entry("cubin", ("a",), lambda: b"ours")))
        waiting.start()
        assert looks.wait(LIMIT)
        with monkeypatch.context() as third:
            third.setattr(cache, "LIMIT", 0.0)
            assert cache.entry("cubin", ("a",), lambda: b"third") == b"third"
        waiting.join(LIMIT)
    assert found == [b"third"]


@pytest.mark.parametrize("write", [lambda path: log.append(path, RECORD), lambda path: log.rewrite(path, lambda _: [])],
                         ids=["append", "rewrite"])
def test_a_log_that_a_stopped_process_holds_is_an_error(write: Callable[[Path], None], root: Path,
                                                        monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log, "LIMIT", 0.3)
    path = root.parent / "log.jsonl"
    log.append(path, RECORD)
    with stopped(LOG, path), pytest.raises(RecordError, match=r"has held .*log.jsonl.lock for 0 s, and may be stopped"):
        write(path)
    write(path)
    assert len(log.read(path).lines) in (0, 2)
