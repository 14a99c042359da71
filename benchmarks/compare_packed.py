"""Packed sequences, ``ecornn.torch``'s layer and PyTorch's in turns; and sequences laid end to end in columns.

    python benchmarks/compare_packed.py --output benchmarks/results/h100_packed.json
    python benchmarks/compare_packed.py --training --output benchmarks/results/h100_packed_training.json
    python benchmarks/compare_packed.py --columns --output benchmarks/results/h100_columns.json
    python benchmarks/compare_packed.py --columns --training --output benchmarks/results/h100_columns_training.json

Outputs, and gradients, are compared with PyTorch in float64 first: ours must be within twice the error of PyTorch's
own in the same type. Times are medians with 20th and 80th percentiles, in microseconds a layer and time step.

Lengths are uniform in 1..T, in float16. Both are called as they are (no graph: lengths are read on the host); so is
our own module with ``lengths``, by them and with all rows at full length, on padded rows. ``columns`` are those that
the first of these lays them in.

Rows with ``case`` "pytorch#149194" are that issue's: a model that packs padded x, calls the layer and pads y, all
of it timed, in float32 (cuDNN may round to TF32 there, as PyTorch sets it; ours does not), with lengths from 1 to T in
even steps. B, I and H are ours: those of the issue are not known to us. ``packing`` is PyTorch's packing and padding of
as much data without a layer, which both sides have; ``cudnn_padded`` is PyTorch's layer on padded x, all rows to the
end, which the issue compares with.

``--training``: that model in training, the gradients of the mean of y, by ``ecornn.torch``, by PyTorch, and by
PyTorch on padded rows (``padded``), as they are called, in float32. ``packing`` is what all but ``padded`` have of
PyTorch: packing, padding and its gradient, around no layer.

``--columns``: such columns against the same valid steps as a plain layer of columns that are all full, kernels alone,
in CUDA graphs, in turns; float16. A row has some draws of lengths uniform in 1..T: ``columns``, sequences that may wrap
around (``together`` neighbours); ``whole``, those that may not; ``alone``, ceil(valid / C)
steps of a plain layer of C columns; ``lengths``, a row of a padded batch for each sequence. Steps are those of the
longest sequence (of both directions together); ``share`` is alone / columns.

``--columns --training``: of each side the backward pass, and with ``_step`` forward and backward; ``share`` is then
columns / alone of the backward pass, which is to be at most 1.1. ``cudnn_step`` is PyTorch's packed layer as it is
called. Two runs of columns have the same bits.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from side_by_side import CELLS, environment, options, relative, replaced, timed, told, write
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

import ecornn
from ecornn.bench import turns
from ecornn.torch.packed import columns_for

Shape = tuple[str, int, int, int, int, int, bool]
NAMES = ("cell", "T", "B", "I", "H", "layers", "bidirectional")  # of a Shape
PACKED: list[Shape] = [
    ("lstm", 300, 32, 512, 512, 1, False), ("lstm", 300, 32, 512, 512, 2, True), ("gru", 300, 32, 800, 800, 1, True)]
ISSUE: list[Shape] = [("lstm", T, 32, 64, H, 2, False) for H in (64, 256) for T in (100, 500, 2000, 4000)]
DTYPE, SIDES = "float16", ("columns", "whole", "alone", "lengths")
TRAINED = ("columns", "alone", "lengths")
CASES: list[tuple[Shape, int]] = [*((shape, 16) for shape in PACKED),  # with columns
                                  (("lstm", 300, 64, 1024, 1024, 1, False), 32)]


def build(shape: Shape, dtype: str, width: int, kind: str, training: bool, folder: str) -> str:
    """Compiles a row's module for sequences in so many ``columns``, for so many rows of the same length (``alone``), or
    for a padded batch (``lengths``), and returns its file."""
    cell, T, B, I, H, layers, both = shape
    out = f"{folder}/{'-'.join(map(str, shape))}-{kind}.so"
    ecornn.compile(cell, hidden=H, input=I, batch=B if kind == "lengths" else width, seq=T, dtype=dtype, target="cuda",
                   layers=layers, bidirectional=both, sequences=kind == "columns", lengths=kind == "lengths",
                   training=training, out=out)
    return out


def library_of(shape: Shape, dtype: str, device: str = "cuda") -> torch.nn.RNNBase:
    """PyTorch's layer, with random weights."""
    cell, _, _, I, H, layers, both = shape
    return CELLS[cell](I, H, layers, bidirectional=both).to(device, getattr(torch, dtype)).eval()


def bound(file: str, library: torch.nn.RNNBase) -> ecornn.Layer:
    """Our layer, of the same weights."""
    return ecornn.load(file).bind({k: v.detach() for k, v in library.named_parameters()})


def check(name: str, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor],
          exact: Sequence[torch.Tensor]) -> dict[str, float]:
    """The largest relative errors of both; ends the program where one of ours is over twice theirs."""
    errors = [(relative(a, c), relative(b, c)) for a, b, c in zip(ours, theirs, exact, strict=True)]
    for found, library in errors:
        if not found <= 2 * library + 1e-6:
            sys.exit(f"{name}: error {found:.2e}, PyTorch's {library:.2e}")
    return dict(zip(("error", "cudnn_error"), map(max, zip(*errors, strict=True)), strict=True))


def as_called(sides: dict[str, Callable[[], object]], repeats: int, steps: int) -> dict[str, float]:
    """Times between events before and after a call on an idle GPU, for which nothing waits: the host's work for it is
    included."""
    row = timed(sides, lambda: None, repeats, steps, clock=lambda call: turns.gpu_clock(call, 0) * 1e6)
    return row | {"ratio": row["cudnn_us"] / row["ecornn_us"]}


def compare_packed(shape: Shape, dtype: str, repeats: int, file: str) -> dict[str, Any]:
    """One row of packed sequences."""
    _, T, B, I, _, layers, _ = shape
    library = library_of(shape, dtype)
    layer, ours = bound(file, library), replaced(library)
    lengths = torch.randint(1, T + 1, (B,))
    lengths[0] = T
    x = torch.randn(T, B, I, device="cuda").to(getattr(torch, dtype))
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    on_gpu, full = lengths.cuda(), torch.full((B,), T, device="cuda")
    with torch.inference_mode():
        exact, theirs, y = (pad_packed_sequence(of(x)[0], total_length=T)[0] for of, x in (
            (copy.deepcopy(library).double(), packed.double()), (library, packed), (ours, packed)))
        check(f"{shape} padded", [layer(x, lengths=on_gpu)[0]], [theirs], [exact])
        return described(shape, dtype) | check(str(shape), [y], [theirs], [exact]) | as_called({
            "ecornn": lambda: ours(packed), "padded": lambda: layer(x, lengths=on_gpu),
            "full": lambda: layer(x, lengths=full), "cudnn": lambda: library(packed)}, repeats, T * layers) | {
            "case": "uniform", "valid": float(lengths.double().mean()) / T,
            "columns": columns_for(np.sort(lengths.numpy())[::-1])}


def triangular(steps: int, batch: int) -> torch.Tensor:
    """The lengths of pytorch#149194, (B,) int64."""
    return torch.linspace(1, steps, batch).round().long()


def packed_and_padded(layer: Callable[[Any], Any], x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The model of pytorch#149194: x (T, B, I) to y (T, B, H), zero beyond the lengths."""
    return pad_packed_sequence(layer(pack_padded_sequence(x, lengths, enforce_sorted=False))[0])[0]


def compare_issue(shape: Shape, repeats: int, device: str = "cuda") -> dict[str, Any]:
    """One row of pytorch#149194."""
    _, T, B, I, _, layers, _ = shape
    library = library_of(shape, "float32", device)
    ours, x, lengths = replaced(library), torch.randn(T, B, I, device=device), triangular(T, B)
    with torch.inference_mode():
        exact = packed_and_padded(copy.deepcopy(library).double(), x.double(), lengths)
        errors = check(str(shape), *([packed_and_padded(of, x, lengths)] for of in (ours, library)), [exact])
        return described(shape, "float32") | errors | as_called({
            "ecornn": lambda: packed_and_padded(ours, x, lengths),
            "cudnn": lambda: packed_and_padded(library, x, lengths), "cudnn_padded": lambda: library(x),
            "packing": lambda: packed_and_padded(lambda packed: (packed,), x, lengths)},
            max(3, min(repeats, repeats * 1000 // T)), T * layers) | {
            "case": "pytorch#149194", "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "valid": float(lengths.double().mean()) / T}


def train_issue(shape: Shape, repeats: int) -> dict[str, Any]:
    """One row of pytorch#149194 in training: the gradients of the mean of y, by both, and by PyTorch on padded rows."""
    _, T, B, I, H, layers, _ = shape
    library = library_of(shape, "float32").train()
    ours, x, lengths = replaced(library), torch.randn(T, B, I, device="cuda"), triangular(T, B)

    def step(layer: Any) -> tuple[torch.Tensor, ...]:
        kind = next(layer.parameters()).dtype
        return torch.autograd.grad(packed_and_padded(layer, x.to(kind), lengths).mean(), [*layer.parameters()])

    def padded() -> Any:
        return torch.autograd.grad(library(x)[0].mean(), [*library.parameters()])

    def packing() -> Any:
        leaves: list[torch.Tensor] = []

        def nothing(packed: Any) -> tuple[Any]:
            leaves.append(packed.data[:, :H].clone().requires_grad_())
            return (packed._replace(data=leaves[0]),)

        return torch.autograd.grad(packed_and_padded(nothing, x, lengths).mean(), leaves)

    exact = step(copy.deepcopy(library).double())
    error, library_error = (max(map(relative, step(layer), exact)) for layer in (ours, library))
    if not error <= max(2e-5, 2 * library_error):
        sys.exit(f"{shape}: error {error:.2e}, PyTorch's {library_error:.2e}")
    row = as_called({"ecornn": lambda: step(ours), "cudnn": lambda: step(library), "padded": padded,
                     "packing": packing}, max(3, min(repeats, repeats * 1000 // T)), T * layers)
    return {"T": T, "B": B, "I": I, "H": H, "layers": layers, "error": error, "cudnn_error": library_error, **row,
            "packing_costs": row["ecornn_us"] / row["padded_us"]}


def described(shape: Shape, dtype: str) -> dict[str, Any]:
    return dict(zip(NAMES, shape, strict=True)) | {"dtype": dtype}


def laid(lengths: Any, width: int, together: int) -> dict[str, ecornn.Columns]:
    """Where the sequences of a draw lie."""
    return {"columns": ecornn.Columns.of(lengths, width, together), "whole": ecornn.Columns.of(lengths, width)}


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda").to(getattr(torch, DTYPE))


def compare_columns(shape: Shape, width: int, lengths: Any, library: Any, layers: dict[str, Any],
                    repeats: int) -> dict[str, Any]:
    """One row: all sides checked and timed on one draw of lengths."""
    _, _, _, I, H, depth, both = shape
    longest, least = int(lengths.max()), -(-int(lengths.sum()) // width)
    rows, full, counts = drawn(longest, len(lengths), I), drawn(least, width, I), torch.as_tensor(lengths).int().cuda()
    found = laid(lengths, width, layers["columns"].together)
    xs = {name: rows[columns.inside, columns.table] for name, columns in found.items()}  # graphs read and write these
    outs = {name: drawn(*x.shape[:2], H * (1 + both)) for name, x in xs.items()}
    sides = {name: turns.graph_of(lambda n=name, c=columns: layers["columns"](xs[n], sequences=c, out=outs[n]))
             for name, columns in found.items()}
    sides["alone"] = turns.graph_of(lambda: layers["alone"](full))
    sides["lengths"] = turns.graph_of(lambda: layers["lengths"](rows, lengths=counts))
    packed = pack_sequence([rows[:n, s] for s, n in enumerate(lengths)], enforce_sorted=False)
    exact = torch.cat(unpack_sequence(copy.deepcopy(library).double()(packed.double())[0]))
    theirs, errors = torch.cat(unpack_sequence(library(packed)[0])), {}
    for name, columns in found.items():
        outs[name].fill_(float("nan"))
        sides[name].replay()
        y = outs[name].reshape(-1, H * (1 + both))[torch.from_numpy(columns.places).cuda()]
        errors[name] = check(f"{shape} {name}", [y], [theirs], [exact])
    row: dict[str, Any] = {"longest": longest, "valid": int(lengths.sum()), "together": layers["columns"].together}
    row |= errors["columns"] | timed({name: sides[name].replay for name in SIDES}, lambda: None, repeats,
                                     longest * depth)
    return row | {"share": row["alone_us"] / row["columns_us"], "whole_share": row["alone_us"] / row["whole_us"],
                  "steps": {name: len(columns.table) / max(longest, least) for name, columns in found.items()}}


def runs_of(layer: Any, x: torch.Tensor, dy: torch.Tensor, **masks: Any) -> dict[str, Any]:
    """The backward pass alone, and a whole step; they hold what their graphs read."""
    _, _, kept = layer.forward(x, **masks)
    backward = turns.graph_of(lambda: layer.backward(dataclasses.replace(kept), dy))
    step = turns.graph_of(lambda: layer.backward(layer.forward(x, **masks)[2], dy))
    return {"": lambda kept=kept: backward.replay(), "_step": step.replay}


def gradients(library: torch.nn.RNNBase, rows: list[torch.Tensor], drows: list[torch.Tensor]) -> list[torch.Tensor]:
    """PyTorch's, of the rows one behind the other and of all weights."""
    inputs = [row.detach().requires_grad_() for row in rows]
    y = library(pack_sequence(inputs, enforce_sorted=False))[0]
    made = torch.autograd.grad(y.data, [*inputs, *library.parameters()],
                               pack_sequence(drows, enforce_sorted=False).data)
    return [torch.cat(made[:len(rows)]), *made[len(rows):]]


def train_columns(shape: Shape, width: int, lengths: Any, library: Any, layers: dict[str, Any],
                  repeats: int) -> dict[str, Any]:
    """One draw of lengths: gradients of columns checked, all sides timed."""
    _, _, _, I, H, depth, both = shape
    longest, least = int(lengths.max()), -(-int(lengths.sum()) // width)
    x, dy = (drawn(longest, len(lengths), size) for size in (I, H * (1 + both)))
    columns = ecornn.Columns.of(lengths, width, layers["columns"].together)
    laid_x, laid_dy = (v[columns.inside, columns.table] for v in (x, dy))
    rows, drows = ([v[:n, s] for s, n in enumerate(lengths)] for v in (x, dy))
    places, names = torch.from_numpy(columns.places).cuda(), [n for n, _ in library.named_parameters()]

    def ours() -> list[torch.Tensor]:
        found = layers["columns"].backward(layers["columns"].forward(laid_x, sequences=columns)[2], laid_dy)
        return [found.x.reshape(-1, I)[places], *(found.weights[n] for n in names)]

    found = ours()
    errors = check(f"{shape}, gradients", found, gradients(library, rows, drows), gradients(
        copy.deepcopy(library).double(), [r.double() for r in rows], [r.double() for r in drows]))
    if not all(map(torch.equal, found, ours())):
        sys.exit(f"{shape}: two runs differ")
    del found
    full, dfull = (drawn(least, width, size) for size in (I, H * (1 + both)))
    counts = torch.as_tensor(lengths).int().cuda()
    with torch.no_grad():
        sides = {"columns": runs_of(layers["columns"], laid_x, laid_dy, sequences=columns),
                 "alone": runs_of(layers["alone"], full, dfull),
                 "lengths": runs_of(layers["lengths"], x, dy, lengths=counts)}
    runs = {name + part: run for name, of in sides.items() for part, run in of.items()}
    runs["cudnn_step"] = lambda: gradients(library, rows, drows)
    row: dict[str, Any] = {"longest": longest, "valid": int(lengths.sum()), "together": layers["columns"].together,
                           "steps": len(columns.table), "least": least}
    row |= errors | timed(runs, lambda: None, repeats, longest * depth)
    return row | {"share": row["columns_us"] / row["alone_us"],
                  "step_share": row["columns_step_us"] / row["alone_step_us"]}


def of_draws(shape: Shape, width: int, draws: list[dict[str, Any]]) -> dict[str, Any]:
    """A case: its sizes, and the median with 20th and 80th percentile of its draws."""
    row = described(shape, DTYPE) | {"columns": width, "draws": draws}
    for name in (name for name in draws[0] if name.endswith(("_us", "share"))):
        row[name] = [float(v) for v in np.percentile([draw[name] for draw in draws], [50, 20, 80])]
    return row


def all_packed(arguments: argparse.Namespace, built: Callable[..., Future[str]]) -> Iterator[dict[str, Any]]:
    """The rows of packed sequences."""
    training, shapes = arguments.training, ISSUE if arguments.training else PACKED + ISSUE
    shapes = [shapes[n] for n in arguments.rows or range(len(shapes))]
    files = {shape: built(shape, arguments.dtype, 0, "lengths", False) for shape in shapes if shape not in ISSUE}
    wait(files.values())  # nothing else runs while a row is timed
    for shape in shapes:
        if shape in ISSUE:
            yield (train_issue if training else compare_issue)(shape, arguments.repeats)
        else:
            yield compare_packed(shape, arguments.dtype, arguments.repeats, files[shape].result())


def all_columns(arguments: argparse.Namespace, built: Callable[..., Future[str]]) -> Iterator[dict[str, Any]]:
    """The cases of columns."""
    training, count = arguments.training, arguments.draws or (4 if arguments.training else 8)
    one: Callable[..., dict[str, Any]] = train_columns if training else compare_columns
    cases = [CASES[n] for n in arguments.rows or range(len(CASES))]
    files = [{kind: built(shape, DTYPE, width, kind, training) for kind in TRAINED} for shape, width in cases]
    wait([file for of in files for file in of.values()])
    for (shape, width), of in zip(cases, files, strict=True):
        library, rng = library_of(shape, DTYPE).train(training), np.random.default_rng(0)
        layers = {kind: bound(file.result(), library) for kind, file in of.items()}
        with torch.inference_mode(not training):
            draws = [one(shape, width, rng.integers(1, shape[1] + 1, shape[2]), library, layers, arguments.repeats)
                     for _ in range(count)]
        yield of_draws(shape, width, draws)


def main() -> None:
    parser = options(__doc__, repeats=(20, "timed repetitions a row, or a draw"))
    parser.add_argument("--columns", action="store_true", help="columns in place of packed sequences")
    parser.add_argument("--training", action="store_true", help="training steps in place of forward passes")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="float16", help="of packed sequences")
    parser.add_argument("--draws", type=int, help="of lengths, for columns [8, with --training 4]")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="only these, counted from 0")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.training:
        os.environ["ECORNN_STRICT"] = "1"  # never PyTorch against itself
    rows = []
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for row in (all_columns if arguments.columns else all_packed)(
                arguments, lambda *of: pool.submit(build, *of, folder)):
            rows.append(row)
            print(told(row), flush=True)
    write(arguments.output, environment(), rows)


if __name__ == "__main__":
    main()
