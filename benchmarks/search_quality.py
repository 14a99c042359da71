"""How good the search is: model-guided against random, replayed on measured tables.

    python benchmarks/search_quality.py --table benchmarks/results/search_quality_cpu.jsonl.xz \\
        --output benchmarks/results/search_quality_cpu

Reads a table of `search_tables.py` (or several, .jsonl or .jsonl.xz) and replays searches that may propose its
configurations alone, `--seeds` times each: the time of a proposal is looked up. Written are OUTPUT.json and OUTPUT.png
(needs matplotlib): best so far against trials, relative to the best of the table, median and range over the seeds; and
how many trials it takes to come within 5% of the best, and of a warmed search to be as good as one from nothing at the
end; printed is what is said of `--live` below.

    random   draws without replacement
    model    the tuner, from nothing
    warmed   the tuner, whose model has seen the shipped records of other workloads, as in `ecornn tune`

Random searches begin with the defaults of all schedules; where schedules have estimates the others begin with the
preferred one's alone, and rank the rest with everything else. The tuner is the real one, with as many candidates under
way as on a machine with 16 processors; what it may find outside the table does not count, so a table should be much
larger than the budget. Searches that may propose anything are compared by

    cd benchmarks; python search_quality.py --live results/search_fastest_h100.jsonl.xz \\
        results/search_live_quarter_h100.json results/search_live_none_h100.json

from reports of `search_rate.py`, against the best of random configurations of a layer, which the first file of `--live`
has: a table, or what was fastest in it, measured again on a GPU like that of the reports; what it lacks the `--live`
before it have. Printed are, after some numbers of trials, for those with records of other layers and those without, of
the median run of each layer the geometric mean, the worst, and how many are within 5%; and how many of all single runs
are. Then how many trials it took to come within 5%.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from search_tables import task_of

from ecornn.cells import get
from ecornn.device import Device
from ecornn.schedules.base import Schedule, Task
from ecornn.tune.choose import Environment
from ecornn.tune.log import Journal, Log, read, read_all, shipped_folder
from ecornn.tune.lookup import unfit, up_to_date
from ecornn.tune.pool import SPARE
from ecornn.tune.record import AnyRecord, Outcome, Trial
from ecornn.tune.search import CostModel, Search
from ecornn.tune.space import Candidate, ConfigSpace, halving
from ecornn.tune.transfer import borrowed, warm
from ecornn.tune.tuner import Settings, Tuner
from ecornn.workload import Workload

NEAR = 1.05  # of the best: good enough
BUDGETS = (8, 16, 32, 64, 128, 256)
KINDS = ("random", "model", "warmed")
Curves = dict[str, list[list[float]]]  # kind of search -> best so far of each seed
Times = dict[Candidate, Trial]
asked = cache(task_of)  # each process replays many searches of a table
BUILDERS = 16


class TableSpace(ConfigSpace):
    """The configurations that were measured."""

    def __init__(self, task: Task, schedules: Sequence[Schedule], table: Times) -> None:
        super().__init__(task, schedules)
        self.table = table
        self.by_name: dict[str, list[Candidate]] = {}
        for candidate in table:
            self.by_name.setdefault(candidate.schedule, []).append(candidate)
        self.values = {name: np.array([[str(v) for _, v in c.knobs] for c in found])
                       for name, found in self.by_name.items()}

    def __len__(self) -> int:
        return len(self.table)

    def fits(self, candidate: Candidate) -> bool:
        return candidate in self.table

    def listing(self) -> Iterator[Candidate]:
        return iter(self.table)

    def sample(self, rng: random.Random, count: int) -> list[Candidate]:
        return list(self.table) if len(self) <= count else rng.sample(list(self.table), count)

    def draw(self, rng: random.Random) -> Candidate | None:
        return rng.choice(self.by_name[halving(rng, [name for name in self.schedules if name in self.by_name])])

    def neighbour(self, candidate: Candidate, rng: random.Random) -> Candidate | None:
        mine = np.array([str(v) for _, v in candidate.knobs])
        near = np.flatnonzero((self.values[candidate.schedule] != mine).sum(axis=1) == 1)
        return self.by_name[candidate.schedule][rng.choice(list(near))] if len(near) else None


class Looked:
    """The evaluator of a replay: in the order of the proposals."""

    def __init__(self, table: Times, quiet: bool) -> None:
        self.table, self.waiting = table, deque[Candidate]()
        self.spare = 0 if quiet else round(SPARE * BUILDERS)
        self.idle = 0

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def submit(self, batch: Sequence[Candidate], bound: float | None) -> None:
        self.waiting.extend(batch)

    def next(self, seconds: float | None = None) -> tuple[Candidate, Outcome]:
        candidate = self.waiting.popleft()
        return candidate, Outcome.of(self.table[candidate])

    def drop(self) -> None:
        self.waiting.clear()

    def compare(self, finalists: Sequence[Candidate], seconds: float | None = None) -> list[Outcome]:
        return []


class Unwritten(Journal):
    """A journal in memory."""

    def add(self, record: AnyRecord) -> None:
        self.take(record)


@dataclass(frozen=True)
class Table:
    """One workload's measurements on one device."""

    work: Workload
    device: Device
    trials: tuple[Trial, ...]

    @property
    def times(self) -> Times:
        """The latest trial of each configuration."""
        return {Candidate.of(t.schedule, t.config): t for t in self.trials}

    @property
    def best(self) -> float:
        """µs per step of the fastest."""
        return min(t.times.median for t in self.trials if t.times)


def tables_of(paths: Sequence[Path]) -> list[Table]:
    """The tables of logs, compressed or not."""
    found: dict[tuple[Workload, str], list[Trial]] = {}
    for path in paths:
        for trial in read(path).trials():
            if trial.stage == "search":  # of all hosts with such a GPU
                found.setdefault((trial.workload, trial.device.name), []).append(trial)
    return [Table(work, trials[0].device, tuple(usable(work, trials[0].device, trials)))
            for (work, _), trials in found.items()]


def usable(work: Workload, device: Device, trials: Sequence[Trial]) -> Iterator[Trial]:
    """The trials that can be proposed, with knobs that came later as things were before."""
    task, schedules = asked(work, device)
    by_name = {s.name: s for s in schedules}
    for trial in trials:
        now = up_to_date(trial, by_name.get(trial.schedule), task)
        if unfit(by_name.get(trial.schedule), task, now.config) is None:
            yield now


@cache
def others(mine: Workload) -> Log:
    """The shipped records but those of this workload, or of this layer at less than twice or half the batch."""
    def other(work: Workload) -> bool:
        same = (work.cell, work.hidden, work.input, work.dtype) == (mine.cell, mine.hidden, mine.input, mine.dtype)
        return not same or max(work.batch, mine.batch) >= 2 * min(work.batch, mine.batch)

    log = read_all([shipped_folder()])
    return Log([line for line in log.lines if isinstance(line.record, Trial) and other(line.record.workload)])


def replay(table: Table, kind: str, seed: int, budget: int) -> list[float]:
    """Best so far after each trial, relative to the best of the table."""
    task, schedules = asked(table.work, table.device)
    times, model = table.times, CostModel(seed)
    space, lent = TableSpace(task, schedules, times), list[Candidate]()
    if kind == "random":
        order = [c for c in space.defaults() if c in times]
        rest = [c for c in times if c not in order]
        random.Random(seed).shuffle(rest)
        tried = [times[c] for c in (order + rest)[:budget]]
    else:
        if kind == "warmed":
            records = others(table.work)
            warm(model, get(table.work.cell), task, schedules, records)
            lent = borrowed(task, schedules, records)
        quiet, first = table.device.kind == "llvm", table.trials[0]
        budget = min(budget, len(times))
        settings = Settings(budget, seed, None, max(4, min(16 if quiet else 8, budget // 6)))
        journal = Unwritten(Path("replay"), "replay-1")
        Tuner(Search(space, model, seed, lent=lent), Looked(times, quiet), journal, settings,
              Environment(first.versions, first.clocks)).run()
        tried = journal.search
    return so_far([trial.times and trial.times.median for trial in tried], table.best)


def so_far(trials: Iterable[float | None], best: float) -> list[float]:
    """The best so far after each trial, relative to the ``best``; None: it failed."""
    return [us / best for us in itertools.accumulate((us or math.inf for us in trials), min)]


def needed(run: Sequence[float | None], goal: float) -> float:
    """Trials until one is as good as ``goal``; infinite where none is."""
    return next((n for n, value in enumerate(run, 1) if value is not None and value <= goal), math.inf)


def reached(work: str, found: Curves) -> dict[str, object]:
    """Trials to come within `NEAR` of the best, the median over the seeds; and of the warmed search to be as good as
    the one from nothing after all its trials, in the median. None: not within the budget."""
    def trials(kind: str, goal: float) -> float | None:
        median = statistics.median(needed(run, goal) for run in found[kind])
        return median if median < math.inf else None

    budget = min(len(run) for run in found["model"])
    end = statistics.median(run[budget - 1] for run in found["model"])
    return {"workload": work, **{kind: trials(kind, NEAR) for kind in KINDS}, "budget": budget, "end": end,
            "model_as_good": trials("model", end), "warmed_as_good": trials("warmed", end)}


def behind(found: Curves) -> dict[str, list[int]]:
    """Of each kind of search, at how many budgets from 32 trials on random search is ahead by more than 1% in the
    median, of how many."""
    counts = {}
    for kind, runs in found.items():
        length = min(map(len, (*runs, *found["random"])))
        mine, drawn = (np.median([run[31:length] for run in each], axis=0) for each in (runs, found["random"]))
        counts[kind] = [int((mine > 1.01 * drawn).sum()), len(mine)]
    return counts


def plot(data: dict[str, Curves], device: str, sizes: dict[str, int], path: Path) -> None:
    """One panel a workload: median over the seeds and their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(data))
    lines = -(-len(data) // columns)
    figure, panels = plt.subplots(lines, columns, figsize=(4.4 * columns, 3.2 * lines), squeeze=False)
    for panel in panels.flat[len(data):]:
        panel.axis("off")
    for panel, (workload, kinds) in zip(panels.flat, data.items(), strict=False):
        for kind, runs in kinds.items():
            at = np.array([*zip(*runs, strict=False)])
            (drawn,) = panel.plot(range(1, len(at) + 1), np.median(at, 1), label=kind)
            panel.fill_between(range(1, len(at) + 1), at.min(1), at.max(1), alpha=0.15, color=drawn.get_color())
        panel.set(xlabel="trials", xscale="log", ylim=(0.85, 1.5))
        panel.set_title(f"{workload}\n{sizes[workload]} configurations", fontsize=9)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("best so far / best of the table")
    panels[0][0].legend()
    figure.suptitle(device)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


class Live(NamedTuple):
    """A search of the whole space by `search_rate.py`: the records that it knew; relative to the best of the table, the
    best so far after each trial, and the best after a last measurement; and the file with its report. Or one that was
    replayed, and its kind."""

    workload: str
    records: str
    curve: list[float]
    ratio: float
    report: str


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
                    if (least := best.get((work, report["device"]))) and one["best_us"]:
                        found.append(Live(work, report["records"], so_far(one["trials_us"], least),
                                          one["best_us"] / least, path.stem))
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
    took, never = dict[str, list[float]](), 0
    for one in found:
        trials = needed(one.curve, goal)
        never += trials == math.inf
        took.setdefault(one.workload, []).append(min(trials, len(one.curve)))
    return sum(statistics.median(each) for each in took.values()), never


def line(records: str, budget: int, of: dict[str, tuple[float, list[float]]]) -> str:
    """A line of the table that is printed."""
    middle, single = [m for m, _ in of.values()], [v for _, values in of.values() for v in values]
    return (f"| {records} | {budget} | {statistics.geometric_mean(middle):.3f} | {max(middle):.3f} | "
            f"{sum(m <= NEAR for m in middle)} of {len(middle)} | {sum(v <= NEAR for v in single)} of {len(single)} |")


def compare(found: Sequence[Live]) -> None:
    """Prints what the help says, by the records that the searches knew, or their kinds."""
    kinds = {records: [one for one in found if one.records == records]
             for records in dict.fromkeys(one.records for one in found)}
    print("| records | trials | mean | worst | layers within 5% | runs within 5% |\n|---|---|---|---|---|---|")
    for records, budget in itertools.product(kinds, BUDGETS):
        if of := medians(kinds[records], budget):
            print(line(records, budget, of))
    print("\ntrials until within 5%, summed over the layers, and runs that never were")
    for records, of_kind in kinds.items():
        print("{}: {:g}, {}".format(records, *until(of_kind, NEAR)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=Path, nargs="+", action="append", metavar=("TABLE", "REPORT"))
    parser.add_argument("--table", type=Path, nargs="+")
    parser.add_argument("--budget", type=int, default=256, help="trials of a search [%(default)s]")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, help="without its suffix")
    arguments = parser.parse_args()
    if arguments.live:
        return compare(lives((tables_of(group[:1]), group[1:]) for group in arguments.live))
    if not (arguments.table and arguments.output):
        parser.error("expected --live, or --table and --output")
    tables, data = tables_of(arguments.table), {}
    with ProcessPoolExecutor(arguments.processes) as pool:
        for table in tables:
            work, seeds, budget = str(table.work), range(arguments.seeds), itertools.repeat(arguments.budget)
            found = {kind: pool.map(replay, itertools.repeat(table), itertools.repeat(kind), seeds, budget)
                     for kind in KINDS}
            data[work] = {kind: list(runs) for kind, runs in found.items()}
    searches = {kind: [Live(work, kind, run, run[-1], "") for work, found in data.items() for run in found[kind]]
                for kind in KINDS}
    compare([*itertools.chain(*searches.values())])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".json").write_text(json.dumps({
        "device": tables[0].device.name, "seeds": arguments.seeds,
        "configurations": {str(t.work): len(t.times) for t in tables}, "best_us": {str(t.work): t.best for t in tables},
        "noisy": {str(t.work): sum(each.noisy for each in t.trials) for t in tables},
        "rows": [{"workload": work, "search": kind, "trials": budget, "median": middle, "best": min(at),
                  "worst": max(at)} for kind, budget in itertools.product(KINDS, BUDGETS)
                 for work, (middle, at) in medians(searches[kind], budget).items()],
        "needed": [reached(work, found) for work, found in data.items()],
        "budgets_behind_random": {work: behind(found) for work, found in data.items()},
        "command": "python benchmarks/search_quality.py " + " ".join(sys.argv[1:])}, indent=1) + "\n")
    plot(data, tables[0].device.name, {str(t.work): len(t.times) for t in tables}, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
