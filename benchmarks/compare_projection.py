"""The hoisted input projection against cuBLAS, kernel against kernel, on a GPU.

    python benchmarks/compare_projection.py --output benchmarks/results/h100_projection.jsonl
    python benchmarks/compare_projection.py --target sm_90a --compile-only     # no GPU needed

Layers of the grid with at least 16 batch rows, with all of the projection done before the recurrence (`ahead=100`).
cuBLAS computes x W^T through PyTorch, without a bias, to the type that ours writes: float32, or that of the layer. Ours
adds biases, and deals the values out as the recurrence reads them. Times are those of the kernels alone, from CUPTI
(torch.profiler), of calls in turns on fresh random inputs that were copied just before: µs a call, median, 20th and
80th percentile. The layer's output is checked against float64, and cuBLAS's product as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases import Files, parser_of, run
from compiled_case import Made, knobs
from grid import GRID, Row
from grid_log import GridLog
from grid_tables import layer, table, times
from measuring_process import Limits

if TYPE_CHECKING:
    from ecornn.compiler import LayerPlan
    from ecornn.device import Device

ASKED = 0.7  # of cuBLAS's rate, at least


@dataclass(frozen=True)
class Hoisted(Made):
    """The best known configuration, but with all of the projection before the recurrence."""

    def _plan(self, device: Device) -> LayerPlan:
        planned = super()._plan(device)
        found = planned.found
        if found.config.get("ahead", 100) == 100:
            return planned
        return replace(self, schedule=found.schedule.name, config=knobs({**found.config, "ahead": 100}))._plan(device)


@dataclass(frozen=True)
class Case(Row):
    """A layer of the grid."""

    def sides(self) -> dict[str, Made]:
        precision = "tf32" if self.arithmetic == "tf32" else None
        return {"ecornn": Hoisted(self.cell, self.T, self.B, self.I, self.H, self.kind, precision=precision)}


CASES = [Case(r.cell, r.T, r.B, r.I, r.H, r.dtype) for r in dict.fromkeys(GRID) if r.B >= 16 and r.dtype != "tf32"]


def kernels(function: Callable[[], object]) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels that a call launches, in order."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.time_range.elapsed_us()) for e in sorted(events, key=lambda e: e.time_range.start)]


def of_calls(found: list[tuple[str, float]], names: set[str], calls: int) -> list[float]:
    """Microseconds of each call that launches kernels of these names, and the same number of them each time."""
    taken = [us for name, us in found if name in names]
    each, rest = divmod(len(taken), calls)
    if rest or not each:
        raise RuntimeError(f"{len(taken)} kernels in {calls} calls")
    return [sum(taken[i * each:(i + 1) * each]) for i in range(calls)]


def compare(case: Case, files: Files, limits: Limits) -> dict:
    """One row: the layer and cuBLAS checked, their kernels timed."""
    import torch
    from side_by_side import CELLS, DEVICE, WARM, float64_forward, relative, summary

    import ecornn

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.arithmetic == "tf32"
    if isinstance(files["ecornn"], str):
        return {"failed": files["ecornn"]}
    kind = getattr(torch, case.kind)
    library = CELLS[case.cell](case.I, case.H, device=DEVICE).to(kind)
    weights = {k: v.detach() for k, v in library.named_parameters()}
    module = ecornn.load(files["ecornn"])
    bound, manifest = module.bind(weights), module.manifest
    x = torch.randn(case.T, case.B, case.I, device=DEVICE).to(kind)
    y = torch.full((case.T, case.B, case.H), float("nan"), device=DEVICE, dtype=kind)
    flat, matrix = x.view(-1, case.I), weights["weight_ih_l0"].T
    output = case.kind if manifest.config.get("hoisted") == "same" else "float32"
    asked = {"out_dtype": torch.float32} if output != case.kind else {}
    calls: dict[str, Callable[[], object]] = {
        "ecornn": lambda: bound(x, out=y), "cublas": lambda: torch.mm(flat, matrix, **asked)}

    def turns() -> None:
        for _ in range(limits.repeats):
            for call in calls.values():
                x.copy_(torch.randn(case.T, case.B, case.I, device=DEVICE))
                call()

    with torch.no_grad():
        bound(x, out=y)
        reference = float64_forward(case.cell, x, weights)
        error, library_error = relative(y, reference), relative(library(x)[0], reference)
        limit = 1e-5 if case.arithmetic == "float32" else 2 * library_error + 1e-6
        if not error <= limit:
            return {"failed": f"error {error:.2e}, allowed {limit:.2e}"}
        product_error = relative(torch.mm(flat, matrix, **asked), flat.double() @ matrix.double())
        del reference
        names = {name: {kernel for kernel, _ in kernels(call)} for name, call in calls.items()}
        names["ecornn"] = {name for name in names["ecornn"] if "project" in name}
        for _ in range(WARM):
            for call in calls.values():
                call()
        found = kernels(turns)
    row: dict[str, Any] = {
        "sides": [*calls], "wrong": [], "output": output, "error": error, "cudnn_error": library_error,
        "cublas_error": product_error, "schedule": manifest.schedule, "config": manifest.config,
        "kernels": {name: sorted(of) for name, of in names.items()}, "repetitions": limits.repeats}
    work = 2.0 * case.T * case.B * case.I * matrix.shape[1]
    for name in calls:
        row |= summary(name, of_calls(found, names[name], limits.repeats), 1)
        row[f"{name}_tflops"] = work / row[f"{name}_us"] / 1e6
    return row | {"rate": row["cublas_us"] / row["ecornn_us"]}


def report(path: Path, log: GridLog) -> list[str]:
    """The table, in Markdown."""
    env, rows = log.environment, [r for r in log.rows if "failed" not in r]

    def line(r: dict[str, Any]) -> list[str]:
        return [layer(r), r["dtype"], r["output"], times(r, "ecornn"), times(r, "cublas"), f"{r['ecornn_tflops']:.0f}",
                f"{r['cublas_tflops']:.0f}", f"{r['rate']:.0%}", "holds" if r["rate"] >= ASKED else "**missed**"]

    lines = ["# The hoisted projection against cuBLAS", "",
             f"{env['gpu']}, CUDA {env['cuda']}, PyTorch {env['torch']}; µs of the kernels of a call, medians with "
             "20th and 80th percentiles, in turns; both checked against float64. `output`: what both write. Asked "
             f"are {ASKED:.0%} of cuBLAS's rate. It is always our kernel that runs: it adds biases and writes values "
             "where the recurrence reads them, which after a library's product another pass over them would do. Data: "
             f"`{path.name}`; `make bench`.", "",
             *table(("layer, T x B x I x H", "dtype", "output", "ecornn, µs", "cuBLAS, µs", "TFLOP/s", "cuBLAS", "rate",
                     ""), map(line, rows)), ""]
    return lines + [f"- {r['name']}: {r['failed']}" for r in log.rows if "failed" in r]


def main() -> None:
    run(parser_of(__doc__).parse_args(), CASES, compare, report)


if __name__ == "__main__":
    main()
