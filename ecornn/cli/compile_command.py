"""``ecornn compile``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ecornn.cli.common import default_dtype, layer_options, plain_errors
from ecornn.errors import ArgumentError

if TYPE_CHECKING:
    from ecornn.build.generated import Generated
    from ecornn.compiler import Plan

EPILOG = """\b
Examples:
  ecornn-compile --cell lstm --hidden 800 --batch 20 -o lstm800.so
  ecornn-compile --cell gru --hidden 256 --dtype bfloat16 --target sm_90a -o gru256.so
  ecornn-compile --cell lstm --hidden 128 --target cpu --emit asm --emit-to lstm.s
  ecornn-compile --cell lstm --hidden 128 --target neoverse-v1 --emit object --emit-to lstm.o
  ecornn-compile --cell lstm --hidden 800 --schedule fused_step --config units=32 -o lstm800.so
"""
EMIT = ("cuda", "tir", "ptx", "asm", "object")


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@layer_options(batch=20, seq=300, dtype_help="[default: float32 on a CPU, bfloat16 on a GPU]")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.so",
              help="The module file. May be left out with --emit.")
@click.option("--schedule", help="This schedule instead of the best record's.")
@click.option("--config", multiple=True, metavar="KNOB=VALUE",
              help="With --schedule: change this knob of its default; may be repeated.")
@click.option("--emit", type=click.Choice(EMIT),
              help="Print the code that was generated; an object file, of a CPU's code, needs --emit-to.")
@click.option("--emit-to", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write it to this file instead.")
@plain_errors
def compile(cell: str, hidden: int, input_: int | None, batch: int, seq: int, dtype: str | None,
            weights: str | None, target: str | None, output: Path | None, schedule: str | None, config: tuple[str, ...],
            emit: str | None, emit_to: Path | None) -> None:
    """Compiles a layer to one .so file, with the best tuning record that applies.

    The file runs with `ecornn.load("FILE.so").bind(weights)(x)`, on machines without a compiler too.
    """
    from ecornn.compiler import build, generate, plan
    from ecornn.tune.quick_tvm import import_tvm

    import_tvm()
    if output is None and emit is None:
        raise ArgumentError("--output", None, "a file name, or --emit to see the code only")
    if emit_to is not None and emit is None:
        raise ArgumentError("--emit-to", str(emit_to), f"--emit {'|'.join(EMIT)} beside it")
    if emit == "object" and emit_to is None:
        raise ArgumentError("--emit-to", None, "a file name: an object file is not text")
    dtype, target = default_dtype(dtype, target)
    planned = plan(cell, hidden=hidden, input=input_, batch=batch, seq=seq, dtype=dtype, weights=weights,
                   target=target, schedule=schedule, config=dict(knob(c) for c in config))
    found = planned.found
    chosen = " ".join(f"{k}={v}" for k, v in found.config.items())
    click.echo(f"{planned.task.workload} on {planned.task.device.name}\n"
               f"schedule: {found.schedule.name} {chosen}\nwhy: {found.provenance}", err=True)
    generated = build(planned, output) if output is not None else generate(planned)
    if output is not None:
        click.echo(f"wrote {output} ({output.stat().st_size / 1024:.0f} KiB)", err=True)
    if emit == "object" and emit_to is not None:
        emit_to.write_bytes(machine_code(planned, generated))
    elif emit is not None:
        text = emitted(planned, generated, emit)
        if emit_to is None:
            click.echo(text)
        else:
            emit_to.write_text(text)


def knob(text: str) -> tuple[str, int | str | bool]:
    """``name=value``, the value an integer, true/false, or a word.

    Raises :class:`ArgumentError` without a ``=``.
    """
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ArgumentError("--config", text, "KNOB=VALUE")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    return name, int(value) if value.lstrip("-").isdecimal() else value


def machine_code(planned: Plan, generated: Generated) -> bytes:
    """The object file; :class:`ArgumentError` for a GPU."""
    if planned.task.device.kind != "llvm":
        raise ArgumentError("--emit", "object", f"one of {', '.join(generated.emitted)} for a GPU")
    (code,) = generated.objects.values()
    return code


def emitted(planned: Plan, generated: Generated, kind: str) -> str:
    """The code of that kind; :class:`ArgumentError` where the target has none."""
    if kind in generated.emitted:
        return generated.emitted[kind]
    if kind == "ptx" and "cuda" in generated.emitted:
        from ecornn.build.nvcc import ptx

        return ptx(generated.emitted["cuda"], planned.task.device.arch)
    if kind == "tir":
        program = planned.found.schedule.program(planned.task, planned.found.config)
        return "\n\n".join(f"# {n}\n{f.script()}" for n, f in program.functions.items())
    raise ArgumentError("--emit", kind, f"one of {', '.join(generated.emitted)} for "
                        + planned.task.device.kind)
