"""``ecornn log merge|export|import|prune``: the commands that write logs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ecornn.cli.common import plain_errors
from ecornn.cli.log_command import FILES, collect

if TYPE_CHECKING:
    from ecornn.tune.log import Line, Log
    from ecornn.tune.merge import Merged
    from ecornn.tune.record import AnyRecord

GIVEN = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
NEW = click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path),
                   metavar="LOG.jsonl", help="File to write; must not exist.")


def merged(lines: Iterable[Line]) -> Merged:
    """The union; conflicts go to stderr."""
    from ecornn.tune.merge import merge

    found = merge(lines)
    for conflict in found.conflicts:
        click.echo(f"kept out {conflict}", err=True)
    return found


def write(output: Path, found: Merged, newer: Iterable[bytes] = ()) -> None:
    """A new log, with these lines of a newer ecornn as they are; :class:`ArgumentError` where the file is there."""
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
               + f", and {len(unread)} lines of a newer ecornn as they are" * bool(unread))


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
@plain_errors
def merge_files(files: tuple[Path, ...], output: Path) -> None:
    """Makes one log of several: their union, the same whatever their order.

    Equal records count once. Of records that contradict each other the one that promises less is
    kept; those, and damaged lines, are reported with file and line and kept out.
    """
    write(output, merged(collect(files, strict=True).lines))


@click.command()
@FILES
@NEW
@click.option("--best", "only_best", is_flag=True,
              help="Only the fastest trial of each workload and device: what an application ships.")
@plain_errors
def export(files: tuple[Path, ...], output: Path, only_best: bool) -> None:
    """Writes one log to share, without the lines that are damaged. Without FILES: all there is."""
    from ecornn.schedules import revisions
    from ecornn.tune.selection import best_lines

    found = collect(files)
    write(output, merged(best_lines(found, revisions()) if only_best else found.lines))


@click.command(name="import")
@GIVEN
@plain_errors
def import_files(files: tuple[Path, ...]) -> None:
    """Adds records to imported.jsonl in your folder, where look-up finds them.

    Records that are there already are not added again.
    """
    from ecornn.tune.folders import user_folder
    from ecornn.tune.log import rewrite
    from ecornn.tune.merge import event

    target, lines = user_folder() / "imported.jsonl", collect(files, strict=True).lines

    def union(there: Log) -> list[AnyRecord]:
        tell(there)
        found = merged([*there.lines, *lines])
        known = {event(line.record) for line in there.lines}
        added = sum(event(line.record) not in known for line in found.lines)
        click.echo(f"{added} records added to {target}, {len(found.lines)} in all")
        return found.records

    rewrite(target, union)


@click.command()
@GIVEN
@click.option("--keep", type=click.IntRange(min=1), default=16, show_default=True,
              help="Configurations of each workload and device, the fastest ones.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="LOG.jsonl",
              help="File to write; must not exist.  [default: each file in place]")
@plain_errors
def prune(files: tuple[Path, ...], keep: int, output: Path | None) -> None:
    """Drops what look-up has no use for: failures, slow configurations, stale ones that are known again.

    Runs that are not finished stay whole, so that they can go on. Damaged lines are dropped; those of a newer ecornn
    stay.
    """
    from ecornn.errors import ArgumentError
    from ecornn.schedules import revisions
    from ecornn.tune.log import rewrite
    from ecornn.tune.selection import worth_keeping

    if output is not None:
        log = collect(files)
        write(output, merged(worth_keeping(log.lines, revisions(), keep)), log.newer)
        return
    for path in files:
        if not path.exists():
            raise ArgumentError("FILES", str(path), "a log that exists")

        def selected(there: Log, path: Path = path) -> list[AnyRecord]:
            tell(there)
            kept = worth_keeping(there.lines, revisions(), keep)
            click.echo(f"{path}: {len(kept)} of {len(there.lines)} records kept")
            return [line.record for line in kept]

        rewrite(path, selected)
