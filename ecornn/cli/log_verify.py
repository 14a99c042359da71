"""``ecornn log verify``."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ecornn.cli.common import JSON, as_json, plain_errors, said_while
from ecornn.cli.log_command import FILES, collect, text_of
from ecornn.interrupts import ENDING, safe_interrupts

if TYPE_CHECKING:
    from ecornn.tune.verify import Check

EPILOG = """\b
Examples:
  ecornn log verify                          8 records of this device
  ecornn log verify mine.jsonl --sample 30   more of a log of one's own
  ecornn log verify --target cpu --json
"""


@click.command(epilog=EPILOG)
@FILES
@click.option("--sample", "count", type=click.IntRange(min=1), default=8, show_default=True,
              help="Records to measure again, drawn at random from the best of each workload.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=10.0, show_default=True,
              help="Percent that a time may have drifted.")
@click.option("--target", metavar="cuda|cpu", help="Device.  [default: cuda if there is a GPU, else cpu]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draw and the data.")
@JSON
@plain_errors
@safe_interrupts(*ENDING)
def verify(files: tuple[Path, ...], count: int, tolerance: float, target: str | None, seed: int, json: bool) -> None:
    """Builds and measures a sample of records again, on this device, and reports drift.

    Exit code 1 where one failed or drifted beyond the tolerance. Records of other devices, of other
    revisions of their schedule and of cells that are not built in or have options are left out, and counted.
    """
    from ecornn.schedules import revisions
    from ecornn.tune.selection import best_lines
    from ecornn.tune.session import Session
    from ecornn.tune.verify import sample
    from ecornn.tune.verify import verify as measure

    found = collect(files)
    checks: list[dict[str, Any]] = []
    with Session(target, seed=seed) as session, said_while("building modules") as told:
        device = session.device
        drawn, left = sample(best_lines(found, revisions()), device, count, seed)
        for reason, number in left.items():
            click.echo(f"{number} left out, {reason}", err=True)
        for check in measure(drawn, session):
            told(f"measured {len(checks) + 1}/{len(drawn)}")
            holds = check.drift is not None and abs(check.drift - 1) * 100 <= tolerance
            checks.append({"file": str(check.line.path), "line": check.line.number, "trial": check.line.record,
                           "times": check.outcome.times, "drift": check.drift, "noisy": check.outcome.noisy,
                           "error": check.outcome.error, "holds": holds})
            if not json:
                click.echo(f"{'holds' if holds else 'DRIFTED':8}{text_of(check.line)}  {now(check)}  "
                           f"({check.line.place})")
    good = sum(check["holds"] for check in checks)
    if json:
        as_json({"device": device.name, "tolerance_percent": tolerance, "left_out": left, "checks": checks})
    elif not checks:
        click.echo(f"nothing to measure again on {device.name}", err=True)
    else:
        drifts = [check["drift"] for check in checks if check["drift"] is not None]
        middle = f", median drift {100 * (median(drifts) - 1):+.1f}%" if drifts else ""
        click.echo(f"{good} of {len(checks)} hold within {tolerance:g}%{middle}")
    if good < len(checks):
        raise SystemExit(1)


def now(check: Check) -> str:
    """What came of it."""
    if check.drift is None:
        return f"failed: {check.outcome.error}"
    assert check.outcome.times is not None
    return (f"now {check.outcome.times.median:.4g} µs/step, {100 * (check.drift - 1):+.1f}%"
            + " (noisy)" * check.outcome.noisy)
