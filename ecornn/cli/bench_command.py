"""``ecornn bench``."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs, to_builtins

from ecornn.cli.common import PATH, PROPERTIES, TARGET, as_json, every, told_aloud, with_json
from ecornn.errors import ArgumentError, EcornnError, MissingPackageError
from ecornn.interrupts import ENDING, safe_interrupts

if TYPE_CHECKING:
    from ecornn.bench.grid import Case, Layer
    from ecornn.bench.measure import Plan
    from ecornn.bench.results import Earlier, Row

EPILOG = """\b
Examples:
  ecornn bench --cell lstm --hidden 512 --batch 16 \\
      --against cudnn,torch,onnxruntime
  ecornn bench --cell gru --hidden 768 --training
  ecornn bench --cell mine.py:Mine --hidden 256 \\
      --against torch,cudnn
  ecornn bench lstm800.so --seq 300 --batch 20
  ecornn bench --grid layers.csv --against torch \\
      --csv times.csv --json > times.json
  ecornn bench --reproduce times.csv:3
  ecornn bench --grid layers.toml --jobs 16 \\
      --output rows.jsonl

\b
A grid has the options' names in its first line:
  cell,hidden,batch,seq
  lstm,512,16,300
  gru,768,1,100

\b
Exit code 1: our result is wrong, or a layer of a
grid failed; 130: stopped, what was done is printed.
"""
CHANGED: dict[str, dict[str, Any]] = {
    "batch": {"default": None, "show_default": False, "help": "B.  [default: 20, or the module's]"},
    "seq": {"default": None, "show_default": False, "help": "T.  [default: 300, or the module's]"},
    "training": {"help": "Time forward and backward, with the gradients of x and all weights."}}
OF_CALL = ("cell", "batch", "seq", "training", "threads")  # what a module's file leaves open


@click.command(epilog=EPILOG)
@click.argument("module", required=False, type=PATH)
@every([click.option(f"--{name}", **settings | CHANGED.get(name, {})) for name, settings in PROPERTIES.items()
        if name not in ("lengths", "resets", "sequences")])
@TARGET
@click.option("--threads", type=click.IntRange(1, 1024), help="Of every side, on a CPU.  [default: the physical cores]")
@click.option("--against", metavar="SIDE,...", help=(
    "Whom to compare with: cudnn, torch, onnxruntime, or none. torch is torch.nn's layer, on a GPU without cuDNN; of a "
    "cell that torch.nn has not a loop over its step. cudnn is, of such a cell, its nearest.  [default: cudnn on a "
    "GPU, torch on a CPU, if PyTorch is installed]"))
@click.option("--grid", type=PATH, metavar="FILE",
              help="Many layers: CSV, or a JSON list of objects, with the options' names, or TOML, which has lists of "
                   "values, and sides of ours that are compiled otherwise. What a line leaves open the options say.")
@click.option("--only", multiple=True, metavar="WORDS",
              help="Layers of the grid with all of these words in their name; may repeat.")
@click.option("--list", "listed", is_flag=True, help="Say the grid's layers, measure nothing.")
@click.option("--output", type=PATH, metavar="FILE.jsonl", help="Append each layer's row to this file; those that it "
              "has are not measured again, so that the same command goes on where it was stopped.")
@click.option("--jobs", type=click.IntRange(0, 1024), default=0, show_default=True,
              help="Layers of the grid that are compiled at a time, ahead, in processes; they are then measured in a "
                   "process of their own, which is replaced where one hangs. 0: all in this process.")
@click.option("--longest", type=click.FloatRange(min=1), default=120.0, show_default=True,
              help="With --jobs: seconds after which a layer has failed.")
@click.option("--reproduce", metavar="FILE[:N]",
              help="The N-th row of results, of --json or --csv, again, and beside it.")
@click.option("--seconds", type=click.FloatRange(min=0.01), default=2.0, show_default=True,
              help="Of timing each side, about; a few runs at least.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights and inputs.")
@click.option("--csv", type=PATH, metavar="FILE",
              help="Also write a line for each layer to this file, as they are done.")
@with_json
@safe_interrupts(*ENDING)
def bench(module: Path | None, target: str | None, threads: int | None, against: str | None, grid: Path | None,
          only: tuple[str, ...], listed: bool, output: Path | None, jobs: int, longest: float, reproduce: str | None,
          seconds: float, seed: int, csv: Path | None, json: bool, **layer: Any) -> None:
    """Times a layer, or a module's file, against other libraries.

    The layer is compiled with the best tuning records that apply. All sides get the same random weights and inputs.
    Each one's output, or gradients, are held against float64 first: what is wrong is not timed. Then sides take turns,
    after a warm-up, on inputs that are new in each; on a GPU as CUDA graphs. Times are microseconds a step: the median
    and percentiles of whole calls, divided by T."""
    from ecornn.bench.grid import selected
    from ecornn.bench.measure import Plan
    from ecornn.bench.peers import named
    from ecornn.bench.results import CsvFile, RowLog, append, environment, read_row, shown

    given = {name: value for name, value in (layer | {"target": target, "threads": threads}).items()
             if value not in (None, False)}
    if reproduce is not None and (given or module is not None or grid is not None):
        raise ArgumentError("--reproduce", reproduce, "nothing beside it that says what is timed: its row does")
    earlier: Earlier | None = read_row(reproduce) if reproduce is not None else None
    calls, layers = asked(module, grid, earlier, given)
    if only:
        layers = selected(layers, only)
    if listed:
        click.echo("\n".join(" ".join(filter(None, (layer.group, layer.name))) for layer in layers))
        return
    log = RowLog(output) if output is not None else None
    if log is not None and (known := [layer for layer in layers if log.has(layer.name)]):
        click.echo(f"{len(known)} of {len(layers)} layers are in {output} already", err=True)
        layers = [layer for layer in layers if layer not in known]
    sides = named(against) if against is not None else earlier.against if earlier is not None else None
    rows: list[Row] = []
    stopped = False
    with contextlib.ExitStack() as stack:
        plan = Plan(sides, seconds, seed, stack.enter_context(told_aloud()), calls=calls)
        file = CsvFile(stack.enter_context(csv.open("w", newline=""))) if csv is not None else None
        try:
            for row in measured(layers, plan, earlier, jobs, longest):
                rows.append(row)
                if log is not None:
                    append(log, row)
                if file is not None:
                    file.add(row)
                if not json:
                    click.echo("\n".join(shown(row)))
        except KeyboardInterrupt:
            stopped = True
    if stopped:
        click.echo(f"stopped: {len(rows)} of {len(layers)} layers were done", err=True)
    if json:
        whole = {"environment": environment(rows[0] if rows else None)}
        as_json(whole | ({"rows": rows} if grid is not None or not rows else to_builtins(rows[0])))
    if stopped or not all(row.good for row in rows):
        raise SystemExit(130 if stopped else 1)


def asked(module: Path | None, grid: Path | None, earlier: Earlier | None,
          given: dict[str, Any]) -> tuple[int, list[Layer]]:
    """How many calls of a short sequence are timed as one, and the layers; refuses options that do not go together."""
    from ecornn.bench.grid import Case, Layer, name_of, read_grid
    from ecornn.bench.results import read_cases

    def whole(case: Case) -> Case:
        return structs.replace(Case(**given), **to_builtins(case))

    if earlier is not None:
        cases = [earlier.case]
    elif grid is not None:
        if module is not None:
            raise ArgumentError("--grid", str(grid), "none beside a module's file")
        if grid.suffix == ".toml":
            read = read_grid(grid)
            return read.calls, [structs.replace(layer, case=whole(layer.case)) for layer in read.expanded(str(grid))]
        cases = [whole(case) for case in read_cases(grid)]
    else:
        if module is not None and (beside := [name for name in given if name not in OF_CALL]):
            raise ArgumentError(f"--{beside[0]}", given[beside[0]], "none beside a module's file, which says it")
        cases = [Case(**given, module=str(module) if module is not None else None)]
    return 1, [Layer(name=name_of(case), case=case) for case in cases]


def measured(layers: list[Layer], plan: Plan, earlier: Earlier | None, jobs: int, longest: float) -> Iterator[Row]:
    """Rows as they are done, with what the grid says of their layers."""
    from ecornn.bench import measure

    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        rows = (measure.measured(layers, plan, Path(folder), jobs, longest) if jobs else in_this_process(layers, plan))
        for number, (layer, row) in enumerate(zip(layers, rows, strict=True), 1):
            if row.failed:
                click.echo(f"[{number}/{len(layers)}] error: {row.failed}", err=True)
            row.name, row.group, row.at_most, row.at_least = layer.name, layer.group, layer.at_most, layer.at_least
            if earlier is not None:
                row.earlier = earlier.medians
                for what in ("device", "schedule"):
                    then, now = getattr(earlier, what), getattr(row, what)
                    if then != now:
                        click.echo(f"the {what} was {then} then, and is {now} now", err=True)
            yield row


def in_this_process(layers: list[Layer], plan: Plan) -> Iterator[Row]:
    """Rows of the layers. One layer of a grid that cannot be measured does not end the others."""
    from ecornn.bench.measure import failed, measure

    for number, layer in enumerate(layers, 1):
        if len(layers) > 1:
            plan.told(f"[{number}/{len(layers)}]")
        against = plan.against if layer.against is None else layer.against
        try:
            yield measure(layer.case, replace(plan, own=layer.own, against=against))
        except MissingPackageError:  # of which every other layer would say the same
            raise
        except EcornnError as error:
            if len(layers) == 1:
                raise
            yield failed(layer.case, plan, str(error))
