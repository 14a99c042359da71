"""Trials a second of a search, and what its processes wait for.

    python benchmarks/search_rate.py --output benchmarks/results/search_rate.json             # on a machine with a GPU
    python benchmarks/search_rate.py --suite --records none --at-once 3 --seeds 0 1 2 --output search_live.json
    python benchmarks/search_rate.py --suite --records others --trials 32 --at-once 3
    python benchmarks/search_rate.py --pretend 0.03 --pretend-builds 1.1 --builders 16        # no GPU, no compiler

Runs `ecornn tune`'s search of each layer (`--suite`: of the twelve of `search_tables.py`), without early stopping, with
a build cache that is empty at first, which `--seeds` share, and a log of its own. `--records` is what it knows
beforehand: `all` that ship, `none`, or those of `others`, none of the layer itself at a similar batch;
`search_quality.py --live` compares what was found with the tables. Reported are for each run of `--at-once` layers

    per_second           trials a second from the first measurement to the last trial
    per_second_all       the same from the start of this command, imports and the final comparison included
    builders, measurer   their share of that time, from first to last trial, in which they were at work
    proposing            the share in which the search chose what to try next, of the main thread of each run
    starved              the share in which the measuring process had nothing to do
    build, measure       seconds of one: median, mean, most
    first                seconds from the start to the first trial
    found                of each layer, µs per step of the best and the default, measured again in turns, which the best
                         is, and µs per step of every trial in its order (null: it failed)

`--pretend` replaces measurements by sleeps, for an H100 that is not there; with `--pretend-builds` also builds, by a
long-tailed distribution of that mean: what is left is the search itself and the traffic between processes.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()

import argparse  # noqa: E402
import hashlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import msgspec  # noqa: E402

from ecornn.quick_tvm import import_tvm  # noqa: E402
from ecornn.targets import resolve  # noqa: E402
from ecornn.tune import proposing  # noqa: E402
from ecornn.tune import session as sessions  # noqa: E402
from ecornn.tune.building import Build  # noqa: E402
from ecornn.tune.log import Log  # noqa: E402
from ecornn.tune.pool import Entries, Pool  # noqa: E402
from ecornn.tune.record import Outcome, Times  # noqa: E402
from ecornn.tune.search import Search  # noqa: E402
from ecornn.tune.timing import Measure  # noqa: E402
from ecornn.worker import Worker  # noqa: E402

Span = tuple[float, float]
PRETEND = "ECORNN_PRETEND"  # to the worker processes: seconds of a build and of a measurement


SPANS: dict[str, list[Span]] = {"build": [], "measure": [], "propose": []}  # when it was at work, from all threads


def watch(kind: str, function: Any) -> Any:
    """``function``, noting when it ran."""
    def watched(*args: Any, **named: Any) -> Any:
        begin = time.monotonic()
        try:
            return function(*args, **named)
        finally:
            SPANS[kind].append((begin, time.monotonic()))
    return watched


def nothing(_: None) -> bool:
    """In place of what a worker imports."""
    return True


def pretended_build(request: Build) -> str:
    """Sleeps as long as a build might take: lognormal, the median two thirds of the mean."""
    mean = json.loads(os.environ[PRETEND])[0]
    digest = hashlib.sha256(msgspec.json.encode((request.schedule, sorted(request.config.items())))).hexdigest()
    time.sleep(min(5 * mean, mean * 2 / 3 * random.Random(digest).lognormvariate(0, 0.9)))
    Path(request.out).write_text(digest)
    return digest


def pretended_measure(request: Measure) -> list[Outcome]:
    """Sleeps, and makes a time up."""
    time.sleep(json.loads(os.environ[PRETEND])[1] * len(request.paths))
    times = [random.Random(Path(path).read_bytes()).uniform(2, 8) for path in request.paths]
    return [Outcome(Times.of([one] * 7), 1e-7) for one in times]


def know(records: str) -> None:
    """Keeps records from the searches."""
    def log(task: Any) -> Any:
        if records == "none":
            return Log()
        from search_quality import others

        return others(task.workload)

    warm, seeds, borrowed = proposing.warm, proposing.seeds, proposing.borrowed
    proposing.warm = lambda model, cell, task, schedules, _, run=None: warm(
        model, cell, task, schedules, log(task), run)
    proposing.seeds = lambda task, schedules, _: seeds(task, schedules, log(task))
    proposing.borrowed = lambda task, schedules, _: borrowed(task, schedules, log(task))


def run(session: Any, layers: list[str], trials: int, folder: Path) -> dict[str, object]:
    """Searches these layers at the same time; the row of the report."""
    done: list[float] = []
    each_us: dict[str, list[float | None]] = {}
    begun = time.monotonic() if folder.name != "0" else STARTED

    def report(progress: Any) -> None:
        done.append(time.monotonic())
        trial = progress.trial
        each_us.setdefault(str(trial.workload), []).append(trial.times and trial.times.median)

    def tune(text: str) -> Any:
        cell, hidden, batch, seq, dtype = text.split(":")
        return session.tune(cell, hidden=int(hidden), batch=int(batch), seq=int(seq), dtype=dtype, trials=trials,
                            early_stop=False, output=folder / f"{text}.jsonl", report=report)

    for each in SPANS.values():
        each.clear()
    with ThreadPoolExecutor(len(layers)) as threads:
        results = list(threads.map(tune, layers))
    ended, first, last = time.monotonic(), min(end for _, end in SPANS["measure"]), max(done)
    length, seconds = last - first, {kind: [end - begin for begin, end in each] for kind, each in SPANS.items()}
    shares = {kind: sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in each) / length
              for kind, each in SPANS.items()}
    return {
        "layers": layers, "seed": session.seed, "trials": len(done), "noisy": sum(r.noisy for r in results),
        "failed": sum(sum(r.failures.values()) for r in results),
        "per_second": (len(done) - 1) / length, "per_second_all": len(done) / (ended - begun),
        "first": first - begun, "seconds": ended - begun,
        "builders": shares["build"] / len(session.pool.builders), "measurer": shares["measure"],
        "starved": 1 - shares["measure"], "proposing": shares["propose"] / len(layers),
        **{kind: {"median": statistics.median(each), "mean": statistics.fmean(each), "most": max(each)}
           for kind, each in seconds.items()},
        "found": {str(r.workload): {
            "best_us": r.finish.best_us, "default_us": r.finish.default_us, "schedule": r.best and r.best.schedule,
            "config": r.best and r.best.config, "trials": r.finish.trials, "trials_us": each_us[str(r.workload)]}
            for r in results}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=["lstm:800:20:300:bfloat16"], metavar="CELL:H:B:T:DTYPE",
                        help="[%(default)s]")
    parser.add_argument("--suite", action="store_true", help="the workloads of search_tables.py")
    parser.add_argument("--records", default="all", choices=["all", "others", "none"], help="[%(default)s]")
    parser.add_argument("--at-once", type=int, default=1, help="layers searched at the same time [%(default)s]")
    parser.add_argument("--trials", type=int, default=128, help="of a layer [%(default)s]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the searches [%(default)s]")
    parser.add_argument("--target", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--builders", type=int, help="build processes [one a processor, at most 16]")
    parser.add_argument("--pretend", type=float, metavar="MEASURE", help="sleep so many seconds instead of measuring")
    parser.add_argument("--pretend-builds", type=float, metavar="BUILD", help="the same for builds, in the mean")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    import_tvm()
    entries, call = Entries(), Worker.call
    if arguments.pretend:
        os.environ[PRETEND] = json.dumps([arguments.pretend_builds, arguments.pretend])
        here = Path(__file__).stem
        builds = (f"{here}:nothing", f"{here}:pretended_build")
        entries = Entries(*(builds if arguments.pretend_builds else (entries.build_ready, entries.build)),
                          f"{here}:nothing", f"{here}:pretended_measure")
        sessions.present = lambda target: resolve("sm_90a" if target == "cuda" else target)
    kinds = {entries.build: watch("build", call), entries.measure: watch("measure", call)}
    Worker.call = lambda self, function, *rest: kinds.get(function, call)(self, function, *rest)
    Search.ask = watch("propose", Search.ask)
    if arguments.suite:
        from search_tables import WORKLOADS

        arguments.layers = list(WORKLOADS[arguments.target])
    if arguments.records != "all":
        know(arguments.records)
    groups = [arguments.layers[i:i + arguments.at_once] for i in range(0, len(arguments.layers), arguments.at_once)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ECORNN_CACHE"] = str(Path(folder, "cache"))
        with sessions.Session(arguments.target, entries=entries) as session:
            if arguments.builders:
                session._pool = Pool(entries, arguments.builders, quiet=arguments.target == "cpu",
                                     poisoned=arguments.target == "cuda")
            rows = []
            for number, (session.seed, layers) in enumerate(itertools.product(arguments.seeds, groups)):
                Path(folder, str(number)).mkdir()
                rows.append(run(session, layers, arguments.trials, Path(folder, str(number))))
                print(json.dumps(rows[-1]), flush=True)
                if arguments.output:  # after each, so that what a limit cuts off is not lost
                    arguments.output.parent.mkdir(parents=True, exist_ok=True)
                    arguments.output.write_text(json.dumps({
                        "device": session.device.name, "processors": len(os.sched_getaffinity(0)),
                        "builders": len(session.pool.builders), "records": arguments.records,
                        "pretended": [arguments.pretend_builds, arguments.pretend], "rows": rows,
                        "command": "python benchmarks/search_rate.py " + " ".join(sys.argv[1:])}, indent=1) + "\n")


if __name__ == "__main__":
    main()
