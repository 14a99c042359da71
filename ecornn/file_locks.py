"""Locks of files, by which processes take turns. A process may be stopped (SIGSTOP, a debugger, a container that is
frozen) while it holds one: others say that they wait and for what, and not for ever."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SAID = 10.0  # seconds until a wait is told of, and twice as many until the next word
LOOK = 1.0  # seconds between two looks whether there is still something to wait for


@contextlib.contextmanager
def held(path: str | Path, limit: float, otherwise: str, done: Callable[[], bool] | None = None) -> Iterator[bool]:
    """Holds the lock of the file ``path``: yields True; or False where another process has not given it back within
    ``limit`` seconds, or has ``done`` its work. The logger ``ecornn`` is told who waits for what, and what happens
    ``otherwise``, after that time. Raises :class:`OSError` where there can be no such file."""
    from filelock import FileLock, Timeout

    lock, begin, word, log = FileLock(path), time.monotonic(), SAID, logging.getLogger("ecornn")
    other = f"another process that holds {path} (`fuser -v` shows which; it may be suspended)"
    while True:
        waited = time.monotonic() - begin
        try:
            lock.acquire(timeout=min(LOOK, max(0.0, min(word, limit) - waited)))
            break
        except Timeout:
            waited = time.monotonic() - begin
        finished = done is not None and done()
        if not finished and waited >= limit:
            log.warning("waited %.0f s for %s; %s", waited, other, otherwise)
        if finished or waited >= limit:
            yield False
            return
        if waited >= word:
            log.warning("waiting for %s; after %.0f s, %s", other, limit, otherwise)
            word *= 2
    try:
        yield True
    finally:
        lock.release()
