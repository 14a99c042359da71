"""Interrupts a program with an executor at every call and return of its main thread, one in each turn.

    python tests/runtime/interrupting.py safe|plain

Prints at how many points it did, where no KeyboardInterrupt came of it, and after which of them the executor's threads
never ended. A real signal comes at the same points; in fifty thousand tries it came once at a bad one.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import Any

from ecornn.interrupts import safe_interrupts

LONG = 5.0  # seconds that threads with nothing to do do not take to end


def work(threads: ThreadPoolExecutor) -> None:
    for _ in range(2):
        futures = [threads.submit(int) for _ in range(3)]
        wait(futures)
        assert [f.result() for f in futures] == [0, 0, 0]


def interrupted(point: int) -> tuple[str, bool]:
    """Interrupts at a point. Returns ``raised``, ``lost``, or ``none`` where there is no such point; and True if the
    executor's threads end."""
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
