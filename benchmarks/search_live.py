"""Searches of whole spaces, of several runs and GPUs: what few trials with records are worth beside many without.

    cd benchmarks; python search_live.py --on results/search_fastest_h100.jsonl.xz \\
        results/search_live_quarter_h100.json results/search_live_none_h100.json

Reads reports of `search_rate.py`: `--records others` knew the records of other layers, `none` nothing. They are set
against the best of random configurations of a layer, which the first file of `--on` has: a table of `search_tables.py`,
or what was fastest in it, measured again on a GPU like that of the reports; what it lacks the `--on` before it have.
Printed are, after some numbers of trials, for those with records and those without, the median of the runs of each
layer: the geometric mean of the layers, the worst of them, and how many are within 5%; and how many of all single runs
are. Then how many trials it took to come within 5%.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_quality import NEAR, Table, needed, tables_of

BUDGETS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Live:
    """A search of the whole space: its device, the records it knew and what it found (`search_rate.py`)."""

    workload: str
    device: str
    records: str
    found: dict[str, Any]
    best: float  # of the table, µs per step
    report: str = ""  # where it is

    @property
    def curve(self) -> list[float]:
        """Best so far after each trial, relative to the best of the table."""
        so_far = itertools.accumulate((us or math.inf for us in self.found["trials_us"]), min)
        return [us / self.best for us in so_far]

    @property
    def ratio(self) -> float:
        """The best after a last measurement, relative to the best of the table."""
        return self.found["best_us"] / self.best


def lives(groups: Iterable[tuple[Sequence[Table], Sequence[Path]]]) -> list[Live]:
    """The searches of reports, of layers and on devices of which there is a table, with the report or before it."""
    best: dict[tuple[str, str], float] = {}
    found = []
    for tables, paths in groups:
        best |= {(str(t.work), t.device.name): t.best for t in tables}
        for path in paths:
            report = json.loads(path.read_text())
            for row in report["rows"]:
                for work, one in row["found"].items():
                    if (work, report["device"]) in best and one["best_us"]:
                        found.append(Live(work, report["device"], report["records"], one, best[work, report["device"]],
                                          path.stem))
    return found


def medians(found: Sequence[Live], budget: int) -> dict[str, tuple[float, list[float]]]:
    """Of each layer the median of the runs, and each of them: the best after so many trials over the table's."""
    at: dict[str, list[float]] = {}
    for one in found:
        if len(one.curve) >= budget:
            at.setdefault(one.workload, []).append(one.curve[budget - 1])
    return {work: (statistics.median(values), values) for work, values in at.items()}


def until(found: Sequence[Live], goal: float) -> tuple[float, int]:
    """Trials until the best is ``goal`` times the table's, medians of the runs of a layer, summed over the layers; and
    how many runs never were, each of which counts with all its trials."""
    took: dict[str, list[float]] = {}
    never = 0
    for one in found:
        trials = needed(one.curve, goal)
        never += trials == math.inf
        took.setdefault(one.workload, []).append(min(trials, len(one.curve)))
    return sum(statistics.median(each) for each in took.values()), never


def line(records: str, budget: int, of: dict[str, tuple[float, list[float]]]) -> str:
    """Of the table that is printed."""
    middle, single = [m for m, _ in of.values()], [v for _, values in of.values() for v in values]
    return (f"| {records} | {budget} | {statistics.geometric_mean(middle):.3f} | {max(middle):.3f} | "
            f"{sum(m <= NEAR for m in middle)} of {len(middle)} | {sum(v <= NEAR for v in single)} of {len(single)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", type=Path, nargs="+", action="append", required=True, metavar=("TABLE", "REPORT"))
    arguments = parser.parse_args()
    found = lives((tables_of(group[:1]), group[1:]) for group in arguments.on)
    kinds = {records: [one for one in found if one.records == records] for records in ("others", "none")}
    print("| records | trials | mean | worst | layers within 5% | runs within 5% |\n|---|---|---|---|---|---|")
    for records, budget in itertools.product(kinds, BUDGETS):
        if of := medians(kinds[records], budget):
            print(line(records, budget, of))
    print("\ntrials until within 5%, summed over the layers, and runs that never were")
    for records, of_kind in kinds.items():
        print("{}: {:g}, {}".format(records, *until(of_kind, NEAR)))


if __name__ == "__main__":
    main()
