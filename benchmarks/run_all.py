"""Measures what docs say of speed, on the GPU at hand, and writes their tables; `make bench`.

    python benchmarks/run_all.py                 # everything: of a GPU, or without one of this CPU
    python benchmarks/run_all.py grid classes    # some of it
    python benchmarks/run_all.py --list          # which command makes which file of results

Layers are grids/NAME.toml, which `ecornn bench --grid` measures into benchmarks/results/DEVICE_NAME.jsonl; the other
parts are programs of this folder. `report.py` makes a page of each file, beside it, and docs' tables. Results are
named after the GPU, and take the place of older ones when they are complete; what was interrupted goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ecornn.device import Device
from ecornn.targets import default_target, resolve

HERE = Path(__file__).resolve().parent
RESULTS, BEGUN = Path("benchmarks/results"), Path("build/bench")  # docs' links are relative to the checkout
PLOTS = {"grid": "docs/images/speed.svg", "cpu": "docs/images/speed_cpu.svg"}
ECORNN = ("-m", "ecornn", "bench", "--grid")


@dataclass(frozen=True)
class Part:
    """A file of results: what makes it, ``{out}`` the file and ``{name}`` the device in the command; then what is made
    of it: ``docs``, a table there; ``report``, a page beside it, which a program writes itself."""

    name: str
    command: tuple[str, ...]
    report: bool = True
    docs: bool = False
    needs: str = ""  # a package

    def file(self, device: str) -> Path:
        """The results."""
        return RESULTS / f"{device}_{self.name}.json{'l' * self.report}"


def grid(name: str, *more: str, docs: bool = False) -> Part:
    """A grid of benchmarks/grids."""
    return Part(name, (*ECORNN, f"benchmarks/grids/{name}.toml", "--output", "{out}", *more), docs=docs)


def program(name: str, script: str, *more: str, report: bool = False, docs: bool = False, needs: str = "") -> Part:
    """A program of this folder, which writes a page itself if there is one."""
    return Part(name, (f"benchmarks/{script}", *more, "--output", "{out}"), report, docs, needs)


JOBS = ("--jobs", str(max(1, len(os.sched_getaffinity(0)) - 1)), "--seconds", "0.5")
GPU = [
    grid("layers", *JOBS, docs=True), grid("grid", *JOBS, docs=True),
    program("reasons", "why_above_floor.py", "benchmarks/results/{name}_grid.jsonl", report=True),
    grid("stacks", *JOBS, docs=True), program("packed", "compare_packed.py"),
    program("columns", "compare_packed.py", "--columns"),
    program("projection", "compare_projection.py", report=True), grid("ablation", *JOBS), grid("variants", *JOBS),
    grid("published", *JOBS, docs=True), grid("heads", *JOBS, docs=True), grid("classes", *JOBS, docs=True),
    grid("integer_weights", *JOBS, docs=True), program("compile_times", "compile_times.py", report=True),
    program("flashrnn", "compare_flashrnn.py", docs=True, needs="flashrnn"),
    program("flashrnn_training", "compare_flashrnn.py", "--training", docs=True, needs="flashrnn")]
CPU = [grid("cpu"), grid("cpu_training")]
NAMED = [  # what is measured where it is asked for
    grid("training", *JOBS), grid("past_chip", *JOBS), grid("scan", *JOBS), program("models", "compare_models.py"),
    program("packed_training", "compare_packed.py", "--training"),
    program("columns_training", "compare_packed.py", "--columns", "--training"),
    program("many_gpus", "run_many_gpus.py"), program("cpu_cells", "cpu_in_programs.py", "cells"),
    program("cpu_in_programs", "cpu_in_programs.py", "turns"), program("serving", "serving.py"),
    program("real_time", "real_time.py"), program("host_time", "cpu_in_programs.py", "host"),
    program("programs", "compare_programs.py"), program("onnx", "compare_onnx.py")]


def run(*arguments: object) -> bool:
    """Runs Python with these arguments, and says which; whether it succeeded. Cells of tests/ can be named."""
    print(f"\n$ python {' '.join(map(str, arguments))}", flush=True)
    paths = [str(HERE), str(HERE.parent / "tests"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run([sys.executable, *map(str, arguments)],
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}).returncode == 0


def short_name(device: Device) -> str:
    """``h100`` of NVIDIA H100 80GB HBM3: the first word with a letter and a number."""
    words = re.findall(r"[a-z0-9]+", device.name.lower())
    return next((w for w in words if re.fullmatch(r"[a-z]+\d\w*", w)), "gpu" if device.kind == "cuda" else "cpu")


def measure(part: Part, device: str) -> bool:
    """One part, into a file that takes the place of the result when it is complete, and what is made of it."""
    if part.needs and not importlib.util.find_spec(part.needs):
        print(f"\n{part.name} is left out: pip install {part.needs}")
        return True
    result = part.file(device)
    begun = BEGUN / result.name
    for file in (begun, result):
        file.parent.mkdir(parents=True, exist_ok=True)
    good = run(*(word.format(out=begun, name=device) for word in part.command))
    for suffix in (result.suffix, ".md"):
        if begun.with_suffix(suffix).exists():
            begun.with_suffix(suffix).replace(result.with_suffix(suffix))
    if result.exists() and (part.docs or "--grid" in part.command):
        good &= run("benchmarks/report.py", result, *["--docs"] * part.docs)
    if result.exists() and part.name in PLOTS:
        good &= run("benchmarks/report.py", result, "--plot", PLOTS[part.name])
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="names of parts [GPU's or CPU's, as the device is]")
    parser.add_argument("--list", action="store_true", help="say which command makes which file")
    arguments = parser.parse_args()
    every = {part.name: part for part in (*GPU, *CPU, *NAMED)}
    if unknown := sorted(set(arguments.parts) - set(every)):
        parser.error(f"PART: {', '.join(unknown)}; expected some of {', '.join(every)}")
    if arguments.list:
        for part in every.values():
            print(f"{part.file('DEVICE')}: python {' '.join(part.command)}")
        return
    if not importlib.util.find_spec("torch"):
        sys.exit("the benchmarks compare with PyTorch, which is not installed: pip install '.[bench]'")
    target = default_target()
    if target == "cpu":
        print("There is no GPU here that ecornn serves. The GPU benchmarks need one of compute capability 8.0 or "
              "newer, its driver, and a PyTorch with CUDA and cuDNN. What follows compares on this CPU.", flush=True)
    elif not importlib.import_module("torch").cuda.is_available():
        sys.exit("PyTorch does not see the GPU: install one with CUDA")
    parts = [every[name] for name in arguments.parts] or (CPU if target == "cpu" else GPU)
    sys.exit(not all([measure(part, short_name(resolve(target))) for part in parts]))


if __name__ == "__main__":
    main()
