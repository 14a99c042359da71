"""``stage``, which all examples use: it says how long a part of a program takes, and that it is still running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 5.0  # seconds between two lines while a stage runs


@contextmanager
def stage(name: str, beats: bool = True) -> Iterator[None]:
    """Prints a line every few seconds while its block runs, and how long that took. Without ``beats`` only the last
    line: for commands that show their own progress."""
    begin, ended = time.perf_counter(), threading.Event()

    def beat() -> None:
        while not ended.wait(EVERY):
            print(f"... {name}, {time.perf_counter() - begin:.0f} s so far", flush=True)

    thread = threading.Thread(target=beat, daemon=True)
    if beats:
        thread.start()
    try:
        yield
    finally:
        ended.set()
    if beats:
        thread.join()
    print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
