"""Packed sequences: ``ecornn.torch``'s layer and PyTorch's, on the same PackedSequence, in turns.

    python benchmarks/compare_packed.py --output benchmarks/results/h100_packed.json

Lengths are uniform in 1..T, in float16. Both are called as they are (no graph: lengths are read on the host); so is
our own module with ``lengths``, by them and with all rows at full length, on padded rows. ``columns`` are those that
the first of these lays them in. Outputs are compared with PyTorch in float64 first: ours must be within twice cuDNN's
own error. A row is a median with its 20th and 80th percentile, in microseconds per layer and time step.

Rows with ``case`` "pytorch#149194" are that issue's: a model that packs padded x, calls the layer and pads y, all
of it timed, in float32 (cuDNN may round to TF32 there, as PyTorch sets it; ours does not), with lengths from 1 to T in
even steps. B, I and H are ours: those of the issue are not known to us. ``packing`` is PyTorch's packing and padding of
as much data without a layer, which both sides have; ``cudnn_padded`` is PyTorch's layer on padded x, all rows to the
end, which the issue compares with.

``--training``: that model in training, the gradients of the mean of y, by ``ecornn.torch``, by PyTorch, and by
PyTorch on padded rows (``padded``), as they are called, in float32. ``packing`` is what all but ``padded`` have of
PyTorch: packing, padding and its gradient, around no layer.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from side_by_side import CELLS, environment, options, relative, summary, write
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ecornn
import ecornn.torch
from ecornn.bench import turns
from ecornn.torch.packed import columns_for

Shape = tuple[str, int, int, int, int, int, bool]
PACKED: list[Shape] = [
    ("lstm", 300, 32, 512, 512, 1, False), ("lstm", 300, 32, 512, 512, 2, True), ("gru", 300, 32, 800, 800, 1, True)]

ISSUE: list[Shape] = [("lstm", T, 32, 64, H, 2, False) for H in (64, 256) for T in (100, 500, 2000, 4000)]


def build(shape: Shape, dtype: str, folder: str) -> str:
    """Compiles the module of a row, and returns its file."""
    cell, T, B, I, H, layers, both = shape
    out = f"{folder}/{'-'.join(map(str, shape))}.so"
    ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda", layers=layers,
                   bidirectional=both, lengths=True, out=out)
    return out


def library_of(shape: Shape, dtype: str) -> torch.nn.RNNBase:
    """PyTorch's layer, with random weights."""
    cell, _, _, I, H, layers, both = shape
    return CELLS[cell](I, H, layers, bidirectional=both).cuda().to(getattr(torch, dtype)).eval()


def bound(file: str, library: torch.nn.RNNBase) -> ecornn.Layer:
    """Our layer, of the same weights."""
    return ecornn.load(file).bind({k: v.detach() for k, v in library.named_parameters()})


def check(name: str, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Relative errors of both; ends the program where ours is over twice theirs."""
    found, library = relative(ours, exact), relative(theirs, exact)
    if not found <= 2 * library + 1e-6:
        sys.exit(f"{name}: error {found:.2e}, allowed {2 * library + 1e-6:.2e}")
    return found, library


def timed(sides: dict[str, Any], repeats: int, steps: int) -> dict[str, float]:
    """Microseconds a step of calls that take turns, the host's work for them included."""
    row = {}
    for name, values in turns.take_turns(sides, lambda: None, repeats, float("inf"), called).items():
        row |= summary(name, values, steps)
    return row


def called(call: Callable[[], object]) -> float:
    """Microseconds between events before and after a call on an idle GPU, for which nothing waits."""
    return turns.gpu_clock(call, 0) * 1e6


def compare_packed(shape: Shape, dtype: str, repeats: int, file: str) -> dict[str, Any]:
    """One row of packed sequences."""
    _, T, B, I, _, layers, _ = shape
    library = library_of(shape, dtype)
    layer = bound(file, library)
    ours = copy.deepcopy(library)
    ecornn.torch.replace(ours, wait=True)
    lengths = torch.randint(1, T + 1, (B,))
    lengths[0] = T
    x = torch.randn(T, B, I, device="cuda").to(getattr(torch, dtype))
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    on_gpu, full = lengths.cuda(), torch.full((B,), T, device="cuda")
    with torch.inference_mode():
        exact = pad_packed_sequence(copy.deepcopy(library).double()(packed.double())[0], total_length=T)[0]
        theirs = pad_packed_sequence(library(packed)[0], total_length=T)[0]
        check(f"{shape} padded", layer(x, lengths=on_gpu)[0], theirs, exact)
        error = check(str(shape), pad_packed_sequence(ours(packed)[0], total_length=T)[0], theirs, exact)
        row = timed({"ecornn": lambda: ours(packed), "padded": lambda: layer(x, lengths=on_gpu),
                     "full": lambda: layer(x, lengths=full), "cudnn": lambda: library(packed)}, repeats,
                    T * layers)
    return describe(shape, dtype, error) | row | {
        "case": "uniform", "valid": float(lengths.double().mean()) / T,
        "columns": columns_for(np.sort(lengths.numpy())[::-1]), "ratio": row["cudnn_us"] / row["ecornn_us"]}


def triangular(steps: int, batch: int) -> torch.Tensor:
    """The lengths of pytorch#149194, (B,) int64."""
    return torch.linspace(1, steps, batch).round().long()


def packed_and_padded(layer: Callable[[Any], Any], x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The model of pytorch#149194: x (T, B, I) to y (T, B, H), zero beyond the lengths."""
    return pad_packed_sequence(layer(pack_padded_sequence(x, lengths, enforce_sorted=False))[0])[0]


def compare_issue(shape: Shape, repeats: int, device: str = "cuda") -> dict[str, Any]:
    """One row of pytorch#149194."""
    cell, T, B, I, H, layers, both = shape
    library = CELLS[cell](I, H, layers, bidirectional=both).to(device).eval()
    ours = copy.deepcopy(library)
    ecornn.torch.replace(ours, wait=True)
    x, lengths = torch.randn(T, B, I, device=device), triangular(T, B)
    with torch.inference_mode():
        exact = packed_and_padded(copy.deepcopy(library).double(), x.double(), lengths)
        error = check(str(shape), packed_and_padded(ours, x, lengths), packed_and_padded(library, x, lengths), exact)
        row = timed({"ecornn": lambda: packed_and_padded(ours, x, lengths),
                     "cudnn": lambda: packed_and_padded(library, x, lengths),
                     "cudnn_padded": lambda: library(x),
                     "packing": lambda: packed_and_padded(lambda packed: (packed,), x, lengths)},
                    max(3, min(repeats, repeats * 1000 // T)), T * layers)
    return describe(shape, "float32", error) | row | {
        "case": "pytorch#149194", "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "valid": float(lengths.double().mean()) / T, "ratio": row["cudnn_us"] / row["ecornn_us"]}


def train_issue(shape: Shape, repeats: int) -> dict[str, Any]:
    """One row of pytorch#149194 in training: the gradients of the mean of y, by both, and by PyTorch on padded rows."""
    cell, T, B, I, H, layers, both = shape
    library = CELLS[cell](I, H, layers, bidirectional=both).cuda()
    ours = copy.deepcopy(library)
    ecornn.torch.replace(ours, wait=True)
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
                max(3, min(repeats, repeats * 1000 // T)), T * layers)
    return {"T": T, "B": B, "I": I, "H": H, "layers": layers, "error": errors[0], "cudnn_error": errors[1], **row,
            "ratio": row["cudnn_us"] / row["ecornn_us"], "packing_costs": row["ecornn_us"] / row["padded_us"]}


def told(row: dict[str, Any]) -> str:
    """A row in a line."""
    extra = f" {row['case']}, {row['valid']:.2f} valid" if "case" in row else ""
    if "padded_us" in row:
        extra += f", padded {row['padded_us']:.2f}, full {row['full_us']:.2f}"
    if "packing_us" in row:
        extra += f", {row['packing_us']:.2f} of it packing, cuDNN on padded rows {row['cudnn_padded_us']:.2f}"
    return (f"{row['dtype']} ecornn {row['ecornn_us']:.2f} [{row['ecornn_p20']:.2f}, {row['ecornn_p80']:.2f}]{extra}  "
            f"cuDNN {row['cudnn_us']:.2f} [{row['cudnn_p20']:.2f}, {row['cudnn_p80']:.2f}] us  {row['ratio']:.2f}x  "
            f"error {row['error']:.1e} / {row['cudnn_error']:.1e}")


def describe(shape: Shape, dtype: str, error: tuple[float, float]) -> dict[str, Any]:
    names = ("cell", "T", "B", "I", "H", "layers", "bidirectional")
    return dict(zip(names, shape, strict=True)) | {"dtype": dtype, "error": error[0], "cudnn_error": error[1]}


def trained(r: dict[str, Any]) -> str:
    """A row of training in a line."""
    return (f"ecornn {r['ecornn_us']:.2f}, cuDNN {r['cudnn_us']:.2f}, cuDNN padded {r['padded_us']:.2f} us/step; "
            f"{r['ratio']:.2f}x, {r['packing_costs']:.2f} of padded, {r['packing_us']:.2f} of it packing; error "
            f"{r['error']:.1e} / {r['cudnn_error']:.1e}")


def main() -> None:
    parser = options(__doc__, repeats=(20, "timed repetitions a row"))
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="float16")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="only these rows, counted from 0")
    parser.add_argument("--training", action="store_true", help="pytorch#149194 in training")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.training:
        os.environ["ECORNN_STRICT"] = "1"  # never PyTorch against itself
    rows, shapes = [], ISSUE if arguments.training else PACKED + ISSUE
    shapes = [shapes[n] for n in arguments.rows or range(len(shapes))]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        built = {shape: pool.submit(build, shape, arguments.dtype, folder) for shape in shapes if shape not in ISSUE}
        wait(built.values())  # nothing else runs while a row is timed
        for shape in shapes:
            rows.append((train_issue if arguments.training else compare_issue)(shape, arguments.repeats)
                        if shape in ISSUE
                        else compare_packed(shape, arguments.dtype, arguments.repeats, built[shape].result()))
            print(f"{shape} {trained(rows[-1]) if arguments.training else told(rows[-1])}", flush=True)
    write(arguments.output, environment(), rows)


if __name__ == "__main__":
    main()
