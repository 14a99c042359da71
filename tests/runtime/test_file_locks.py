"""Locks that a stopped process holds, for which others wait, and not for ever; and a file system without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from events import LIMIT, Clock
from msgspec.structs import replace

from ecornn import file_locks
from ecornn.build import cache
from ecornn.errors import RecordError
from ecornn.tune import log
from ecornn.tune.pool import YOUNG, Scratch
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
pytestmark = pytest.mark.filterwarnings("ignore:flock not supported")  # filelock says so, and goes on
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


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)


def test_the_build_cache_keeps_what_was_made_without_locks(root: Path, without_locks: None):
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"code"

    assert [cache.entry("cubin", ("a",), make) for _ in range(2)] == [b"code"] * 2 and len(made) == 1


def test_logs_are_written_without_locks(tmp_path: Path, without_locks: None):
    for run in ("a-1", "b-1"):
        log.append(tmp_path / "log.jsonl", replace(RECORD, run=run))
    assert len(log.read(tmp_path / "log.jsonl").lines) == 2


def test_a_living_run_keeps_its_folder_without_locks(tmp_path: Path, without_locks: None,
                                                     monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = Scratch()
    os.utime(alive.name, (time.time() - 2 * YOUNG,) * 2)
    last = Scratch()
    assert sorted(tmp_path.iterdir()) == sorted([Path(alive.name), Path(last.name)])
    for scratch in (alive, last):
        scratch.cleanup()
    assert not list(tmp_path.iterdir())
