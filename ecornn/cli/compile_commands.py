"""``ecornn compile``, ``ecornn explain``, ``ecornn onnx-rewrite``: their arguments, and the plan that comes of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecornn.cli.common import (
    PATH,
    PROPERTIES,
    SIZE,
    VERBOSE,
    GroupedCommand,
    as_json,
    every,
    layer_options,
    load_tvm,
    said_while,
    with_json,
)
from ecornn.compiler import LayerPlan, build, build_archive, generate, host_code_for, plan_layer
from ecornn.dtypes import DTYPES
from ecornn.errors import ArgumentError
from ecornn.interrupts import ENDING, safe_interrupts
from ecornn.layer_spec import LayerSpec, usual_dtype
from ecornn.quick_tvm import import_tvm
from ecornn.targets import default_target, kind_of
from ecornn.weight_files import check_place, check_shapes, read_layer, save, sizes_of
from ecornn.workload import OVERLAPS, SERIAL, Workload

if TYPE_CHECKING:
    import numpy as np

    from ecornn.explain import Explanation, Part

WISHES = ("auto", "none", *OVERLAPS)


@dataclass(frozen=True)
class Asked:
    """The arguments, by their options' names; ``properties`` are a layer's."""

    model: Path | None
    node: str | None
    target: str | None
    weights_from: Path | None
    prefix: str
    schedule: str | None
    config: tuple[str, ...]
    overlap: str
    properties: dict[str, Any]

    def layer(self) -> tuple[LayerSpec, str, dict[str, Any]]:
        """The layer, its target, and the weights, by name, of a model or a file; refuses arguments that do not fit."""
        given = {name: value for name, value in self.properties.items() if value not in (None, False)}
        stated, bound = layer_of(self.model, self.node, self.weights_from, self.prefix)
        for name, value in stated.items():
            if given.get(name, value) != value:
                raise ArgumentError(f"--{name}", given[name], f"{value}, as in {self.model or self.weights_from}")
        layer = given | stated
        for name, other in (("cell", "MODEL.onnx"), ("hidden", "--weights-from FILE, or MODEL.onnx")):
            if name not in layer:
                raise ArgumentError(f"--{name}", None, f"a value, or {other}")
        target = self.target or default_target()
        usual = usual_dtype(kind_of(target), layer.get("precision"))
        layer.setdefault("dtype", "float32" if self.model is not None else usual)
        return LayerSpec(**layer), target, bound

    def plan(self, spec: LayerSpec, target: str, weights: dict[str, Any]) -> LayerPlan:
        """The plan of what :meth:`layer` returns. Raises what :func:`ecornn.compile` raises."""
        planned = plan_layer(spec, target=target, schedule=self.schedule,
                             config=dict(knob(c) for c in self.config), overlap=self.overlap)
        if self.weights_from is not None:
            hidden = planned.workload.hidden
            parameters = planned.cell.parameters(planned.cell.own_input(planned.workload.input, hidden), hidden)
            check_shapes(weights, {planned.cell.parameter_name(name): (shape[0] * shape[1], *shape[2:])
                                         for name, shape in parameters.items()})
        return planned


def plan_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of :class:`Asked`, which the function gets as its first argument."""

    @functools.wraps(function)
    def wrapper(**given: Any) -> Any:
        layer = {name: given.pop(name) for name in list(given) if name in PROPERTIES}
        own = {field.name: given.pop(field.name) for field in fields(Asked) if field.name in given}
        return function(Asked(**own, properties=layer), **given)

    return every([
        click.argument("model", required=False, metavar="[MODEL.onnx]", type=PATH),
        click.option("--node", metavar="NAME", help="With MODEL.onnx, the name of the LSTM, GRU or RNN node, "
                     "if the model has several. It is compiled in float32 unless --dtype says otherwise."),
        layer_options(required=False),
        click.option("--weights-from", type=PATH, metavar="FILE",
                     help="Read sizes, layers and directions from this safetensors file or PyTorch checkpoint."),
        click.option("--prefix", default="", metavar="TEXT", help="With --weights-from, the text before the names of "
                     "the layer's weights in the file, such as encoder.rnn."),
        *(click.option(f"--{name}", **settings) for name, settings in PROPERTIES.items()
          if name not in Workload.__struct_fields__),
        click.option("--schedule", metavar="NAME", help="Use this schedule instead of that of the best record."),
        click.option("--config", multiple=True, metavar="KNOB=VALUE",
                     help="With --schedule, set this knob of its default configuration. May be repeated."),
        click.option("--overlap", type=click.Choice(WISHES), default="auto", show_default=True,
                     help="Which parts of a stack run at the same time on a GPU, each on a share of it. directions: "
                     "both directions of a layer. wavefront: several layers, each a chunk of time behind the one "
                     "before it. auto: the choice that is expected to be fastest; the command prints it."),
    ])(wrapper)


def layer_of(model: Path | None, node: str | None, weights: Path | None,
             prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The properties of a layer, and its weights, of a model or a file of weights; refuses options that do not fit."""
    if model is not None and weights is not None:
        raise ArgumentError("--weights-from", str(weights), "no such option with MODEL.onnx, which has weights")
    if prefix and weights is None:
        raise ArgumentError("--prefix", prefix, "--weights-from beside it")
    if model is not None:
        from ecornn.onnx import read

        layer = read(model, node)
        if own := [name for name, value in layer.inputs.items() if value is not None]:
            click.echo(f"note: the module does not contain the node's constant {', '.join(own)}; pass them in each "
                       "call", err=True)
        return {"cell": layer.cell.identity(), "hidden": layer.hidden, "input": layer.input, "layers": 1,
                "bidirectional": layer.direction == "bidirectional", "reverse": layer.direction == "reverse",
                "lengths": True}, layer.weights
    if node is not None:
        raise ArgumentError("--node", node, "MODEL.onnx beside it")
    if weights is None:
        return {}, {}
    values = read_layer(weights, prefix)
    return sizes_of(values), values


def knob(text: str) -> tuple[str, int | str | bool]:
    """The name and value of ``NAME=VALUE``: an integer, true or false, or a word; refuses another text."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ArgumentError("--config", text, "KNOB=VALUE")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    return name, int(value) if value.removeprefix("-").isdecimal() else value


COMPILING = """\b
Examples:
  ecornn compile --cell lstm --hidden 800 --batch 20 -o lstm800.so
  ecornn compile --cell gru --hidden 256 --dtype bfloat16 --target sm_90a -o gru256.so
  ecornn compile --cell lstm --hidden 512 --layers 4 --bidirectional --lengths -o lstm4x512.so
  ecornn compile --cell gru --weights-from model.safetensors --prefix encoder. -o encoder.so
  ecornn compile model.onnx --node encoder_lstm --batch 8 -o encoder.so
  ecornn compile --cell mine.py:Mine --hidden 512 --emit step      prints the step
  ecornn compile --cell lstm --hidden 128 --target cpu --emit asm --emit-to lstm.s
  ecornn compile --cell lstm --hidden 128 --target neoverse-v1 --emit object --emit-to lstm.o
  ecornn compile --cell lstm --hidden 64 --target cpu --emit archive --emit-to lstm64.a      also writes lstm64.h
  ecornn compile --cell lstm --weights-from lstm64.safetensors --target cpu --emit archive --emit-to lstm64.a --embed
  ecornn compile --cell lstm --hidden 800 --schedule fused_step --config units=32 -o lstm800.so
"""
EMIT = ("step", "cuda", "tir", "ptx", "asm", "object", "archive")
FILES = {"object": "an object file", "archive": "a static library"}  # of those, what is no text
EMITTED = {"cuda": ("step", "cuda", "tir", "ptx"), "llvm": ("step", "tir", "asm", "object", "archive")}  # by device


@click.command(cls=GroupedCommand, epilog=COMPILING)
@plan_options
@click.option("-o", "--output", type=PATH, metavar="FILE.so", help="The module file to write. Optional with --emit.")
@click.option("--emit", type=click.Choice(EMIT),
              help="Print the generated code, or with `step` the formulas and the memory traffic of a step. object and "
              "archive need --emit-to and a CPU target; an archive is a static library for C and C++, with a header "
              "beside it.")
@click.option("--emit-to", type=PATH, metavar="FILE", help="Write the output of --emit to this file.")
@click.option("--embed", is_flag=True, help="With --emit archive, include the weights of --weights-from or "
              "MODEL.onnx.")
@VERBOSE
@with_json
@click.version_option(package_name="ecornn")
@safe_interrupts(*ENDING)
def compile(asked: Asked, output: Path | None, emit: str | None, emit_to: Path | None, embed: bool,
            verbose: bool, json: bool) -> None:
    """Compiles a layer, or a stack of layers, to one .so file, with the best tuning records that apply.

    `ecornn.load("FILE.so").bind(weights)(x)` runs the file; machines that run it need no compiler. The weights of an
    ONNX node are written beside it, to FILE.safetensors."""
    from ecornn.build.module import name_of

    if output is None and emit is None:
        raise ArgumentError("--output", None, "a file name, or --emit to see only the code")
    if emit_to is not None and emit is None:
        raise ArgumentError("--emit-to", str(emit_to), f"--emit {'|'.join(EMIT)} beside it")
    if emit in FILES and emit_to is None:
        raise ArgumentError("--emit-to", None, f"a file name: {FILES[emit]} is not text")
    if emit == "archive" and emit_to is not None:
        name_of(emit_to)
    if embed and (emit != "archive" or not (asked.weights_from or asked.model)):
        raise ArgumentError("--embed", True, "--emit archive, and --weights-from or MODEL.onnx beside it")
    if json and emit is not None and emit_to is None:
        raise ArgumentError("--json", True, "--emit-to, too, since --emit and --json both print to standard output")
    check_files(asked.model, asked.weights_from, output, emit_to)
    with host_code_for(asked.target) if output is not None else contextlib.nullcontext():
        load_tvm()
        spec, target, bound = asked.layer()
        if emit == "step" and output is None:  # also of a step that no schedule serves
            show(step_of(spec), emit_to)
            return
        planned = asked.plan(spec, target, bound)
        kind = planned.device.kind
        if emit is not None and emit not in EMITTED[kind]:  # before anything is written
            raise ArgumentError("--emit", emit, f"one of {', '.join(EMITTED[kind])} for {kind}")
        words = [str(planned.workload), str(planned.stack), str(planned.overlap) if planned.overlap != SERIAL else ""]
        click.echo(", ".join(filter(None, words)) + f" on {planned.device.name}", err=True)
        for labels, chosen, why in planned.why():
            chosen, why = (chosen, why) if verbose else (chosen.split()[0], briefly(why))
            click.echo(f"schedule{f' of {labels}' if labels else ''}: {chosen}\nwhy: {why}", err=True)
        with said_while("compiling"):
            generated = build(planned, output) if output is not None else generate(planned)
    written: list[Path | None] = []
    if output is not None:
        click.echo(f"wrote {output} ({output.stat().st_size / 1024:.0f} KiB)", err=True)
        written, weights_from = [output], asked.weights_from
        if asked.model is not None:
            weights_from = output.with_suffix(".safetensors")
            save(weights_from, bound)
            click.echo(f"wrote {weights_from}", err=True)
            written.append(weights_from)
        if weights_from is not None:
            more = f", prefix={asked.prefix!r}" if asked.prefix else ""
            click.echo(f'to run it: ecornn.load("{output}").bind("{weights_from}"{more})', err=True)
    if emit == "object" and emit_to is not None:
        (code,) = generated.objects.values()
        emit_to.write_bytes(code)
    elif emit == "archive" and emit_to is not None:
        weights = {name: host(value) for name, value in bound.items()} if embed else None
        header = build_archive(planned, emit_to, weights)
        click.echo(f"wrote {emit_to} and {header}", err=True)
    elif emit is not None:
        show(step_of(spec) if emit == "step" else generated.emitted[emit], emit_to)
    if json:
        as_json({"workload": planned.workload, "stack": planned.stack, "overlap": str(planned.overlap),
                 "device": planned.device.name, "arch": planned.device.arch,
                 "chosen": [{"of": of, "schedule": text, "why": why} for of, text, why in planned.why()],
                 "written": [str(path) for path in (*written, emit_to) if path is not None]})


def briefly(why: str) -> str:
    """The provenance of a choice without the records that were skipped."""
    from ecornn.tune.lookup import SKIPPED

    return SKIPPED.sub("", why)


def host(weight: Any) -> np.ndarray[Any, Any]:
    """A weight of a file; one of torch, from a checkpoint or of a type that NumPy lacks, in float64."""
    import numpy as np

    return np.asarray(weight if isinstance(weight, np.ndarray) else weight.double())


def show(text: str, file: Path | None) -> None:
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
    """Refuses to write over what is read, over what is written beside it, or over what is no earlier module."""
    beside = output.with_suffix(".safetensors") if output is not None and model is not None else None
    if code is not None and any(same(code, other) for other in (model, weights, output, beside)):
        raise ArgumentError("--emit-to", str(code), "a file name of its own")
    if output is None:
        return
    if output.suffix.lower() == ".safetensors" or any(same(output, given) for given in (model, weights)):
        raise ArgumentError("--output", str(output), "a file name of its own, such as FILE.so")
    if beside is not None:
        check_place(beside)


def same(path: Path, other: Path | None) -> bool:
    """True where both name one file, which need not exist."""
    return other is not None and (path.resolve() == other.resolve()
                                  or (path.exists() and other.exists() and path.samefile(other)))


EXPLAINING = """\b
Examples:
  ecornn explain --cell lstm --hidden 800
  ecornn explain --cell gru --hidden 2816 --batch 32 --dtype float16 --target sm_90a
  ecornn explain --cell my_cell.py:MinimalGatedUnit --hidden 512 --target sm_90a --json
"""
CHIP = {"blocks": "{:.0f} blocks", "threads": "{:.0f} threads a block", "registers": "about {:.0f} registers a thread",
        "shared_bytes": "{:,.0f} bytes of shared memory a block", "threads_of_a_call": "{:.0f} threads",
        "weight_bytes_of_a_thread": "{:,.0f} bytes of weights a thread"}

# by the values of Past in ecornn/analysis/affine.py, whose import takes long
PAST = {"unread": "no later step reads it",
        "affine": "affine in its past, so that parts of a sequence can be computed side by side",
        "nonlinear": "nonlinear in its unit's past alone, so one step after the other",
        "coupled": "coupled with other units' past, so one step after the other"}


@click.command(cls=GroupedCommand, epilog=EXPLAINING)
@plan_options
@VERBOSE
@with_json
@safe_interrupts(*ENDING)
def explain(asked: Asked, verbose: bool, json: bool) -> None:
    """Explains how a layer would be compiled, and why. Takes the options of `ecornn compile`, and builds nothing.

    It describes one step of the layer, the schedules (templates of code) that support it and those that do not, the
    record behind the choice, the resources on the chip, the expected time of a step, and a lower bound for it. To
    explain a GPU's code you need no GPU: name its architecture with --target."""
    from ecornn.explain import explain as explained

    load_tvm()
    explanation = explained(asked.plan(*asked.layer()))
    if json:
        as_json(explanation)
    else:
        click.echo("\n".join(text(explanation, verbose)))


def text(explanation: Explanation, verbose: bool) -> Iterator[str]:
    """The lines for people."""
    of = ", ".join(filter(None, (explanation.layer, explanation.stack, explanation.overlap)))
    cores = f"{explanation.cores} {'SMs' if explanation.arch[:3] == 'sm_' else 'cores'}"
    yield f"{of} on {explanation.device} ({explanation.arch}, {cores})"
    for part in explanation.parts:
        yield ""
        if len(explanation.parts) > 1:
            yield f"{', '.join(part.labels) or 'layer'}{', backward' * (part.entry == 'backward')}: {part.workload}"
        yield from _step(part)
        yield from _choice(part, verbose)
        yield from _time(part, explanation)


def _step(part: Part) -> Iterator[str]:
    step = part.step
    yield "step"
    if step.hoisted:
        yield f"  {_many(step.hoisted, 'product')} with x, computed for all steps at once"
    if step.travels:
        yield (f"  {_many(step.products, 'product')} in each step; units exchange "
               + "; then ".join(", ".join(names) or "nothing" for names in step.travels))
    else:
        yield "  no product with a state, so that units exchange nothing"
    if step.statistics:
        yield f"  {_many(step.statistics, 'statistic')} over the units of a row"
    if step.stays:
        yield f"  {', '.join(step.stays)} stays with the unit that owns it"
    for group in step.past:
        yield f"  {', '.join(group.states)}: {PAST[group.past]}"
    if step.weights:
        yield (f"  {step.weights:,} recurrent weights, {step.weight_bytes / 1e6:.3g} MB; "
               f"{step.multiplications / 1e6:.4g} million multiply-adds a step")


def _choice(part: Part, verbose: bool) -> Iterator[str]:
    yield "schedules"
    for one in part.schedules:
        said = f"yes, {one.expected_us:.3g} µs per step expected for its default" if one.expected_us else "yes"
        said = said if one.refuses is None else f"no: {one.refuses}"
        yield f"  {'->' if one.chosen else '  '} {one.schedule:16} {said}"
    yield f"chosen: {part.schedule}" + "".join(f" {k}={v}" for k, v in part.config.items() if verbose)
    yield f"why: {part.why if verbose else briefly(part.why)}"
    if chip := [form.format(part.chip[name]) for name, form in CHIP.items() if name in part.chip]:
        yield f"on the chip: {', '.join(chip)}"
    if part.held_bytes:
        yield "weights per block: " + ", ".join(f"{size:,} bytes in {at}" for at, size in part.held_bytes.items())


def _time(part: Part, explanation: Explanation) -> Iterator[str]:
    words = []
    if r := part.record:
        words.append(f"{r.us:.4g} µs per step by the record (p20 {r.p20_us:.4g}, p80 {r.p80_us:.4g}; {r.device}, "
                     f"B={r.batch}, T={r.seq})")
    if part.expected_us is not None:
        words.append(f"{part.expected_us:.3g} µs per step by the schedule's estimate")
    yield f"expected: {'; '.join(words) or 'unknown before it is measured'}"
    if part.stages_us:
        yield f"estimate in µs: {', '.join(f'{name} {us:.2g}' for name, us in part.stages_us.items())}"
    if f := part.floor:
        limits = "" if explanation.floor_from == "measured" else " (by documents, not measured)"
        yield (f"floor: {f.total_us:.3g} µs per step: exchange {f.exchange_us:.2g}, products {f.products_us:.2g}, "
               f"product with x {f.hoisted_us:.2g}, bytes {f.bytes_us:.2g}{limits}; a kernel can be faster only "
               "if it overlaps these parts")
    elif explanation.no_floor is not None:
        yield f"floor: unknown; {explanation.no_floor}"
    if part.sequence_us is not None:
        yield f"whole sequence: {part.sequence_us / 1e3:.4g} ms"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


REWRITING = """\b
Examples:
  ecornn onnx-rewrite speech.onnx -o speech.fast.onnx
  ecornn onnx-rewrite speech.onnx -o speech.fast.onnx --batch 8 --seq 500
  ecornn onnx-rewrite speech.onnx -o speech.gpu.onnx --target cuda
"""


@click.command("onnx-rewrite", epilog=REWRITING)
@click.argument("model", metavar="MODEL.onnx", type=PATH)
@click.option("-o", "--output", required=True, type=PATH, metavar="FILE.onnx",
              help="The new model. Its modules and the operator library are written to a folder beside it, "
              "FILE.modules.")
@click.option("--batch", type=SIZE, metavar="N", help="Largest batch size B to serve.  [default: the model's, or 20 if "
              "it states none]")
@click.option("--seq", type=SIZE, metavar="N", help="Expected sequence length T. Every other length is served, too.  "
              "[default: the model's, or 300 if it states none]")
@click.option("--dtype", type=click.Choice(DTYPES), help="Data type in which the nodes compute.  [default: their own; "
              "on a CPU float32 for nodes of 16 bits]")
@click.option("--target", metavar="cuda|cpu|ARCH", help="The device, as for `ecornn compile`. On a GPU the session "
              "needs the CUDA execution provider.  [default: cuda if there is a GPU, else cpu]")
@click.option("--measure/--no-measure", default=True, show_default=True, help="Time each node with ONNX Runtime and "
              "compiled, and keep ONNX Runtime's where that is faster. A model for another machine is not timed.")
@with_json
@safe_interrupts(*ENDING)
def onnx_rewrite(model: Path, output: Path, batch: int | None, seq: int | None, dtype: str | None, target: str | None,
                 measure: bool, json: bool) -> None:
    """Writes an ONNX model for ONNX Runtime whose LSTM, GRU and RNN nodes are compiled.

    Other nodes do not change. The command names the recurrent nodes that it leaves as they are, with the reason."""
    from ecornn.onnxruntime import rewrite
    from ecornn.onnxruntime.rewriting import milliseconds

    import_tvm()
    rewritten = rewrite(model, output, batch=batch, seq=seq, target=target, dtype=dtype, measure=measure)
    for taken in rewritten.taken:
        gain = f": {milliseconds(taken.times[1])} a call, before {milliseconds(taken.times[0])}" if taken.times else ""
        click.echo(f"compiled {taken.node} ({taken.op}): {taken.layer.workload} in {taken.module.name}{gain}", err=True)
    for left in rewritten.left:
        click.echo(f"left {left.node} ({left.op}) as it is: {left.reason}", err=True)
    if rewritten.times:
        before, after = rewritten.times
        click.echo(f"the whole model: {milliseconds(after)} a call, before {milliseconds(before)}, "
                   f"{before / after:.2f}x as fast", err=True)
    elif not rewritten.taken:
        click.echo("no node was replaced, so the new model equals the old one", err=True)
    click.echo(f"wrote {rewritten.model} and {rewritten.library.parent}\n"
               f'to run it: onnxruntime.InferenceSession("{rewritten.model}", '
               f'ecornn.onnxruntime.session_options("{rewritten.model}"))\n'
               f'without ecornn: SessionOptions.register_custom_ops_library("{rewritten.library}")', err=True)
    if json:
        as_json({"model": str(rewritten.model), "library": str(rewritten.library),
                 "taken": [{"node": t.node, "op": t.op, "workload": t.layer.workload, "stack": t.layer.stack,
                            "module": str(t.module), "seconds": t.times} for t in rewritten.taken],
                 "left": [{"node": x.node, "op": x.op, "reason": x.reason} for x in rewritten.left],
                 "seconds": rewritten.times})
