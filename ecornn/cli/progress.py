"""Showing how a tuning run goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from ecornn.tune.tuner import Progress

EVERY = 10.0  # seconds between two lines where there is no terminal


class Meter:
    """Shows how searches go on ``console``, of one layer or of many, some of them at the same time; a context manager
    around them. On a terminal each search has a line of the bar, and many layers one for all of them; elsewhere the
    latest one has a line of text."""

    def __init__(self, console: Console, layers: int = 1) -> None:
        from rich import progress

        self.console, self.lock = console, threading.Lock()
        self.last = 0.0
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[best]}"),
            progress.TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self.all = self.bar.add_task("layers", total=layers, best="") if layers > 1 else None

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.bar.stop()

    @contextlib.contextmanager
    def layer(self, name: str, training: bool = False) -> Iterator[Callable[[Progress], None]]:
        """While a layer is tuned, or the two searches of one that trains; the function is called after each trial.
        ``name``: as ``[2/7]``, to be told from others; empty where it is the only one."""
        rows: list[TaskID] = []
        names = [f"{name} {which}".strip() for which in (("forward", "backward") if training else ("tuning",))]

        def report(now: Progress) -> None:
            entry = int(now.trial.workload.backward)
            best = f"best {now.best_us:.4g} µs/step" if now.best_us else "none has run yet"
            with self.lock:
                while len(rows) <= entry:
                    rows.append(self.bar.add_task(names[len(rows)], total=None, best=""))
                self.bar.update(rows[entry], completed=now.done, total=now.total, best=best)
                late = time.monotonic() - self.last >= EVERY
                if not self.console.is_terminal and (late or now.done == now.total):
                    self.last = time.monotonic()
                    of = f"{names[entry]} " if name or training else ""
                    self.console.print(f"{of}trial {now.done}/{now.total}  {best}", highlight=False, markup=False)

        try:
            rows.append(self.bar.add_task(names[0], total=None, best=""))
            yield report
        finally:
            if self.all is not None:  # of the only one the bar stays
                for row in rows:
                    self.bar.remove_task(row)
                self.bar.advance(self.all)
