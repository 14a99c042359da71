"""What a command is doing, on standard error: a line when that changes, and again where it takes long."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import click

EVERY = 8.0  # seconds of silence, at most


class Saying:
    """Called with what comes next; a context manager around it all."""

    def __init__(self) -> None:
        self.now, self.begun, self.last = "", time.monotonic(), time.monotonic()
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.clock = threading.Thread(target=self._tick, name="saying", daemon=True)

    def __call__(self, text: str) -> None:
        with self.lock:
            self.now, self.begun = text, time.monotonic()
            self._say(text)

    def __enter__(self) -> Saying:
        self.clock.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.ended.set()
        self.clock.join()

    def _say(self, text: str) -> None:
        self.last = time.monotonic()
        click.echo(text, err=True)

    def _tick(self) -> None:
        while not self.ended.wait(max(0.05, self.last + EVERY - time.monotonic())):
            with self.lock:
                if self.now and time.monotonic() >= self.last + EVERY:
                    self._say(f"  still {self.now}, {time.monotonic() - self.begun:.0f} s")
