"""Layers whose recurrent weights are more than the chip holds, ours in several configurations and cuDNN's; on a GPU.

    python benchmarks/compare_past_chip.py --output benchmarks/results/h100_past_chip.jsonl
    python benchmarks/compare_past_chip.py --target sm_90a --compile-only     # no GPU needed

`ours` is what a compilation chooses, `before` a launch a step (layout_transform), or `persistent` where it serves
the layer; `wide` the default of `persistent_wide` where that is not chosen. The others are `persistent_wide` with what
stays on the chip cut in other ways: blocks that share K in 1, 2 and 3 parts, with less or more weights on their way,
and other parts of them that L2 is asked to keep. Whole forward passes in CUDA graphs, interleaved; each side is checked
against float64, two runs must be equal; median, 20th and 80th percentile.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class Case:
    """A layer of H inputs."""

    cell: str
    B: int
    H: int
    dtype: str = "float16"
    few: bool = False  # without other cuts

    def sides(self) -> dict[str, Made]:
        """The modules, by name; each once."""
        found = {"ours": self._made()}
        for name, schedule, config in self._others():
            found[name] = self._made(schedule, made_knobs(config))
        return found

    def _made(self, schedule: str | None = None, config: Any = ()) -> Made:
        return Made(self.cell, T, self.B, self.H, self.H, self.dtype, schedule, config)

    def _others(self) -> list[tuple[str, str, Any]]:
        """(name, schedule, configuration) of what is compared with the choice."""
        from ecornn.analysis import analyse
        from ecornn.cells import get
        from ecornn.schedules.base import Task
        from ecornn.schedules.persistent_wide import PersistentWide, estimate
        from ecornn.targets import KNOWN
        from ecornn.tune.choose import choose, serving_or_raise
        from ecornn.workload import Workload

        work = Workload(self.cell, self.H, self.H, self.B, T, self.dtype)
        task = Task(work, analyse(get(self.cell), self.H, self.H), KNOWN["sm_90a"])
        serving = {schedule.name: schedule for schedule in serving_or_raise(task)}
        chosen, wide = choose(task, None, None), PersistentWide()
        before = next(name for name in ("persistent", "layout_transform") if name in serving)
        known = choose(task, before, None)
        found = [] if chosen.schedule.name == before else [("before", before, known.config)]
        if wide.serves(task):
            return found
        best = wide.default(task)
        if chosen.schedule.name != wide.name:
            found.append(("wide", wide.name, best))
        if self.few:
            return found
        every = [*wide.candidates(task)]
        for parts in (1, 2, 3):
            some = [c for c in every if c["parts"] == parts]
            if not some:
                continue
            least = min(some, key=lambda c: estimate(task, PersistentWide().plan(task, c)))
            one = {**least, "hoisted": best["hoisted"]}
            cut = {name: one[name] for name in ("groups", "units", "parts", "row_teams")}
            for ahead in (16, 32, 64, 96):
                made = wide.fullest(task, cut, {**one, "ahead": ahead})
                if made is not None and made != dict(chosen.config):
                    found.append((f"{parts} parts, {ahead} KB", wide.name, made))
        if int(best["streamed"]):
            found += [(f"lasting {n}", wide.name, {**best, "lasting": n})
                      for n in (100, 75, 50, 25) if n != best["lasting"]]
        return found

    def __str__(self) -> str:
        return f"{self.cell} {self.dtype} B={self.B} H={self.H}"


CASES = [Case("gru", 64, 3072), Case("lstm", 8, 4096), Case("gru", 32, 3072), Case("lstm", 64, 2560),
         Case("lstm", 128, 2560),
         *(Case(*layer, few=True) for layer in (
             ("lstm", 32, 3072), ("lstm", 16, 2816), ("lstm", 8, 2816), ("lstm", 1, 2816), ("rnn_tanh", 1, 5120),
             ("gru", 16, 4096), ("gru", 64, 2816, "bfloat16"),
             ("rnn_tanh", 32, 6144), ("gru", 64, 3072, "bfloat16"), ("lstm", 16, 4096, "bfloat16"),
             ("lstm", 64, 4096), ("gru", 128, 3072)))]


def compare(case: Case, files: Files, limits: Limits) -> dict:
    """One row: every side checked and timed."""
    import torch
    from many_sides import beside_library
    from side_by_side import float64_forward, relative

    if isinstance(files["ours"], str):
        return {"failed": files["ours"], "served": False}
    sides, library, weights = beside_library(case.cell, (T, case.B, case.H, case.H), case.dtype)
    with torch.no_grad():
        sides.x.copy_(sides.random())
        reference = float64_forward(case.cell, sides.x, weights)
        limit = 2 * relative(library(sides.x)[0], reference) + 1e-6
        for name, file in files.items():
            sides.add_module(name, file, weights)
        sides.add("cudnn", lambda y: library(sides.x)[0])
        sides.check(dict.fromkeys(sides.row["sides"], reference), dict.fromkeys(sides.row["sides"], limit))
        if "ours" in sides.row["wrong"]:
            sides.row["missing"]["ours"] = f"WRONG {sides.row['missing']['ours']}"
        row = sides.time(limits)
    ratios = {f"{side}_ratio": row["cudnn_us"] / row[f"{side}_us"] for side in row["sides"] if side != "cudnn"}
    return row | ratios | {"T": T, "B": case.B}


def report(path: Path, log: GridLog) -> list[str]:
    """The table, in Markdown."""
    env, rows = log.environment, [r for r in log.rows if "ours_ratio" in r]
    mean = math.exp(sum(math.log(r["ours_ratio"]) for r in rows) / max(1, len(rows)))
    lines = ["# Layers whose weights are more than the chip holds", "",
             f"{env['gpu']}, CUDA {env['cuda']}, PyTorch {env['torch']}, cuDNN {env['cudnn']}; {T}xBxHxH, µs a step of "
             "whole forward passes in CUDA graphs, interleaved, medians with 20th and 80th percentiles, each side "
             f"checked against float64. Data: `{path.name}`. Geometric mean of {len(rows)} layers, cuDNN over ours: "
             f"{mean:.2f}x.", "",
             *table(("layer", "ours", "cuDNN", "ratio", "others", "ours is"), map(_line, rows)), "",
             "## Not compiled or not right", "",
             *([f"- {r['name']}: {r['failed']}" for r in log.rows if "failed" in r] or ["None."]),
             *(f"- {r['name']}, {side}: {why}" for r in log.rows for side, why in r.get("missing", {}).items()), ""]
    return lines


def _line(row: dict) -> list[str]:
    config = dict(row["configs"]["ours"])
    others = ", ".join(f"{side} {row[f'{side}_us']:.2f}" for side in row["sides"] if side not in ("ours", "cudnn"))
    return [row["name"], times(row, "ours"), times(row, "cudnn"), f"{row['ours_ratio']:.2f}x", others,
            f"{config.pop('schedule')} {knobs(config)}"]


def main() -> None:
    run(parser_of(__doc__).parse_args(), CASES, compare, report)


if __name__ == "__main__":
    main()
