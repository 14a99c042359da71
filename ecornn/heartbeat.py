"""Signs of life of what takes long: nothing is silent for more than a few seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ecornn.notebook import Line

EVERY = 5.0  # seconds of silence, at most, while something goes on


class Heartbeat:
    """Calls ``beat`` in a thread when nobody, holding :attr:`lock`, has called :meth:`said` for ``EVERY`` seconds."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self.beat, self.last, self.lock, self.ended = beat, time.monotonic(), threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def said(self) -> None:
        self.last = time.monotonic()

    def due(self) -> float:
        """Seconds until the next beat, if nothing is said before; 0 where it is due."""
        return max(0.0, self.last + EVERY - time.monotonic())

    def __enter__(self) -> Heartbeat:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.ended.wait(max(0.05, self.due())):
            with self.lock:
                if not self.due():
                    self.said()
                    self.beat()


@contextlib.contextmanager
def going(now: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that takes how far something is. A notebook shows that at once, in one line; elsewhere standard
    error has it every few seconds, and at the end."""
    line, begun, first = Line(), time.monotonic(), now

    def told(text: str) -> None:
        nonlocal now
        now = text
        if line.changes:
            with clock.lock:
                clock.said()
                line(text)

    with Heartbeat(lambda: line(f"{now}, {time.monotonic() - begun:.0f} s so far")) as clock:
        yield told
    if now != first:
        line(now)
