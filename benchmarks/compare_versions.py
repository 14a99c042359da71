"""Two versions of ecornn on the same layers, in turns: a change that moves code and does not change it keeps times.

    git worktree add ../before COMMIT
    python benchmarks/compare_versions.py ../before --output benchmarks/results/h100_versions.json

Forward: the rows of the README's plot (grid.py). Training: twelve rows of training_rows.py. Each version compiles the
rows in processes that import its own tree; modules of both are loaded by this version, which must read the other's.
Outputs of the two must be the same bits, or as near to float64 as before. Times are medians with 20th and 80th
percentiles of CUDA graphs on fresh inputs, in microseconds a time step and layer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean

import torch
from compare_training import CELLS, DEVICE, gradients64, graph_of, relative, summary, take_turns
from grid import GRID
from side_by_side import environment, float64_forward
from training_rows import ROWS, Row

import ecornn

HERE = Path(__file__).parent
KINDS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "tf32": "f32", "tf32-both": "tf32"}
FORWARD = list(dict.fromkeys(Row(r.cell, r.T, r.B, r.I, r.H, KINDS[r.dtype]) for r in GRID))
TRAINING = [row for row in ROWS if str(row) in {
    "lstm 1024x16x768x768 bf16", "lstm 300x20x800x800 f16", "lstm 300x20x800x800 f32", "gru 1024x16x768x768 f16",
    "rnn_tanh 300x20x800x800 tf32", "lstm 256x64x256x256 f16", "lstm 256x64x1024x1024 bf16", "gru 256x32x2048x2048 f16",
    "rnn_tanh 256x32x2560x2560 f16", "lstm 365x256x30x256 bf16", "lstm 128x512x256x256 tf32",
    "lstm 35x32x650x650 bf16 2 layers"}]


def build(row: Row, training: bool, out: Path) -> str:
    """Compiles a row's module; empty, or why there is none."""
    try:
        ecornn.compile(row.cell, **row.properties, target="cuda", training=training, out=out)  # type: ignore[arg-type]
    except ecornn.errors.EcornnError as error:
        return str(error)
    return ""


def compile_all(folder: Path, rows: list[tuple[Row, bool]], processes: int) -> None:
    """Compiles the rows to ``folder/N.so`` with the version that this process imports; writes ``faults.json``."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = [pool.submit(build, *row, folder / f"{n}.so") for n, row in enumerate(rows)]
        (folder / "faults.json").write_text(json.dumps([f.result() for f in futures]))


def compare(row: Row, training: bool, files: dict[str, Path], repeats: int, seconds: float) -> dict:
    """One row: results of both versions checked, then timed."""
    kind = {"f16": torch.float16, "bf16": torch.bfloat16}.get(row.kind, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    options = {"nonlinearity": "tanh"} if row.cell == "rnn_tanh" else {}
    library = CELLS[row.cell](row.I, row.H, row.layers, bidirectional=row.bidirectional, device=DEVICE,
                              **options).to(kind)
    weights = {k: v.detach() for k, v in library.named_parameters()}
    x = torch.randn(row.T, row.B, row.I, device=DEVICE).to(kind)
    dy = torch.randn(row.T, row.B, row.H * (1 + row.bidirectional), device=DEVICE).to(kind)

    def side(file: Path) -> Callable[[], list[torch.Tensor]]:
        layer = ecornn.load(file).bind(weights)
        if not training:
            out = torch.full_like(dy, float("nan"))
            return lambda: [layer(x, out=out)[0]]

        def step() -> list[torch.Tensor]:
            _, _, kept = layer.forward(x)
            found = layer.backward(kept, dy, want_state=False)
            return [found.x, *(found.weights[n] for n in weights)]
        return step

    with torch.no_grad():
        sides = {name: side(file) for name, file in files.items()}
        results = {name: [t.clone() for t in run()] for name, run in sides.items()}
        same = all(torch.equal(a, b) for a, b in zip(*results.values(), strict=True))
        graphs = {name: graph_of(run) for name, run in sides.items()}
    exact = gradients64(row, library, x, dy) if training else [float64_forward(row.cell, x, weights)]
    errors = {name: max(relative(a, b) for a, b in zip(found, exact, strict=True)) for name, found in results.items()}
    del exact, results
    if not errors["new"] <= 1.01 * errors["old"] + 1e-6:
        return {"fault": f"error {errors['new']:.2e}, before {errors['old']:.2e}"}

    def fresh() -> None:
        for buffer in (x, dy):
            buffer.copy_(torch.randn(buffer.shape, device=DEVICE))

    times = take_turns({name: graph.replay for name, graph in graphs.items()}, fresh, repeats, seconds)
    found: dict = {"same_bits": same, "errors": errors, "repetitions": len(times["new"])}
    for name, values in times.items():
        found |= summary(name, values, row.T * row.layers)
    return found | {"ratio": found["new_us"] / found["old_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other version's tree")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=40, help="timed repetitions a row, at most")
    parser.add_argument("--seconds", type=float, default=0.6, help="for these, after which there are at least seven")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile")
    parser.add_argument("--compile-into", type=Path, help=argparse.SUPPRESS)  # what the other version is asked to do
    arguments = parser.parse_args()
    rows = [*((row, True) for row in TRAINING), *((row, False) for row in FORWARD)]
    if arguments.compile_into:
        compile_all(arguments.compile_into, rows, arguments.processes)
        return
    done: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        folders = {name: Path(folder, name) for name in ("old", "new")}
        for name, tree in zip(folders, (arguments.before.resolve(), HERE.parent), strict=True):
            folders[name].mkdir()
            begin = time.monotonic()
            path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
            subprocess.run([sys.executable, __file__, str(tree), "--compile-into", folders[name], "--processes",
                            str(arguments.processes)], check=True,
                           env=os.environ | {"PYTHONPATH": path, "ECORNN_CACHE": str(folders[name] / "cache")})
            print(f"{name}: {time.monotonic() - begin:.0f} s to compile {len(rows)} modules", flush=True)
        faults = {name: json.loads((at / "faults.json").read_text()) for name, at in folders.items()}
        for n, (row, training) in enumerate(rows):
            torch.manual_seed(0)
            name = f"{row}{' training' * training}"
            fault = "; ".join(f"{side}: {each[n]}" for side, each in faults.items() if each[n])
            made = {"fault": fault} if fault else compare(
                row, training, {side: at / f"{n}.so" for side, at in folders.items()}, arguments.repeats,
                arguments.seconds)
            torch.cuda.empty_cache()
            done.append({"row": name} | made)
            print(name, made.get("fault") or f"{made['old_us']:.3f} {made['new_us']:.3f} us/step, "
                  f"{made['ratio']:.3f} {'same bits' if made['same_bits'] else 'other bits'}", flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps({"environment": environment(), "rows": done}, indent=1) + "\n")
    ratios = [r["ratio"] for r in done if "ratio" in r]
    print(f"{len(ratios)} of {len(done)} rows, new / old: geometric mean {geometric_mean(ratios):.3f}, "
          f"{min(ratios):.3f} to {max(ratios):.3f}")
    sys.exit(any("fault" in r for r in done))


if __name__ == "__main__":
    main()
