"""The hoisted input projection against cuBLAS, kernel against kernel, on a GPU.

    python benchmarks/compare_projection.py --output benchmarks/results/h100_projection.jsonl

Layers of the grid with at least 16 batch rows, with all of the projection done before the recurrence (`ahead=100`).
cuBLAS computes x W^T through PyTorch, without a bias, to the type that ours writes: float32, or that of the layer.
Ours adds biases, and deals the values out as the recurrence reads them. Times are those of the kernels alone, from
CUPTI (torch.profiler), of calls in turns on fresh random inputs that were copied just before: µs a call, median, 20th
and 80th percentile. The layer's output is checked against float64, and cuBLAS's product as well. Every row is
appended as soon as it is measured; the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measured_rows import Results, described, read, single_modules
from msgspec import structs
from report import layer, table, times
from side_by_side import CELLS, DEVICE, environment, float64_forward, kernels, relative, summary

import ecornn
from ecornn.bench.grid import Layer, Own, selected
from ecornn.bench.measure import Plan, compiled
from ecornn.bench.results import RowLog
from ecornn.bench.turns import WARM
from ecornn.errors import ScheduleError

ASKED = 0.7  # of cuBLAS's rate, at least
REPEATS = 20
WHOLE = {"hoisted": Own(config={"ahead": 100})}


def layers() -> list[Layer]:
    """The grid's layers of enough rows."""
    return [one for one in single_modules() if one.case.batch >= 16]


def of_calls(found: list[tuple[str, float]], names: set[str], calls: int) -> list[float]:
    """Microseconds of each call that launches kernels of these names, and the same number of them each time."""
    taken = [us for name, us in found if name in names]
    each, rest = divmod(len(taken), calls)
    if rest or not each:
        raise RuntimeError(f"{len(taken)} kernels in {calls} calls")
    return [sum(taken[i * each:(i + 1) * each]) for i in range(calls)]


def compare(asked: Layer, file: Path) -> dict[str, Any]:
    """One row: the layer and cuBLAS checked, their kernels timed."""
    case, row = asked.case, described(asked)
    T, B, I, H, dtype = (row[name] for name in ("T", "B", "I", "H", "dtype"))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32-both"
    kind = getattr(torch, case.dtype)
    library = CELLS[case.cell](I, H, device=DEVICE).to(kind)
    weights = {k: v.detach() for k, v in library.named_parameters()}
    module = ecornn.load(file)
    bound, manifest = module.bind(weights), module.manifest
    if manifest.config.get("ahead", 100) != 100:
        raise ScheduleError("no module with all of the projection before the recurrence could be compiled")
    x = torch.randn(T, B, I, device=DEVICE).to(kind)
    y = torch.full((T, B, H), float("nan"), device=DEVICE, dtype=kind)
    flat, matrix = x.view(-1, I), weights["weight_ih_l0"].T
    output = case.dtype if manifest.config.get("hoisted") == "same" else "float32"
    wider = {"out_dtype": torch.float32} if output != case.dtype else {}
    calls: dict[str, Callable[[], object]] = {
        "ecornn": lambda: bound(x, out=y), "cublas": lambda: torch.mm(flat, matrix, **wider)}

    def turns(repeats: int = REPEATS) -> None:
        for _ in range(repeats):
            for call in calls.values():
                x.copy_(torch.randn(T, B, I, device=DEVICE))
                call()

    with torch.no_grad():
        bound(x, out=y)
        reference = float64_forward(case.cell, x, weights)
        error, library_error = relative(y, reference), relative(library(x)[0], reference)
        limit = 1e-5 if dtype == "float32" else 2 * library_error + 1e-6
        if not error <= limit:
            return {"failed": f"error {error:.2e}, allowed {limit:.2e}"}
        product_error = relative(torch.mm(flat, matrix, **wider), flat.double() @ matrix.double())
        del reference
        names = {name: {kernel for kernel, *_ in kernels(call)} for name, call in calls.items()}
        names["ecornn"] = {name for name in names["ecornn"] if "project" in name}
        turns(WARM)
        found = [(name, end - begin) for name, begin, end in kernels(turns)]
    row |= {
        "sides": [*calls], "wrong": [], "output": output, "error": error, "cudnn_error": library_error,
        "cublas_error": product_error, "schedule": manifest.schedule, "config": manifest.config,
        "kernels": {name: sorted(of) for name, of in names.items()}, "repetitions": REPEATS}
    work = 2.0 * T * B * I * matrix.shape[1]
    for name in calls:
        row |= summary(name, of_calls(found, names[name], REPEATS), 1)
        row[f"{name}_tflops"] = work / row[f"{name}_us"] / 1e6
    return row | {"rate": row["cublas_us"] / row["ecornn_us"]}


def file_of(folder: Path) -> Path:
    """The module with all of the projection in front: the layer's own where that has it, or does not know the knob."""
    found = [file for name in ("hoisted", "ecornn") if (file := folder / f"{name}.so").exists()]
    if not found:
        raise ScheduleError("no module could be compiled")
    return found[0]


def report(results: Results) -> list[str]:
    """The table, in Markdown."""
    env = results.environment
    lines = ["# The hoisted projection against cuBLAS", "",
             f"{env['gpu']}, CUDA {env['cuda']}, PyTorch {env['torch']}; µs of the kernels of a call, medians with "
             "20th and 80th percentiles, in turns; both checked against float64. `output`: what both write. Asked "
             f"are {ASKED:.0%} of cuBLAS's rate. It is always our kernel that runs: it adds biases and writes values "
             "where the recurrence reads them, which after a library's product another pass over them would do. Data: "
             f"`{results.path.name}`; `make bench`.", "",
             *table(("layer, T x B x I x H", "dtype", "output", "ecornn, µs", "cuBLAS, µs", "TFLOP/s", "cuBLAS", "rate",
                     ""), ((layer(r), r["dtype"], r["output"], times(r, "ecornn"), times(r, "cublas"),
                            f"{r['ecornn_tflops']:.0f}", f"{r['cublas_tflops']:.0f}", f"{r['rate']:.0%}",
                            "holds" if r["rate"] >= ASKED else "**missed**") for r in results.good)), ""]
    return [*lines, *(f"- {r['name']}: {r['failed']}" for r in results.rows if r.get("failed"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to append to; a table is written beside")
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="layers with all of these words")
    parser.add_argument("--jobs", type=int, default=8, help="layers that are compiled at a time [%(default)s]")
    arguments = parser.parse_args()
    log = RowLog(arguments.output)
    left = [one for one in selected(layers(), arguments.only) if not log.has(one.name)]
    log.begin(environment())
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        for asked, own in compiled([structs.replace(one, own=WHOLE) for one in left], Plan(()), Path(folder),
                                   arguments.jobs):
            torch.manual_seed(0)
            try:
                row = compare(asked, file_of(Path(own.folder)))
            except (ecornn.errors.EcornnError, RuntimeError) as error:
                row = {"failed": f"{type(error).__name__}: {error}"}
            log.add(asked.name, row)
            print(asked.name, row.get("failed") or f"{row['rate']:.0%} of cuBLAS's rate", flush=True)
    arguments.output.with_suffix(".md").write_text("\n".join(report(read(arguments.output))) + "\n")
    sys.exit(any(row.get("failed") for row in log.rows))


if __name__ == "__main__":
    main()
