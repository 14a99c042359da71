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

from ecornn.cli.common import (
    PATH,
    STOPPED,
    VERBOSE,
    GroupedCommand,
    as_json,
    layer_options,
    load_tvm,
    said_while,
    with_json,
)
from ecornn.errors import ArgumentError, CellError, DTypeError, ScheduleError
from ecornn.interrupts import ENDING, safe_interrupts
from ecornn.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console

    from ecornn.layer_spec import LayerSpec
    from ecornn.tune.record import Choice
    from ecornn.tune.remote import Tracker
    from ecornn.tune.session import Result, Session
    from ecornn.tune.space import ConfigSpace

EPILOG = """\b
Examples:
  ecornn tune --cell lstm --hidden 800
  ecornn tune --cell gru --hidden 256 --batch 1 --seq 100 --target cpu --trials 24
  ecornn tune --cell my_cell.py:MinimalGatedUnit --hidden 512 --time-limit 300
  ecornn tune --cell lstm --hidden 800 --training

With --training there are two searches: first of the forward pass, then of the backward pass. Each makes --trials
trials. The forward pass takes at most half of --time-limit, the backward pass the rest. `ecornn compile --training`
uses the best of both. On a CPU the backward pass has no knobs, so there is one search.

This command tunes every combination of its values; each layer has its own trials and time limit:

\b
  ecornn tune --cell lstm --cell gru --hidden 256 --hidden 512 --batch 1 --batch 16 --time-limit 60

This one measures on GPUs of other machines, each of which runs `ecornn serve`:

\b
  ecornn tune --cell lstm --hidden 800 --tracker 127.0.0.1:9190 --key h100

The last one reads the layers from a file, with the options of a layer on each line, such as `--cell lstm --hidden 800
--training`. With a tracker it tunes as many layers at a time as there are servers. If a server is lost, other servers
repeat its unfinished trials:

\b
  ecornn tune --workloads layers.txt --tracker 127.0.0.1:9190 --key h100

Every trial is saved to the log as soon as it is done. If you stop a run, the same command resumes it. If the run is
finished, the command shows its result; with more --trials it searches further.
"""
NAMES = tuple(name for name in Workload.__struct_fields__ if name != "entry")  # options of a layer
ONE_SEARCH = "The backward pass has no knobs on a CPU, so only the forward pass was searched."


@click.command(cls=GroupedCommand, epilog=EPILOG)
@layer_options(required=False, many=True)
@click.option("--workloads", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Read the layers from this file, which has the options of a layer on each line.")
@click.option("--training", is_flag=True, help="Search the backward pass, too (GPU only).")
@click.option("--trials", type=click.IntRange(min=1, max=100_000), metavar="N",
              help="Number of configurations to try.  [default: 48 on a CPU, 128 on a GPU]")
@click.option("--timeout", type=click.FloatRange(min=0.1), metavar="SECONDS", default=60.0, show_default=True,
              help="Stop a build or a measurement that takes longer.")
@click.option("--time-limit", type=click.FloatRange(min=1.0), metavar="SECONDS",
              help="End the search of a layer after this time, which includes earlier runs that it resumes.")
@click.option("--early-stop/--no-early-stop", default=True, show_default=True, help="End after 59 trials in a row that "
              "were not faster by 1%. Then, with 95% confidence, fewer than one in twenty more would be faster.")
@click.option("--seed", type=click.IntRange(min=0, max=1 << 30), metavar="N", default=0, show_default=True,
              help="Seed of the search and of the random inputs.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Continue the run that is in the log.")
@click.option("--output", type=PATH, metavar="LOG.jsonl",
              help="Log file.  [default: one for each layer and device in your data folder]")
@click.option("--tensorboard", type=PATH, metavar="DIR", help="Also log each trial and the result for TensorBoard: "
              "`tensorboard --logdir DIR` shows them. Needs tensorboardX or tensorboard.")
@click.option("--schedule", metavar="NAME", help="Search this schedule only.")
@click.option("--torch/--no-torch", default=True, show_default=True, help="First time PyTorch's layer for comparison, "
              "if PyTorch is installed. This takes a few seconds.")
@click.option("--tracker", metavar="HOST:PORT", help="Measure on the servers of this TVM RPC tracker.")
@click.option("--key", default="ecornn", show_default=True, help="With --tracker, the key of the servers to use.")
@click.option("--allow-remote", is_flag=True, help="Allow a tracker on another machine. RPC lets whoever reaches a "
              "server run any code on it, so use it on trusted networks only.")
@VERBOSE
@with_json
@click.version_option(package_name="ecornn")
@click.pass_context
def tune(context: click.Context, target: str | None, timeout: float, seed: int, tracker: str | None, key: str,
         allow_remote: bool, torch: bool, verbose: bool, json: bool, tensorboard: Path | None, **options: Any) -> None:
    """Searches for the fastest schedule and knobs of a layer, or of many layers.

    It tries many configurations on this machine's GPU or CPU, and writes each trial to a log, which later compilations
    read. A configuration counts only if its output matches a float64 reference. Configurations run in a process of
    their own, which is stopped if one hangs."""
    layers = asked_layers(context, options.pop("workloads"), {n: options.pop(n) for n in (*NAMES, "training")})
    try:
        with contextlib.ExitStack() as stack, safe_interrupts(*ENDING):
            from rich.console import Console

            load_tvm()
            with said_while("loading the tuner"):
                from ecornn.tune.loggers import TensorBoard
                from ecornn.tune.session import Session

            options["logger"] = None if tensorboard is None else TensorBoard(tensorboard)
            if options["logger"] is not None:
                stack.callback(options["logger"].finish)
            console = Console(soft_wrap=True, highlight=False, quiet=json)  # results; how it goes is on stderr
            done: list[Result] = []
            servers = found_tracker(tracker, key, allow_remote)
            with Session(target, timeout=timeout, seed=seed, tracker=servers) as session:
                good = all(run(console, session, layers, target, options, done, torch, verbose))
    except KeyboardInterrupt:
        click.echo("\nStopped. The log has every finished trial; to continue, run the same command again"
                   + ("" if options["resume"] else " without --no-resume") + ".", err=True)
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
        raise click.UsageError(f"--{beside[0]} cannot be used with --workloads: write it into the lines of the file",
                               context)
    return read(path)


def found_tracker(address: str | None, key: str, allow_remote: bool) -> Tracker | None:
    """The tracker to measure with, warned of where it is another machine's."""
    from ecornn.tune.remote import Tracker, is_loopback

    tracker = Tracker.parse(address, key, allow_remote) if address is not None else None
    if tracker is not None and not is_loopback(tracker.host):
        click.echo(f"warning: {tracker} is another machine. Whoever controls it or its servers can run any code here, "
                   "so use it on a trusted network only.", err=True)
    return tracker


def run(console: Console, session: Session, asked: Sequence[dict[str, Any]], target: str | None,
        options: dict[str, Any], done: list[Result], torch: bool, verbose: bool = False) -> list[bool]:
    """Tunes layers in turn, and adds results to ``done``; says of each if it has a best. A failure does not end the
    rest."""
    from rich.console import Console

    from ecornn.cli.torch_time import torch_us
    from ecornn.tune.log import microseconds
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
            several = len(space.schedules) > 1
            progress.print(f"{count}tuning {work} on {device.name} ({device.arch})\n"
                           f"{count}schedule{'s' * several}: {', '.join(space.schedules)}", markup=False)
            if resumed:
                progress.print(f"{count}resuming: {resumed} trial{'s are' if resumed > 1 else ' is'} in the log",
                               markup=False)
            if torch and session.tracker is None:
                one.stage("timing PyTorch's layer")
                if (theirs := torch_us(work, device)) is not None:
                    progress.print(f"{count}PyTorch's layer takes {microseconds(theirs)} per step", markup=False)

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
            console.print(f"{count}{line(entry, verbose)}", markup=False)
        return all(entry.best is not None for entry in both)

    with Meter(progress, len(layers)) as meter:
        good = each(tune_one, layers, session)
    if len(layers) == 1:
        for one in done:
            show(console, one, verbose)
        if layers[0].training and len(done) == 1:
            console.print(ONE_SEARCH)
        if done[0].best is not None:
            console.print("to compile it:\n  " + use_of(done[0], layers[0], target), markup=False)
        return good
    if any(layer.training for layer in layers) and session.device.kind == "llvm":
        console.print(ONE_SEARCH)
    use = "ecornn compile" + " --training" * layers[0].training + (f" --target {target}" if target else "")
    console.print(f"{sum(good)} of {len(layers)} layers were tuned; `{use}` uses the results", markup=False)
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


def text_of(choice: Choice, verbose: bool) -> str:
    """The name of a schedule; ``verbose``: with its knobs."""
    from ecornn.schedules import config_text

    return f"{choice.schedule} {config_text(choice.config)}" if verbose else choice.schedule


def line(result: Result, verbose: bool) -> str:
    """A result on one line."""
    from ecornn.tune.log import microseconds, words

    finish = result.finish
    if finish.best is None or finish.best_us is None:
        return f"{result.workload}: no candidate ran with the right output; the errors are in {result.log}"
    gain = f", {words(result.gain, finish.default_us)}" if result.gain and finish.default_us else ""
    return (f"{result.workload}: {microseconds(finish.best_us)} per step{gain}, {finish.trials} trials in "
            f"{finish.seconds:.0f} s: {text_of(finish.best, verbose)}")


def show(console: Console, result: Result, verbose: bool) -> None:
    """Prints the end of a run."""
    from ecornn.tune.log import microseconds, words

    finish, work = result.finish, result.workload
    if work.backward:
        console.print("backward:")
    if not result.fresh:
        console.print(f"This run was finished at {finish.time} after {finish.trials} trials; for more, increase "
                      "--trials.")
    if finish.reason == "converged":
        console.print(f"The search ended early, after {finish.trials} trials: with 95% confidence, fewer than one in "
                      "twenty further trials would be faster by 1%. --no-early-stop searches on.")
    if finish.reason == "time":
        console.print(f"The search ended at --time-limit, after {finish.trials} trial{'s' * (finish.trials != 1)}; "
                      "with a longer limit it continues.")
    for reason, count in result.failures.items():
        console.print(f"{count} trial{'s' * (count != 1)} failed: {reason}", markup=False)
    if result.noisy:
        noisy = "1 timing was" if result.noisy == 1 else f"{result.noisy} timings were"
        console.print(f"{noisy} noisy (a busy machine or a changing clock), so candidates that are close may be in the "
                      "wrong order.")
    console.print(f"log: {result.log}", markup=False)
    if finish.best is None or finish.best_us is None:
        console.print("No candidate ran with the right output; the log has the error of each.")
        return
    console.print(f"best: {text_of(finish.best, verbose)}", markup=False)
    console.print(f"time: {microseconds(finish.best_us)} per step, {finish.best_us * work.seq / 1e3:.4g} ms for "
                  f"T={work.seq}")
    if finish.best == finish.default:
        console.print("gain: none; no trial was faster than the untuned default")
    elif finish.default_us is not None and result.gain is not None:
        console.print(f"gain: {words(result.gain, finish.default_us)}")


def use_of(result: Result, layer: LayerSpec, target: str | None) -> str:
    """The command that compiles what was tuned, to be pasted into a shell."""
    work, name = result.workload, result.workload.cell.split("@")[0]
    options = {key: getattr(work, key) for key in NAMES} | {"cell": str(layer.cell)}
    words = [word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))]
    words += ["--training"] * layer.training + (["--target", target] if target is not None else [])
    return shlex.join(["ecornn", "compile", *words, "-o", f"{name}{work.hidden}.so"])


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
