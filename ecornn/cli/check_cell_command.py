"""``ecornn check-cell``."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from ecornn.cells.naming import load_cell
from ecornn.cli.common import SIZE, as_json, load_tvm, said_while, with_json
from ecornn.targets import resolve

if TYPE_CHECKING:
    from ecornn.cli.cell_checks import Outcome, Report

EPILOG = """\b
Examples:
  ecornn check-cell mine.py:Mine              this CPU, and code for an H100
  ecornn check-cell mine.py:Mine --hidden 96  for cells with heads or groups
  ecornn check-cell mine.py:Mine --target sm_80 --target sm_90a --json
  ecornn check-cell 'lstm(peepholes)'         built-in cells, too

\b
What the columns say:
  right   compiled, run, and close enough to the te step in NumPy float64
  wrong   beyond it: a fault of ecornn, or an operator that is not continuous
  yes     the schedule serves the cell, and its CUDA code was generated
  no      the schedule does not serve the cell; the table's notes say why
  fails   an unexpected error
Exits with 1 if the step cannot be analysed, or anything is wrong or fails.
"""
WIDTH = 80


@click.command("check-cell", epilog=EPILOG)
@click.argument("cell", metavar="FILE.py:NAME")
@click.option("--hidden", type=SIZE, default=64, show_default=True, help="Hidden size H to try.")
@click.option("--input", type=SIZE, help="Input size I to try.  [default: less than H, or H if each unit reads its own "
              "value of x]")
@click.option("--batch", type=SIZE, default=4, show_default=True, help="Batch size B to try.")
@click.option("--target", "targets", multiple=True, metavar="cpu|ARCH", default=("cpu", "sm_90a"), show_default=True,
              help="This CPU, or a GPU's architecture, which needs no GPU. May be repeated.")
@with_json
def check_cell(cell: str, hidden: int, input: int | None, batch: int, targets: tuple[str, ...], json: bool) -> None:
    """Tries a cell with every schedule and data type, at a small size, and says which serve it, and why others do not.

    It checks that the step can be analysed and differentiated, compares a CPU's results and gradients with those of
    NumPy in float64, and generates code for a GPU. It takes about twenty seconds, and needs no GPU."""
    from ecornn.cli.cell_checks import check_cell as checked

    load_tvm()
    devices = [resolve(target) for target in dict.fromkeys(targets)]
    with said_while("analysing the cell") as told:
        report = checked(cell, load_cell(cell), hidden, input, batch, devices, told)
    if json:
        as_json(report)
    else:
        click.echo(table(report))
    if not report.good:
        raise SystemExit(1)


def table(report: Report) -> str:
    """The report for people, at 80 columns: equal outcomes of a schedule on one line, reasons as notes."""
    notes: list[str] = []
    lines = [f"{report.cell}: I = {report.input}, H = {report.hidden}, B = {report.batch}, T = {report.steps}", ""]

    def word(outcome: Outcome) -> str:
        text = outcome.result or "-"
        if outcome.error is not None:
            text += f" {outcome.error:.0e}"
        if outcome.why:
            if outcome.why not in notes:
                notes.append(outcome.why)
            text += f" [{notes.index(outcome.why) + 1}]"
        return text

    lines.append(f"the step can be analysed: {word(report.analysis)}")
    if report.analysis.result == "yes":
        lines[-1] += f", {report.exchanges} exchange{'s' * (report.exchanges != 1)} between units a step"
        if report.wide.result != "yes":
            lines.append(f"  with I other than H: {word(report.wide)}")
    lines.append(f"the derived gradients agree with finite differences: {word(report.derivative)}")
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for row in report.rows:
        key = row.device, row.schedule, word(row.forward), word(row.gradients)
        groups.setdefault(key, []).append(row.dtype)
    if groups:
        lines += ["", f"{'device':<8}{'schedule':<18}{'type':<24}{'forward':<15}gradients"]
    before = "", ""
    for key, types in groups.items():
        device, schedule = ("" if key[:n] == before[:n] else key[n - 1] for n in (1, 2))
        first, *rest = textwrap.wrap(", ".join(types), 23)
        lines += [f"{device:<8}{schedule:<18}{first:<24}{key[2]:<15}{key[3]}".rstrip(),
                  *(f"{'':<26}{more}" for more in rest)]
        before = key[0], key[1]
    lines += [""] * bool(notes)
    for n, note in enumerate(notes, 1):
        first, *rest = note.splitlines() or [""]
        lines += textwrap.wrap(f"[{n}] {first}", WIDTH, subsequent_indent="    ", break_long_words=False)
        lines += [f"    {more.strip()}" for more in rest]  # the line of a file
    return "\n".join(lines)
