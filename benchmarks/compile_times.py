"""Seconds to compile the module of every row of the grid, and its size; needs no GPU.

    python benchmarks/compile_times.py --target sm_90a --output benchmarks/results/compile_times.jsonl

Every module is compiled in a new process, without the build cache, so that nothing is known from the one before; one at
a time unless --jobs says otherwise. `imports` is the time until TVM is loaded, `choice` that of the tuning logs and of
the heuristic, `build` from the program to the file: lowering, the CUDA compiler, linking. A persistent module should be
built in less than 5 seconds. Beside the table rows have of `build` the seconds of CPU of this process, `lowering`, and
of the compilers, `compilers`, and nvcc's own report of the source that took longest: `preprocessing`, `cicc` and
`ptxas`. Rows are appended; the same command goes on where it stopped. Of --first they are medians of --repeats.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from pathlib import Path

from measured_rows import alone, described, modules
from report import layer, table

from ecornn.bench.results import RowLog
from ecornn.device import Device
from ecornn.errors import EcornnError
from ecornn.layer_spec import LayerSpec
from ecornn.targets import resolve

# forward, and training: two bidirectional layers; H of the first one and of the other one
FIRST = {"LSTM 512 B=16 float32": ((512, 384), {"batch": 16}),
         "training, 2 bidirectional LSTMs of 128": (
             (128, 96), {"batch": 32, "layers": 2, "bidirectional": True, "training": True})}
MOST = 5.0  # seconds to build a persistent module
PHASES = {"gcc (preprocessing 1)": "preprocessing", "cicc": "cicc", "ptxas": "ptxas"}


def compile_alone(layer: LayerSpec, device: Device, folder: Path, cache: str) -> dict:
    """Seconds of each part, and bytes; in a process that has done nothing else."""
    os.environ["ECORNN_CACHE"] = cache
    begin = time.perf_counter()
    from ecornn.compiler import build, host_code_for, plan_layer
    from ecornn.quick_tvm import import_tvm

    out = folder / f"{layer.workload.hidden}.so"
    os.environ["NVCC_APPEND_FLAGS"] = f"--time={out.with_suffix('.csv')}"
    with host_code_for(device):  # as compile() does
        import_tvm()
        imported = time.perf_counter()
        planned = plan_layer(layer, target=device)
        chosen, before = time.perf_counter(), os.times()
        build(planned, out)
    built, after = time.perf_counter(), os.times()
    return {"imports": imported - begin, "choice": chosen - imported, "build": built - chosen, "all": built - begin,
            "module_bytes": out.stat().st_size, "schedule": planned.found.schedule.name,
            "lowering": after.user + after.system - before.user - before.system,
            "compilers": after.children_user + after.children_system, **slowest(out.with_suffix(".csv"))}


def first_layers(device: Device, repeats: int) -> list[dict]:
    """A row of each layer of FIRST, cold and warm."""
    turns: dict[tuple[str, str], list[dict]] = {}
    for _, (name, (sizes, properties)) in itertools.product(range(repeats), FIRST.items()):
        with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
            for hidden, which in zip(sizes, ("cold", "warm"), strict=True):
                row = alone(compile_alone, LayerSpec("lstm", hidden=hidden, **properties), device, Path(folder),
                            f"{folder}/cache")
                turns.setdefault((name, which), []).append(row)
                print(f"{name}, {which}: " + ", ".join(f"{k} {v:.2f}" for k, v in row.items()
                                                       if isinstance(v, float)), flush=True)
    return [{"layer": name, "cache": which} | {
        key: value if isinstance(value, str) else statistics.median(row.get(key, 0) for row in of)
        for key, value in of[0].items()} for (name, which), of in turns.items()]


def slowest(times: Path) -> dict[str, float]:
    """Seconds of each phase that nvcc says of the source that took longest; nothing where it was not called."""
    sources: dict[str, dict[str, float]] = {}
    for row in csv.reader(times.read_text().splitlines()) if times.exists() else ():
        phase = PHASES.get(row[1].strip()) if len(row) > 6 else None
        if phase:
            sources.setdefault(row[0].strip(), {})[phase] = float(row[6]) / 1000
    return max(sources.values(), key=lambda of: sum(of.values()), default={})


def report(path: Path, log: RowLog) -> list[str]:
    """The table, in Markdown."""
    env, rows = log.environment, [r for r in log.rows if "failed" not in r]
    lines = ["# Compilation of the grid's modules", "",
             f"For {env['gpu']}, by {env['compiler']} on {env['cpu']} with {env['cores']} cores; seconds, each module "
             f"in a new process without the build cache, {env['jobs']} at a time. Data: `{path.name}`.", ""]
    for name in dict.fromkeys(r["schedule"] for r in rows):
        of = [r for r in rows if r["schedule"] == name]
        worst = max(of, key=lambda r: r["build"])
        lines.append(f"- `{name}`: {len(of)} modules, at most {worst['build']:.1f} s to build ({layer(worst)} "
                     f"{worst['dtype']}), {sum(r['build'] > MOST for r in of)} above {MOST:.0f} s; "
                     f"{min(r['module_bytes'] for r in of) / 1000:.0f} to "
                     f"{max(r['module_bytes'] for r in of) / 1000:.0f} kB")
    return [*lines, "", *table(("layer, T x B x I x H", "dtype", "schedule", "imports", "choice", "build", "kB"), (
        (layer(r), r["dtype"], r["schedule"], *(f"{r[k]:.2f}" for k in ("imports", "choice", "build")),
         f"{r['module_bytes'] / 1000:.0f}") for r in rows)), "",
        *(f"- {r['name']} failed: {r['failed']}" for r in log.rows if "failed" in r)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True,
                        help="JSON lines to append to; a Markdown table is written beside it")
    parser.add_argument("--target", default="cuda", help="what to compile for (default: the GPU at hand)")
    parser.add_argument("--jobs", type=int, default=1, help="modules at a time (default: 1)")
    parser.add_argument("--first", action="store_true", help="the layers of FIRST; OUTPUT is JSON")
    parser.add_argument("--repeats", type=int, default=3, help="times each of --first is compiled (default: 3)")
    arguments = parser.parse_args()
    from side_by_side import environment, write  # with PyTorch: not what processes that compile begin with

    from ecornn.tune.choose import cuda_compiler

    try:
        device = resolve(arguments.target)
        where = environment(cpu=True) | {"target": device.name, "cores": len(os.sched_getaffinity(0))}
        if arguments.first:
            write(arguments.output, where, first_layers(device, arguments.repeats))
            return
        log = RowLog(arguments.output)
        left = [row for row in modules() if not log.has(row.name)]
        log.begin(where | {"gpu": device.name, "compiler": cuda_compiler(), "jobs": arguments.jobs})
    except (EcornnError, ValueError) as error:  # no GPU; a file that is no results
        sys.exit(str(error))
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder, ThreadPoolExecutor(arguments.jobs) as threads:
        futures = [threads.submit(alone, compile_alone, row.case.layer(), device, Path(folder), "off") for row in left]
        for row, future in zip(left, futures, strict=True):
            try:
                result = future.result()
            except (EcornnError, BrokenExecutor) as error:
                result = {"failed": f"{type(error).__name__}: {error}"}
            log.add(row.name, described(row) | result)
            print(f"{row.name:32} " + (result.get("failed") or f"{result['build']:.1f} s"), flush=True)
    arguments.output.with_suffix(".md").write_text("\n".join(report(arguments.output, log)) + "\n")
    sys.exit(any("failed" in row for row in log.rows))


if __name__ == "__main__":
    main()
