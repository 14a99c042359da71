"""Whole forward passes against cuDNN through PyTorch, both in CUDA graphs, interleaved in one run.

    python benchmarks/compare_cudnn.py --output benchmarks/results/h100.json

Every repetition copies fresh random inputs into both sides' buffers, then replays one graph after the
other. Outputs of both are compared with a float64 computation first: ours must be within twice
cuDNN's own error (float32: 1e-5 relative). A row is a median with its 20th and 80th percentile, in
microseconds per time step, of the whole layer: input projection and recurrence.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
import torch

import ecornn

SHAPES = ((300, 20, 800, 800), (1024, 16, 768, 768))
CELLS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}


def float64_forward(cell: str, x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer in float64 on the GPU; x (T, B, I) to y (T, B, H), initial state zero."""
    p = {k: v.double() for k, v in p.items()}
    gates = x.double() @ p["weight_ih_l0"].T + p["bias_ih_l0"]
    hidden = p["weight_hh_l0"].shape[1]
    h = torch.zeros(x.shape[1], hidden, dtype=torch.float64, device=x.device)
    c, out = h.clone(), []
    for g in gates:
        r = h @ p["weight_hh_l0"].T + p["bias_hh_l0"]
        if cell == "lstm":
            i, f, n, o = (g + r).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * n.tanh()
            h = o.sigmoid() * c.tanh()
        elif cell == "gru":
            (gr, gz, gn), (rr, rz, rn) = g.chunk(3, 1), r.chunk(3, 1)
            n = (gn + (gr + rr).sigmoid() * rn).tanh()
            z = (gz + rz).sigmoid()
            h = (1 - z) * n + z * h
        else:
            h = (g + r).tanh()
        out.append(h)
    return torch.stack(out)


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where value has one."""
    return ((value.double() - reference).norm() / reference.norm()).item()


def graph_of(function) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call, captured after warm-up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def compare(cell: str, shape: tuple[int, int, int, int], dtype: str, repeats: int) -> dict:
    """One row: both sides checked and timed."""
    T, B, I, H = shape
    kind = getattr(torch, dtype)
    kwargs = {"nonlinearity": "tanh"} if cell == "rnn_tanh" else {}
    library = CELLS[cell](I, H, **kwargs).cuda().to(kind)
    weights = {k: v.detach() for k, v in library.named_parameters()}
    module = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda")
    layer = module.bind(weights)
    x = torch.randn(T, B, I, device="cuda").to(kind)
    ours = torch.full((T, B, H), float("nan"), device="cuda", dtype=kind)
    with torch.no_grad():
        run_ours = graph_of(lambda: layer(x, out=ours))
        run_theirs = graph_of(lambda: library(x))
        x.copy_(torch.randn(T, B, I, device="cuda"))
        ours.fill_(float("nan"))
        run_ours.replay()
        reference = float64_forward(cell, x, weights)
        error, library_error = relative(ours, reference), relative(library(x)[0], reference)
        repeat = ours.clone()
        ours.fill_(float("nan"))
        run_ours.replay()
        identical = torch.equal(repeat, ours)
    limit = 1e-5 if dtype == "float32" else 2 * library_error + 1e-6
    if not error <= limit:
        sys.exit(f"{cell} {shape} {dtype}: error {error:.2e}, allowed {limit:.2e}")
    if not identical:
        sys.exit(f"{cell} {shape} {dtype}: two runs differ")
    times: dict[str, list[float]] = {"ecornn": [], "cudnn": []}
    for repetition in range(repeats + 3):
        x.copy_(torch.randn(T, B, I, device="cuda"))
        for name, graph in (("ecornn", run_ours), ("cudnn", run_theirs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repetition >= 3:
                times[name].append(start.elapsed_time(end) * 1e3 / T)
    row: dict = {"cell": cell, "T": T, "B": B, "I": I, "H": H, "dtype": dtype, "error": error,
                 "cudnn_error": library_error, "schedule": module.manifest.schedule,
                 "config": module.manifest.config, "provenance": module.manifest.provenance}
    for name, values in times.items():
        p20, median, p80 = np.percentile(values, [20, 50, 80])
        row |= {f"{name}_us": float(median), f"{name}_p20": float(p20), f"{name}_p80": float(p80)}
    row["ratio"] = row["cudnn_us"] / row["ecornn_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=30, help="timed repetitions a row")
    parser.add_argument("--cell", choices=list(CELLS), action="append", help="only this cell; may repeat")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], action="append")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    rows = []
    for cell in arguments.cell or CELLS:
        for shape in SHAPES:
            for dtype in arguments.dtype or ("bfloat16", "float16"):
                row = compare(cell, shape, dtype, arguments.repeats)
                rows.append(row)
                print(f"{cell:9} {dtype:9} {shape}  ecornn {row['ecornn_us']:.2f} "
                      f"[{row['ecornn_p20']:.2f}, {row['ecornn_p80']:.2f}]  cuDNN {row['cudnn_us']:.2f} "
                      f"[{row['cudnn_p20']:.2f}, {row['cudnn_p80']:.2f}] us/step  {row['ratio']:.2f}x  "
                      f"error {row['error']:.1e} / {row['cudnn_error']:.1e}", flush=True)
    if arguments.output:
        environment = {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(), "ecornn": ecornn.__version__,
            "tvm": importlib.metadata.version("apache-tvm"),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": "python benchmarks/compare_cudnn.py " + " ".join(sys.argv[1:])}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
