"""Ctrl-C at every point: none is lost, and no thread waits for a lock that nobody has.

    python tests/runtime/test_interrupts.py safe|plain

interrupts a program with an executor at every call and return of its main thread, one in each turn, and prints at how
many points it did, where no KeyboardInterrupt came of it, and after which of them the executor's threads never ended. A
real signal comes at the same points; in fifty thousand tries it came once at a bad one."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import Any

import pytest

from ecornn.interrupts import safe_interrupts


def found(kind: str) -> dict:
    """Runs this file, and returns what it prints."""
    return json.loads(subprocess.run([sys.executable, __file__, kind], capture_output=True, check=True, preexec_fn=(
        lambda: signal.signal(signal.SIGINT, signal.default_int_handler))).stdout)


def test_at_every_call_and_return():
    """Python's own interrupts leave locks locked, or this test finds nothing."""
    assert len(found("plain")["hung"]) == 2
    safe = found("safe")
    assert safe["points"] > 100 and not safe["lost"] and not safe["hung"]


def test_a_handler_of_the_program_stays(monkeypatch: pytest.MonkeyPatch):
    with safe_interrupts(signal.SIGTERM):
        outer = signal.getsignal(signal.SIGTERM)
        with safe_interrupts(signal.SIGTERM):
            assert signal.getsignal(signal.SIGTERM) is outer
        assert outer is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_in_another_thread_nothing_is_changed():
    def inside() -> object:
        with safe_interrupts(signal.SIGTERM):
            return signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor() as threads:
        assert threads.submit(inside).result() is signal.SIG_DFL


LONG = 5.0  # seconds that threads with nothing to do do not take to end


def work(threads: ThreadPoolExecutor) -> None:
    for _ in range(2):
        futures = [threads.submit(int) for _ in range(3)]
        wait(futures)
        assert [f.result() for f in futures] == [0, 0, 0]


def interrupted(point: int) -> tuple[str, bool]:
    """``raised``, ``lost``, or ``none`` where there is no such point; and whether the executor's threads end."""
    left, threads, became = itertools.count(point, -1), ThreadPoolExecutor(2), "lost"
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event != "line" and next(left) == 0:
            sys.settrace(None)
            signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)  # type: ignore[operator,misc]
        return trace

    try:
        sys.settrace(trace)
        work(threads)
        sys.settrace(None)
        if next(left) >= 0:
            became = "none"
        else:
            threading.Event().wait(LONG)  # for one that comes again
    except (KeyboardInterrupt, RuntimeError):  # RuntimeError, of plain ones: "release unlocked lock"
        became = "raised"
    finally:
        sys.settrace(None)
    ended = threading.Thread(target=threads.shutdown, daemon=True)
    ended.start()
    ended.join(LONG)
    return became, not ended.is_alive()


def main() -> None:
    points, lost, hung = 0, [], []
    with safe_interrupts() if sys.argv[1] == "safe" else contextlib.nullcontext():
        while len(hung) < 2:
            became, ended = interrupted(points)
            if became == "none":
                break
            lost += [points] * (became == "lost")
            hung += [points] * (not ended)
            points += 1
    print(json.dumps({"points": points, "lost": lost, "hung": hung}), flush=True)
    os._exit(0)  # does not wait for threads that hang


if __name__ == "__main__":
    main()
