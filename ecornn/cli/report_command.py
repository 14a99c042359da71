"""``ecornn report``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ecornn.cli.common import JSON, as_json, plain_errors, said_while
from ecornn.cli.log_command import collect

EPILOG = """\b
Examples:
  ecornn report -o report.html     what was tuned on this machine
  ecornn report theirs.jsonl --only "lstm T=300" -o page.html
  ecornn report --results times.json     beside other libraries
"""


@click.command(epilog=EPILOG)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[LOG]...")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("report.html"),
              show_default=True, metavar="PAGE.html", help="File to write; what is there is replaced.")
@click.option("--searches", type=click.IntRange(1, 1000), default=12, show_default=True,
              help="Searches that have a section, the latest ones.")
@click.option("--only", default="", metavar="TEXT", help="Layers whose name has this in it, as 'lstm T=300 B=20'.")
@click.option("--results", multiple=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also show times of other libraries, as `ecornn bench --json` or --csv wrote them; several times.")
@JSON
@plain_errors
def report(files: tuple[Path, ...], output: Path, searches: int, only: str, results: tuple[Path, ...],
           json: bool) -> None:
    """Makes one HTML page of tuning logs, by default those of your folder, to be read without a network.

    Of each search its curve, what each knob did, and what was found, held against the default and the floor; of all
    layers the best. Needs Jinja: pip install jinja2.
    """
    from ecornn.errors import ArgumentError
    from ecornn.report.measured import measured
    from ecornn.report.page import render
    from ecornn.tune.log import read_all, user_folder

    log = collect(files, strict=True) if files else read_all([user_folder()])
    if not log.trials():
        raise ArgumentError("LOG", ", ".join(map(str, files)) or str(user_folder()),
                            "logs with trials: `ecornn tune` makes one")
    runs = {trial.run for trial in log.trials() if only in str(trial.workload)}
    if not runs:
        raise ArgumentError("--only", only, "a part of the name of a layer in these logs, as "
                            f"{str(log.trials()[-1].workload)!r}")
    log = replace(log, lines=[line for line in log.lines if line.record.run in runs])
    beside = measured(results)
    with said_while("the best of all layers") as told:
        page = render(log, most=searches, results=beside, told=told)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    size = output.stat().st_size
    click.echo(f"wrote {output} ({size / 1024:.0f} KiB)", err=True)
    if json:
        as_json({"page": str(output), "bytes": size, "logs": sorted({str(line.path) for line in log.lines}),
                 "trials": len(log.trials()), "problems": log.problems})
