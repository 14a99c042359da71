"""Whole forward passes on a CPU against torch.nn (oneDNN) and ONNX Runtime, interleaved in one run.

    python benchmarks/compare_cpu.py --suite layers --output benchmarks/results/cpu.json

Every side gets the same weights, the same fresh random input in every repetition and the same number of
threads. Outputs are compared with the float64 reference first; ours must be within 1e-5 relative in float32
(rounded weights: the error is reported). In a repetition the sides take turns: the next one waits until the threads
of the one before have stopped spinning, then one run is not timed, the next ones are. A repetition in which other
processes used the processors is made again, up to four times as many in all (ecornn/bench/host_turns.py). A row is a
median with its 20th and 80th percentile, in milliseconds. Rows that --output already has stay unless they are measured
again, so a suite may be done in parts (--cell, --only).

Suites: layers (300x20x800, with products and pointwise operations one by one as the unfused side, as MXNet's cells
are, see unfused.py), stacks (the same, five layers in both directions), latency (B=1, T=100, with int21 weights, too),
grid (24 shapes), weights (rounded weights against our own float32), threads (ours on 1 and on 2 threads).
ONNX Runtime takes part where the packages onnxruntime and onnx are there.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import ecornn
from ecornn.bench.host_turns import take_turns
from ecornn.bench.onnx_layer import session
from ecornn.host_cpu import detect

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
GRID = [  # T, B, I, H: what speech, text, tables of sensors and decoders use, and sizes that divide nothing
    (100, 1, 64, 128), (200, 8, 128, 128), (50, 32, 256, 512), (300, 16, 80, 320), (30, 64, 300, 300),
    (64, 4, 512, 768)]
SUITES: dict[str, list[tuple[str, tuple[int, int, int, int]]]] = {
    "layers": [(cell, (300, 20, 800, 800)) for cell in CELLS],
    "stacks": [(cell, (300, 20, 800, 800)) for cell in CELLS],
    "latency": [(cell, (100, 1, h, h)) for cell in CELLS for h in (64, 128, 256, 512, 1024)],
    "grid": [(cell, shape) for cell in CELLS for shape in GRID],
    "weights": [(cell, (100, 1, 1024, 1024)) for cell in CELLS],
    "threads": [(cell, (300, 20, 800, 800)) for cell in CELLS],
}
ROUNDED = {"int21": 1e-5, "int16": 1e-4, "bfloat16": 0.1, "int8": 0.1}  # and the error that is too much
STACK = 5  # layers, each in both directions
Run = Callable[[np.ndarray], np.ndarray]


def library_of(cell: str, input: int, hidden: int, suite: str) -> torch.nn.Module:
    """The layer of torch.nn, or the stack."""
    many = {"num_layers": STACK, "bidirectional": True} if suite == "stacks" else {}
    if cell.startswith("rnn"):
        return torch.nn.RNN(input, hidden, nonlinearity=cell[4:], **many)
    return {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](input, hidden, **many)


def directions(library: torch.nn.Module) -> list[list[str]]:
    """The endings of names of parameters: of each layer, of each of its directions."""
    return [[f"_l{n}", f"_l{n}_reverse"][:1 + library.bidirectional] for n in range(library.num_layers)]


def unfused(cell: str, library: torch.nn.Module, hidden: int) -> Run:
    """Products and pointwise operations of PyTorch, one by one."""
    from unfused import unfused as one_by_one

    layers = [[{f"{kind}_{part}_l0": getattr(library, f"{kind}_{part}{end}").detach()
                for kind in ("weight", "bias") for part in ("ih", "hh")} for end in layer]
              for layer in directions(library)]

    def run(x: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(x)
        for layer in layers:
            parts = []
            for reverse, parameters in enumerate(layer):
                y = torch.empty(*rows.shape[:2], hidden)
                one_by_one(cell, rows.flip(0) if reverse else rows, parameters, y, per_gate=False)
                parts.append(y.flip(0) if reverse else y)
            rows = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
        return rows.numpy()

    return run


def sides_of(suite: str, cell: str, shape: tuple[int, int, int, int], threads: int,
             library: torch.nn.Module) -> tuple[dict[str, Run], dict[str, object]]:
    """Name -> one forward pass, ours first; and what the row says about ours."""
    T, B, I, H = shape
    weights = {name: value.detach() for name, value in library.named_parameters()}

    def ours(threads: int, **options: str) -> tuple[Run, ecornn.Module]:
        module = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, target="cpu", layers=library.num_layers,
                                bidirectional=library.bidirectional, **options)
        layer = module.bind(weights, threads=threads)
        return lambda x: layer(x)[0], module

    run, module = ours(threads)
    sides, about = {"ecornn": run}, {"config": module.manifest.config, "provenance": module.manifest.provenance}
    if suite == "threads":
        sides["ecornn_1_thread"] = ours(1)[0]
    elif suite == "weights":
        for kind in ROUNDED:
            if kind != "int8" or {"avx512vnni", "avxvnni"} & set(detect().features):
                sides[f"ecornn_{kind}"] = ours(threads, weights=kind)[0]
    else:
        if suite == "latency":
            sides["ecornn_int21"] = ours(threads, weights="int21")[0]
        sides["torch"] = lambda x: library(torch.from_numpy(x))[0].numpy()
        if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
            sides["onnxruntime"] = session(cell, {name: value.numpy() for name, value in weights.items()}, H,
                                           library.num_layers, library.bidirectional, threads)
        if suite in ("layers", "stacks"):
            sides["unfused"] = unfused(cell, library, H)
    return sides, about


def compare(suite: str, cell: str, shape: tuple[int, int, int, int], threads: int, repeats: int) -> dict:
    """One row: all sides checked and timed."""
    T, B, I, H = shape
    library = library_of(cell, I, H, suite)
    sides, about = sides_of(suite, cell, shape, threads, library)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape[:3], np.float32)
    numpy_weights = {name: value.detach().numpy() for name, value in library.named_parameters()}
    expected = ecornn.reference(cell, x, numpy_weights)[0]
    row: dict = {"suite": suite, "cell": cell, "T": T, "B": B, "I": I, "H": H, "threads": threads, **about}
    for name, run in sides.items():
        error = float(np.linalg.norm(run(x) - expected) / np.linalg.norm(expected))
        row[f"{name}_error"] = error
        if not error <= ROUNDED.get(name.removeprefix("ecornn_"), 1e-5):
            sys.exit(f"{cell} {shape}: {name} has error {error:.2e}")

    def fresh() -> None:
        nonlocal x
        x = rng.standard_normal(shape[:3], np.float32)

    found = take_turns({name: lambda run=run: run(x) for name, run in sides.items()}, fresh, repeats)
    times = {name: [1e3 * seconds for seconds in found.means(name)] for name in sides}
    row["repetitions"], row["disturbed"] = repeats, found.disturbed
    for name, values in times.items():
        p20, median, p80 = np.percentile(values, [20, 50, 80])
        row |= {f"{name}_ms": float(median), f"{name}_p20": float(p20), f"{name}_p80": float(p80)}
    for name in list(sides)[1:]:
        if suite == "latency" and name.startswith("ecornn"):
            continue
        row[f"ratio_{name}"] = row[f"{name}_ms"] / row["ecornn_ms"]
        if suite == "weights":  # here ecornn's float32 is the other side
            row[f"ratio_{name}"] **= -1
    peers = [row[f"{name}_ms"] for name in ("torch", "onnxruntime") if name in sides]
    if peers:
        row["ratio"] = min(peers) / row["ecornn_ms"]
        if suite == "latency":
            row["ratio_int21"] = min(peers) / row["ecornn_int21_ms"]
    values = sum(value.numel() for name, value in library.named_parameters() if name.startswith("weight"))
    row["gflops"] = 2e-6 * T * B * values / row["ecornn_ms"]
    return row


def key(row: dict) -> tuple:
    return tuple(row[name] for name in ("suite", "cell", "T", "B", "I", "H", "threads"))


def write(path: Path, rows: list[dict]) -> None:
    """Adds the rows to the file."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    fresh = {key(row) for row in rows}
    versions = {name: importlib.metadata.version(package) for name, package in
                (("torch", "torch"), ("onnxruntime", "onnxruntime"), ("tvm", "apache-tvm"), ("numpy", "numpy"))
                if importlib.util.find_spec(name)}
    device = detect()
    environment = {"cpu": device.name, "arch": device.arch, "cores": device.cores, "ecornn": ecornn.__version__,
                   **versions, "command": "python benchmarks/compare_cpu.py --suite SUITE"}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for row in old if key(row) not in fresh] + rows
    order = [(suite, cell, *shape) for suite, of in SUITES.items() for cell, shape in of]
    rows.sort(key=lambda row: order.index(key(row)[:-1]))
    path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(SUITES), required=True)
    parser.add_argument("--output", type=Path, help="JSON file to write or to add to")
    parser.add_argument("--repeats", type=int, default=15, help="timed repetitions a row")
    parser.add_argument("--threads", type=int, default=detect().cores, help="of every side (default: physical cores)")
    parser.add_argument("--cell", choices=CELLS, action="append", help="only this cell; may repeat")
    parser.add_argument("--only", metavar="TxBxIxH", action="append", help="only this shape; may repeat")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    for cell, shape in SUITES[arguments.suite]:
        name = "x".join(map(str, shape))
        if cell not in (arguments.cell or CELLS) or name not in (arguments.only or [name]):
            continue
        with torch.no_grad():
            row = compare(arguments.suite, cell, shape, arguments.threads, arguments.repeats)
        row["time"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        rows.append(row)
        if arguments.output:
            write(arguments.output, [row])
        text = "  ".join(f"{side} {row[f'{side}_ms']:.3f} [{row[f'{side}_p20']:.3f}, {row[f'{side}_p80']:.3f}]"
                         + (f" ({row[f'ratio_{side}']:.2f}x)" if f"ratio_{side}" in row else "")
                         for side in (k.removesuffix("_ms") for k in row if k.endswith("_ms")))
        print(f"{cell:8} {name:15} {text} ms  {row['gflops']:.0f} GFLOP/s", flush=True)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        print(f"against the faster peer: geometric mean {np.exp(np.mean(np.log(ratios))):.2f}x, "
              f"least {min(ratios):.2f}x, {len(ratios)} rows")


if __name__ == "__main__":
    main()
