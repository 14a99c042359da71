"""Seconds that `ecornn.compile` takes from a record, by phase, with an empty cache and with one that is full.

    python benchmarks/compile_phases.py --output benchmarks/results/compile_phases.json

Rows are workloads of the shipped records, spread evenly over cells, data types and sizes, and those whose kernels are
largest. Each is compiled twice, in processes of their own, without PyTorch; needs nvcc, and no GPU. Phases of our own
are seconds of CPU; those of compilers too (all processes, which run side by side where there are processors);
`preprocessing`, `cicc` and `ptxas` are nvcc's own report of the largest cubin, in seconds of wall time.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import msgspec

PHASES = {"gcc (preprocessing 1)": "preprocessing", "cicc": "cicc", "ptxas": "ptxas"}
COLUMNS = ("import", "look-up", "lowering", "nvcc", "host code", "CPU", "wall", "again")


@dataclass(frozen=True)
class Seconds:
    """CPU of this process, of its children that ended, and wall time; a point in time, or a difference of two."""

    own: float
    children: float
    wall: float

    @classmethod
    def now(cls) -> Seconds:
        own, children = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
        return cls(own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime, time.perf_counter())

    def __sub__(self, before: Seconds) -> Seconds:
        return Seconds(self.own - before.own, self.children - before.children, self.wall - before.wall)


def compile_once(layer: dict[str, Any], target: str, times: Path) -> dict[str, Any]:
    """One compilation, in this process. The phases are those of `ecornn.compiler.build`; ``times`` is for nvcc."""
    begin = Seconds.now()
    from ecornn.quick_tvm import import_tvm

    import_tvm()
    from ecornn.build import link, module
    from ecornn.compiler import plan
    from ecornn.compose import compose
    from ecornn.task import make_manifest

    marks = [begin, Seconds.now()]
    os.environ["NVCC_APPEND_FLAGS"] = f"--time={times}"  # which is no part of a cached cubin's name
    planned = plan(**layer, target=target)
    marks.append(Seconds.now())
    program = compose(planned.stack, planned.workload, planned.programs())
    generated = module.generate(program, planned.task.device)
    marks.append(Seconds.now())
    found = planned.found
    manifest = make_manifest(planned.cell, planned.task, found.schedule, found.config, program, found.provenance)
    binaries = {**generated.binaries, module.MANIFEST: msgspec.json.encode(manifest)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "module.so")
        link.link(replace(generated, binaries=binaries), out)
        marks.append(Seconds.now())
        size = out.stat().st_size
    imports, looking, generating, linking = (b - a for a, b in pairwise(marks))
    whole = marks[-1] - begin
    return {
        "schedule": found.schedule.name, "config": dict(found.config), "provenance": found.provenance,
        "import": imports.own, "look-up": looking.own, "lowering": generating.own, "nvcc": generating.children,
        "host code": linking.own + linking.children, "CPU": whole.own + whole.children, "wall": whole.wall,
        "cubins": [len(b) for b in generated.binaries.values()], "bytes": size,
        "registers": max((r["registers"] for r in generated.resources.values()), default=0),
        "spilled": sum(r["spill_stores"] for r in generated.resources.values()), **slowest(times)}


def slowest(times: Path) -> dict[str, float]:
    """What nvcc says of the source that took longest; nothing where it was not called."""
    sources: dict[str, dict[str, float]] = {}
    for row in csv.reader(times.read_text().splitlines()) if times.exists() else ():
        phase = PHASES.get(row[1].strip()) if len(row) > 6 else None
        if phase:
            sources.setdefault(row[0].strip(), {})[phase] = float(row[6]) / 1000
    return max(sources.values(), key=lambda of: sum(of.values()), default={})


def in_a_process(layer: dict[str, Any], target: str, cache: Path) -> dict[str, Any]:
    """:func:`compile_once` in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--target", target, "--one", json.dumps(layer), str(Path(folder, "t.csv"))]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ECORNN_CACHE": str(cache)})
    if done.returncode:
        sys.exit(f"{layer}:\n{done.stderr}")
    return json.loads(done.stdout)


def layers(target: str, count: int) -> list[dict[str, Any]]:
    """``count`` workloads of the shipped records for that architecture."""
    from ecornn.tune.log import read_all, shipped_folder

    found = {t.workload for t in read_all([shipped_folder()]).trials() if t.device.arch == target}
    order = sorted(found, key=lambda w: (w.dtype, w.cell, w.hidden, w.batch, w.seq))
    large = sorted(order, key=lambda w: (w.hidden % 64 != 0) * w.batch * w.hidden)[-2:]
    chosen = dict.fromkeys([*order[:: max(1, len(order) // max(1, count - len(large)))], *large])
    return [{"cell": w.cell.split("@")[0], "hidden": w.hidden, "input": w.input, "batch": w.batch, "seq": w.seq,
             "dtype": w.dtype, "precision": w.precision} for w in chosen]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = ["layer, T x B x I x H", "dtype", "schedule", *COLUMNS, "KiB"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        w = row["layer"]
        lines.append([f"{w['cell']} {w['seq']}x{w['batch']}x{w['input']}x{w['hidden']}", w["dtype"], row["schedule"],
                      *(f"{row[name]:.2f}" for name in COLUMNS), str(row["bytes"] // 1024)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--count", type=int, default=16, help="rows; default: 16")
    parser.add_argument("--target", default="sm_90a", help="architecture; default: sm_90a")
    parser.add_argument("--one", nargs=2, metavar=("LAYER", "TIMES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(compile_once(json.loads(arguments.one[0]), arguments.target, Path(arguments.one[1]))))
        return
    rows = []
    for layer in layers(arguments.target, arguments.count):
        with tempfile.TemporaryDirectory() as cache:
            first, again = (in_a_process(layer, arguments.target, Path(cache)) for _ in range(2))
        rows.append({"layer": layer, **first, "again": again["wall"]})
        print(table(rows).splitlines()[-1], file=sys.stderr)
    print(table(rows))
    medians = {name: sorted(row[name] for row in rows)[len(rows) // 2] for name in COLUMNS}
    most = {name: max(row[name] for row in rows) for name in COLUMNS}
    print("\nmedians: " + ", ".join(f"{n} {s:.2f}" for n, s in medians.items()))
    print("most:    " + ", ".join(f"{n} {s:.2f}" for n, s in most.items()))
    if arguments.output:
        nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout.split("release ")[-1]
        arguments.output.write_text(json.dumps({
            "target": arguments.target, "nvcc": nvcc.split(",")[0], "processors": len(os.sched_getaffinity(0)),
            "machine": platform.machine(), "load_before": os.getloadavg(), "medians": medians, "most": most,
            "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
