"""``ecornn tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ecornn.cli.common import command_line, layer_options, plain_errors

if TYPE_CHECKING:
    from rich.console import Console

    from ecornn.tune.api import Result
    from ecornn.tune.space import ConfigSpace

EPILOG = """\b
Examples:
  ecornn-tune --cell lstm --hidden 800
  ecornn-tune --cell gru --hidden 256 --batch 1 --seq 100 --target cpu --trials 24
  ecornn-tune --cell my_cell.py:MinimalGatedUnit --hidden 512 --time-limit 300

Every trial is on the disk as soon as it is done. The same command again goes on with a run
that was stopped, and returns at once if it was finished; with more --trials it goes on from there.
"""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@layer_options(batch=20, seq=300, dtype_help="[default: float32 on a CPU, bfloat16 on a GPU]")
@click.option("--trials", type=click.IntRange(min=1, max=100_000),
              help="Configurations to try.  [default: 48 on a CPU, 128 on a GPU]")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=60.0, show_default=True,
              help="Seconds one build, and one measurement, may take.")
@click.option("--time-limit", type=click.FloatRange(min=1.0),
              help="Seconds for the whole run, earlier sessions included.")
@click.option("--seed", type=click.IntRange(min=0, max=1 << 30), default=0, show_default=True,
              help="Of the search and of the random data.")
@click.option("--resume/--no-resume", default=True, show_default=True,
              help="Go on with the run that the log has.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), metavar="LOG.jsonl",
              help="Log file.  [default: one for each layer and device in your data folder]")
@click.option("--schedule", help="Search this schedule only.")
@plain_errors
def tune(cell: str, hidden: int, input_: int | None, batch: int, seq: int, dtype: str | None,
         weights: str | None, target: str | None, trials: int | None, timeout: float,
         time_limit: float | None, seed: int, resume: bool, output: Path | None, schedule: str | None) -> None:
    """Searches the fastest schedule and knobs of a layer.

    Builds run in processes that see no GPU; measurements run in one that is killed when a
    candidate hangs. A candidate counts only if its output matches a float64 reference.
    """
    from rich.console import Console

    from ecornn.cli.progress import Meter
    from ecornn.tune.api import tune as run

    console = Console(soft_wrap=True, highlight=False)
    meter = Meter(console)

    def begin(space: ConfigSpace, resumed: int) -> None:
        work, device = space.task.workload, space.task.device
        console.print(f"{work} on {device.name} ({device.arch}): {', '.join(space.schedules)}, "
                      f"{len(space)} candidates" + (f", {resumed} trials in the log" if resumed else ""),
                      markup=False)

    try:
        with meter:
            result = run(cell, hidden=hidden, input=input_, batch=batch, seq=seq, dtype=dtype,
                         weights=weights, target=target, trials=trials, timeout=timeout, time_limit=time_limit,
                         seed=seed, resume=resume, output=output, schedule=schedule, report=meter.report, begin=begin)
    except KeyboardInterrupt:
        console.print("\nStopped. Every trial that was done is in the log; the same command goes on"
                      + ("" if resume else ", without --no-resume") + ".")
        raise SystemExit(130) from None
    show(console, result, cell, target)
    if result.best is None:
        raise SystemExit(1)


def show(console: Console, result: Result, cell: str, target: str | None) -> None:
    """The end of a run: what was found, and how to use it."""
    finish, work = result.finish, result.workload
    if not result.fresh:
        console.print(f"This run is finished: {finish.trials} trials, {finish.time}.")
    for reason, count in result.failures.items():
        console.print(f"{count} failed: {reason}", markup=False)
    console.print(f"log: {result.log}", markup=False)
    if finish.best is None or finish.best_us is None:
        console.print("No candidate ran with the right output; the log has each one's error.")
        return
    knobs = " ".join(f"{k}={v}" for k, v in finish.best.config.items())
    console.print(f"best: {finish.best.schedule} {knobs}", markup=False)
    line = (f"time: {finish.best_us:.4g} µs per step, "
            f"{finish.best_us * work.seq / 1e3:.4g} ms for T={work.seq}")
    if finish.default_us is not None:
        line += (f"; {finish.default_us / finish.best_us:.2f} times as fast as the untuned default "
                 f"({finish.default_us:.4g} µs)")
    console.print(line)
    name = work.cell.split("@")[0]
    console.print("use it:\n  " + command_line("ecornn-compile", {
        "--cell": cell, "--hidden": work.hidden, "--input": work.input, "--batch": work.batch,
        "--seq": work.seq, "--dtype": work.dtype, "--weights": work.weights, "--target": target,
        "-o": f"{name}{work.hidden}.so"}), markup=False)
