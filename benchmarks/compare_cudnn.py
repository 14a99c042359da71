"""Whole forward passes against cuDNN through PyTorch, both in CUDA graphs, interleaved in one run.

    python benchmarks/compare_cudnn.py --output benchmarks/results/h100.json

Every repetition copies fresh random inputs into both sides' buffers, then replays one graph after the
other. Outputs of both are compared with a float64 computation first: ours must be within twice
cuDNN's own error (float32: 1e-5 relative). A row is a median with its 20th and 80th percentile, in
microseconds per time step, of the whole layer: input projection and recurrence. ``compare_grid.py``
does the same for every layer of the grid.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from side_by_side import CELLS, WrongResultError, compare, environment

import ecornn

SHAPES = ((300, 20, 800, 800), (1024, 16, 768, 768))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=30, help="timed repetitions a row")
    parser.add_argument("--cell", choices=list(CELLS), action="append", help="only this cell; may repeat")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], action="append")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU and a PyTorch that sees it; compare_cpu.py compares on a CPU")
    torch.manual_seed(0)
    rows = []
    for cell in arguments.cell or CELLS:
        for shape in SHAPES:
            T, B, I, H = shape
            for dtype in arguments.dtype or ("bfloat16", "float16"):
                module = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda")
                try:
                    row = compare(cell, shape, dtype, module, repeats=arguments.repeats)
                except WrongResultError as error:
                    sys.exit(f"{cell} {shape} {dtype}: {error}")
                rows.append(row)
                print(f"{cell:9} {dtype:9} {shape}  ecornn {row['ecornn_us']:.2f} "
                      f"[{row['ecornn_p20']:.2f}, {row['ecornn_p80']:.2f}]  cuDNN {row['cudnn_us']:.2f} "
                      f"[{row['cudnn_p20']:.2f}, {row['cudnn_p80']:.2f}] us/step  {row['ratio']:.2f}x  "
                      f"error {row['error']:.1e} / {row['cudnn_error']:.1e}", flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
