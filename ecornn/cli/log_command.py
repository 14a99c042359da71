"""``ecornn log``: what tuning logs hold. Commands that write logs are in ``log_files.py``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecornn.cli.common import JSON, as_json, plain_errors
from ecornn.cli.help_text import Commands

if TYPE_CHECKING:
    from ecornn.tune.log import Line, Log

EPILOG = """\b
Without FILES the commands read your data folder and the logs that ship:
  ecornn log ls                           files, runs, trials
  ecornn log best                         fastest of each layer and device
  ecornn log verify --sample 4            measure some of them again, here
Sharing:
  ecornn log export --best -o mine.jsonl  what an application needs
  ecornn log import theirs.jsonl          into your folder, for look-up
  ecornn log merge mine.jsonl theirs.jsonl -o both.jsonl
"""
NONE = "no records; make some with: ecornn tune --cell lstm --hidden 800"


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
def log() -> None:
    """Shows, shares and checks tuning records."""


FILES = click.argument("files", nargs=-1, type=click.Path(path_type=Path))


def collect(files: tuple[Path, ...], strict: bool = False) -> Log:
    """The given files, or every log there is; problems go to stderr.

    ``strict``: raises :class:`~ecornn.errors.RecordError` for a file that has text, but no record.
    """
    from ecornn.errors import RecordError
    from ecornn.tune.folders import read_all
    from ecornn.tune.log import Log, read

    if files:
        found = Log()
        for path in files:
            one = read(path)
            if strict and one.problems and not one.lines and not one.newer:
                raise RecordError(f"{path} is no tuning log: {one.problems[0]}")
            found.extend(one)
    else:
        found = read_all()
    for problem in found.problems:
        click.echo(f"skipped {problem}", err=True)
    return found


@log.command()
@FILES
@JSON
@plain_errors
def ls(files: tuple[Path, ...], json: bool) -> None:
    """Lists log files: runs, trials, failures."""
    from ecornn.tune.folders import shipped_folder, user_folder
    from ecornn.tune.record import Start, Trial
    from ecornn.tune.selection import under_way

    found = collect(files, strict=True)
    if not files and not json:
        click.echo(f"yours: {user_folder()}\nshipped: {shipped_folder()}")
    listed = []
    for path in dict.fromkeys(line.path for line in found.lines):
        lines = [line for line in found.lines if line.path == path]
        records = [line.record for line in lines]
        trials = [r for r in records if isinstance(r, Trial) and r.stage == "search"]
        runs = {r.run for r in records if isinstance(r, Start)}
        failed = sum(1 for t in trials if t.error)
        done = len(runs - under_way(lines))
        listed.append({"file": str(path), "runs": len(runs), "finished": done, "trials": len(trials), "failed": failed})
        if not json:
            click.echo(f"{path}: {len(runs)} runs ({done} finished), {len(trials)} trials, {failed} failed")
    if json:
        as_json(listed)
    elif not found.lines:
        click.echo(NONE, err=True)


@log.command()
@FILES
@JSON
@plain_errors
def best(files: tuple[Path, ...], json: bool) -> None:
    """Prints the fastest trial of each workload and device."""
    from ecornn.schedules import revisions
    from ecornn.tune.selection import best_lines

    lines = best_lines(collect(files, strict=True), revisions())
    if json:
        as_json([{"file": str(line.path), "line": line.number, "trial": line.record} for line in lines])
        return
    for line in lines:
        click.echo(f"{text_of(line)}  ({line.place})")


def text_of(line: Line) -> str:
    """A trial with times, on one line."""
    from ecornn.tune.record import Trial

    trial = line.record
    assert isinstance(trial, Trial) and trial.times is not None
    knobs = " ".join(f"{k}={v}" for k, v in trial.config.items())
    return (f"{trial.workload} on {trial.device.name}: {trial.times.median:.4g} µs/step  "
            f"{trial.schedule} {knobs}")


@log.command()
@FILES
@JSON
@plain_errors
def stats(files: tuple[Path, ...], json: bool) -> None:
    """Counts by device: workloads, trials, failures and their reasons, stale and noisy records.

    And how much faster than the untuned default the best of each workload is.
    """
    counted = counts(collect(files, strict=True))
    if json:
        as_json(counted)
        return
    for one in counted:
        click.echo(f"{one['device']} ({one['arch']}): {one['workloads']} workloads, {one['trials']} trials in the "
                   f"search, {one['failed']} failed, {one['stale']} stale, {one['noisy']} noisy")
        for schedule, count in one["schedules"].items():
            click.echo(f"  {schedule}: {count} trials")
        for reason, count in list(one["failures"].items())[:5]:
            click.echo(f"  {count} failed: {reason}")
        if gains := one["gains"]:
            click.echo(f"  best against untuned default: {gains['median']:.2f}x in the median of {gains['runs']} "
                       f"runs, {gains['least']:.2f}x to {gains['most']:.2f}x")
        if one["seconds"]:
            click.echo(f"  {one['seconds']:.0f} s of tuning in {one['finished']} finished runs")
    if not counted:
        click.echo(NONE, err=True)


def counts(found: Log) -> list[dict[str, Any]]:
    """What is counted of each device; schedules and reasons of failures by how often, the most frequent first."""
    from ecornn.schedules import revisions
    from ecornn.tune.record import Finish, Trial, first_line

    revision, counted = revisions(), []
    trials = [line.record for line in found.lines if isinstance(line.record, Trial)]
    devices = {t.run: (t.device.name, t.device.arch) for t in trials}
    for device in sorted(set(devices.values())):
        mine = [t for t in trials if devices[t.run] == device]
        search = [t for t in mine if t.stage == "search"]
        done = [line.record for line in found.lines
                if isinstance(line.record, Finish) and devices.get(line.record.run) == device]
        gains = sorted(f.default_us / f.best_us for f in done if f.best_us and f.default_us)
        counted.append({
            "device": device[0], "arch": device[1], "workloads": len({t.workload for t in mine}),
            "trials": len(search), "failed": sum(t.error is not None for t in search),
            "stale": sum(t.revision != revision.get(t.schedule) for t in mine), "noisy": sum(t.noisy for t in mine),
            "schedules": dict(Counter(t.schedule for t in search).most_common()),
            "failures": dict(Counter(first_line(t.error, 80) for t in search if t.error).most_common()),
            "gains": {"runs": len(gains), "median": gains[len(gains) // 2], "least": gains[0], "most": gains[-1]}
            if gains else None,
            "seconds": sum(f.seconds for f in done), "finished": len(done)})
    return counted
