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

from ecornn.cli.common import PATH, PROPERTIES, TARGET, GroupedCommand, as_json, every, told_aloud, with_json
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
Exit code 1: ecornn's result is wrong, or a layer
of a grid failed. 130: you stopped the command; the
finished layers are printed.
"""
CHANGED: dict[str, dict[str, Any]] = {
    "batch": {"default": None, "show_default": False, "help": "Batch size B.  [default: 20, or the module's]"},
    "seq": {"default": None, "show_default": False, "help": "Sequence length T.  [default: 300, or the module's]"},
    "training": {"help": "Time the forward and backward passes, with the gradients of x and of all weights."}}
OF_CALL = ("cell", "batch", "seq", "training", "threads")  # what a module's file leaves open


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("module", required=False, type=PATH)
@every([click.option(f"--{name}", **settings | CHANGED.get(name, {})) for name, settings in PROPERTIES.items()
        if name not in ("lengths", "resets", "sequences")])
@TARGET
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N",
              help="Number of CPU threads of each library.  [default: the physical cores]")
@click.option("--against", metavar="LIBRARY,...", help=(
    "Libraries to compare with: cudnn, torch, onnxruntime, or none. torch is the layer of torch.nn, without cuDNN; "
    "for a cell that torch.nn lacks it is a loop over the step, and cudnn is the nearest cell of cuDNN.  [default: "
    "cudnn on a GPU, torch on a CPU, if PyTorch is installed]"))
@click.option("--grid", type=PATH, metavar="FILE",
              help="Time the layers of this file: CSV or a JSON list of objects with the names of these options, or "
                   "TOML, which may have lists of values and variants of ecornn. The options set what a layer omits.")
@click.option("--only", multiple=True, metavar="WORDS",
              help="Time only the layers of the grid whose name has all of these words. May be repeated.")
@click.option("--list", "listed", is_flag=True, help="List the layers of the grid, and time nothing.")
@click.option("--output", type=PATH, metavar="FILE.jsonl", help="Append the result of each layer to this file. Layers "
              "that it already has are skipped, so that the same command continues a stopped run.")
@click.option("--jobs", type=click.IntRange(0, 1024), metavar="N", default=0, show_default=True,
              help="Compile N layers of the grid at a time, in processes, and time them in another process, which is "
                   "replaced if a layer hangs. 0 does both in this process.")
@click.option("--longest", type=click.FloatRange(min=1), metavar="SECONDS", default=120.0, show_default=True,
              help="With --jobs, the time after which a layer counts as failed.")
@click.option("--reproduce", metavar="FILE[:N]", help="Time row N of this file of results (--json or --csv) again, and "
              "compare with the earlier times.")
@click.option("--seconds", type=click.FloatRange(min=0.01), metavar="SECONDS", default=2.0, show_default=True,
              help="Approximate time for timing each library, which takes a few runs at least.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True,
              help="Seed of the weights and inputs.")
@click.option("--csv", type=PATH, metavar="FILE", help="Also write a line for each layer to this file.")
@with_json
@safe_interrupts(*ENDING)
def bench(module: Path | None, target: str | None, threads: int | None, against: str | None, grid: Path | None,
          only: tuple[str, ...], listed: bool, output: Path | None, jobs: int, longest: float, reproduce: str | None,
          seconds: float, seed: int, csv: Path | None, json: bool, **layer: Any) -> None:
    """Times a layer, or a module file, against other libraries.

    The layer is compiled with the best tuning records that apply. All libraries get the same random weights and inputs.
    Their outputs or gradients are first compared with float64; wrong ones are not timed. After a warm-up the libraries
    take turns, with new inputs in each turn; on a GPU they run as CUDA graphs. Times are microseconds per step: the
    median and percentiles of whole calls, divided by T."""
    from ecornn.bench.grid import selected
    from ecornn.bench.measure import Plan
    from ecornn.bench.peers import named
    from ecornn.bench.results import CsvFile, RowLog, append, environment, read_row, shown

    given = {name: value for name, value in (layer | {"target": target, "threads": threads}).items()
             if value not in (None, False)}
    if reproduce is not None and (given or module is not None or grid is not None):
        raise ArgumentError("--reproduce", reproduce, "no options that describe a layer, since its row does")
    earlier: Earlier | None = read_row(reproduce) if reproduce is not None else None
    calls, layers = asked(module, grid, earlier, given)
    if only:
        layers = selected(layers, only)
    if listed:
        click.echo("\n".join(" ".join(filter(None, (layer.group, layer.name))) for layer in layers))
        return
    log = RowLog(output) if output is not None else None
    if log is not None and (known := [layer for layer in layers if log.has(layer.name)]):
        click.echo(f"skipping {len(known)} of {len(layers)} layers, which are already in {output}", err=True)
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
        click.echo(f"stopped after {len(rows)} of {len(layers)} layers", err=True)
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
            raise ArgumentError("--grid", str(grid), "either a grid or a module file")
        if grid.suffix == ".toml":
            read = read_grid(grid)
            return read.calls, [structs.replace(layer, case=whole(layer.case)) for layer in read.expanded(str(grid))]
        cases = [whole(case) for case in read_cases(grid)]
    else:
        if module is not None and (beside := [name for name in given if name not in OF_CALL]):
            raise ArgumentError(f"--{beside[0]}", given[beside[0]], "no such option with a module file, which sets it")
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
                        click.echo(f"note: the {what} is now {now}; in the earlier result it was {then}", err=True)
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
