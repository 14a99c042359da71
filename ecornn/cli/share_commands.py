"""``ecornn log export``, ``import``, ``pull``, ``push``, ``check`` share records. None of them sends anything, and only
``pull`` reads from another machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecornn.cli.common import as_json, every, said_while, with_json
from ecornn.cli.log_commands import FILES, GIVEN, MAKE, NEW, collect, fastest, merged, tell, write
from ecornn.errors import ArgumentError, RecordError
from ecornn.interrupts import ENDING, safe_interrupts
from ecornn.tuning_logs import user_folder

if TYPE_CHECKING:
    from ecornn.tune.log import Line, Log
    from ecornn.tune.record import AnyRecord

EXPORTING = """\b
Examples:
  ecornn log export -o mine.jsonl                      all of your own records
  ecornn log export -o h200.jsonl --device H200 --best
  ecornn log export -o new.jsonl --since 2026-11-01 old.jsonl
"""
PULLING = """\b
Examples:
  ecornn log pull shared/                  a folder, or its tuning_logs/
  ecornn log pull git@example.org:team/logs.git --dry-run
  ecornn log pull https://example.org/team/logs.git
  ecornn log pull https://example.org/h200.jsonl.xz --sha256 DIGEST
"""
PUSHING = """\b
Examples:
  ecornn log push shared/                  new files in shared/tuning_logs
  ecornn log push logs/ --branch h200      a commit in a clone of logs
  git -C logs push origin h200             then open a pull request
"""
FOLDER = click.Path(path_type=Path)
RUNS = every([
    click.option("--device", metavar="TEXT", help="Only runs on a device whose name or architecture contains TEXT."),
    click.option("--since", metavar="YYYY-MM-DD", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ"]),
                 help="Only runs with records since then (UTC).")])


def chosen(files: tuple[Path, ...], device: str | None, since: datetime | None) -> Log:
    """The runs of the files, or without files the user's own, on such a device and since that time. Raises
    :class:`RecordError` if there are none."""
    from ecornn.tune.sharing import devices, is_own, name_of, runs_of

    content = collect(files)
    lines = content.lines if files else [line for line in content.lines if is_own(line.path)]
    content = replace(content, lines=runs_of(lines, device, since.strftime("%Y-%m-%dT%H:%M:%SZ") if since else ""))
    if not content.lines:
        there = sorted({*map(name_of, devices(lines).values())})
        raise RecordError(f"there are no such records to export; there are runs on {', '.join(there)}" if there else
                          f"there are no records to export; {MAKE}")
    return content


@click.command(epilog=EXPORTING)
@FILES
@NEW
@click.option("--best", "only_best", is_flag=True,
              help="Only the fastest trial of each workload and device, for an application to ship.")
@RUNS
@with_json
def export(files: tuple[Path, ...], output: Path, only_best: bool, device: str | None, since: datetime | None,
           json: bool) -> None:
    """Writes one log to share, without damaged lines.

    Without FILES it exports your own records, but not those that ship or that you have imported."""
    content = chosen(files, device, since)
    written = write(output, merged(fastest(content) if only_best else content.lines))
    if json:
        as_json(written)


def take_in(lines: Sequence[Line], dry: bool = False) -> dict[str, Any]:
    """Adds records of others to the user's folder; if ``dry``, it only prints how many. The result is for programs."""
    from ecornn.tune.log import Log, read, rewrite
    from ecornn.tune.selection import event
    from ecornn.tune.sharing import IMPORTED

    target = user_folder() / IMPORTED
    written: dict[str, Any] = {"file": str(target)}

    def union(there: Log) -> list[AnyRecord]:
        tell(there)
        joined = merged([*there.lines, *lines])
        known = {event(line.record) for line in there.lines}
        added = sum(event(line.record) not in known for line in joined.lines)
        done = "would add" if dry else "added"
        click.echo(f"{done} {added} records to {target}, {len(joined.lines)} in all", err=True)
        written.update(added=added, records=len(joined.lines), kept_out=[*map(str, joined.conflicts)])
        return joined.records

    if dry:
        union(read(target) if target.exists() else Log())
    else:
        rewrite(target, union)
    return written


@click.command(name="import")
@GIVEN
@with_json
def import_files(files: tuple[Path, ...], json: bool) -> None:
    """Adds records to imported.jsonl in your folder, where compilations find them.

    It does not add records that are already there."""
    written = take_in(collect(files, strict=True).lines)
    if json:
        as_json(written)


@click.command(epilog=PULLING)
@click.argument("source")
@click.option("--sha256", metavar="DIGEST", help="Take the file SOURCE only if it has this digest.")
@click.option("--max-size", type=click.IntRange(1, 1 << 20), default=64, show_default=True, metavar="MIB",
              help="Take SOURCE only if it is not larger.")
@click.option("--dry-run", is_flag=True, help="Only print what would change.")
@with_json
@safe_interrupts(*ENDING)
def pull(source: str, sha256: str | None, max_size: int, dry_run: bool, json: bool) -> None:
    """Adds the records of SOURCE to yours, for compilations to use.

    SOURCE is a log, a folder of logs, the https address of a log, or a Git repository. The command reads the logs in a
    folder and in its tuning_logs/, and the same of the latest commit of a repository. If a line is damaged, it adds
    nothing. To undo, delete imported.jsonl in your folder; this also drops what `ecornn log import` added."""
    from ecornn.schedules import revisions
    from ecornn.tune.log import read_all
    from ecornn.tune.sharing import news
    from ecornn.tune.sources import fetched

    with said_while(f"reading {source}") as told:
        theirs = fetched(source, max_size << 20, sha256, told)
        for problem in theirs.problems:  # a newer ecornn's lines
            click.echo(f"skipped {problem}", err=True)
        told("comparing records")
        new, found = news(read_all(), theirs.lines, revisions())
    written = {**take_in(new, dry_run), "dry_run": dry_run, "devices": found}
    if json:
        as_json(written)
        return
    for device, count in found.items():
        click.echo(f"{device}: new records: {count['records']}; layers that had none: {count['first']}; layers with a "
                   f"faster one: {count['faster']}; records that contradict yours: {count['contradictions']}")


@click.command(epilog=PUSHING)
@click.argument("folder", type=FOLDER)
@FILES
@RUNS
@click.option("--branch", metavar="NAME", help="Commit the files on this new branch of FOLDER, a Git repository; its "
                                               "working tree does not change.")
@with_json
@safe_interrupts(*ENDING)
def push(folder: Path, files: tuple[Path, ...], device: str | None, since: datetime | None, branch: str | None,
         json: bool) -> None:
    """Adds your records to a repository of logs in FOLDER, and prints a text for a pull request. It sends nothing.

    Without FILES it takes your own records, but not those that ship or that you have imported. It leaves out records
    that the repository already has, failures and slow configurations. It writes one file for each device to
    FOLDER/tuning_logs."""
    from ecornn.schedules import revisions
    from ecornn.tune.sharing import add, request

    require_folder("FOLDER", folder)
    with said_while("choosing records"), repository(folder, branch) as (place, commit):
        added = add(place, chosen(files, device, since).lines, revisions())
        if not added:
            raise RecordError(f"FOLDER={str(folder)!r} already has all of these records that others can use; {MAKE}")
        text = request(added)
        commit(text)
    names = [str(path.relative_to(place)) for path in added]
    for name in names:
        click.echo(f"wrote {name} in {folder}" if branch is None else f"committed {name} to {branch}", err=True)
    if json:
        as_json({"folder": str(folder), "branch": branch, "files": names, "text": text,
                 "records": sum(map(len, added.values()))})
    else:
        click.echo(text, nl=False)


def require_folder(argument: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ArgumentError(argument, str(folder), "a folder that exists")


@contextlib.contextmanager
def repository(folder: Path, branch: str | None) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Gives a folder for new files and a function that commits them to a branch; without one it does nothing."""
    from ecornn.tune.sources import on_branch

    if branch is None:
        yield folder, lambda text: None
    else:
        with on_branch(folder, branch) as place:
            yield place


@click.command()
@click.argument("folder", type=FOLDER)
@click.option("--base", type=FOLDER, required=True, help="A checkout from before the change.")
@with_json
def check(folder: Path, base: Path, json: bool) -> None:
    """Checks a change of a repository of logs. FOLDER is a checkout with the change.

    A change may only add logs to tuning_logs/. They must be named as `ecornn log push` names them, and each must have
    records of one device, no damaged line, and no record that contradicts another one. The exit code is 1 if the change
    breaks a rule."""
    from ecornn.tune.sharing import faults

    require_folder("FOLDER", folder)
    require_folder("--base", base)
    if folder.samefile(base):
        raise ArgumentError("--base", str(base), "another folder than FOLDER")
    found = faults(base, folder)
    if json:
        as_json({"faults": found})
    else:
        click.echo("\n".join(found) or "the change breaks no rule")
    if found:
        raise SystemExit(1)
