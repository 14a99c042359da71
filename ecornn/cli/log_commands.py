"""``ecornn log`` shows, merges, prunes and verifies tuning logs; ``ecornn report`` makes a page of them.

With ``--json`` results are objects on standard output. Messages about files, skipped lines and records that are left
out go to standard error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ecornn.cli.common import PATH, Commands, as_json, said_while, with_json
from ecornn.errors import ArgumentError, RecordError
from ecornn.interrupts import ENDING, safe_interrupts
from ecornn.tuning_logs import shipped_folder, user_folder

if TYPE_CHECKING:
    from ecornn.tune.log import Line, Log, TrialLine
    from ecornn.tune.record import AnyRecord, Trial
    from ecornn.tune.selection import Check, Merged

SHARING = """\b
Without FILES the commands read your data folder and the logs that ship:
  ecornn log ls                           files, runs, trials
  ecornn log best                         fastest of each layer and device
  ecornn log verify --sample 4            measure some of them again on this machine
Sharing:
  ecornn log export -o mine.jsonl         your own records
  ecornn log import theirs.jsonl          into your folder, for compilations
  ecornn log merge mine.jsonl theirs.jsonl -o both.jsonl
With a repository of logs:
  ecornn log pull https://example.org/team/logs.git
  ecornn log push logs/ --branch mine     a commit in a clone of it
"""
VERIFYING = """\b
Examples:
  ecornn log verify                          8 records of this device
  ecornn log verify mine.jsonl --sample 30   more records of one log
  ecornn log verify --target cpu --json
"""
ROWS = 16  # of the table of `ecornn log best`
MAKE = "to make some, run: ecornn tune --cell lstm --hidden 800"
NONE = f"there are no records; {MAKE}"


@click.group(cls=Commands, epilog=SHARING)
def log() -> None:
    """Shows, shares and checks tuning records."""


FILES = click.argument("files", nargs=-1, type=click.Path(path_type=Path))
GIVEN = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
NEW = click.option("-o", "--output", required=True, type=PATH, metavar="LOG.jsonl",
                   help="File to write; must not exist.")


def collect(files: tuple[Path, ...], strict: bool = False) -> Log:
    """The records of the files, or of all logs; problems go to stderr. ``strict`` rejects a file without any record."""
    from ecornn.tune.log import Log, read, read_all

    content = Log() if files else read_all()
    for path in files:
        one = read(path)
        if strict and one.problems and not one.lines and not one.newer:
            raise RecordError(f"{path} is not a tuning log: {one.problems[0]}")
        content.extend(one)
    for problem in content.problems:
        click.echo(f"skipped {problem}", err=True)
    return content


@log.command()
@FILES
@with_json
def ls(files: tuple[Path, ...], json: bool) -> None:
    """Lists log files: runs, trials, failures."""
    from ecornn.tune.record import Start, Trial
    from ecornn.tune.selection import under_way

    content = collect(files, strict=True)
    if not files and not json:
        click.echo(f"yours: {user_folder()}\nshipped: {shipped_folder()}")
    listed = []
    for path in dict.fromkeys(line.path for line in content.lines):
        lines = [line for line in content.lines if line.path == path]
        records = [line.record for line in lines]
        trials = [r for r in records if isinstance(r, Trial) and r.stage == "search"]
        runs = {r.run for r in records if isinstance(r, Start)}
        failed, done = sum(bool(t.error) for t in trials), len(runs - under_way(lines))
        listed.append({"file": str(path), "runs": len(runs), "finished": done, "trials": len(trials), "failed": failed})
        if not json:
            click.echo(f"{path}: {len(runs)} runs ({done} finished), {len(trials)} trials, {failed} failed")
    if json:
        as_json(listed)
    elif not content.lines:
        click.echo(NONE, err=True)


@log.command()
@FILES
@click.option("--all", "whole", is_flag=True, help="Print all, with configuration, file and line. So does --json.")
@with_json
def best(files: tuple[Path, ...], whole: bool, json: bool) -> None:
    """Prints the fastest trial of each layer and device, for those that were tuned last.

    Without FILES your own records come before those that ship."""
    lines = fastest(collect(files, strict=True))
    if json:
        as_json([{"file": str(line.path), "line": line.number, "trial": line.record} for line in lines])
    elif whole:
        for line in lines:
            click.echo(f"{text_of(line)}  ({line.place})")
    elif lines:
        lines.sort(key=lambda line: (line.path.parent != shipped_folder(), line.record.time), reverse=True)
        rows = [("layer", "device", "µs/step", "schedule"), *(row_of(line.record) for line in lines[:ROWS])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            click.echo("  ".join(map(str.ljust, row, widths)).rstrip())
        if len(lines) > ROWS:
            click.echo(f"there are {len(lines) - ROWS} more; --all prints them", err=True)
    else:
        click.echo(NONE, err=True)


def row_of(trial: Trial) -> tuple[str, ...]:
    assert trial.times is not None
    return str(trial.workload), trial.device.name, f"{trial.times.median:.4g}", trial.schedule


def fastest(content: Log) -> list[TrialLine]:
    from ecornn.schedules import revisions
    from ecornn.tune.selection import best_lines

    return best_lines(content, revisions())


def text_of(line: TrialLine) -> str:
    """A trial with times, on one line."""
    from ecornn.schedules import config_text

    trial = line.record
    assert trial.times is not None
    return (f"{trial.workload} on {trial.device.name}: {trial.times.median:.4g} µs/step  "
            f"{trial.schedule} {config_text(trial.config)}")


@log.command()
@FILES
@with_json
def stats(files: tuple[Path, ...], json: bool) -> None:
    """Prints counts for each device: workloads, trials, failures and their reasons, stale and noisy records.

    It also prints how many times as fast as the untuned default the best configurations are."""
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
            click.echo(f"  the best is {gains['median']:.2f} times as fast as the untuned default in the median of "
                       f"{gains['runs']} runs, {gains['least']:.2f} to {gains['most']:.2f} times in all")
        if one["seconds"]:
            click.echo(f"  {one['seconds']:.0f} s of tuning in {one['finished']} finished runs")
    if not counted:
        click.echo(NONE, err=True)


def counts(content: Log) -> list[dict[str, Any]]:
    """Counts for each device; schedules and reasons of failures are in order of frequency."""
    from ecornn.schedules import revisions
    from ecornn.tune.record import Finish, first_line

    revision, counted, trials = revisions(), [], content.trials()
    devices = {t.run: (t.device.name, t.device.arch) for t in trials}
    finished = [line.record for line in content.lines if isinstance(line.record, Finish)]
    for device in sorted(set(devices.values())):
        mine = [t for t in trials if devices[t.run] == device]
        search, done = [t for t in mine if t.stage == "search"], [f for f in finished if devices.get(f.run) == device]
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


def merged(lines: Iterable[Line]) -> Merged:
    """The union of the lines; conflicts go to stderr."""
    from ecornn.tune.selection import merge

    union = merge(lines)
    for conflict in union.conflicts:
        click.echo(f"left out {conflict}", err=True)
    return union


def write(output: Path, union: Merged, newer: Iterable[bytes] = ()) -> dict[str, Any]:
    """Writes a new log, with lines of a ``newer`` ecornn unchanged, and returns the result for programs."""
    from ecornn.tune.log import rewrite

    if output.exists():
        raise ArgumentError("--output", str(output), "a file that does not exist yet")
    unread = sorted(set(newer))

    def filled(there: Log) -> list[AnyRecord]:
        there.newer += unread
        return union.records

    rewrite(output, filled)
    click.echo(f"wrote {len(union.lines)} records to {output}"
               + f", and {len(unread)} lines of a newer ecornn unchanged" * bool(unread), err=True)
    return {"file": str(output), "records": len(union.lines), "newer": len(unread),
            "kept_out": [*map(str, union.conflicts)]}


def tell(there: Log) -> None:
    """Prints which lines cannot be read of a file that is written again."""
    for problem in there.problems:
        click.echo(f"skipped {problem}", err=True)
    if there.problems:
        click.echo(f"the file loses damaged lines ({len(there.problems) - len(there.newer)}) and keeps those of a "
                   f"newer ecornn ({len(there.newer)})", err=True)


@log.command(name="merge")
@GIVEN
@NEW
@with_json
def merge_files(files: tuple[Path, ...], output: Path, json: bool) -> None:
    """Merges several logs into one. Their order does not matter.

    Equal records count once. If two records contradict each other, the less favourable one is kept. The other one, and
    damaged lines, are left out and reported with file and line."""
    written = write(output, merged(collect(files, strict=True).lines))
    if json:
        as_json(written)


@log.command()
@GIVEN
@click.option("--keep", type=click.IntRange(min=1), default=16, show_default=True,
              help="The number of the fastest configurations to keep for each workload and device.")
@click.option("-o", "--output", type=PATH, metavar="LOG.jsonl",
              help="File to write; must not exist.  [default: each file in place]")
@with_json
def prune(files: tuple[Path, ...], keep: int, output: Path | None, json: bool) -> None:
    """Drops records that compilations do not need: failures, slow configurations, and stale records of configurations
    that also have current ones.

    It keeps all records of runs that are not finished, so that they can continue. It drops damaged lines and keeps
    lines of a newer ecornn."""
    from ecornn.schedules import revisions
    from ecornn.tune.log import rewrite
    from ecornn.tune.selection import worth_keeping

    written: list[dict[str, Any]] = []
    if output is not None:
        content = collect(files)
        one = write(output, merged(worth_keeping(content.lines, revisions(), keep)), content.newer)
        written.append({**one, "before": len(content.lines)})
    for path in files if output is None else ():
        if not path.exists():
            raise ArgumentError("FILES", str(path), "a log that exists")

        def selected(there: Log, path: Path = path) -> list[AnyRecord]:
            tell(there)
            staying = worth_keeping(there.lines, revisions(), keep)
            click.echo(f"{path}: kept {len(staying)} of {len(there.lines)} records", err=True)
            written.append({"file": str(path), "records": len(staying), "newer": len(there.newer), "kept_out": [],
                            "before": len(there.lines)})
            return [line.record for line in staying]

        rewrite(path, selected)
    if json:
        as_json(written)


@log.command(epilog=VERIFYING)
@FILES
@click.option("--sample", "count", type=click.IntRange(min=1), default=8, show_default=True,
              help="The number of records to measure again, drawn at random from the best of each workload.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=10.0, show_default=True,
              help="The largest drift of a time that is accepted, in percent.")
@click.option("--target", metavar="cuda|cpu", help="Device.  [default: cuda if there is a GPU, else cpu]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Seed of the sample and of the data.")
@with_json
@safe_interrupts(*ENDING)
def verify(files: tuple[Path, ...], count: int, tolerance: float, target: str | None, seed: int, json: bool) -> None:
    """Builds and measures a sample of records again on this device, and reports how much their times have drifted.

    The exit code is 1 if a record failed or drifted by more than the tolerance. The sample has no records of other
    devices, of other revisions of their schedule, and of cells that are not built in or have options; the command
    prints how many there are."""
    from ecornn.tune import selection
    from ecornn.tune.session import Session

    content = collect(files)
    checks: list[dict[str, Any]] = []
    with Session(target, seed=seed) as session, said_while("building modules") as told:
        device = session.device
        drawn, left = selection.sample(fastest(content), device, count, seed)
        for reason, number in left.items():
            click.echo(f"left out {number} {reason}", err=True)
        for check in selection.verify(drawn, session):
            told(f"measured {len(checks) + 1}/{len(drawn)}")
            line, outcome = check.line, check.outcome
            holds = check.drift is not None and abs(check.drift - 1) * 100 <= tolerance
            checks.append({"file": str(line.path), "line": line.number, "trial": line.record, "times": outcome.times,
                           "drift": check.drift, "noisy": outcome.noisy, "error": outcome.error, "holds": holds})
            if not json:
                click.echo(f"{'holds' if holds else 'DRIFTED':8}{text_of(line)}  {now(check)}  ({line.place})")
    good = sum(check["holds"] for check in checks)
    if json:
        as_json({"device": device.name, "tolerance_percent": tolerance, "left_out": left, "checks": checks})
    elif not checks:
        click.echo(f"there are no records to measure again on {device.name}", err=True)
    else:
        drifts = [check["drift"] for check in checks if check["drift"] is not None]
        middle = f", median drift {100 * (median(drifts) - 1):+.1f}%" if drifts else ""
        click.echo(f"{good} of {len(checks)} times hold within {tolerance:g}%{middle}")
    if good < len(checks):
        raise SystemExit(1)


def now(check: Check) -> str:
    """The outcome of a check, on one line."""
    if check.drift is None:
        return f"failed: {check.outcome.error}"
    assert check.outcome.times is not None
    return (f"now {check.outcome.times.median:.4g} µs/step, {100 * (check.drift - 1):+.1f}%"
            + " (noisy)" * check.outcome.noisy)


REPORTING = """\b
Examples:
  ecornn report -o report.html     the searches of this machine
  ecornn report theirs.jsonl --only "lstm T=300" -o page.html
  ecornn report --results times.json     with times of other libraries
"""


@click.command(epilog=REPORTING)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[LOG]...")
@click.option("-o", "--output", type=PATH, default=Path("report.html"),
              show_default=True, metavar="PAGE.html", help="File to write; an existing file is replaced.")
@click.option("--searches", type=click.IntRange(1, 1000), default=12, show_default=True,
              help="The number of latest searches that have a section.")
@click.option("--only", default="", metavar="TEXT", 
              help="Only layers whose name contains TEXT, such as 'lstm T=300 B=20'.")
@click.option("--results", multiple=True, type=PATH, metavar="FILE",
              help="Also show times of other libraries from `ecornn bench --json` or --csv. May be repeated.")
@with_json
def report(files: tuple[Path, ...], output: Path, searches: int, only: str, results: tuple[Path, ...],
           json: bool) -> None:
    """Makes one HTML page of tuning logs, by default those of your folder. The page needs no network.

    For each search it shows the best time after each trial, the effect of each knob (a choice in the code), and the
    result compared with the default and with the floor (a lower bound). For all layers it shows the best times. It
    needs Jinja: pip install jinja2."""
    from ecornn.report.measured import measured
    from ecornn.report.page import render
    from ecornn.tune.log import read_all

    log = collect(files, strict=True) if files else read_all([user_folder()])
    if not log.trials():
        raise ArgumentError("LOG", ", ".join(map(str, files)) or str(user_folder()),
                            "logs with trials; `ecornn tune` makes one")
    runs = {trial.run for trial in log.trials() if only in str(trial.workload)}
    if not runs:
        raise ArgumentError("--only", only, "a part of the name of a layer in these logs, as "
                            f"{str(log.trials()[-1].workload)!r}")
    log = replace(log, lines=[line for line in log.lines if line.record.run in runs])
    beside = measured(results)
    with said_while("the best of all layers") as told:
        page = render(log, most=searches, results=beside, told=told)
    output.parent.mkdir(parents=True, exist_ok=True)
    size = output.write_bytes(page.encode())
    click.echo(f"wrote {output} ({size / 1024:.0f} KiB)", err=True)
    if json:
        as_json({"page": str(output), "bytes": size, "logs": sorted({str(line.path) for line in log.lines}),
                 "trials": len(log.trials()), "problems": log.problems})
