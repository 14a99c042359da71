"""What one GPU's tuning log is worth on another: measured, both ways, from the logs of both.

    python benchmarks/compare_logs.py tuning_logs/h100.jsonl.xz tuning_logs/h200.jsonl.xz \
        --times benchmarks/results/transfer_h200_on_h100.jsonl.xz --output benchmarks/results/transfer_h100_h200.json

Of every workload that both logs have: the configuration that one log calls the fastest, as the other GPU timed it,
against the fastest of all that the other GPU timed (1.00: nothing is lost by never tuning there); and for comparison
what the untuned default would lose. Only times of the other GPU itself enter, each the best known of a configuration:
of the final comparison if it was in one. A workload whose best configuration the other GPU never timed is left out
and counted. `--times` are records in which either GPU timed what the other's log had found: they say how fast that
is, and nothing is chosen by them.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from search_tables import trials_of
from side_by_side import options

from ecornn.tune.space import Candidate
from ecornn.workload import Workload

Times = dict[Workload, dict[Candidate, float]]


def times_of(*paths: Path) -> tuple[str, Times]:
    """The device of logs, and µs a step of each workload's configurations; several devices are refused."""
    names: set[str] = set()
    found: dict[Workload, dict[Candidate, tuple[bool, float]]] = {}
    for trial in (trial for path in paths for trial in trials_of(path)):
        if trial.times is None or trial.device.kind != "cuda":
            continue
        names.add(trial.device.name)
        of, one = found.setdefault(trial.workload, {}), Candidate.of(trial.schedule, trial.config)
        rank = trial.stage != "final", trial.times.median
        of[one] = min(of.get(one, rank), rank)
    if len(names) != 1:
        raise SystemExit(f"{' and '.join(map(str, paths))}: records of {', '.join(sorted(names)) or 'no GPU'}; "
                         "expected those of one")
    return names.pop(), {w: {c: us for c, (_, us) in of.items()} for w, of in found.items()}


def worth(source: Times, there: Times) -> tuple[list[dict[str, Any]], int]:
    """Rows of the workloads in both, and how many had to be left out, of ``source`` a log and ``there`` another GPU."""
    rows, unknown = [], 0
    for work in source.keys() & there.keys():
        both = {c: us for c, us in source[work].items() if c in there[work]}
        chosen = min(source[work], key=lambda c: source[work][c])
        if len(both) < 2 or chosen not in both:
            unknown += 1
            continue
        best = min(there[work].values())
        default = _default_us(work, there[work])
        rows.append({"cell": work.cell, "dtype": work.dtype, "hidden": work.hidden, "batch": work.batch,
                     "candidates": len(there[work]), "best_us": best, "transferred_us": there[work][chosen],
                     "loss": there[work][chosen] / best, "default_loss": default / best if default else None})
    return sorted(rows, key=lambda r: (r["cell"], r["dtype"], r["hidden"], r["batch"])), unknown


def _default_us(work: Workload, there: dict[Candidate, float]) -> float | None:
    from ecornn.cells import BUILTIN
    from ecornn.targets import KNOWN
    from ecornn.task import make_task
    from ecornn.tune.choose import serving_or_raise

    task = make_task(BUILTIN[work.cell], work, KNOWN["sm_90a"])
    first = serving_or_raise(task)[0]
    return there.get(Candidate.of(first.name, first.default(task)))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and the worst of a direction."""
    losses = [r["loss"] for r in rows]
    defaults = [r["default_loss"] for r in rows if r["default_loss"]]
    return {"workloads": len(rows), "geomean_loss": statistics.geometric_mean(losses), "worst_loss": max(losses),
            "within_2_percent": sum(x <= 1.02 for x in losses), "within_5_percent": sum(x <= 1.05 for x in losses),
            "geomean_default_loss": statistics.geometric_mean(defaults) if defaults else None,
            "default_workloads": len(defaults)}


def main() -> None:
    """The command line."""
    parser = options(__doc__)
    parser.add_argument("logs", type=Path, nargs=2, help="the logs of two GPUs")
    parser.add_argument("--times", type=Path, nargs="*", default=[], help="logs of either GPU that only say how fast "
                        "configurations are")
    args = parser.parse_args()
    (a, of_a), (b, of_b) = (times_of(path) for path in args.logs)
    more = [(path, times_of(path)[0]) for path in args.times]
    _, on_a = times_of(args.logs[0], *(path for path, name in more if name == a))
    _, on_b = times_of(args.logs[1], *(path for path, name in more if name == b))
    result: dict[str, Any] = {"command": " ".join(["python benchmarks/compare_logs.py", *sys.argv[1:]])}
    for source, here, target, there in ((a, of_a, b, on_b), (b, of_b, a, on_a)):
        rows, unknown = worth(here, there)
        if not rows:
            raise SystemExit(f"no workload of {source}'s log was measured on {target}")
        result[f"{source} on {target}"] = {**summary(rows), "left_out": unknown, "rows": rows}
        print(f"{source}'s log on {target}:", json.dumps({**summary(rows), "left_out": unknown}))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
