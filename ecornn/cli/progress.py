"""Showing how a tuning run goes: a bar on a terminal, elsewhere a line now and then; and PyTorch's own time."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ecornn.bench.peers import TORCH, layer_of
from ecornn.cli.common import Heartbeat
from ecornn.workload import SINGLE, Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from ecornn.device import Device
    from ecornn.tune.tuner import Progress

SECONDS = 1.0  # of runs
PATIENCE = 20.0  # seconds, with the import of PyTorch


class Meter:
    """Shows searches on ``console``, several at the same time: on a terminal a line of the bar for each, or one for
    many layers; elsewhere a line of text now and then."""

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
        finally:
            with self.lock:
                self.going.remove(one)
            if self.all is not None:  # of the only one the bar stays
                for row in one.rows:
                    self.bar.remove_task(row)
                self.bar.advance(self.all)

    def print(self, text: str) -> None:
        self.clock.said()
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

    def report(self, now: Progress) -> None:
        """Called after each trial."""
        meter, entry = self.meter, int(now.trial.workload.backward)
        best = standing(now)
        with meter.lock:
            while len(self.rows) <= entry:
                self.rows.append(meter.bar.add_task(self.names[len(self.rows)], total=None, best=""))
            meter.bar.update(self.rows[entry], completed=now.done, total=now.total, best=best)
            if not meter.console.is_terminal and (not meter.clock.due() or now.done in (1, now.total)):
                of = f"{self.names[entry]} " if self.name or self.training else ""
                meter.print(f"{of}trial {now.done}/{now.total}, {best}")


def standing(now: Progress) -> str:
    """Says how long the rest takes at most, and the best time so far, in µs a step. It states no gain, which is known
    once the fastest have been compared."""
    left = [f"at most {duration(now.left_s)} left"] if now.left_s is not None and now.done < now.total else []
    return ", ".join([*left, "none has run yet" if now.best_us is None else f"best {now.best_us:.4g} µs/step"])


def duration(seconds: float) -> str:
    """``45 s``, ``2:05``, ``1:00:00``."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def torch_us(work: Workload, device: Device) -> float | None:
    """µs a step of PyTorch's layer, timed in another process; None if there is no such layer or PyTorch, or no time."""
    if importlib.util.find_spec("torch") is None or work.cell not in TORCH or work.weights or work.backward:
        return None
    asked = msgspec.json.encode((device.kind, work)).decode()
    try:
        done = subprocess.run([sys.executable, "-m", __name__, asked], capture_output=True, text=True, timeout=PATIENCE)
        return float(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _main(asked: str) -> None:
    """Prints the median of a few runs."""
    import torch

    from ecornn.tune.timing import Contestant, event_clock, race, wall_clock

    kind, work = msgspec.json.decode(asked, type=tuple[str, Workload])
    place, clock = ("cuda", event_clock) if kind == "cuda" else ("cpu", wall_clock)
    if kind == "cuda":
        torch.backends.cudnn.allow_tf32 = work.precision == "tf32"  # exact float32 against exact float32
    layer = layer_of(work, SINGLE, kind)
    x = torch.rand(work.seq, work.batch, work.input).to(device=place, dtype=getattr(torch, work.dtype))
    with torch.inference_mode():
        (times,) = race([Contestant(lambda: layer(x), clock)], seconds=SECONDS)
    print(statistics.median(times) / work.seq * 1e6)


if __name__ == "__main__":
    _main(sys.argv[1])
