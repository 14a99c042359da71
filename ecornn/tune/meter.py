"""Showing how a tuning run goes: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ecornn.heartbeat import Heartbeat
from ecornn.notebook import Line
from ecornn.tune.log import microseconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from ecornn.tune.tuner import Progress


class Meter:
    """Shows searches on ``console``, several at the same time: on a terminal a line of the bar for each, or one for
    many layers; in a notebook one line that changes; elsewhere a line of text now and then."""

    def __init__(self, console: Console, layers: int = 1) -> None:
        from rich import progress
        from rich.table import Column

        self.console, self.begun, self.clock = console, time.monotonic(), Heartbeat(self._beat)
        self.lock = self.clock.lock
        what = progress.TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))  # cut if narrow
        self.bar = progress.Progress(progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[best]}"),
                                     progress.BarColumn(bar_width=10), what, console=console, expand=True,
                                     disable=not console.is_terminal)
        self.all = self.bar.add_task("layers", total=layers, best="") if layers > 1 else None
        self.going: list[LayerMeter] = []
        self.line = Line()  # in a notebook; rich needs widgets there to change what it has shown

    def __enter__(self) -> Meter:
        self.bar.start()
        self.clock.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self.clock.__exit__()

    @contextlib.contextmanager
    def layer(self, name: str, training: bool = False) -> Iterator[LayerMeter]:
        """Shows the searches of a layer. ``name``, as ``[2/7]``, tells it from others; empty where there are none."""
        one = LayerMeter(self, name, training)
        with self.lock:
            self.going.append(one)
        try:
            yield one
            if self.line.changes:  # and stays as it is last
                one.stage("done")
        finally:
            with self.lock:
                self.going.remove(one)
            if self.all is not None:  # of the only one the bar stays
                for row in one.rows:
                    self.bar.remove_task(row)
                self.bar.advance(self.all)

    def print(self, text: str) -> None:
        self.clock.said()
        if self.line.changes:
            self.line(text)
        else:
            self.console.print(text, highlight=False, markup=False)

    def _beat(self) -> None:
        if self.going and not self.console.is_terminal:
            latest, more = self.going[-1], f", and {len(self.going) - 1} more" if len(self.going) > 1 else ""
            self.print(f"{latest.name} {latest.now}{more}, {time.monotonic() - self.begun:.0f} s so far".strip())


class LayerMeter:
    """A layer's part of a :class:`Meter`."""

    def __init__(self, meter: Meter, name: str, training: bool) -> None:
        self.meter, self.name, self.training = meter, name, training
        self.names = [f"{name} {which}".strip() for which in (("forward", "backward") if training else ("tuning",))]
        self.now = "starting"
        self.rows: list[TaskID] = [meter.bar.add_task(self.names[0], total=None, best="")]

    def stage(self, name: str) -> None:
        """Called when what is done changes: shown until the next stage."""
        with self.meter.lock:
            self.now = name
            self.meter.bar.update(self.rows[-1], description=f"{self.names[len(self.rows) - 1]}: {name}")
            if self.meter.line.changes:
                self.meter.print(f"{self.names[len(self.rows) - 1]}: {name}")

    def report(self, now: Progress) -> None:
        """Called after each trial."""
        meter, entry = self.meter, int(now.trial.workload.backward)
        best = standing(now)
        with meter.lock:
            while len(self.rows) <= entry:
                self.rows.append(meter.bar.add_task(self.names[len(self.rows)], total=None, best=""))
            meter.bar.update(self.rows[entry], completed=now.done, total=now.total, best=best)
            if not meter.console.is_terminal and (
                    meter.line.changes or not meter.clock.due() or now.done in (1, now.total)):
                of = f"{self.names[entry]} " if self.name or self.training else ""
                meter.print(f"{of}trial {now.done}/{now.total}, {best}")


def standing(now: Progress) -> str:
    """Says the best time so far, in µs a step, and how long the rest takes at most. It states no gain, which is known
    once the fastest have been compared."""
    left = [f"at most {duration(now.left_s)} left"] if now.left_s is not None and now.done < now.total else []
    best = "no result yet" if now.best_us is None else f"best so far {microseconds(now.best_us)} per step"
    return ", ".join([best, *left])


def duration(seconds: float) -> str:
    """``45 s``, ``2:05``, ``1:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
