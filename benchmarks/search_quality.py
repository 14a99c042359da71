"""How good the search is: model-guided against random, replayed on measured tables.

    python benchmarks/search_quality.py --target cpu --output benchmarks/results/search_quality_cpu

For each workload a random sample of its config space is built and measured (`--trials` of them; the log
`--table` keeps every one, so that the command goes on where it was stopped). Then searches that may
propose these configurations alone are replayed, `--seeds` times each: the time of a proposal is looked
up. Written are OUTPUT.json and OUTPUT.png (needs matplotlib): best so far against trials, relative to the
best of the table, median and range over the seeds.

    random   draws without replacement
    model    the tuner's search
    warmed   the tuner's search, whose model has seen the other workloads' tables

All three begin with the schedules' defaults. On a shared machine `--lock FILE` holds a lock on the file:
shared while building, exclusive while measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ecornn.cells import get
from ecornn.schedules.base import Schedule, Task
from ecornn.task import make_task
from ecornn.tune import Session, oracle
from ecornn.tune.choose import serving_or_raise
from ecornn.tune.evaluate import Outcome, ProcessEvaluator
from ecornn.tune.features import features
from ecornn.tune.log import append, read
from ecornn.tune.model import CostModel
from ecornn.tune.record import Trial
from ecornn.tune.search import Search
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.workload import Workload

Costs = dict[Candidate, float | None]  # µs per step; None: failed
BATCH = 16
CHUNK = 64  # built before any of them is measured


class TableSpace(ConfigSpace):
    """The configurations that were measured."""

    def __init__(self, task: Task, schedules: Sequence[Schedule], table: Costs) -> None:
        super().__init__(task, schedules)
        self.table, self.names = table, sorted({c.schedule for c in table})

    def __len__(self) -> int:
        return len(self.table)

    def fits(self, candidate: Candidate) -> bool:
        return candidate in self.table

    def listing(self) -> Iterator[Candidate]:
        return iter(self.table)

    def draw(self, rng: random.Random) -> Candidate | None:
        name = rng.choice(self.names)
        return rng.choice([c for c in self.table if c.schedule == name])


def workload_of(text: str, dtype: str) -> Workload:
    """From ``cell:H:B:T``."""
    cell, hidden, batch, seq = text.split(":")
    return Workload(cell, int(hidden), int(hidden), int(batch), int(seq), dtype)


def sample(space: ConfigSpace, count: int) -> list[Candidate]:
    """The defaults and random configurations, each schedule as often as another."""
    rng, found = random.Random(0), dict.fromkeys(space.defaults())
    for _ in range(50 * count):
        if len(found) >= min(count, len(space)):
            break
        found[space.draw(rng)] = None  # type: ignore[index]
    return list(found)


def measure(session: Session, task: Task, schedules: Sequence[Schedule], path: Path, count: int,
            lock: Callable[[int], None]) -> Costs:
    """The table of a workload; what the log has is not measured again."""
    log = read(path) if path.exists() else None
    known = {Candidate.of(t.schedule, t.config): t.times.median if t.times else None
             for t in (log.trials() if log else []) if t.workload == task.workload and t.device == task.device}
    wanted = sample(ConfigSpace(task, schedules), count)
    missing = [c for c in wanted if c not in known]
    cell, began = get(task.workload.cell), time.monotonic()
    for first in range(0, len(missing), CHUNK):
        chunk = missing[first:first + CHUNK]
        with ProcessEvaluator(task, cell.name, lambda file: oracle.write(file, cell, task, 0), session.pool,
                              limit=session.timeout, seed=0) as evaluator:
            lock(fcntl.LOCK_SH)
            futures = [session.pool.building.submit(evaluator.build, c) for c in chunk]
            for future in futures:
                future.exception()
            lock(fcntl.LOCK_EX)
            for candidate, future in zip(chunk, futures, strict=True):
                outcome: Outcome = evaluator.outcome(future)
                known[candidate] = outcome.times.median if outcome.times else None
                append(path, Trial(
                    run="search-quality", index=len(known), stage="search", workload=task.workload, device=task.device,
                    schedule=candidate.schedule, config=candidate.config, seed=0, source=outcome.source,
                    revision=next(s.revision for s in schedules if s.name == candidate.schedule),
                    versions=session.environment.versions, clocks=session.environment.clocks,
                    seconds=time.monotonic() - began, times=outcome.times, check=outcome.check, error=outcome.error,
                    noisy=outcome.noisy))
            lock(fcntl.LOCK_UN)
        print(f"{task.workload}: {len(known)} of {len(wanted)} measured", flush=True)
    return {c: known[c] for c in wanted}


def replay(space: TableSpace, seed: int, trials: int, model: CostModel | None) -> list[float]:
    """Best so far after each trial; ``model`` None: a random search."""
    search, found, best = Search(space, model or CostModel(seed), seed), [], float("inf")
    order = [c for c in space.defaults() if c in space.table]
    rest = [c for c in space.table if c not in order]
    random.Random(seed).shuffle(rest)
    while len(found) < min(trials, len(space.table)):
        count = min(BATCH, trials - len(found))
        for candidate in search.ask(count) if model is not None else (order + rest)[len(found):len(found) + count]:
            us = space.table[candidate]
            search.tell(candidate, us)
            best = min(best, us if us is not None else best)
            found.append(best)
    return found


def warmed(seed: int, task: Task, spaces: Sequence[TableSpace]) -> CostModel:
    """A model that has seen the other tables."""
    model = CostModel(seed)
    for space in spaces:
        if space.task is not task:
            for candidate, us in space.table.items():
                row = features(space.schedules[candidate.schedule], space.task, candidate)
                model.add(str(space.task.workload), row, us)
    return model


def curves(spaces: Sequence[TableSpace], seeds: int, trials: int) -> dict[str, dict[str, list[list[float]]]]:
    """workload -> kind of search -> best so far of each seed, relative to the best of the table."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for space in spaces:
        best = min(us for us in space.table.values() if us is not None)
        kinds: dict[str, Callable[[int], CostModel | None]] = {"random": lambda seed: None, "model": CostModel}
        if len(spaces) > 1:
            kinds["warmed"] = lambda seed, space=space: warmed(seed, space.task, spaces)
        found[str(space.task.workload)] = {
            kind: [[us / best for us in replay(space, seed, trials, make(seed))] for seed in range(seeds)]
            for kind, make in kinds.items()}
    return found


def plot(data: dict[str, dict[str, list[list[float]]]], device: str, sizes: dict[str, int], path: Path) -> None:
    """One panel a workload: median over the seeds and their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(data), figsize=(5.2 * len(data), 3.6), squeeze=False)
    for panel, (workload, kinds) in zip(panels[0], data.items(), strict=True):
        for kind, runs in kinds.items():
            steps = range(1, len(runs[0]) + 1)
            at = list(zip(*runs, strict=True))
            (drawn,) = panel.plot(steps, [statistics.median(v) for v in at], label=kind)
            panel.fill_between(steps, [min(v) for v in at], [max(v) for v in at], alpha=0.15, color=drawn.get_color())
        panel.set(title=f"{workload}\n{sizes[workload]} configurations", xlabel="trials",
                  ylabel="best so far / best of the table", xscale="log", ylim=(0.99, 1.5))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(device)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workloads", nargs="+", default=["lstm:128:4:50", "gru:256:8:50"], metavar="CELL:H:B:T")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--trials", type=int, default=500, help="configurations of a table")
    parser.add_argument("--budget", type=int, default=256, help="trials of a search")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--table", type=Path, default=Path("build/search_quality.jsonl"))
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="without its suffix")
    arguments = parser.parse_args()
    spaces = []
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(Session(arguments.target))
        held = stack.enter_context(arguments.lock.open("a")) if arguments.lock else None
        for text in arguments.workloads:
            dtype = arguments.dtype or ("float32" if arguments.target == "cpu" else "bfloat16")
            work = workload_of(text, dtype)
            task = make_task(get(work.cell), work, session.device)
            schedules = serving_or_raise(task)
            table = measure(session, task, schedules, arguments.table, arguments.trials,
                            lambda kind: fcntl.flock(held, kind) if held else None)
            spaces.append(TableSpace(task, schedules, table))
    data = curves(spaces, arguments.seeds, arguments.budget)
    rows = []
    for space in spaces:
        work = str(space.task.workload)
        for kind, runs in data[work].items():
            for budget in (8, 16, 32, 64, 128, 256):
                at = sorted(run[budget - 1] for run in runs if len(run) >= budget)
                if at:
                    rows.append({"workload": work, "search": kind, "trials": budget, "median": statistics.median(at),
                                 "best": at[0], "worst": at[-1]})
                    print(f"{work}  {kind:7} {budget:4} trials: {statistics.median(at):.3f} "
                          f"[{at[0]:.3f}, {at[-1]:.3f}] of the best")
    sizes = {str(s.task.workload): len(s.table) for s in spaces}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".json").write_text(json.dumps({
        "device": spaces[0].task.device.name, "seeds": arguments.seeds, "configurations": sizes,
        "noisy": sum(t.noisy for t in read(arguments.table).trials()), "rows": rows,
        "command": "python benchmarks/search_quality.py " + " ".join(sys.argv[1:])}, indent=1) + "\n")
    plot(data, spaces[0].task.device.name, sizes, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
