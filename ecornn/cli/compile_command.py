"""``ecornn compile``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecornn.cli.common import default_dtype, ended_like_ctrl_c, layer_options, plain_errors, stack_options
from ecornn.errors import ArgumentError
from ecornn.workload import OVERLAPS, SERIAL

if TYPE_CHECKING:
    from ecornn.build.generated import Generated
    from ecornn.compiler import LayerPlan
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
  ecornn-compile --cell lstm --hidden 800 --schedule fused_step --config units=32 -o lstm800.so
"""
WISHES = ("auto", "none", *OVERLAPS)
EMIT = ("step", "cuda", "tir", "ptx", "asm", "object")
EMITTED = {"cuda": ("step", "cuda", "tir", "ptx"), "llvm": ("step", "tir", "asm", "object")}  # by kind of device


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", required=False, metavar="[MODEL.onnx]", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--node", metavar="NAME", help="With MODEL.onnx: the LSTM, GRU or RNN node, if it has several. It is "
              "compiled in float32 unless --dtype says otherwise.")
@layer_options(required=False)
@click.option("--weights-from", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="A safetensors file or PyTorch checkpoint: sizes, layers and directions are taken from it.")
@click.option("--prefix", default="", help="With --weights-from: what stands before the layer's names, as encoder.rnn.")
@stack_options()
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.so",
              help="The module file. May be left out with --emit.")
@click.option("--schedule", help="This schedule instead of the best record's.")
@click.option("--config", multiple=True, metavar="KNOB=VALUE",
              help="With --schedule: change this knob of its default; may be repeated.")
@click.option("--overlap", type=click.Choice(WISHES), default="auto", show_default=True,
              help="What of a stack runs at the same time on a GPU, each sequence on its share of it. directions: the "
              "two of a layer side by side. wavefront: several layers, each a chunk of time behind the one before it. "
              "auto: what is expected to be fastest, as it tells you.")
@click.option("--emit", type=click.Choice(EMIT),
              help="step: print what a step of the cell computes once, for all steps at once and between exchanges, "
              "in formulas, and its bytes. Else print the code that was generated; an object file, of a CPU's code, "
              "needs --emit-to.")
@click.option("--emit-to", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write it to this file instead.")
@click.version_option(package_name="ecornn")
@plain_errors
@ended_like_ctrl_c()
def compile(model: Path | None, node: str | None, target: str | None, weights_from: Path | None, prefix: str,
            output: Path | None, schedule: str | None, config: tuple[str, ...], overlap: str, emit: str | None,
            emit_to: Path | None, **properties: Any) -> None:
    """Compiles a layer, or a stack of them, to one .so file, with the best tuning records that apply.

    The file runs with `ecornn.load("FILE.so").bind(weights)(x)`, on machines without a compiler too. The
    weights of an ONNX node are written beside it, as FILE.safetensors.
    """
    from ecornn.compiler import build, generate, plan_layer
    from ecornn.layer_spec import LayerSpec
    from ecornn.tune.quick_tvm import import_tvm

    import_tvm()
    if output is None and emit is None:
        raise ArgumentError("--output", None, "a file name, or --emit to see the code only")
    if emit_to is not None and emit is None:
        raise ArgumentError("--emit-to", str(emit_to), f"--emit {'|'.join(EMIT)} beside it")
    if emit == "object" and emit_to is None:
        raise ArgumentError("--emit-to", None, "a file name: an object file is not text")
    check_files(model, weights_from, output, emit_to)
    given = {name: value for name, value in properties.items() if value not in (None, False)}
    found, bound = layer_of(model, node, weights_from, prefix)
    for name, value in found.items():
        if given.get(name, value) != value:
            raise ArgumentError(f"--{name}", given[name], f"{value}, as {model or weights_from} says")
    layer = given | found
    for name in ("cell", "hidden"):
        if name not in layer:
            raise ArgumentError(f"--{name}", None, "a value" + (", or MODEL.onnx" if name == "cell" else
                                                               ", or --weights-from FILE, or MODEL.onnx"))
    dtype = "float32" if model is not None else None
    layer["dtype"], target = default_dtype(layer.get("dtype", dtype), layer.get("precision"), target)
    spec = LayerSpec(**layer)
    if emit == "step" and output is None:  # also of a step that no schedule serves
        show(step_of(spec), emit_to)
        return
    planned = plan_layer(spec, target=target, schedule=schedule, config=dict(knob(c) for c in config),
                         overlap=overlap)
    kind = planned.device.kind
    if emit is not None and emit not in EMITTED[kind]:  # before anything is written
        raise ArgumentError("--emit", emit, f"one of {', '.join(EMITTED[kind])} for {kind}")
    if weights_from is not None:
        from ecornn.weight_files import check_shapes

        hidden = planned.workload.hidden
        parameters = planned.cell.parameters(planned.cell.own_input(planned.workload.input, hidden), hidden)
        check_shapes(bound, {planned.cell.parameter_name(name): (shape[0] * shape[1], *shape[2:])
                             for name, shape in parameters.items()})
    words = [str(planned.workload), str(planned.stack), str(planned.overlap) if planned.overlap != SERIAL else ""]
    click.echo(", ".join(filter(None, words)) + f" on {planned.device.name}", err=True)
    for labels, chosen, why in planned.why():
        of = f" of {labels}" if labels else ""
        click.echo(f"schedule{of}: {chosen}\nwhy: {why}", err=True)
    generated = build(planned, output) if output is not None else generate(planned)
    if output is not None:
        click.echo(f"wrote {output} ({output.stat().st_size / 1024:.0f} KiB)", err=True)
        if model is not None:
            from ecornn.weight_files import save

            weights_from = output.with_suffix(".safetensors")
            save(weights_from, bound)
            click.echo(f"wrote {weights_from}", err=True)
        if weights_from is not None:
            more = f", prefix={prefix!r}" if prefix else ""
            click.echo(f'use it: ecornn.load("{output}").bind("{weights_from}"{more})', err=True)
    if emit == "object" and emit_to is not None:
        emit_to.write_bytes(machine_code(generated))
    elif emit is not None:
        show(step_of(spec) if emit == "step" else emitted(planned, generated, emit), emit_to)


def show(text: str, file: Path | None) -> None:
    """Prints it, or writes it to a file."""
    if file is None:
        click.echo(text)
    else:
        file.write_text(text + "\n" * (not text.endswith("\n")))


def step_of(layer: LayerSpec) -> str:
    """The analysed step, of the first layer."""
    from ecornn.analysis import analyse
    from ecornn.cli.step_text import step_text

    work = layer.workload
    return step_text(analyse(layer.loaded, work.input, work.hidden), work, layer.stack)


def check_files(model: Path | None, weights: Path | None, output: Path | None, code: Path | None) -> None:
    """Raises :class:`ArgumentError` where what is written would replace a file that is read, written beside it, or no
    module of before."""
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
    """Whether both name one file, which need not be there yet."""
    if other is None:
        return False
    return path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))


def layer_of(model: Path | None, node: str | None, weights: Path | None,
             prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a model or a file of weights says of the layer, and its weights."""
    if model is not None and weights is not None:
        raise ArgumentError("--weights-from", str(weights), "none with MODEL.onnx, which has its own")
    if prefix and weights is None:
        raise ArgumentError("--prefix", prefix, "none without --weights-from")
    if model is not None:
        from ecornn.onnx import read

        found = read(model, node)
        both = found.direction == "bidirectional"
        own = [name for name, value in found.inputs.items() if value is not None]
        if own:
            click.echo(f"the files do not hold the node's constant {', '.join(own)}: give them at each call", err=True)
        return {"cell": found.cell.identity(), "hidden": found.hidden, "input": found.input, "layers": 1,
                "bidirectional": both, "reverse": found.direction == "reverse", "lengths": True}, found.weights
    if node is not None:
        raise ArgumentError("--node", node, "none without MODEL.onnx")
    if weights is None:
        return {}, {}
    from ecornn.weight_files import WeightFile, sizes_of

    layer = WeightFile(weights, prefix).layer()
    return sizes_of(layer), layer


def knob(text: str) -> tuple[str, int | str | bool]:
    """``name=value``, the value an integer, true/false, or a word.

    Raises :class:`ArgumentError` without a ``=``.
    """
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ArgumentError("--config", text, "KNOB=VALUE")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    return name, int(value) if value.removeprefix("-").isdecimal() else value


def machine_code(generated: Generated) -> bytes:
    """The object file, of a CPU's code."""
    (code,) = generated.objects.values()
    return code


def emitted(planned: LayerPlan, generated: Generated, kind: str) -> str:
    """The code of that kind, one of those that the target has."""
    if kind != "ptx":
        return generated.emitted[kind]
    from ecornn.build.nvcc import ptx

    return ptx(generated.emitted["cuda"], planned.task.device.arch)
