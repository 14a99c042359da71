"""Whole forward passes on a CPU against torch.nn (oneDNN) and ONNX Runtime, interleaved in one run.

    python benchmarks/compare_cpu.py --suite layers --output benchmarks/results/cpu.json

Every side gets the same weights, the same fresh random input in every repetition and the same number of
threads. Outputs are compared with the float64 reference first; ours must be within 1e-5 relative in float32
(rounded weights: the error is reported). In a repetition the sides take turns: the next one waits until the threads
of the one before have stopped spinning, then one run is not timed, the next ones are. A repetition in which other
processes used the processors is made again, up to four times as many in all. A row is a median with its 20th and
80th percentile, in milliseconds. Rows that --output already has stay unless they are measured again, so a suite may
be done in parts (--cell, --only).

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
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import ecornn
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
LONG = 1.0  # seconds; longer runs are not preceded by one that is not timed
SAMPLE = 2e-3  # seconds; shorter runs are timed several at once
PAUSE = 0.005  # seconds in which no thread of this process must run before a side's turn
FOREIGN = 0.03  # seconds of other processes in a repetition that are too many, and share of its time
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


def onnx_runtime(cell: str, library: torch.nn.Module, threads: int, hidden: int) -> Run:
    """The operators LSTM, GRU or RNN of ONNX, one a layer; their gates are in another order."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    order = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}.get(cell, (0,))
    kind, more = {"lstm": ("LSTM", {}), "gru": ("GRU", {"linear_before_reset": 1}),
                  "rnn_tanh": ("RNN", {"activations": ["Tanh"]}), "rnn_relu": ("RNN", {"activations": ["Relu"]})}[cell]
    both = library.bidirectional
    if both:
        more = {**more, "direction": "bidirectional", **{k: v * 2 for k, v in more.items() if k == "activations"}}
    nodes, initial = [], [numpy_helper.from_array(np.array([0, 0, -1] if both else [1], np.int64), "shape")]

    def sorted_gates(name: str) -> np.ndarray:
        value = getattr(library, name).detach().numpy()
        return np.concatenate([value[g * hidden:(g + 1) * hidden] for g in order])

    above = "x"
    for n, ends in enumerate(directions(library)):
        parts = {f"W{n}": [sorted_gates(f"weight_ih{e}") for e in ends],
                 f"R{n}": [sorted_gates(f"weight_hh{e}") for e in ends],
                 f"B{n}": [np.concatenate([sorted_gates(f"bias_ih{e}"), sorted_gates(f"bias_hh{e}")]) for e in ends]}
        initial += [numpy_helper.from_array(np.stack(value), name) for name, value in parts.items()]
        nodes.append(helper.make_node(kind, [above, *parts], [f"four{n}"], hidden_size=hidden, **more))
        if both:  # (T, 2, B, H) -> (T, B, 2 H)
            nodes.append(helper.make_node("Transpose", [f"four{n}"], [f"turned{n}"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", [f"turned{n}", "shape"], [f"y{n}"]) if both else
                     helper.make_node("Squeeze", [f"four{n}", "shape"], [f"y{n}"]))
        above = f"y{n}"
    graph = helper.make_graph(
        nodes, "layer", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "B", library.input_size])],
        [helper.make_tensor_value_info(above, TensorProto.FLOAT, ["T", "B", (1 + both) * hidden])], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


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
            sides["onnxruntime"] = onnx_runtime(cell, library, threads, H)
        if suite in ("layers", "stacks"):
            sides["unfused"] = unfused(cell, library, H)
    return sides, about


def settle() -> None:
    """Waits until no thread of this process spins any more; ONNX Runtime's do for some 40 ms."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(PAUSE)
        if time.process_time() - before < PAUSE / 5:
            return


def foreign() -> float:
    """Seconds of processor time that other processes, and other machines on this host, have used so far."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


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
    counts, long = {}, {}
    for name, run in sides.items():
        error = float(np.linalg.norm(run(x) - expected) / np.linalg.norm(expected))
        row[f"{name}_error"] = error
        if not error <= ROUNDED.get(name.removeprefix("ecornn_"), 1e-5):
            sys.exit(f"{cell} {shape}: {name} has error {error:.2e}")
        begin = time.perf_counter()
        run(x)
        took = time.perf_counter() - begin
        counts[name] = max(1, min(50, int(SAMPLE / took)))
        long[name] = took > LONG
    times: dict[str, list[float]] = {name: [] for name in sides}
    again = 0
    while len(times["ecornn"]) < repeats:
        start, before, sample = time.perf_counter(), foreign(), {}
        x = rng.standard_normal(shape[:3], np.float32)
        for name, run in sides.items():
            settle()
            # wakes the threads, brings the weights back to the caches
            for _ in range(0 if long[name] else counts[name]):
                run(x)
            begin = time.perf_counter()
            for _ in range(counts[name]):
                run(x)
            sample[name] = (time.perf_counter() - begin) / counts[name] * 1e3
        used, again = foreign() - before, again + 1
        if used > max(FOREIGN, FOREIGN * (time.perf_counter() - start)) and again <= 4 * repeats:
            continue
        for name, value in sample.items():
            times[name].append(value)
    row["repetitions"], row["disturbed"] = repeats, again - repeats
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
