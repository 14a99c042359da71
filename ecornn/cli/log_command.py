"""``ecornn log``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ecornn.cli.common import plain_errors

if TYPE_CHECKING:
    from ecornn.tune.log import Line, Log


@click.group()
def log() -> None:
    """Shows and exports tuning records."""


FILES = click.argument("files", nargs=-1, type=click.Path(path_type=Path))


def collect(files: tuple[Path, ...]) -> Log:
    """The given files, or every log there is; problems go to stderr."""
    from ecornn.tune.folders import read_all
    from ecornn.tune.log import Log, read

    if files:
        found = Log()
        for path in files:
            found.extend(read(path))
    else:
        found = read_all()
    for problem in found.problems:
        click.echo(f"skipped {problem}", err=True)
    return found


def best_lines(found: Log) -> list[Line]:
    """The fastest trial of each workload and device: of the final comparison if there was one."""
    from ecornn.tune.record import Trial

    best: dict[tuple[object, object], tuple[tuple[bool, float], Line]] = {}
    for line in found.lines:
        trial = line.record
        if isinstance(trial, Trial) and trial.times is not None:
            key, rank = (trial.workload, trial.device), (trial.stage != "final", trial.times.median)
            if key not in best or rank < best[key][0]:
                best[key] = rank, line
    return [line for _, line in best.values()]


@log.command()
@FILES
@plain_errors
def ls(files: tuple[Path, ...]) -> None:
    """Lists log files: runs, trials, failures.

    Without FILES: your data folder and the logs that ship.
    """
    from ecornn.tune.folders import shipped_folder, user_folder
    from ecornn.tune.record import Finish, Start, Trial

    found = collect(files)
    if not files:
        click.echo(f"yours: {user_folder()}\nshipped: {shipped_folder()}")
    for path in dict.fromkeys(line.path for line in found.lines):
        records = [line.record for line in found.lines if line.path == path]
        trials = [r for r in records if isinstance(r, Trial) and r.stage == "search"]
        runs = {r.run for r in records if isinstance(r, Start)}
        done = {r.run for r in records if isinstance(r, Finish)}
        failed = sum(1 for t in trials if t.error)
        click.echo(f"{path}: {len(runs)} runs ({len(runs & done)} finished), {len(trials)} trials, "
                   f"{failed} failed")
    if not found.lines:
        click.echo("no records; make some with: ecornn tune --cell lstm --hidden 800")


@log.command()
@FILES
@plain_errors
def best(files: tuple[Path, ...]) -> None:
    """Prints the fastest trial of each workload and device."""
    for line in best_lines(collect(files)):
        trial = line.record
        knobs = " ".join(f"{k}={v}" for k, v in trial.config.items())  # type: ignore[union-attr]
        click.echo(f"{trial.workload} on {trial.device.name}: "  # type: ignore[union-attr]
                   f"{trial.times.median:.4g} µs/step  {trial.schedule} {knobs}  "  # type: ignore[union-attr]
                   f"({line.place})")


@log.command()
@FILES
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path),
              metavar="LOG.jsonl", help="File to write; must not exist.")
@click.option("--best", "only_best", is_flag=True,
              help="Only the fastest trial of each workload and device: what an application ships.")
@plain_errors
def export(files: tuple[Path, ...], output: Path, only_best: bool) -> None:
    """Merges logs into one file, without the lines that are damaged."""
    from ecornn.errors import ArgumentError
    from ecornn.tune.log import append_all

    if output.exists():
        raise ArgumentError("--output", str(output), "a file that does not exist yet")
    found = collect(files)
    lines = best_lines(found) if only_best else found.lines
    append_all(output, [line.record for line in lines])
    click.echo(f"wrote {len(lines)} records to {output}")
