"""Sequences laid end to end in columns, against the same valid steps as a plain layer of columns that are all full.

    python benchmarks/compare_columns.py --output benchmarks/results/h100_columns.json
    python benchmarks/compare_columns.py --training --output benchmarks/results/h100_columns_training.json

Kernels alone, in CUDA graphs, in turns; float16. A row has some draws of lengths uniform in 1..T: ``columns``,
sequences that may wrap around (``together`` neighbours); ``whole``, those that may not; ``alone``, ceil(valid / C)
steps of a plain layer of C columns; ``lengths``, a row of a padded batch for each sequence. Times are microseconds a
layer and step of the longest sequence (of both directions together); ``share`` is alone / columns. y of columns and
whole is compared with PyTorch in float64 first: within twice the error of PyTorch's own float16.

``--training``: of each side the backward pass, and with ``_step`` forward and backward; ``share`` is then columns /
alone of the backward pass, which is to be at most 1.1. ``cudnn_step`` is PyTorch's packed layer as it is called. All
gradients of columns are compared with PyTorch's in float64 first: within twice the error of PyTorch's own float16;
and two runs have the same bits.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from compare_packed import Shape, bound, check, library_of
from side_by_side import environment, graph_of, options, relative, summary, take_turns, write
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import ecornn

DTYPE, SIDES = "float16", ("columns", "whole", "alone", "lengths")
TRAINED = ("columns", "alone", "lengths")
GOAL = 1.1  # of the backward pass, columns / alone
CASES: list[tuple[Shape, int]] = [  # cell, T, sequences, I, H, layers, bidirectional; columns
    (("lstm", 300, 32, 512, 512, 1, False), 16), (("lstm", 300, 32, 512, 512, 2, True), 16),
    (("gru", 300, 32, 800, 800, 1, True), 16), (("lstm", 300, 64, 1024, 1024, 1, False), 32)]


def build(shape: Shape, width: int, kind: str, folder: str, training: bool) -> str:
    """Compiles one of the modules ``columns``, ``alone`` and ``lengths``, and returns its file."""
    cell, T, B, I, H, layers, both = shape
    out = f"{folder}/{'-'.join(map(str, shape))}-{kind}.so"
    ecornn.compile(cell, hidden=H, input=I, batch=B if kind == "lengths" else width, seq=T, dtype=DTYPE, target="cuda",
                   layers=layers, bidirectional=both, sequences=kind == "columns", lengths=kind == "lengths",
                   training=training, out=out)
    return out


def laid(lengths: Any, width: int, together: int) -> dict[str, ecornn.Columns]:
    """Where the sequences of a draw lie."""
    return {"columns": ecornn.Columns.of(lengths, width, together), "whole": ecornn.Columns.of(lengths, width)}


def compare(shape: Shape, width: int, lengths: Any, library: Any, layers: dict[str, Any],
            repeats: int) -> dict[str, Any]:
    """One row: all sides checked and timed on one draw of lengths."""
    _, _, _, I, H, depth, both = shape
    longest, least, kind = int(lengths.max()), -(-int(lengths.sum()) // width), getattr(torch, DTYPE)
    rows = torch.randn(longest, len(lengths), I, device="cuda").to(kind)
    sequences = [rows[:n, s] for s, n in enumerate(lengths)]
    found, sides = laid(lengths, width, layers["columns"].together), {}
    xs = {name: rows[columns.inside, columns.table] for name, columns in found.items()}  # graphs read and write these
    outs = {name: torch.empty((*x.shape[:2], H * (1 + both)), device="cuda", dtype=kind) for name, x in xs.items()}
    for name, columns in found.items():
        sides[name] = graph_of(lambda n=name, c=columns: layers["columns"](xs[n], sequences=c, out=outs[n]))
    full, counts = torch.randn(least, width, I, device="cuda").to(kind), torch.as_tensor(lengths).int().cuda()
    sides["alone"] = graph_of(lambda: layers["alone"](full))
    sides["lengths"] = graph_of(lambda: layers["lengths"](rows, lengths=counts))
    packed = pack_sequence(sequences, enforce_sorted=False)
    exact = torch.cat(unpack_sequence(copy.deepcopy(library).double()(packed.double())[0]))
    theirs, errors = torch.cat(unpack_sequence(library(packed)[0])), {}
    for name, columns in found.items():
        outs[name].fill_(float("nan"))
        sides[name].replay()
        y = outs[name].reshape(-1, H * (1 + both))[torch.from_numpy(columns.places).cuda()]
        errors[name] = check(f"{shape} {name}", y, theirs, exact)
    times = take_turns({name: graph.replay for name, graph in sides.items()}, lambda: None, repeats, float("inf"))
    row: dict[str, Any] = {"longest": longest, "valid": int(lengths.sum()), "together": layers["columns"].together,
                           "error": errors["columns"][0], "cudnn_error": errors["columns"][1]}
    for name in SIDES:
        row |= summary(name, times[name], longest * depth)
    return row | {"share": row["alone_us"] / row["columns_us"], "whole_share": row["alone_us"] / row["whole_us"],
                  "steps": {name: len(columns.table) / max(longest, least) for name, columns in found.items()}}


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


def compare_training(shape: Shape, width: int, lengths: Any, library: Any, layers: dict[str, Any],
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
    for name in (name for name in draws[0] if name.endswith(("_us", "share"))):
        row[name] = [float(v) for v in np.percentile([draw[name] for draw in draws], [50, 20, 80])]
    return row


def told(row: dict[str, Any], training: bool = False) -> str:
    """A case in a line."""
    of = f"{row['cell']} {row['H']} layers={row['layers']} both={row['bidirectional']} {row['B']} in {row['columns']}: "
    if training:
        backward = ", ".join("{} {:.2f} [{:.2f}, {:.2f}]".format(side, *row[f"{side}_us"]) for side in TRAINED)
        step = ", ".join(f"{side} {row[f'{side}_step_us'][0]:.2f}" for side in (*TRAINED, "cudnn"))
        return (f"{of}backward {backward}; share {row['share'][0]:.3f} (at most {GOAL}); step {step}, share "
                f"{row['step_share'][0]:.3f}; error {max(d['error'] for d in row['draws']):.1e}")
    values = ", ".join("{} {:.2f} [{:.2f}, {:.2f}]".format(name, *row[name]) for name in
                       (*(f"{side}_us" for side in SIDES), "share", "whole_share"))
    steps = [np.mean([draw["steps"][name] for draw in row["draws"]]) for name in ("columns", "whole")]
    return (f"{of}{values}; steps / least {steps[0]:.3f}, whole {steps[1]:.3f}; together "
            f"{row['draws'][0]['together']}")


def main() -> None:
    parser = options(__doc__, repeats=(20, "timed repetitions a draw"))
    parser.add_argument("--training", action="store_true", help="training steps in place of forward passes")
    parser.add_argument("--draws", type=int, help="of lengths [8, with --training 4]")
    parser.add_argument("--cases", type=int, nargs="+", metavar="N", help="only these, counted from 0")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    training, count = arguments.training, arguments.draws or (4 if arguments.training else 8)
    one: Callable[..., dict[str, Any]] = compare_training if training else compare
    rows, cases = [], [CASES[n] for n in arguments.cases or range(len(CASES))]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        built = [{kind: pool.submit(build, shape, width, kind, folder, training) for kind in TRAINED}
                 for shape, width in cases]
        files = [{kind: file.result() for kind, file in of.items()} for of in built]  # before anything is timed
        for (shape, width), of in zip(cases, files, strict=True):
            library, rng = library_of(shape, DTYPE).train(training), np.random.default_rng(0)
            layers = {kind: bound(file, library) for kind, file in of.items()}
            with torch.inference_mode(not training):
                drawn = [rng.integers(1, shape[1] + 1, shape[2]) for _ in range(count)]
                draws = [one(shape, width, lengths, library, layers, arguments.repeats) for lengths in drawn]
            rows.append(described(shape, width, draws))
            print(told(rows[-1], training), flush=True)
    write(arguments.output, environment(), rows)


if __name__ == "__main__":
    main()
