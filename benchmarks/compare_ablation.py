"""What fusion, layout and persistence each gain, on the layers of EcoRNN, Deep Speech 2 and Persistent RNNs; on a GPU.

    python benchmarks/compare_ablation.py --output benchmarks/results/h100_ablation.jsonl
    python benchmarks/compare_ablation.py --target sm_90a --compile-only     # no GPU needed

Columns, each with its gain over the one before and its time against cuDNN's:

    per gate        PyTorch, a product for each gate and operand, pointwise kernels one by one (unfused.py)
    per cell        PyTorch, all gates in one product, as MXNet's cells have it; the rest one by one
    fused_step      one launch a step, gates stay on the chip, weights as they are; float32 arithmetic, no tensor cores
    layout, plain   layout_transform with the state's hidden axis innermost
    layout          layout_transform with the batch inside blocks of the hidden axis, else the same configuration
    persistent      one launch a sequence, weights on the chip: the faster of persistent and persistent_wide
    cuDNN           through PyTorch

From fused_step to layout_transform the packed weights and the tensor cores come together: no schedule has one of them
alone. Whole forward passes in CUDA graphs, interleaved, outputs checked against float64; median, 20th and 80th
percentile. Every row is appended to --output as soon as it is measured; the same command goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from cases import Files, parser_of, run
from compiled_case import Made
from grid_log import GridLog
from grid_tables import NAMES, table, times
from measuring_process import Limits

SCHEDULES = {"fused_step": ("fused_step", ()), "layout_plain": ("layout_transform", (("layout", "hidden"),)),
             "layout": ("layout_transform", (("layout", "batch"),)), "persistent": ("persistent", ()),
             "persistent_wide": ("persistent_wide", ())}  # side -> schedule, knobs that are changed
NEVER = {("persistent_wide", "float32")}  # schedules that serve no layer of a data type
UNFUSED = {"per_gate": True, "per_cell": False}
COLUMNS = {"per_gate": "per gate", "per_cell": "per cell", "fused_step": "fused_step", "layout_plain": "layout, plain",
           "layout": "layout", "persistent": "persistent", "cudnn": "cuDNN"}
ROUGH = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-5}  # of unfused sides, which round after every operation


@dataclass(frozen=True)
class Case:
    """A layer of one of the papers."""

    paper: str
    cell: str
    T: int
    B: int
    H: int
    dtype: str

    @property
    def I(self) -> int:  # noqa: E743
        return self.H

    def sides(self) -> dict[str, Made]:
        """The modules that the columns need."""
        return {side: Made(self.cell, self.T, self.B, self.I, self.H, self.dtype, name, changed=changed)
                for side, (name, changed) in SCHEDULES.items() if (name, self.dtype) not in NEVER}

    def __str__(self) -> str:
        return f"{self.cell} {self.T}x{self.B}x{self.I}x{self.H} {self.dtype}"


PAPERS: dict[str, tuple[tuple[str, int, int, int], ...]] = {  # cell, T, B, H
    "EcoRNN": (("lstm", 300, 20, 800), ("lstm", 35, 32, 650), ("lstm", 35, 20, 1500)),
    "Deep Speech 2": (("gru", 256, 32, 2816), ("rnn_tanh", 256, 32, 1760), ("rnn_tanh", 256, 32, 2560)),
    "Persistent RNNs": tuple(("rnn_tanh", 512, B, 1152) for B in (4, 1, 2, 8, 16, 32, 64))}
CASES = [Case(paper, cell, T, B, H, dtype) for dtype in ("float16", "float32")
         for paper, layers in PAPERS.items() for cell, T, B, H in layers]


def compare(case: Case, files: Files, limits: Limits) -> dict:
    """One row: every side checked and timed."""
    import torch
    from many_sides import Sides
    from side_by_side import CELLS, DEVICE, float64_forward, relative
    from unfused import unfused

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kwargs = {"nonlinearity": "tanh"} if case.cell == "rnn_tanh" else {}
    sides = Sides((case.T, case.B, case.I, case.H), case.dtype)
    library = CELLS[case.cell](case.I, case.H, device=DEVICE, **kwargs).to(sides.kind)
    weights = {k: v.detach() for k, v in library.named_parameters()}
    with torch.no_grad():
        for name, per_gate in UNFUSED.items():
            sides.add(name, partial(unfused, case.cell, sides.x, weights, per_gate=per_gate))
        made = [sides.add_module(name, file, weights) for name, file in files.items()]
        sides.add("cudnn", lambda y: library(sides.x)[0])
        if not any(made):
            return {"failed": "; ".join(f"{name}: {why}" for name, why in sides.row["missing"].items())}
        sides.x.copy_(sides.random())
        reference = float64_forward(case.cell, sides.x, weights)
        error = relative(library(sides.x)[0], reference)
        near = 1e-5 if case.dtype == "float32" else 2 * error + 1e-6
        allowed = dict.fromkeys(files, near) | dict.fromkeys(UNFUSED, ROUGH[case.dtype]) | {"cudnn": ROUGH[case.dtype]}
        sides.check(dict.fromkeys(allowed, reference), allowed)
        return sides.time(limits)


def chain(row: dict) -> dict[str, str]:
    """Columns that were measured, with the side that stands there: of both persistent schedules the faster."""
    found = {}
    for column in COLUMNS:
        sides = [s for s in (column, f"{column}_wide") if s in row["sides"]]
        if sides:
            found[column] = min(sides, key=lambda s: row[f"{s}_us"])
    return found


def gains(row: dict) -> dict[str, tuple[float | None, float]]:
    """Of each column: times as fast as the one before (None for the first, and for cuDNN), and as cuDNN."""
    us = {column: row[f"{side}_us"] for column, side in chain(row).items()}
    found, before = {}, None
    for column, now in us.items():
        found[column] = (None if before is None or column == "cudnn" else before / now, us["cudnn"] / now)
        before = now
    return found


def _cell(row: dict, column: str) -> list[str]:
    """Time, and gains."""
    side = chain(row).get(column)
    if side is None:
        return ["not served"]
    gain, of_cudnn = gains(row)[column]
    parts = [times(row, side), *([] if gain is None else [f"**{gain:.2f}x**"])]
    return [" ".join([*parts, *([] if column == "cudnn" else [f"({of_cudnn:.2f})"])])]


def report(path: Path, log: GridLog) -> list[str]:
    """The table, in Markdown."""
    env, rows = log.environment, [r for r in log.rows if "failed" not in r]
    lines = ["# What fusion, layout and persistence gain", "",
             f"{env['gpu']}, CUDA {env['cuda']}, cuDNN {env['cudnn']} and PyTorch {env['torch']}; µs a step of whole "
             "forward passes in CUDA graphs, interleaved, medians with 20th and 80th percentiles, outputs checked "
             "against float64. In bold the gain over the column before, in brackets the speed against cuDNN's. The "
             "columns are explained in `benchmarks/compare_ablation.py`: `fused_step` has no tensor cores, "
             f"`layout_transform` has them. Data: `{path.name}`; `make bench`.", ""]
    heads = ("layer, T x B x I x H", "dtype", *COLUMNS.values())
    for paper in PAPERS:
        if of := [r for r in rows if r["paper"] == paper]:
            lines += [f"## {paper}", "", *table(heads, (
                (f"{NAMES[r['cell']]} {r['T']}x{r['B']}x{r['H']}x{r['H']}", r["dtype"],
                 *(cell for column in COLUMNS for cell in _cell(r, column))) for r in of)), ""]
    lines += ["## Geometric means of the gains", "", *_means(rows), ""]
    missing = [f"- {r['name']}, {side}: {why}" for r in rows for side, why in r["missing"].items()]
    lines += ["## Not served", "", *(missing or ["Nothing."]), ""]
    if failed := [r for r in log.rows if "failed" in r]:
        lines += ["## Failed", "", *(f"- {r['name']}: {r['failed']}" for r in failed), ""]
    return lines


def _means(rows: Sequence[dict]) -> list[str]:
    """Over the column before, in the rows that have both; and against cuDNN."""
    lines = []
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        of = [gains(r) for r in rows if r["dtype"] == dtype]
        before = [_mean([g[c][0] for g in of if c in g and g[c][0]]) for c in COLUMNS]
        against = [_mean([g[c][1] for g in of if c in g]) for c in COLUMNS]
        lines += [(dtype, "over the column before", *before), (dtype, "against cuDNN", *against)]
    return table(("dtype", "", *COLUMNS.values()), lines)


def _mean(values: Sequence[float | None]) -> str:
    return f"{np.exp(np.mean(np.log([v for v in values if v]))):.2f}x" if values else ""


def main() -> None:
    run(parser_of(__doc__).parse_args(), CASES, compare, report)


if __name__ == "__main__":
    main()
