"""Large layers with recurrent weights in 8 bits, beside the same in 16 bits and cuDNN; on a GPU.

    python benchmarks/compare_integer_weights.py --output benchmarks/results/h100_integer_weights.jsonl
    python benchmarks/compare_integer_weights.py --target sm_90a --compile-only     # no GPU needed

`int8` is what a compilation with weights="int8" chooses, `warps N` the cut with so many product warps that is expected
to be fastest, `ours` the layer with weights in 16 bits. Whole forward passes in CUDA graphs, interleaved; each side is
checked against float64, those in 8 bits with weights that are rounded alike, and two runs must be equal; median, 20th
and 80th percentile. `rounding` is how far the layer in 8 bits is from float64 with weights that are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import Files, parser_of, run
from compiled_case import Made
from compiled_case import knobs as made_knobs
from grid_log import GridLog
from grid_tables import knobs, table, times
from measuring_process import Limits

T = 64
WARPS = (4, 8, 12)


@dataclass(frozen=True)
class Case:
    """A layer of H inputs."""

    cell: str
    B: int
    H: int
    dtype: str = "float16"

    def sides(self) -> dict[str, Made]:
        """The modules, by name; each once."""
        chosen = self._made("int8")
        found = {"int8": chosen, "ours": self._made(None)}
        return found | {f"warps {n}": self._made("int8", "persistent", made_knobs(cut)) for n, cut in self._cuts()}

    def _made(self, weights: str | None, schedule: str | None = None, config: Any = ()) -> Made:
        return Made(self.cell, T, self.B, self.H, self.H, self.dtype, schedule, config, weights=weights)

    def _cuts(self) -> list[tuple[int, Mapping[str, Any]]]:
        """The best cut of each number of warps, by the estimate, but for what a compilation chooses."""
        from ecornn.analysis import analyse
        from ecornn.cells import get
        from ecornn.schedules.base import Task
        from ecornn.schedules.persistent import Persistent
        from ecornn.targets import KNOWN
        from ecornn.workload import Workload

        work = Workload(self.cell, self.H, self.H, self.B, T, self.dtype, "int8")
        task, schedule = Task(work, analyse(get(self.cell), self.H, self.H), KNOWN["sm_90a"]), Persistent()
        chosen, best = schedule.default(task), {}
        for cost, config in schedule.cuts(task):
            n = int(config["warps"])
            if n in WARPS and n != chosen["warps"] and (n not in best or cost < best[n][0]) and not schedule.check(
                    task, config):
                best[n] = cost, {**config, "hoisted": chosen["hoisted"]}
        return [(n, config) for n, (_, config) in sorted(best.items())]

    def __str__(self) -> str:
        return f"{self.cell} {self.dtype} B={self.B} H={self.H}"


CASES = [Case("lstm", 8, 4096), Case("gru", 64, 3072), Case("lstm", 8, 2560), Case("lstm", 8, 2048),
         Case("lstm", 8, 3072), Case("gru", 16, 4096), Case("rnn_tanh", 1, 6144), Case("lstm", 8, 3072, "bfloat16")]


def compare(case: Case, files: Files, limits: Limits) -> dict:
    """One row: every side checked and timed."""
    import torch
    from many_sides import beside_library
    from side_by_side import float64_forward, relative

    if isinstance(files["int8"], str):
        return {"failed": files["int8"], "served": False}
    sides, library, weights = beside_library(case.cell, (T, case.B, case.H, case.H), case.dtype)
    rows = weights["weight_hh_l0"].double()
    step = rows.abs().amax(1, keepdim=True) / 127
    with torch.no_grad():
        sides.x.copy_(sides.random())
        whole = float64_forward(case.cell, sides.x, weights)
        rounded = float64_forward(case.cell, sides.x, weights | {"weight_hh_l0": (rows / step).round() * step})
        limit = 2 * relative(library(sides.x)[0], whole) + 1e-6
        for name, file in files.items():
            sides.add_module(name, file, weights)
        sides.add("cudnn", lambda y: library(sides.x)[0])
        names = list(sides.row["sides"])
        sides.check({n: whole if n in ("ours", "cudnn") else rounded for n in names}, dict.fromkeys(names, limit))
        row = sides.time(limits)
    row["rounding"] = relative(rounded, whole)
    ratios = {f"{side}_ratio": row["cudnn_us"] / row[f"{side}_us"] for side in row["sides"] if side != "cudnn"}
    return row | ratios | {"T": T, "B": case.B}


def report(path: Path, log: GridLog) -> list[str]:
    """The table, and what is missing in it, in Markdown."""
    return ["# Recurrent weights in 8 bits", "", *lines_of(path, log), "",
            "## Not compiled or not right", "",
            *([f"- {r['name']}: {r['failed']}" for r in log.rows if "failed" in r] or ["None."]),
            *(f"- {r['name']}, {side}: {why}" for r in log.rows for side, why in r.get("missing", {}).items()), ""]


def lines_of(path: Path, log: GridLog) -> list[str]:
    """The table, and where it is from."""
    env, rows = log.environment, [r for r in log.rows if "int8_ratio" in r and "ours_ratio" in r]
    return [*table(("layer", "8 bits", "16 bits", "cuDNN", "16 / 8 bits", "cuDNN / 8 bits", "error of rounding",
                    "others in 8 bits", "8 bits are"), map(_line, rows)), "",
            f"{env['gpu']}, CUDA {env['cuda']}, PyTorch {env['torch']}, cuDNN {env['cudnn']}; {T}xBxHxH, µs a step of "
            "whole forward passes in CUDA graphs, interleaved, medians with 20th and 80th percentiles, each side "
            f"checked against float64. Data: `{path.name}`; `python benchmarks/compare_integer_weights.py`."]


def _line(row: dict) -> list[str]:
    config = dict(row["configs"]["int8"])
    others = ", ".join(f"{side} {row[f'{side}_us']:.2f}" for side in row["sides"] if side.startswith("warps"))
    return [row["name"], times(row, "int8"), times(row, "ours"), times(row, "cudnn"),
            f"{row['ours_us'] / row['int8_us']:.2f}x", f"{row['int8_ratio']:.2f}x", f"{row['rounding']:.1e}", others,
            f"{config.pop('schedule')} {knobs(config)}"]


def main() -> None:
    run(parser_of(__doc__).parse_args(), CASES, compare, report)


if __name__ == "__main__":
    main()
