"""``ecornn log merge|export|import|prune``: the commands that write logs. What they wrote is said on standard error, or
with ``--json`` as an object on standard output."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecornn.cli.common import JSON, as_json, plain_errors
from ecornn.cli.log_command import FILES, collect

if TYPE_CHECKING:
    from ecornn.tune.log import Line, Log
    from ecornn.tune.record import AnyRecord
    from ecornn.tune.selection import Merged

GIVEN = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
NEW = click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path),
                   metavar="LOG.jsonl", help="File to write; must not exist.")


def merged(lines: Iterable[Line]) -> Merged:
    """The union; conflicts go to stderr."""
    from ecornn.tune.selection import merge

    found = merge(lines)
    for conflict in found.conflicts:
        click.echo(f"kept out {conflict}", err=True)
    return found


def write(output: Path, found: Merged, newer: Iterable[bytes] = ()) -> dict[str, Any]:
    """A new log, with these lines of a newer ecornn as they are, and what is said of it to programs;
    :class:`ArgumentError` where the file is there."""
    from ecornn.errors import ArgumentError
    from ecornn.tune.log import rewrite

    if output.exists():
        raise ArgumentError("--output", str(output), "a file that does not exist yet")
    unread = sorted(set(newer))

    def filled(there: Log) -> list[AnyRecord]:
        there.newer += unread
        return found.records

    rewrite(output, filled)
    click.echo(f"wrote {len(found.lines)} records to {output}"
               + f", and {len(unread)} lines of a newer ecornn as they are" * bool(unread), err=True)
    return {"file": str(output), "records": len(found.lines), "newer": len(unread),
            "kept_out": [str(conflict) for conflict in found.conflicts]}


def tell(there: Log) -> None:
    """Says what of a file that is written again cannot be read."""
    for problem in there.problems:
        click.echo(f"not read {problem}", err=True)
    lost = len(there.problems) - len(there.newer)
    if there.problems:
        click.echo(f"{lost} damaged lines are dropped, {len(there.newer)} of a newer ecornn stay", err=True)


@click.command(name="merge")
@GIVEN
@NEW
@JSON
@plain_errors
def merge_files(files: tuple[Path, ...], output: Path, json: bool) -> None:
    """Makes one log of several: their union, the same whatever their order.

    Equal records count once. Of records that contradict each other the one that promises less is
    kept; those, and damaged lines, are reported with file and line and kept out.
    """
    written = write(output, merged(collect(files, strict=True).lines))
    if json:
        as_json(written)


@click.command()
@FILES
@NEW
@click.option("--best", "only_best", is_flag=True,
              help="Only the fastest trial of each workload and device: what an application ships.")
@JSON
@plain_errors
def export(files: tuple[Path, ...], output: Path, only_best: bool, json: bool) -> None:
    """Writes one log to share, without the lines that are damaged. Without FILES: all there is."""
    from ecornn.schedules import revisions
    from ecornn.tune.selection import best_lines

    found = collect(files)
    written = write(output, merged(best_lines(found, revisions()) if only_best else found.lines))
    if json:
        as_json(written)


@click.command(name="import")
@GIVEN
@JSON
@plain_errors
def import_files(files: tuple[Path, ...], json: bool) -> None:
    """Adds records to imported.jsonl in your folder, where look-up finds them.

    Records that are there already are not added again.
    """
    from ecornn.tune.folders import user_folder
    from ecornn.tune.log import rewrite
    from ecornn.tune.selection import event

    target, lines = user_folder() / "imported.jsonl", collect(files, strict=True).lines
    written: dict[str, Any] = {"file": str(target)}

    def union(there: Log) -> list[AnyRecord]:
        tell(there)
        found = merged([*there.lines, *lines])
        known = {event(line.record) for line in there.lines}
        added = sum(event(line.record) not in known for line in found.lines)
        click.echo(f"{added} records added to {target}, {len(found.lines)} in all", err=True)
        written.update(added=added, records=len(found.lines), kept_out=[str(c) for c in found.conflicts])
        return found.records

    rewrite(target, union)
    if json:
        as_json(written)


@click.command()
@GIVEN
@click.option("--keep", type=click.IntRange(min=1), default=16, show_default=True,
              help="Configurations of each workload and device, the fastest ones.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="LOG.jsonl",
              help="File to write; must not exist.  [default: each file in place]")
@JSON
@plain_errors
def prune(files: tuple[Path, ...], keep: int, output: Path | None, json: bool) -> None:
    """Drops what look-up has no use for: failures, slow configurations, stale ones that are known again.

    Runs that are not finished stay whole, so that they can go on. Damaged lines are dropped; those of a newer ecornn
    stay.
    """
    from ecornn.errors import ArgumentError
    from ecornn.schedules import revisions
    from ecornn.tune.log import rewrite
    from ecornn.tune.selection import worth_keeping

    written: list[dict[str, Any]] = []
    if output is not None:
        log = collect(files)
        one = write(output, merged(worth_keeping(log.lines, revisions(), keep)), log.newer)
        written.append({**one, "before": len(log.lines)})
    for path in files if output is None else ():
        if not path.exists():
            raise ArgumentError("FILES", str(path), "a log that exists")

        def selected(there: Log, path: Path = path) -> list[AnyRecord]:
            tell(there)
            kept = worth_keeping(there.lines, revisions(), keep)
            click.echo(f"{path}: {len(kept)} of {len(there.lines)} records kept", err=True)
            written.append({"file": str(path), "records": len(kept), "newer": len(there.newer), "kept_out": [],
                            "before": len(there.lines)})
            return [line.record for line in kept]

        rewrite(path, selected)
    if json:
        as_json(written)
