"""``ecornn onnx-rewrite``."""

from __future__ import annotations

from pathlib import Path

import click

from ecornn.cli.common import JSON, SIZE, as_json, plain_errors
from ecornn.dtypes import DTYPES
from ecornn.interrupts import ENDING, safe_interrupts

EPILOG = """\b
Examples:
  ecornn onnx-rewrite speech.onnx -o speech.fast.onnx
  ecornn onnx-rewrite speech.onnx -o speech.fast.onnx --batch 8 --seq 500
  ecornn onnx-rewrite speech.onnx -o speech.gpu.onnx --target cuda
"""


@click.command("onnx-rewrite", epilog=EPILOG)
@click.argument("model", metavar="MODEL.onnx", type=click.Path(dir_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.onnx",
              help="The new model. Its modules and the operator library come into a folder beside it, FILE.modules.")
@click.option("--batch", type=SIZE, help="Largest batch B to serve at once.  [default: the model's; 20 where it is "
              "open]")
@click.option("--seq", type=SIZE, help="Sequence length T to expect; every T is served.  [default: the model's; 300 "
              "where it is open]")
@click.option("--dtype", type=click.Choice(DTYPES), help="What the nodes compute in.  [default: their own; on a CPU "
              "float32 for those of 16 bits]")
@click.option("--target", metavar="cuda|cpu|ARCH", help="As of `ecornn compile`; for a GPU the session needs the CUDA "
              "execution provider.  [default: cuda if there is a GPU, else cpu]")
@click.option("--measure/--no-measure", default=True, show_default=True, help="Time ONNX Runtime's own nodes and "
              "compiled ones, in turns, and leave alone what does not gain. A model for another machine is not timed.")
@JSON
@plain_errors
@safe_interrupts(*ENDING)
def onnx_rewrite(model: Path, output: Path, batch: int | None, seq: int | None, dtype: str | None, target: str | None,
                 measure: bool, json: bool) -> None:
    """Writes an ONNX model for ONNX Runtime whose LSTM, GRU and RNN nodes are compiled.

    Other nodes stay as they are, and so do those that cannot be compiled or do not gain, which are named with the
    reason.
    """
    from ecornn.onnxruntime import rewrite
    from ecornn.onnxruntime.rewriting import milliseconds
    from ecornn.quick_tvm import import_tvm

    import_tvm()
    rewritten = rewrite(model, output, batch=batch, seq=seq, target=target, dtype=dtype, measure=measure)
    for taken in rewritten.taken:
        gain = f": {milliseconds(taken.times[1])} a call, before {milliseconds(taken.times[0])}" if taken.times else ""
        click.echo(f"compiled {taken.node} ({taken.op}): {taken.layer.workload} in {taken.module.name}{gain}", err=True)
    for left in rewritten.left:
        click.echo(f"stays {left.node} ({left.op}): {left.reason}", err=True)
    if rewritten.times:
        before, after = rewritten.times
        click.echo(f"the model: {milliseconds(after)} a call, before {milliseconds(before)}, "
                   f"{before / after:.2f}x as fast", err=True)
    elif not rewritten.taken:
        click.echo("nothing is gained: the new model is as the old one", err=True)
    options = f'ecornn.onnxruntime.session_options("{rewritten.model}")'
    click.echo(f"wrote {rewritten.model} and {rewritten.library.parent}\n"
               f'use it: onnxruntime.InferenceSession("{rewritten.model}", {options})\n'
               f'without ecornn: SessionOptions.register_custom_ops_library("{rewritten.library}")', err=True)
    if json:
        as_json({"model": str(rewritten.model), "library": str(rewritten.library),
                 "taken": [{"node": t.node, "op": t.op, "workload": t.layer.workload, "stack": t.layer.stack,
                            "module": str(t.module), "seconds": t.times} for t in rewritten.taken],
                 "left": [{"node": x.node, "op": x.op, "reason": x.reason} for x in rewritten.left],
                 "seconds": rewritten.times})
