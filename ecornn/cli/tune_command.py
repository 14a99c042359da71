"""``ecornn tune``."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ecornn.cli.common import PATH, STOPPED, as_json, layer_options, load_tvm, said_while, with_json
from ecornn.errors import ArgumentError, CellError, DTypeError, ScheduleError
from ecornn.interrupts import ENDING, safe_interrupts
from ecornn.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console

    from ecornn.layer_spec import LayerSpec
    from ecornn.tune.remote import Tracker
    from ecornn.tune.session import Result, Session
    from ecornn.tune.space import ConfigSpace

EPILOG = """\b
Examples:
  ecornn-tune --cell lstm --hidden 800
  ecornn-tune --cell gru --hidden 256 --batch 1 --seq 100 --target cpu --trials 24
  ecornn-tune --cell my_cell.py:MinimalGatedUnit --hidden 512 --time-limit 300
  ecornn-tune --cell lstm --hidden 800 --training

--training searches two things, one after the other: the layer's own pass, whose records also serve the forward pass of
a training step, and the recurrence of its backward pass. Each has --trials; forward has half of --time-limit at most,
backward what is left. `ecornn-compile --training` uses the best of both. On a CPU the backward pass has no knobs, so
there is one search.

Many layers, every combination, with processes that stay warm; each has its own trials and time limit:

\b
  ecornn-tune --cell lstm --cell gru --hidden 256 --hidden 512 --batch 1 --batch 16 --time-limit 60

On other GPUs, each with a server (`ecornn serve --help`):

\b
  ecornn-tune --cell lstm --hidden 800 --tracker 127.0.0.1:9190 --key h100

A list of layers, a line of options each, such as `--cell lstm --hidden 800 --training`; with a tracker as many at once
as there are servers. A server that goes away costs the trials that it was at, which others make again:

\b
  ecornn-tune --workloads layers.txt --tracker 127.0.0.1:9190 --key h100

Every trial is on the disk as soon as it is done. The same command again goes on with a run
that was stopped, and returns at once if it was finished; with more --trials it goes on from there.
"""
NAMES = tuple(name for name in Workload.__struct_fields__ if name != "entry")  # options of a layer
ONE_SEARCH = "A CPU's backward pass has no knobs: what was found is the forward pass's, and all there is to search."


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@layer_options(required=False, many=True)
@click.option("--workloads", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Instead of the options above: a file with those of a layer on each line.")
@click.option("--training", is_flag=True, help="Search the backward pass, too (GPU).")
@click.option("--trials", type=click.IntRange(min=1, max=100_000),
              help="Configurations to try.  [default: 48 on a CPU, 128 on a GPU]")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=60.0, show_default=True,
              help="Seconds one build, and one measurement, may take.")
@click.option("--time-limit", type=click.FloatRange(min=1.0),
              help="Seconds for the whole run of a layer, earlier sessions included.")
@click.option("--early-stop/--no-early-stop", default=True, show_default=True, help="End after 59 trials in a row that "
              "were not faster by 1%: at 95% confidence fewer than one in twenty more would be.")
@click.option("--seed", type=click.IntRange(min=0, max=1 << 30), default=0, show_default=True,
              help="Of the search and of the random data.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Go on with the run that the log has.")
@click.option("--output", type=PATH, metavar="LOG.jsonl",
              help="Log file.  [default: one for each layer and device in your data folder]")
@click.option("--schedule", help="Search this schedule only.")
@click.option("--torch/--no-torch", default=True, show_default=True, help="Where PyTorch is installed, time its layer "
              "first, a few seconds, and show the best so far against it.")
@click.option("--tracker", metavar="HOST:PORT", help="Measure on the servers of this TVM RPC tracker.")
@click.option("--key", default="ecornn", show_default=True, help="Of the servers, with --tracker.")
@click.option("--allow-remote", is_flag=True,
              help="A tracker on another machine. RPC is remote execution: trusted networks only.")
@with_json
@click.version_option(package_name="ecornn")
@click.pass_context
def tune(context: click.Context, target: str | None, timeout: float, seed: int, tracker: str | None, key: str,
         allow_remote: bool, torch: bool, json: bool, **options: Any) -> None:
    """Searches the fastest schedule and knobs of a layer, or of many.

    Builds run in processes that see no GPU; measurements run in one that is killed when a
    candidate hangs. A candidate counts only if its output matches a float64 reference."""
    layers = asked_layers(context, options.pop("workloads"), {n: options.pop(n) for n in (*NAMES, "training")})
    try:
        with safe_interrupts(*ENDING):
            from rich.console import Console

            load_tvm()
            with said_while("loading the tuner"):
                from ecornn.tune.session import Session

            console = Console(soft_wrap=True, highlight=False, quiet=json)  # results; how it goes is on stderr
            done: list[Result] = []
            servers = found_tracker(tracker, key, allow_remote)
            with Session(target, timeout=timeout, seed=seed, tracker=servers) as session:
                good = all(run(console, session, layers, target, options, done, torch))
    except KeyboardInterrupt:
        click.echo("\nStopped. Every trial that was done is in the log; the same command goes on"
                   + ("" if options["resume"] else ", without --no-resume") + ".", err=True)
        raise SystemExit(STOPPED) from None
    if json:
        as_json([{"workload": one.workload, "device": one.device.name, "log": str(one.log), "finish": one.finish,
                  "failures": one.failures, "gain": one.gain} for one in done])
    if not good:
        raise SystemExit(1)


def asked_layers(context: click.Context, path: Path | None, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The properties of each layer, from a file or the options of this command."""
    if path is None:
        missing = next((p for p in context.command.params if p.name in ("cell", "hidden") and not given[p.name]), None)
        if missing is not None:
            raise click.MissingParameter(ctx=context, param=missing)
        return combinations(given)
    if beside := [n for n in given if context.get_parameter_source(n) is not ParameterSource.DEFAULT]:
        raise click.UsageError(f"--{beside[0]} is in the lines of the file where there are --workloads", context)
    return read(path)


def found_tracker(address: str | None, key: str, allow_remote: bool) -> Tracker | None:
    """The tracker to measure with, warned of where it is another machine's."""
    from ecornn.tune.remote import Tracker, is_loopback

    tracker = Tracker.parse(address, key, allow_remote) if address is not None else None
    if tracker is not None and not is_loopback(tracker.host):
        click.echo(f"warning: {tracker} and its servers are trusted with what they are sent; RPC is remote execution",
                   err=True)
    return tracker


def run(console: Console, session: Session, asked: Sequence[dict[str, Any]], target: str | None,
        options: dict[str, Any], done: list[Result], torch: bool) -> list[bool]:
    """Tunes layers in turn, and adds results to ``done``; says of each if it has a best. A failure does not end the
    rest."""
    from rich.console import Console

    from ecornn.cli.torch_time import torch_us
    from ecornn.tune.meter import Meter

    progress = Console(stderr=True, soft_wrap=True, highlight=False)
    if session.tracker is not None:  # a compilation, which has no tracker, is for this machine unless it is told
        target = session.device.arch
    # what is wrong with the last one is said before the first is tuned
    layers = [session.layer(**properties) for properties in asked]

    def tune_one(number: int, layer: LayerSpec) -> bool:
        count = f"[{number}/{len(layers)}] " if len(layers) > 1 else ""

        def begin(space: ConfigSpace, resumed: int) -> None:
            work, device = space.task.workload, space.task.device
            progress.print(f"{count}{work} on {device.name} ({device.arch}): {', '.join(space.schedules)}"
                           + (f", {resumed} trials in the log" if resumed else ""), markup=False)
            if torch and session.tracker is None:
                one.stage("timing PyTorch's layer")
                if (theirs := torch_us(work, device)) is not None:
                    progress.print(f"{count}PyTorch's layer: {theirs:.4g} µs/step", markup=False)

        try:
            with meter.layer(count.strip(), layer.training) as one:
                result = session.tune_layer(layer, **options, report=one.report, begin=begin, stage=one.stage)
        except (CellError, DTypeError, ScheduleError) as error:
            if len(layers) == 1:
                raise
            progress.print(f"{count}error: {error}", markup=False)
            return False
        done.extend(both := results(result))
        for entry in both if len(layers) > 1 else ():
            console.print(f"{count}{line(entry)}", markup=False)
        return all(entry.best is not None for entry in both)

    with Meter(progress, len(layers)) as meter:
        good = each(tune_one, layers, session)
    if len(layers) == 1:
        for one in done:
            show(console, one)
        if layers[0].training and len(done) == 1:
            console.print(ONE_SEARCH)
        if done[0].best is not None:
            console.print("use it:\n  " + use_of(done[0], layers[0], target), markup=False)
        return good
    if any(layer.training for layer in layers) and session.device.kind == "llvm":
        console.print(ONE_SEARCH)
    use = "ecornn compile" + " --training" * layers[0].training + (f" --target {target}" if target else "")
    console.print(f"{sum(good)} of {len(layers)} layers have a schedule; `{use}` uses it", markup=False)
    return good


def each(tune_one: Callable[[int, LayerSpec], bool], layers: Sequence[LayerSpec], session: Session) -> list[bool]:
    """Calls ``tune_one`` for each layer, from 1: as many at once as servers, but not layers that share a search."""
    count = 1 if session.tracker is None or len(layers) == 1 else min(len(layers), max(1, session.tracker.servers()))
    if count == 1:
        return [tune_one(number, layer) for number, layer in enumerate(layers, 1)]
    searches = [{layer.workload, *([layer.workload.adjoint] if layer.training else [])} for layer in layers]
    locks = {workload: threading.Lock() for workload in sorted({w for s in searches for w in s}, key=str)}

    def alone(number: int, layer: LayerSpec) -> bool:
        with contextlib.ExitStack() as stack:
            for workload, lock in locks.items():  # in one order for all
                if workload in searches[number - 1]:
                    stack.enter_context(lock)
            return tune_one(number, layer)

    with ThreadPoolExecutor(count) as threads:
        try:
            return [*threads.map(alone, range(1, len(layers) + 1), layers)]
        except BaseException:  # one cannot go on, or Ctrl-C: the others end with the session's processes
            session.close()
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def results(result: Result) -> list[Result]:
    return [result, *([result.backward] if result.backward is not None else [])]


def line(result: Result) -> str:
    """A result on one line."""
    from ecornn.schedules import config_text
    from ecornn.tune.log import words

    finish = result.finish
    if finish.best is None or finish.best_us is None:
        return f"{result.workload}: no candidate ran with the right output; see {result.log}"
    gain = f", {words(result.gain, finish.default_us)}" if result.gain and finish.default_us else ""
    return (f"{result.workload}: {finish.best_us:.4g} µs per step{gain}, {finish.trials} trials in "
            f"{finish.seconds:.0f} s: {finish.best.schedule} {config_text(finish.best.config)}")


def show(console: Console, result: Result) -> None:
    """Prints the end of a run."""
    from ecornn.schedules import config_text
    from ecornn.tune.log import words

    finish, work = result.finish, result.workload
    if work.backward:
        console.print("backward:")
    if not result.fresh:
        console.print(f"This run is finished: {finish.trials} trials, {finish.time}.")
    if finish.reason == "converged":
        console.print(f"Stopped early after {finish.trials} trials: at 95% confidence fewer than one in twenty more "
                      "would be faster by 1%; --no-early-stop goes on.")
    if finish.reason == "time":
        console.print(f"Stopped by --time-limit after {finish.trials} trial{'s' * (finish.trials != 1)}; "
                      "a longer one goes on.")
    for reason, count in result.failures.items():
        console.print(f"{count} failed: {reason}", markup=False)
    if result.noisy:
        noisy = "1 timing was" if result.noisy == 1 else f"{result.noisy} timings were"
        console.print(f"{noisy} noisy (a busy machine or a changing clock), so candidates that are close may be in the "
                      "wrong order.")
    console.print(f"log: {result.log}", markup=False)
    if finish.best is None or finish.best_us is None:
        console.print("No candidate ran with the right output; the log has each one's error.")
        return
    console.print(f"best: {finish.best.schedule} {config_text(finish.best.config)}", markup=False)
    text = f"time: {finish.best_us:.4g} µs per step, {finish.best_us * work.seq / 1e3:.4g} ms for T={work.seq}"
    if finish.best == finish.default:
        text += "; nothing that was tried is faster than the untuned default, which is best here"
    elif finish.default_us is not None and result.gain is not None:
        text += f"; {words(result.gain, finish.default_us)}"
    console.print(text)


def use_of(result: Result, layer: LayerSpec, target: str | None) -> str:
    """The command that compiles what was tuned, to be pasted into a shell."""
    work, name = result.workload, result.workload.cell.split("@")[0]
    options = {key: getattr(work, key) for key in NAMES} | {"cell": str(layer.cell)}
    words = [word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))]
    words += ["--training"] * layer.training + (["--target", target] if target is not None else [])
    return shlex.join(["ecornn-compile", *words, "-o", f"{name}{work.hidden}.so"])


def combinations(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The properties of each layer: every combination of options that hold one value or more."""
    each = itertools.product(*(given[name] or (None,) for name in NAMES))
    return [dict(zip(NAMES, values, strict=True)) | {"training": given["training"]} for values in each]


def read(path: Path) -> list[dict[str, Any]]:
    """The layers of a file, each once: a line has options of one or several; ``#`` begins a comment. Refuses others."""
    layers: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            if words := shlex.split(line, comments=True):
                for layer in combinations(_line.main(words, standalone_mode=False)):
                    layers.setdefault(tuple(layer.values()), layer)
        except (click.ClickException, ValueError) as error:
            why = error.format_message() if isinstance(error, click.ClickException) else str(error)
            raise ArgumentError("workloads", f"{path}:{number}: {line.strip()}",
                                f"options of a layer, such as --cell lstm --hidden 800 --training ({why})") from None
    if not layers:
        raise ArgumentError("workloads", str(path), "a file with the options of a layer on each line")
    return [*layers.values()]


@click.command(add_help_option=False)
@layer_options(many=True, target=False)
@click.option("--training", is_flag=True)
def _line(**properties: Any) -> dict[str, Any]:
    return properties
