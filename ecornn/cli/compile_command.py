"""``ecornn compile``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ecornn.cli.common import JSON, as_json, load_tvm, plain_errors, said_while
from ecornn.cli.planning import Asked, plan_options
from ecornn.errors import ArgumentError
from ecornn.interrupts import ENDING, safe_interrupts
from ecornn.workload import SERIAL

if TYPE_CHECKING:
    from ecornn.layer_spec import LayerSpec

EPILOG = """\b
Examples:
  ecornn-compile --cell lstm --hidden 800 --batch 20 -o lstm800.so
  ecornn-compile --cell gru --hidden 256 --dtype bfloat16 --target sm_90a -o gru256.so
  ecornn-compile --cell lstm --hidden 512 --layers 4 --bidirectional --lengths -o lstm4x512.so
  ecornn-compile --cell gru --weights-from model.safetensors --prefix encoder. -o encoder.so
  ecornn-compile model.onnx --node encoder_lstm --batch 8 -o encoder.so
  ecornn-compile --cell mine.py:Mine --hidden 512 --emit step      what a step does
  ecornn-compile --cell lstm --hidden 128 --target cpu --emit asm --emit-to lstm.s
  ecornn-compile --cell lstm --hidden 128 --target neoverse-v1 --emit object --emit-to lstm.o
  ecornn-compile --cell lstm --hidden 64 --target cpu --emit archive --emit-to lstm64.a      and lstm64.h
  ecornn-compile --cell lstm --hidden 800 --schedule fused_step --config units=32 -o lstm800.so
"""
EMIT = ("step", "cuda", "tir", "ptx", "asm", "object", "archive")
FILES = {"object": "an object file", "archive": "a static library"}  # of those, what is no text
EMITTED = {"cuda": ("step", "cuda", "tir", "ptx"), "llvm": ("step", "tir", "asm", "object", "archive")}  # by device


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@plan_options
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.so",
              help="The module file. May be left out with --emit.")
@click.option("--emit", type=click.Choice(EMIT),
              help="step: print what a step of the cell computes once, for all steps at once and between exchanges, "
              "in formulas, and its bytes. Else print the code that was generated; an object file, of a CPU's code, "
              "needs --emit-to, and so does an archive, a static library for C and C++ with a header beside it.")
@click.option("--emit-to", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write it to this file instead.")
@JSON
@click.version_option(package_name="ecornn")
@plain_errors
@safe_interrupts(*ENDING)
def compile(asked: Asked, output: Path | None, emit: str | None, emit_to: Path | None, json: bool) -> None:
    """Compiles a layer, or a stack of them, to one .so file, with the best tuning records that apply.

    The file runs with `ecornn.load("FILE.so").bind(weights)(x)`, on machines without a compiler too. The
    weights of an ONNX node are written beside it, as FILE.safetensors.
    """
    from ecornn.build.archive import name_of
    from ecornn.compiler import build, build_archive, generate

    load_tvm()
    if output is None and emit is None:
        raise ArgumentError("--output", None, "a file name, or --emit to see the code only")
    if emit_to is not None and emit is None:
        raise ArgumentError("--emit-to", str(emit_to), f"--emit {'|'.join(EMIT)} beside it")
    if emit in FILES and emit_to is None:
        raise ArgumentError("--emit-to", None, f"a file name: {FILES[emit]} is not text")
    if emit == "archive" and emit_to is not None:
        name_of(emit_to)
    if json and emit is not None and emit_to is None:
        raise ArgumentError("--json", True, "--emit-to beside --emit: both would go to standard output")
    check_files(asked.model, asked.weights_from, output, emit_to)
    layer = asked.layer()
    if emit == "step" and output is None:  # also of a step that no schedule serves
        show(step_of(layer.spec), emit_to)
        return
    planned, bound = asked.plan(layer), layer.weights
    kind = planned.device.kind
    if emit is not None and emit not in EMITTED[kind]:  # before anything is written
        raise ArgumentError("--emit", emit, f"one of {', '.join(EMITTED[kind])} for {kind}")
    words = [str(planned.workload), str(planned.stack), str(planned.overlap) if planned.overlap != SERIAL else ""]
    click.echo(", ".join(filter(None, words)) + f" on {planned.device.name}", err=True)
    for labels, chosen, why in planned.why():
        of = f" of {labels}" if labels else ""
        click.echo(f"schedule{of}: {chosen}\nwhy: {why}", err=True)
    written: list[Path | None] = []
    with said_while("compiling"):
        generated = build(planned, output) if output is not None else generate(planned)
    if output is not None:
        click.echo(f"wrote {output} ({output.stat().st_size / 1024:.0f} KiB)", err=True)
        weights_from = asked.weights_from
        if asked.model is not None:
            from ecornn.weight_files import save

            weights_from = output.with_suffix(".safetensors")
            save(weights_from, bound)
            click.echo(f"wrote {weights_from}", err=True)
        written = [output, weights_from] if asked.model is not None else [output]
        if weights_from is not None:
            more = f", prefix={asked.prefix!r}" if asked.prefix else ""
            click.echo(f'use it: ecornn.load("{output}").bind("{weights_from}"{more})', err=True)
    if emit == "object" and emit_to is not None:
        (code,) = generated.objects.values()
        emit_to.write_bytes(code)
    elif emit == "archive" and emit_to is not None:
        click.echo(f"wrote {emit_to} and {build_archive(planned, emit_to)}", err=True)
    elif emit is not None:
        show(step_of(layer.spec) if emit == "step" else generated.emitted[emit], emit_to)
    if json:
        as_json({"workload": planned.workload, "stack": planned.stack, "overlap": str(planned.overlap),
                 "device": planned.device.name, "arch": planned.device.arch,
                 "chosen": [{"of": of, "schedule": text, "why": why} for of, text, why in planned.why()],
                 "written": [str(path) for path in (*written, emit_to) if path is not None]})


def show(text: str, file: Path | None) -> None:
    """Prints a text, or writes it to a file."""
    if file is None:
        click.echo(text)
    else:
        file.write_text(text + "\n" * (not text.endswith("\n")))


def step_of(layer: LayerSpec) -> str:
    """The analysed step of the first layer, in words."""
    from ecornn.analysis import analyse
    from ecornn.cli.step_text import step_text

    work = layer.workload
    return step_text(analyse(layer.loaded, work.input, work.hidden), work, layer.stack)


def check_files(model: Path | None, weights: Path | None, output: Path | None, code: Path | None) -> None:
    """Raises :class:`ArgumentError` where a file that is written would replace one that is read, one that is written
    beside it, or one that is no earlier module."""
    beside = output.with_suffix(".safetensors") if output is not None and model is not None else None
    if code is not None and any(same(code, other) for other in (model, weights, output, beside)):
        raise ArgumentError("--emit-to", str(code), "a file name of its own")
    if output is None:
        return
    if output.suffix.lower() == ".safetensors" or any(same(output, given) for given in (model, weights)):
        raise ArgumentError("--output", str(output), "a file name of its own, such as FILE.so")
    if beside is not None:
        from ecornn.weight_files import check_place

        check_place(beside)


def same(path: Path, other: Path | None) -> bool:
    """True where both name one file, which need not exist."""
    if other is None:
        return False
    return path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))


