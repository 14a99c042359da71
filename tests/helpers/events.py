"""Tests wait for events, however long these take: no test may fail since a machine is slow."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

LIMIT = 900.0  # seconds after which what a test waits for is taken to hang; pytest's own limit is twice that


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "what the test waits for has not come"
        time.sleep(0.01)


def all_end(processes: Iterable[psutil.Process]) -> None:
    """Waits until none of the processes is left; fails, and kills them, after ``LIMIT``."""
    _, alive = psutil.wait_procs(list(processes), timeout=LIMIT)
    for process in alive:
        process.kill()
    assert not alive


def endless(argument: Any) -> bool:
    """True if a worker's call never ends: a build says so in its configuration, a module by a file beside it."""
    if (config := getattr(argument, "config", None)) is not None:
        return config.get("behaviour") == "slow_build"
    return any(Path(path).with_suffix(".endless").exists() for path in getattr(argument, "paths", ()))


class Clock:
    """Time for a module under test, in place of ``time``: it passes by ``tick`` seconds with each look."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 1000.0, tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        """The wall clock's, as files have it."""
        return time.time()
