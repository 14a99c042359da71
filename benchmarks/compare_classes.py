"""Layers outside the grid against cuDNN, by what records say and by what is chosen without any; on a GPU.

    python benchmarks/compare_classes.py --output benchmarks/results/h100_classes.jsonl
    python benchmarks/compare_classes.py --output build/some.jsonl --only small --only "many_rows 512x256 float16"
    python benchmarks/compare_classes.py --target sm_90a --compile-only     # no GPU needed

Rows (`CLASSES` of grid.py): small layers, calls of one and of a few steps, weights past the chip, many batch rows of
small and middle layers, forecasting. `chosen` is what a user gets, `default` what is chosen where no record applies, if
that is something else. Whole forward passes in CUDA graphs, short calls several to a graph, all sides and cuDNN in
turns, all checked against float64 over all steps; median, 20th and 80th percentile. No row may be below 1x; the
geometric mean of a class has a bound, and some rows a most, in microseconds a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from cases import Files, parser_of, run
from compiled_case import ALIKE, Made
from grid import CLASSES
from grid_log import GridLog
from grid_tables import knobs, layer, table, times
from measuring_process import Limits

MEAN, MEAN_OTHERS = {"one_step": 1.5, "past_chip": 1.5}, 2.0  # geometric means of ratios, at least
EXACT = 1e-5  # relative error of float32
STEPS, CALLS = 300, 16  # of a graph, at most: short calls come several to one, whose launch takes some us


@dataclass(frozen=True)
class Case:
    """A row of a class."""

    kind: str
    cell: str
    T: int
    B: int
    I: int
    H: int
    dtype: str

    def sides(self) -> dict[str, Made]:
        """What a user gets, and what he would without records."""
        return {side: Made(self.cell, self.T, self.B, self.I, self.H, self.dtype, untuned=untuned)
                for side, untuned in (("chosen", False), ("default", True))}

    def __str__(self) -> str:
        return f"{self.kind} {self.cell} {self.T}x{self.B}x{self.I}x{self.H} {self.dtype}"


CASES = [Case(kind, **asdict(row)) for kind, rows in CLASSES.items() for row in rows]
MOST = {**{case: 0.35 if case.dtype == "float32" else 0.3 for case in CASES if case.kind == "small"},
        Case("many_rows", "lstm", 300, 512, 256, 256, "float16"): 2.0,
        **{Case("many_rows", "gru", 300, 2048, 128, 128, dtype): 1.6 for dtype in ("float16", "bfloat16")},
        Case("one_step", "lstm", 1, 16, 1024, 1024, "float16"): 6.0,
        Case("past_chip", "gru", 128, 64, 3072, 3072, "float16"): 14.0}


def calls_of(steps: int) -> int:
    """How many come to a graph."""
    return max(1, min(CALLS, STEPS // steps))


def compare(case: Case, files: Files, limits: Limits) -> dict:
    """One row: every side checked and timed."""
    import torch
    from many_sides import Sides
    from side_by_side import CELLS, DEVICE, float64_forward, relative

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kwargs = {"nonlinearity": "tanh"} if case.cell == "rnn_tanh" else {}
    sides = Sides((case.T, case.B, case.I, case.H), case.dtype, calls_of(case.T))
    library = CELLS[case.cell](case.I, case.H, device=DEVICE, **kwargs).to(sides.kind)
    weights = {k: v.detach() for k, v in library.named_parameters()}
    with torch.no_grad():
        made = [sides.add_module(name, file, weights) for name, file in files.items()]
        if not made[0]:
            return {"failed": str(files["chosen"])}
        sides.add("cudnn", lambda y: library(sides.x)[0])
        sides.x.copy_(sides.random())
        reference = float64_forward(case.cell, sides.x, weights)
        rounding = relative(library(sides.x)[0], reference)
        near = EXACT if case.dtype == "float32" else 2 * rounding + 1e-6
        sides.check(dict.fromkeys(("chosen", "default", "cudnn"), reference),
                    {"chosen": near, "default": near, "cudnn": max(near, 2 * rounding)})
        del reference
        if "chosen" not in sides.row["sides"]:
            return {"failed": sides.row["missing"]["chosen"]}
        row = sides.time(limits)
    if row["missing"].get("default", "").endswith(ALIKE):
        row |= {name.replace("chosen", "default"): row[name] for name in ("chosen_us", "chosen_p20", "chosen_p80")}
    return row | {f"{side}_ratio": row["cudnn_us"] / row[f"{side}_us"] for side in ("chosen", "default")
                  if f"{side}_us" in row}


def mean(rows: Sequence[dict], side: str) -> float:
    """The geometric mean of ratios."""
    return float(np.exp(np.mean([np.log(r[f"{side}_ratio"]) for r in rows])))


def lines_of(path: Path, log: GridLog) -> list[str]:
    """The short table, for docs: of each class its rows, geometric means, and the least ratio."""
    rows = [[r for r in log.rows if r["kind"] == kind and "failed" not in r] for kind in CLASSES]
    lines = table(("class", "rows", "geometric mean, with records", "without", "least ratio", "below 1x"),
                  (_class(of[0]["kind"], of) for of in rows if of))
    whole = path.with_suffix(".md").as_posix()
    return [*lines, "", f"Every row, with its configuration: [{whole}](../{whole}).", "", _source(path, log)]


def _class(kind: str, rows: list[dict]) -> tuple[object, ...]:
    least = min(rows, key=lambda r: r["chosen_ratio"])
    count = len(rows) if len(rows) == len(CLASSES[kind]) else f"{len(rows)} of {len(CLASSES[kind])}"
    return (kind.replace("_", " "), count, f"{mean(rows, 'chosen'):.2f}x",
            f"{mean([r for r in rows if 'default_ratio' in r], 'default'):.2f}x",
            f"{least['chosen_ratio']:.2f}x, {layer(least)} {least['dtype']}",
            sum(r["chosen_ratio"] < 1 for r in rows))


def _source(path: Path, log: GridLog) -> str:
    env = log.environment
    return (f"{env['gpu']}, CUDA {env['cuda']}, cuDNN {env['cudnn']} through PyTorch {env['torch']} in a CUDA graph; "
            "µs a step of whole forward passes, interleaved, medians with 20th and 80th percentiles, outputs checked "
            f"against float64; short calls several to a graph, of {STEPS} steps or {CALLS} calls at most. "
            f"Data: `{path.name}`; `make bench`.")


def report(path: Path, log: GridLog) -> list[str]:
    """Every row, in Markdown."""
    lines = ["# Layers outside the grid", "", _source(path, log), ""]
    for kind in CLASSES:
        of = [r for r in log.rows if r["kind"] == kind and "failed" not in r]
        if not of:
            continue
        bound = MEAN.get(kind, MEAN_OTHERS)
        lines += [f"## {kind.replace('_', ' ')}", "", f"Geometric mean at least {bound}x: "
                  f"{'holds' if mean(of, 'chosen') >= bound else '**missed**'} ({mean(of, 'chosen'):.2f}x).", "",
                  *table(("layer, T x B x I x H", "dtype", "chosen", "default", "cuDNN", "ratio", "default's",
                          "at most", "chosen", "from"), map(_line, of)), ""]
    wrong = [f"- {r['name']}: {r['failed']}" for r in log.rows if "failed" in r]
    wrong += [f"- {r['name']}, {side}: {r['missing'][side]}" for r in log.rows for side in r.get("wrong", [])]
    return [*lines, "## Failed or wrong", "", *(wrong or ["None."]), ""]


def _line(r: dict) -> list[str]:
    bound = {str(case): us for case, us in MOST.items()}.get(r["name"])
    config = dict(r["configs"]["chosen"])
    default = [times(r, "default"), f"{r['default_ratio']:.2f}x"] if "default_us" in r else ["", ""]
    verdict = "" if bound is None else f"{bound} {'holds' if r['chosen_us'] <= bound else '**missed**'}"
    return [layer(r), r["dtype"], times(r, "chosen"), default[0], times(r, "cudnn"), f"{r['chosen_ratio']:.2f}x",
            default[1], verdict, f"{config.pop('schedule')} {knobs(config)}", r["provenance"]["chosen"].split(":")[0]]


def main() -> None:
    run(parser_of(__doc__).parse_args(), CASES, compare, report)


if __name__ == "__main__":
    main()
