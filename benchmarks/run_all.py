"""Measures what docs say of speed, on the GPU at hand, and writes their tables; `make bench`.

    python benchmarks/run_all.py

On a GPU: the layers of docs/PERFORMANCE.md and the whole grid against cuDNN (compare_cudnn.py, compare_grid.py), LSTM
and vanilla against FlashRNN where it is installed (compare_flashrnn.py), the hoisted projection against cuBLAS
(compare_projection.py), stacks and rows of different lengths (compare_stacks.py, compare_columns.py), what fusion,
layout and persistence gain (compare_ablation.py), what variants cost (compare_variants.py), published cells against
PyTorch's loop over steps (compare_published.py), heads against whole matrices (compare_heads.py), why rows are above
their floors (why_above_floor.py), how long modules take to compile (compile_times.py); with CSV, Markdown and plots of
the grid (grid_report.py) and docs' tables (docs_tables.py), all in benchmarks/results, named after the GPU. What was
interrupted goes on where it stopped.

Without a GPU: layers, latencies and the grid on the CPU against PyTorch and ONNX Runtime (compare_cpu.py), into
build/cpu.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from ecornn.device import Device
from ecornn.targets import resolve
from ecornn.tune.choose import default_target

HERE = Path(__file__).resolve().parent
RESULTS = Path("benchmarks/results")  # docs' links are relative to the checkout
CPU_SUITES = ("layers", "latency", "grid")


def run(script: str, *arguments: object) -> bool:
    """Runs a script of this folder, and says which; whether it succeeded."""
    print(f"\n$ python benchmarks/{script} {' '.join(map(str, arguments))}", flush=True)
    return subprocess.run([sys.executable, HERE / script, *map(str, arguments)]).returncode == 0


def short_name(device: Device) -> str:
    """``h100`` of NVIDIA H100 80GB HBM3: the first word with a letter and a number."""
    words = re.findall(r"[a-z0-9]+", device.name.lower())
    return next((w for w in words if re.fullmatch(r"[a-z]+\d\w*", w)), "gpu")


def anew(result: Path, script: str, *arguments: object) -> bool:
    """Measures into a file that takes the place of the result when it is complete; whether it succeeded."""
    begun = Path("build/bench", result.name)
    good = run(script, *arguments, "--output", begun)
    for suffix in (result.suffix, ".md"):
        if begun.with_suffix(suffix).exists():
            result.parent.mkdir(parents=True, exist_ok=True)
            begun.with_suffix(suffix).replace(result.with_suffix(suffix))
    return good


def on_gpu(device: Device) -> bool:
    """Everything on this GPU; whether all of it succeeded."""
    name = short_name(device)
    layers, grid, flashrnn = (RESULTS / f"{name}{end}" for end in (".json", "_grid.jsonl", "_flashrnn.json"))
    good = run("compare_cudnn.py", "--output", layers) and run("docs_tables.py", layers)
    good &= anew(grid, "compare_grid.py")
    if grid.exists():
        good &= run("grid_report.py", grid) and run("docs_tables.py", grid)
        good &= run("speed_plot.py", grid, "docs/images/speed.svg")
        good &= anew(RESULTS / f"{name}_reasons.jsonl", "why_above_floor.py", grid)
    stacks = RESULTS / f"{name}_stacks.json"
    good &= run("compare_stacks.py", "--output", stacks) and run("docs_tables.py", stacks)
    good &= run("compare_stacks.py", "--packed", "--output", RESULTS / f"{name}_packed.json")
    good &= run("compare_columns.py", "--output", RESULTS / f"{name}_columns.json")
    good &= anew(RESULTS / f"{name}_projection.jsonl", "compare_projection.py")
    good &= anew(RESULTS / f"{name}_ablation.jsonl", "compare_ablation.py")
    good &= anew(RESULTS / f"{name}_variants.jsonl", "compare_variants.py")
    for what in ("published", "heads", "classes"):
        result = RESULTS / f"{name}_{what}.jsonl"
        good &= anew(result, f"compare_{what}.py") and run("docs_tables.py", result)
    good &= anew(RESULTS / f"{name}_compile_times.jsonl", "compile_times.py", "--jobs",
                 max(1, len(os.sched_getaffinity(0)) // 4))
    if importlib.util.find_spec("flashrnn"):
        trained = flashrnn.with_stem(f"{flashrnn.stem}_training")
        good &= run("compare_flashrnn.py", "--output", flashrnn) and run("docs_tables.py", flashrnn)
        good &= run("compare_flashrnn.py", "--training", "--output", trained) and run("docs_tables.py", trained)
    else:
        print("\nnot compared with FlashRNN, which is not installed: pip install flashrnn==1.0.8")
    return good


def on_cpu() -> bool:
    print("There is no GPU here that ecornn serves. The GPU benchmarks need one of compute capability 8.0 or newer, "
          "its driver, and a PyTorch with CUDA and cuDNN. What follows compares on this CPU.", flush=True)
    return all([run("compare_cpu.py", "--suite", suite, "--output", "build/cpu.json") for suite in CPU_SUITES])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not importlib.util.find_spec("torch"):
        sys.exit("the benchmarks compare with PyTorch, which is not installed: pip install '.[bench]'")
    if default_target() == "cpu":
        sys.exit(not on_cpu())
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} does not see the GPU: install one with CUDA")
    sys.exit(not on_gpu(resolve("cuda")))


if __name__ == "__main__":
    main()
