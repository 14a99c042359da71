"""Training steps of sequences laid end to end in columns, against the same valid steps in columns that are all full.

    python benchmarks/compare_columns_training.py --output benchmarks/results/h100_columns_training.json
    python benchmarks/compare_columns_training.py --issue

Kernels alone, in CUDA graphs, in turns; float16. A row has some draws of lengths uniform in 1..T: ``columns``,
sequences that may wrap around; ``alone``, ceil(valid / C) steps of a plain layer of C columns; ``lengths``, a row of a
padded batch for each sequence. Of each side the backward pass, and with ``_step`` forward and backward, in
microseconds a layer and step of the longest sequence (of both directions together); ``share`` is columns / alone of the
backward pass, which is to be at most 1.1. ``cudnn_step`` is PyTorch's packed layer as it is called. All gradients of
columns are compared with PyTorch's in float64 first: within twice the error of PyTorch's own float16; and two runs have
the same bits.

``--issue``: the model of pytorch#149194 in training, as ``compare_packed.py`` has it: it packs padded x, calls
the layer, pads y and takes the gradients of the mean of y, by ``ecornn.torch``, by PyTorch, and by PyTorch on padded
rows (``padded``), as they are called, in float32. ``packing`` is what all but ``padded`` have of PyTorch: packing,
padding and its gradient, around no layer.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_columns import CASES, DTYPE, Shape
from compare_packed import CELLS, ISSUE, bound, library_of, packed_and_padded, timed, triangular
from side_by_side import environment, graph_of, relative, summary, take_turns
from torch.nn.utils.rnn import pack_sequence

import ecornn
import ecornn.torch

SIDES = ("columns", "alone", "lengths")
GOAL = 1.1  # of the backward pass, columns / alone


def build(shape: Shape, width: int, kind: str, folder: str) -> str:
    """Compiles one of the sides, and returns its file."""
    cell, T, B, I, H, layers, both = shape
    out = f"{folder}/{'-'.join(map(str, shape))}-{kind}.so"
    ecornn.compile(cell, hidden=H, input=I, batch=B if kind == "lengths" else width, seq=T, dtype=DTYPE, target="cuda",
                   layers=layers, bidirectional=both, sequences=kind == "columns", lengths=kind == "lengths",
                   training=True, out=out)
    return out


def runs_of(layer: Any, x: torch.Tensor, dy: torch.Tensor, **masks: Any) -> dict[str, Any]:
    """The backward pass alone, and a whole step; they hold what their graphs read."""
    def step() -> Any:
        return layer.backward(layer.forward(x, **masks)[2], dy)

    _, _, kept = layer.forward(x, **masks)
    backward = graph_of(lambda: layer.backward(dataclasses.replace(kept), dy))

    def again(kept: Any = kept) -> None:
        backward.replay()

    return {"": again, "_step": graph_of(step).replay}


def gradients(library: torch.nn.RNNBase, rows: list[torch.Tensor], drows: list[torch.Tensor]) -> list[torch.Tensor]:
    """PyTorch's, of the rows one behind the other and of all weights."""
    inputs = [row.detach().requires_grad_() for row in rows]
    y = library(pack_sequence(inputs, enforce_sorted=False))[0]
    made = torch.autograd.grad(y.data, [*inputs, *library.parameters()],
                               pack_sequence(drows, enforce_sorted=False).data)
    return [torch.cat(made[:len(rows)]), *made[len(rows):]]


def compare(shape: Shape, width: int, lengths: Any, library: Any, layers: dict[str, Any],
            repeats: int) -> dict[str, Any]:
    """One draw of lengths: gradients of columns checked, all sides timed."""
    _, _, _, I, H, depth, both = shape
    longest, least, kind = int(lengths.max()), -(-int(lengths.sum()) // width), getattr(torch, DTYPE)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda").to(kind)

    x, dy = drawn(longest, len(lengths), I), drawn(longest, len(lengths), H * (1 + both))
    columns = ecornn.Columns.of(lengths, width, layers["columns"].together)
    laid_x, laid_dy = (v[columns.inside, columns.table] for v in (x, dy))
    rows, drows = ([v[:n, s] for s, n in enumerate(lengths)] for v in (x, dy))
    places, names = torch.from_numpy(columns.places).cuda(), [n for n, _ in library.named_parameters()]

    def ours() -> list[torch.Tensor]:
        found = layers["columns"].backward(layers["columns"].forward(laid_x, sequences=columns)[2], laid_dy)
        return [found.x.reshape(-1, I)[places], *(found.weights[n] for n in names)]

    theirs = gradients(library, rows, drows)
    exact = gradients(copy.deepcopy(library).double(), [r.double() for r in rows], [r.double() for r in drows])
    found, errors = ours(), []
    for name, one, other, wanted in zip(("x", *names), found, theirs, exact, strict=True):
        errors.append((relative(one, wanted), relative(other, wanted)))
        if not errors[-1][0] <= 2 * errors[-1][1] + 1e-6:
            sys.exit(f"{shape}, gradient of {name}: error {errors[-1][0]:.2e}, PyTorch's {errors[-1][1]:.2e}")
    if not all(map(torch.equal, found, ours())):
        sys.exit(f"{shape}: two runs differ")
    del exact, theirs, found
    full, dfull = drawn(least, width, I), drawn(least, width, H * (1 + both))
    counts = torch.as_tensor(lengths).int().cuda()
    with torch.no_grad():
        sides = {"columns": runs_of(layers["columns"], laid_x, laid_dy, sequences=columns),
                 "alone": runs_of(layers["alone"], full, dfull),
                 "lengths": runs_of(layers["lengths"], x, dy, lengths=counts)}
    runs = {name + part: run for name, of in sides.items() for part, run in of.items()}
    times = take_turns(runs | {"cudnn_step": lambda: gradients(library, rows, drows)}, lambda: None, repeats,
                       float("inf"))
    row: dict[str, Any] = {"longest": longest, "valid": int(lengths.sum()), "together": layers["columns"].together,
                           "steps": len(columns.table), "least": least, "error": max(e for e, _ in errors),
                           "cudnn_error": max(e for _, e in errors)}
    for name, values in times.items():
        row |= summary(name, values, longest * depth)
    return row | {"share": row["columns_us"] / row["alone_us"], "step_share": row["columns_step_us"]
                  / row["alone_step_us"]}


def described(shape: Shape, width: int, draws: list[dict[str, Any]]) -> dict[str, Any]:
    """A case: its sizes, and the median with 20th and 80th percentile of its draws."""
    names = ("cell", "T", "B", "I", "H", "layers", "bidirectional")
    row: dict[str, Any] = dict(zip(names, shape, strict=True)) | {"columns": width, "dtype": DTYPE, "draws": draws}
    told = [f"{side}{part}_us" for side in SIDES for part in ("", "_step")]
    for name in (*told, "cudnn_step_us", "share", "step_share"):
        row[name] = [float(v) for v in np.percentile([draw[name] for draw in draws], [50, 20, 80])]
    return row


def line(row: dict[str, Any]) -> str:
    """A case in a line."""
    backward = ", ".join("{} {:.2f} [{:.2f}, {:.2f}]".format(side, *row[f"{side}_us"]) for side in SIDES)
    step = ", ".join(f"{side} {row[f'{side}_step_us'][0]:.2f}" for side in (*SIDES, "cudnn"))
    return (f"{row['cell']} {row['H']} layers={row['layers']} both={row['bidirectional']} {row['B']} in "
            f"{row['columns']}: backward {backward}; share {row['share'][0]:.3f} (at most {GOAL}); step {step}, share "
            f"{row['step_share'][0]:.3f}; error {max(d['error'] for d in row['draws']):.1e}")


def issue(shape: Shape, repeats: int) -> dict[str, Any]:
    """One row of pytorch#149194 in training."""
    cell, T, B, I, H, layers, both = shape
    library = CELLS[cell](I, H, layers, bidirectional=both).cuda()
    ours = copy.deepcopy(library)
    ecornn.torch.replace(ours)
    x, lengths = torch.randn(T, B, I, device="cuda"), triangular(T, B)

    def step(layer: Any) -> list[torch.Tensor]:
        kind = next(layer.parameters()).dtype
        y = packed_and_padded(layer, x.to(kind), lengths)
        return list(torch.autograd.grad(y.mean(), [*layer.parameters()]))

    def padded() -> Any:
        return torch.autograd.grad(library(x)[0].mean(), [*library.parameters()])

    def packing() -> Any:
        leaves: list[torch.Tensor] = []

        def nothing(packed: Any) -> tuple[Any]:
            leaves.append(packed.data[:, :H].clone().requires_grad_())
            return (packed._replace(data=leaves[0]),)

        return torch.autograd.grad(packed_and_padded(nothing, x, lengths).mean(), leaves)

    exact = step(copy.deepcopy(library).double())
    errors = [max(map(relative, step(layer), exact)) for layer in (ours, library)]
    if not errors[0] <= max(2e-5, 2 * errors[1]):
        sys.exit(f"{shape}: error {errors[0]:.2e}, PyTorch's {errors[1]:.2e}")
    row = timed({"ecornn": lambda: step(ours), "cudnn": lambda: step(library), "padded": padded,
                 "packing": packing},
                max(3, min(repeats, repeats * 1000 // T)), lambda: None, 1 / (T * layers))
    return {"T": T, "B": B, "I": I, "H": H, "layers": layers, "error": errors[0], "cudnn_error": errors[1], **row,
            "ratio": row["cudnn_us"] / row["ecornn_us"], "packing_costs": row["ecornn_us"] / row["padded_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--draws", type=int, default=4, help="of lengths [%(default)s]")
    parser.add_argument("--repeats", type=int, default=20, help="timed repetitions a draw [%(default)s]")
    parser.add_argument("--cases", type=int, nargs="+", metavar="N", help="only these, counted from 0")
    parser.add_argument("--issue", action="store_true", help="pytorch#149194")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    if arguments.issue:
        os.environ["ECORNN_STRICT"] = "1"  # never PyTorch against itself
        for n in arguments.cases or range(len(ISSUE)):
            rows.append(issue(ISSUE[n], arguments.repeats))
            r = rows[-1]
            print(f"{ISSUE[n]} ecornn {r['ecornn_us']:.2f}, cuDNN {r['cudnn_us']:.2f}, cuDNN padded "
                  f"{r['padded_us']:.2f} us/step; {r['ratio']:.2f}x, {r['packing_costs']:.2f} of padded, "
                  f"{r['packing_us']:.2f} of it packing; error "
                  f"{r['error']:.1e} / {r['cudnn_error']:.1e}", flush=True)
    else:
        rows = measured([CASES[n] for n in arguments.cases or range(len(CASES))], arguments.draws, arguments.repeats)
        print(f"{sum(r['share'][0] <= GOAL for r in rows)} of {len(rows)} rows within {GOAL}")
    if arguments.output:
        arguments.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def measured(cases: list[tuple[Shape, int]], draws: int, repeats: int) -> list[dict[str, Any]]:
    """All cases, compiled before anything is timed."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        built = [{kind: pool.submit(build, shape, width, kind, folder) for kind in SIDES} for shape, width in cases]
        files = [{kind: file.result() for kind, file in of.items()} for of in built]
        for (shape, width), of in zip(cases, files, strict=True):
            library, rng = library_of(shape, DTYPE).train(), np.random.default_rng(0)
            layers = {kind: bound(file, library) for kind, file in of.items()}
            drawn = [rng.integers(1, shape[1] + 1, shape[2]) for _ in range(draws)]
            rows.append(described(shape, width, [compare(shape, width, lengths, library, layers, repeats)
                                                 for lengths in drawn]))
            print(line(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    main()
