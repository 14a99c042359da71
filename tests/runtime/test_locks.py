"""A file system without locks: filelock says so, makes do with files that name their owner, and we go on."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest

from ecornn.build import cache
from ecornn.tune.log import append, read
from ecornn.tune.pool import YOUNG, Scratch
from ecornn.tune.record import Finish

pytestmark = pytest.mark.filterwarnings("ignore:flock not supported")


@pytest.fixture(autouse=True)
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)


def test_the_build_cache_keeps_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"code"

    assert [cache.entry("cubin", ("a",), make) for _ in range(2)] == [b"code"] * 2 and len(made) == 1


def test_logs_are_written(tmp_path: Path):
    for run in ("a-1", "b-1"):
        append(tmp_path / "log.jsonl", Finish(run=run, time="2026-11-21T20:00:00Z", reason="trials", trials=0,
                                              seconds=1.0, best=None, best_us=None, default=None, default_us=None))
    assert len(read(tmp_path / "log.jsonl").lines) == 2


def test_a_living_run_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = Scratch()
    os.utime(alive.name, (time.time() - 2 * YOUNG,) * 2)
    last = Scratch()
    assert sorted(tmp_path.iterdir()) == sorted([Path(alive.name), Path(last.name)])
    for scratch in (alive, last):
        scratch.cleanup()
    assert not list(tmp_path.iterdir())
