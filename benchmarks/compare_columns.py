"""Sequences laid end to end in columns, against the same valid steps as a plain layer of columns that are all full.

    python benchmarks/compare_columns.py --output benchmarks/results/h100_columns.json

Kernels alone, in CUDA graphs, in turns; float16. A row has some draws of lengths uniform in 1..T: ``columns``,
sequences that may wrap around (``together`` neighbours); ``whole``, those that may not; ``alone``, ceil(valid / C)
steps of a plain layer of C columns; ``lengths``, a row of a padded batch for each sequence. Times are microseconds a
layer and step of the longest sequence (of both directions together); ``share`` is alone / columns. y of columns and
whole is compared with PyTorch in float64 first: within twice the error of PyTorch's own float16.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_packed import Shape, bound, check, library_of
from side_by_side import environment, graph_of, summary, take_turns
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import ecornn

DTYPE, SIDES = "float16", ("columns", "whole", "alone", "lengths")
CASES: list[tuple[Shape, int]] = [  # cell, T, sequences, I, H, layers, bidirectional; columns
    (("lstm", 300, 32, 512, 512, 1, False), 16), (("lstm", 300, 32, 512, 512, 2, True), 16),
    (("gru", 300, 32, 800, 800, 1, True), 16), (("lstm", 300, 64, 1024, 1024, 1, False), 32)]


def build(shape: Shape, width: int, kind: str, folder: str) -> str:
    """Compiles one of the modules ``columns``, ``alone`` and ``lengths``, and returns its file."""
    cell, T, B, I, H, layers, both = shape
    out = f"{folder}/{'-'.join(map(str, shape))}-{kind}.so"
    ecornn.compile(cell, hidden=H, input=I, batch=B if kind == "lengths" else width, seq=T, dtype=DTYPE, target="cuda",
                   layers=layers, bidirectional=both, sequences=kind == "columns", lengths=kind == "lengths", out=out)
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


def described(shape: Shape, width: int, draws: list[dict[str, Any]]) -> dict[str, Any]:
    """A case: its sizes, and the median with 20th and 80th percentile of its draws."""
    names = ("cell", "T", "B", "I", "H", "layers", "bidirectional")
    row: dict[str, Any] = dict(zip(names, shape, strict=True)) | {"columns": width, "dtype": DTYPE, "draws": draws}
    for name in (*(f"{side}_us" for side in SIDES), "share", "whole_share"):
        row[name] = [float(v) for v in np.percentile([draw[name] for draw in draws], [50, 20, 80])]
    return row


def told(row: dict[str, Any]) -> str:
    """A case in a line."""
    values = {name: "{:.2f} [{:.2f}, {:.2f}]".format(*row[name]) for name in
              (*(f"{side}_us" for side in SIDES), "share", "whole_share")}
    steps = [np.mean([draw["steps"][name] for draw in row["draws"]]) for name in ("columns", "whole")]
    return (f"{row['cell']} {row['H']} layers={row['layers']} both={row['bidirectional']} {row['B']} in "
            f"{row['columns']}: " + ", ".join(f"{name} {value}" for name, value in values.items())
            + f"; steps / least {steps[0]:.3f}, whole {steps[1]:.3f}; together {row['draws'][0]['together']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--draws", type=int, default=8, help="of lengths [%(default)s]")
    parser.add_argument("--repeats", type=int, default=20, help="timed repetitions a draw [%(default)s]")
    parser.add_argument("--cases", type=int, nargs="+", metavar="N", help="only these, counted from 0")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows, cases = [], [CASES[n] for n in arguments.cases or range(len(CASES))]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        built = [{kind: pool.submit(build, shape, width, kind, folder) for kind in ("columns", "alone", "lengths")}
                 for shape, width in cases]
        files = [{kind: file.result() for kind, file in of.items()} for of in built]  # before anything is timed
        for (shape, width), of in zip(cases, files, strict=True):
            library, rng = library_of(shape, DTYPE), np.random.default_rng(0)
            layers = {kind: bound(file, library) for kind, file in of.items()}
            with torch.inference_mode():
                drawn = [rng.integers(1, shape[1] + 1, shape[2]) for _ in range(arguments.draws)]
                draws = [compare(shape, width, lengths, library, layers, arguments.repeats) for lengths in drawn]
            rows.append(described(shape, width, draws))
            print(told(rows[-1]), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
