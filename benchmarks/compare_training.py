"""Training steps against cuDNN's through PyTorch, both in CUDA graphs, interleaved in one run.

    python benchmarks/compare_training.py --output benchmarks/results/h100_training.json
    python benchmarks/compare_training.py --only "lstm 1024x16x768"

A step is forward and backward with the gradients of x, all weights and biases. All of them are compared with cuDNN's in
float64 first: ours must be within twice the error of cuDNN's in the same data type (exact float32: 2e-5 relative), and
the same bits in two runs. Times are medians with 20th and 80th percentiles, in microseconds a time step and layer;
memory is the peak of one step, above what x, its gradient and the weights take. ``training_rows.py`` has the layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean

import torch
from side_by_side import CELLS, DEVICE, WrongResultError, environment, graph_of, relative, summary, take_turns
from training_rows import CURVE, ROWS, Row

import ecornn

FLOAT32 = 2e-5  # relative, of exact float32
MEMORY = 1 << 20


def build(row: Row, path: str, keep: str | None = None) -> str:
    """Compiles a row's module; empty, or why there is none."""
    try:
        ecornn.compile(row.cell, **row.properties, target="cuda", training=True, keep=keep,  # type: ignore[arg-type]
                       out=path)
    except ecornn.errors.EcornnError as error:
        return str(error)
    return ""


def compare(row: Row, path: str, repeats: int, seconds: float, beside: Mapping[str, Callable[[], object]] | None = None,
            buffers: Sequence[torch.Tensor] = ()) -> dict:
    """One row: gradients of both sides checked, then timed, in microseconds a step and layer; ``beside`` them others,
    which read these ``buffers``. Raises :class:`WrongResultError` where ours are wrong, or other bits in a second run.
    """
    kind = {"f16": torch.float16, "bf16": torch.bfloat16}.get(row.kind, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = row.kind == "tf32"
    options = {"nonlinearity": "tanh"} if row.cell == "rnn_tanh" else {}
    library = CELLS[row.cell](row.I, row.H, row.layers, bidirectional=row.bidirectional, device=DEVICE,
                              **options).to(kind)
    library.flatten_parameters()
    weights = {k: v.detach() for k, v in library.named_parameters()}
    layer = ecornn.load(path).bind(weights)
    x = torch.randn(row.T, row.B, row.I, device=DEVICE).to(kind)
    dy = torch.randn(row.T, row.B, row.H * (1 + row.bidirectional), device=DEVICE).to(kind)
    inputs = x.clone().requires_grad_()
    parameters = dict(library.named_parameters())

    def theirs() -> list[torch.Tensor]:
        return list(torch.autograd.grad(library(inputs)[0], [inputs, *parameters.values()], dy))

    def ours() -> list[torch.Tensor]:
        with torch.no_grad():
            _, _, kept = layer.forward(x)
            found = layer.backward(kept, dy, want_state=False)
            return [found.x, *(found.weights[n] for n in parameters)]

    peaks = {name: peak(side) for name, side in {"ecornn": ours, "cudnn": theirs, **(beside or {})}.items()}
    exact = gradients64(row, library, x, dy)
    errors = [[relative(g, e) for g, e in zip(side(), exact, strict=True)] for side in (ours, theirs)]
    for name, error, library_error in zip(("x", *parameters), *errors, strict=True):
        limit = FLOAT32 if row.kind == "f32" else 2 * library_error + 1e-6
        if not error <= limit:
            raise WrongResultError(f"gradient of {name}: error {error:.2e}, allowed {limit:.2e}")
    if not all(torch.equal(a, b) for a, b in zip(ours(), ours(), strict=True)):
        raise WrongResultError("two runs differ")
    del exact
    graphs = {"ecornn": graph_of(ours), "cudnn": graph_of(theirs)}

    def fresh() -> None:
        for buffer in (x, dy, *buffers):
            buffer.data.copy_(torch.randn(buffer.shape, device=DEVICE))
        inputs.data.copy_(x)

    sides = {name: graph.replay for name, graph in graphs.items()} | dict(beside or {})
    times = take_turns(sides, fresh, repeats, seconds)
    found: dict = {"cell": row.cell, "T": row.T, "B": row.B, "I": row.I, "H": row.H, "dtype": row.kind,
                   "layers": row.layers, "bidirectional": row.bidirectional, "error": max(errors[0]),
                   "cudnn_error": max(errors[1]), "schedule": layer.manifest.schedule,
                   "keep": layer.manifest.stack.keep}
    for name, values in times.items():
        found |= summary(name, values, row.T * row.layers)
        found[f"{name}_mib"] = peaks[name] / MEMORY
    return found | {"ratio": found["cudnn_us"] / found["ecornn_us"], "repetitions": len(times["ecornn"])}


def gradients64(row: Row, library: torch.nn.RNNBase, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The same by cuDNN in float64."""
    options = {"nonlinearity": "tanh"} if row.cell == "rnn_tanh" else {}
    exact = CELLS[row.cell](row.I, row.H, row.layers, bidirectional=row.bidirectional, device=DEVICE,
                            **options).double()
    exact.load_state_dict({k: v.double() for k, v in library.state_dict().items()})
    inputs = x.double().requires_grad_()
    return list(torch.autograd.grad(exact(inputs)[0], [inputs, *exact.parameters()], dy.double()))


def peak(step) -> int:
    """Bytes that a step takes at most beside what is there before it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this; may repeat")
    parser.add_argument("--repeats", type=int, default=30, help="timed repetitions a row, at most")
    parser.add_argument("--seconds", type=float, default=3.0, help="for these, after which there are at least seven")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--curve", action="store_true", help="an LSTM at B from 1 to 128 in place of these rows")
    parser.add_argument("--add", action="store_true", help="keep what --output has, and measure the other rows")
    parser.add_argument("--time-limit", type=float, help="seconds after which no row begins")
    parser.add_argument("--keep", choices=("gates", "states"), help="what forward keeps [what it keeps if nobody says]")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU and a PyTorch that sees it")
    rows = [r for r in (CURVE if arguments.curve else ROWS)
            if not arguments.only or any(part in str(r) for part in arguments.only)]
    done: list[dict] = []
    if arguments.add and arguments.output and arguments.output.exists():
        done = json.loads(arguments.output.read_text())["rows"]
        rows = [r for r in rows if str(r) not in {one["row"] for one in done}]
    end = time.monotonic() + (arguments.time_limit or float("inf"))
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder, \
            ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        paths = [str(Path(folder, f"{n}.so")) for n in range(len(rows))]
        faults = pool.map(partial(build, keep=arguments.keep), rows, paths)
        for row, path, fault in zip(rows, paths, faults, strict=True):
            if time.monotonic() > end:
                pool.shutdown(cancel_futures=True)
                break
            torch.manual_seed(0)
            try:
                made = {"fault": fault} if fault else compare(row, path, arguments.repeats, arguments.seconds)
            except WrongResultError as error:
                made = {"fault": str(error)}
            torch.cuda.empty_cache()
            done.append({"row": str(row)} | made)
            print(line(str(row), made), flush=True)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps({"environment": environment(), "rows": done}, indent=1) + "\n")
    ratios = [r["ratio"] for r in done if "ratio" in r]
    if ratios:
        print(f"{len(ratios)} of {len(done)} rows, geometric mean {geometric_mean(ratios):.2f}x, "
              f"least {min(ratios):.2f}x")
    sys.exit(any("fault" in r for r in done))


def line(name: str, r: dict) -> str:
    """One row for people."""
    if "fault" in r:
        return f"{name:40} {r['fault']}"
    return (f"{name:40} ecornn {r['ecornn_us']:6.2f} [{r['ecornn_p20']:.2f}, {r['ecornn_p80']:.2f}]  "
            f"cuDNN {r['cudnn_us']:6.2f} us/step  {r['ratio']:.2f}x  error {r['error']:.1e} / {r['cudnn_error']:.1e}  "
            f"{r['ecornn_mib']:.0f} / {r['cudnn_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
