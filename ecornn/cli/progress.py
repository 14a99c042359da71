"""Showing how a tuning run goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ecornn.tune.tuner import Progress

EVERY = 10.0  # seconds between two lines where there is no terminal


class Meter:
    """Reports trials to ``console``; a context manager around the run, or the two of a layer that trains, one line of
    the bar each."""

    def __init__(self, console: Console, training: bool = False) -> None:
        from rich import progress

        self.console = console
        self.last = 0.0
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[best]}"),
            progress.TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self.names = ("forward", "backward") if training else ("tuning",)
        self.rows = [self.bar.add_task(self.names[0], total=None, best="")]

    def __enter__(self) -> Meter:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.bar.stop()

    def report(self, now: Progress) -> None:
        """Called after each trial."""
        entry = int(now.trial.workload.backward)
        best = f"best {now.best_us:.4g} µs/step" if now.best_us else "none has run yet"
        if entry == len(self.rows):
            self.rows.append(self.bar.add_task(self.names[entry], total=None, best=""))
        self.bar.update(self.rows[entry], completed=now.done, total=now.total, best=best)
        late = time.monotonic() - self.last >= EVERY
        if not self.console.is_terminal and (late or now.done == now.total):
            self.last = time.monotonic()
            of = f"{self.names[entry]} " if len(self.names) > 1 else ""
            self.console.print(f"{of}trial {now.done}/{now.total}  {best}", highlight=False)
