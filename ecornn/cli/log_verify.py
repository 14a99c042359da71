"""``ecornn log verify``."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import click

from ecornn.cli.common import plain_errors
from ecornn.cli.log_command import FILES, collect, text_of


@click.command()
@FILES
@click.option("--sample", "count", type=click.IntRange(min=1), default=8, show_default=True,
              help="Records to measure again, drawn at random from the best of each workload.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=10.0, show_default=True,
              help="Percent that a time may have drifted.")
@click.option("--target", metavar="cuda|cpu", help="Device.  [default: cuda if there is a GPU, else cpu]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draw and the data.")
@plain_errors
def verify(files: tuple[Path, ...], count: int, tolerance: float, target: str | None, seed: int) -> None:
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
    with Session(target, seed=seed) as session:
        drawn, left = sample(best_lines(found, revisions()), session.device, count, seed)
        for reason, number in left.items():
            click.echo(f"{number} left out, {reason}")
        drifts, bad = [], 0
        for check in measure(drawn, session):
            off = check.drift is None or abs(check.drift - 1) * 100 > tolerance
            bad += off
            if check.drift is None:
                said = f"failed: {check.outcome.error}"
            else:
                drifts.append(check.drift)
                assert check.outcome.times is not None
                said = f"now {check.outcome.times.median:.4g} µs/step, {100 * (check.drift - 1):+.1f}%"
                said += " (noisy)" if check.outcome.noisy else ""
            click.echo(f"{'DRIFTED' if off else 'holds':8}{text_of(check.line)}  {said}  ({check.line.place})")
    if not drawn:
        click.echo(f"nothing to measure again on {session.device.name}")
        return
    middle = f", median drift {100 * (median(drifts) - 1):+.1f}%" if drifts else ""
    click.echo(f"{len(drawn) - bad} of {len(drawn)} hold within {tolerance:g}%{middle}")
    if bad:
        raise SystemExit(1)
