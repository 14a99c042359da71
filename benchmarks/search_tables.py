"""Tables of random configurations, for `search_quality.py` to replay searches on; and what logs are worth elsewhere.

    python benchmarks/search_tables.py sizes                       # the workloads and their spaces; needs no GPU
    python benchmarks/search_tables.py list table.jsonl            # what a table has; needs no GPU
    python benchmarks/search_tables.py run table.jsonl --logs logs --limit 600
    ecornn log merge -o table.jsonl.xz logs/*.jsonl
    python benchmarks/search_tables.py list again.jsonl --fastest 100 --of benchmarks/results/a_table.jsonl.xz
    python benchmarks/search_tables.py worth tuning_logs/h100.jsonl.xz tuning_logs/h200.jsonl.xz \
        --times benchmarks/results/transfer_h200_on_h100.jsonl.xz --output benchmarks/results/transfer_h100_h200.json
    python benchmarks/search_tables.py training h100-training.jsonl --limit 240 --only "lstm 1024x16x768"

Of each workload the defaults and then configurations drawn uniformly from all that fit, without repetition, up to
`--trials` of them or the whole space, in an order that is the same in every run. `--fastest` lists only so many of each
table of `--of`, the fastest there: what the best of a table is worth on another GPU. `run` measures on the GPU at hand,
into one log for each workload; the same command again goes on.

`worth`: what one GPU's tuning log is worth on another, both ways. Of every workload that both logs have: the
configuration that one log calls the fastest, as the other GPU timed it, against the fastest of all that the other GPU
timed (1.00: nothing is lost by never tuning there); and what the untuned default would lose. Of a configuration the
time of the final comparison counts, if it was in one, else the best. A workload whose best configuration the other GPU
never timed is left out and counted. `--times` are records in which either GPU timed what the other's log had found:
they say how fast that is, and nothing is chosen by them.

`training`: searches the recurrences of the backward passes of the layers of ``grids/training.toml``, `--trials` of each
[8], into the log FILE, `--at-once` in the order of the rows. What is left of `--limit` when a layer begins is its
limit; then the fastest of each are measured once more beside its default. The same command again goes on, with more
--trials too. For each layer it prints the microseconds a step of the default and of the best; `ecornn log export
--best` takes what is to ship.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from ecornn.bench.grid import Layer, read_grid
from ecornn.cells import get
from ecornn.compiler import plan_layer
from ecornn.device import Device
from ecornn.errors import EcornnError
from ecornn.layer_spec import LayerSpec
from ecornn.quick_tvm import import_tvm
from ecornn.schedules.base import Schedule, Task
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.tune import session as sessions
from ecornn.tune.choose import present, serving_or_raise
from ecornn.tune.log import read
from ecornn.tune.pool import Closed
from ecornn.tune.record import Choice
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.workload import Workload

Wanted = TypeVar("Wanted")
Times = dict[Workload, dict[Candidate, float]]  # µs a step
# Recurrences, each with the first row that has it: layers of a stack, both directions and all I share one.
Recurrences = dict[Workload, tuple[Layer, LayerSpec]]
TRAINING = Path(__file__).parent / "grids" / "training.toml"
ROWS = [layer for layer in read_grid(TRAINING).expanded(TRAINING.name) if not layer.group]
LEAST = 5.0  # seconds: with less no layer begins
WON = 1.02
H100 = "sm_90a"
# Cells, H from 128 to 2816, B from 1 to 128 and data types; CELL:H:B:T:DTYPE.
WORKLOADS = {
    "cuda": ("lstm:128:1:100:bfloat16", "lstm:800:20:100:bfloat16", "lstm:1024:64:100:float16",
             "lstm:2048:128:100:bfloat16", "lstm:256:32:100:float32", "gru:512:8:100:float32",
             "gru:1024:4:100:bfloat16", "gru:256:128:100:float16", "gru:2816:1:100:float16",
             "gru:1536:16:100:bfloat16", "rnn_tanh:2048:64:100:bfloat16", "rnn_relu:650:16:100:float16"),
    "cpu": ("lstm:128:4:50:float32", "gru:256:8:50:float32"),
}


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a list: a workload, CELL:H:B:T:DTYPE, and what to try."""

    workload: str
    candidates: tuple[Choice, ...]


def workload_of(text: str) -> Workload:
    """From ``cell:H:B:T:dtype``."""
    cell, hidden, batch, seq, dtype = text.split(":")
    return Workload(get(cell).identity(), int(hidden), int(hidden), int(batch), int(seq), dtype)


def task_of(work: Workload, device: Device) -> tuple[Task, list[Schedule]]:
    """What is searched: the task and the schedules that serve it."""
    task = make_task(get(work.cell), work, device)
    return task, serving_or_raise(task)


def first(space: ConfigSpace, count: int) -> list[Candidate]:
    """The configurations of a table of that size: the defaults, then others in random order."""
    numbers = [(name, number) for name, fitting in space.fitting.items() for number in fitting]
    random.Random(0).shuffle(numbers)
    seen = dict.fromkeys(c for c in space.defaults() if space.fits(c))
    others = (Candidate.of(name, space.config(name, number)) for name, number in numbers)
    return [*islice(chain(seen, (c for c in others if c not in seen)), count)]


def fastest(path: Path, work: Workload, count: int) -> list[Candidate]:
    """The fastest configurations of a workload in the tables of a log."""
    times = {Candidate.of(t.schedule, t.config): t.times.median for t in read(path).trials()
             if t.workload == work and t.times}
    return sorted(times, key=lambda c: times[c])[:count]


def write_list(path: Path, texts: Sequence[str], device: Device, count: int, of: Path | None = None) -> None:
    """``list``: of each workload ``count`` random configurations, or the fastest ``of`` a log."""
    with path.open("wb") as file:
        for text in texts:
            work = workload_of(text)
            given = fastest(of, work, count) if of else first(ConfigSpace(*task_of(work, device)), count)
            item = Item(text, tuple(Choice(c.schedule, c.config) for c in given))
            file.write(msgspec.json.encode(item) + b"\n")


def in_threads(session: sessions.Session, tune: Callable[[Wanted], None], failed: Callable[[Wanted, EcornnError], None],
               every: Iterable[Wanted], at_once: int) -> None:
    """Searches that share a session's processes, so many at a time; ``failed`` is told of errors. Those that the
    session's end interrupts are left out."""
    def one(wanted: Wanted) -> None:
        try:
            tune(wanted)
        except Closed:
            return
        except EcornnError as error:
            failed(wanted, error)

    session.environment  # noqa: B018  before threads ask for it
    threads = ThreadPoolExecutor(at_once)
    try:
        list(threads.map(one, every))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def run(path: Path, limit: float, at_once: int, timeout: float, target: str = "cuda") -> None:
    """``run``: measures; one line a workload."""
    begin, trials, errors = time.monotonic(), 0, list[EcornnError]()

    def failed(item: Item, error: EcornnError) -> None:
        errors.append(error)
        print(f"{item.workload}: {error}", flush=True)

    def tune(item: Item) -> None:
        nonlocal trials
        if time.monotonic() - begin > limit:
            return
        work = workload_of(item.workload)
        result = session.tune(work.cell, hidden=work.hidden, batch=work.batch, seq=work.seq, dtype=work.dtype,
                              only=item.candidates, early_stop=False)
        trials += result.fresh
        best, us = result.best, result.finish.best_us
        why = "".join(f"; {count} failed: {reason}" for reason, count in result.failures.items())
        text = f"{us:.4g} µs/step {best.schedule}" if best and us else "none ran"
        seconds = time.monotonic() - begin
        print(f"{seconds:6.1f} s {trials / seconds:5.2f} trials/s  {item.workload}: {text}{why}", flush=True)

    items = [msgspec.json.decode(line, type=Item) for line in path.read_bytes().splitlines()]
    with sessions.Session(target, timeout=timeout) as session:
        in_threads(session, tune, failed, items, at_once)
    print(f"{trials} trials, {len(errors)} workloads failed, {time.monotonic() - begin:.0f} s")


def sizes(texts: Sequence[str], device: Device) -> None:
    """Prints how many configurations fit."""
    for text in texts:
        task, schedules = task_of(workload_of(text), device)
        space = ConfigSpace(task, schedules)
        parts = ", ".join(f"{name} {'' if name in space.whole else 'a sample of '}{len(numbers)}"
                          for name, numbers in space.fitting.items())
        print(f"{task.workload}: {len(space)} of {space.combinations()} ({parts})", flush=True)


def times_of(*paths: Path) -> tuple[str, Times]:
    """The device of logs, and µs a step of each workload's configurations; several devices are refused."""
    names, found = set[str](), dict[Workload, dict[Candidate, tuple[bool, float]]]()
    for trial in chain(*(read(path).trials() for path in paths)):
        if trial.times is not None and trial.device.kind == "cuda":
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
        task, (first, *_) = task_of(work, resolve(H100))
        default = there[work].get(Candidate.of(first.name, first.default(task)))
        rows.append({"cell": work.cell, "dtype": work.dtype, "hidden": work.hidden, "batch": work.batch,
                     "candidates": len(there[work]), "best_us": best, "transferred_us": there[work][chosen],
                     "loss": there[work][chosen] / best, "default_loss": default / best if default else None})
    return sorted(rows, key=lambda r: (r["cell"], r["dtype"], r["hidden"], r["batch"])), unknown


def losses(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and the worst of a direction."""
    of = [r["loss"] for r in rows]
    defaults = [r["default_loss"] for r in rows if r["default_loss"]]
    return {"workloads": len(rows), "geomean_loss": statistics.geometric_mean(of), "worst_loss": max(of),
            "within_2_percent": sum(x <= 1.02 for x in of), "within_5_percent": sum(x <= 1.05 for x in of),
            "geomean_default_loss": statistics.geometric_mean(defaults) if defaults else None,
            "default_workloads": len(defaults)}


def compare(logs: Sequence[Path], times: Sequence[Path], output: Path | None) -> None:
    """``worth``: prints and writes what each log is worth on the other GPU."""
    (a, of_a), (b, of_b) = map(times_of, logs)
    on_a, on_b = (times_of(log, *(path for path in times if times_of(path)[0] == gpu))[1]
                  for log, gpu in zip(logs, (a, b), strict=True))
    result: dict[str, Any] = {"command": " ".join(["python benchmarks/search_tables.py", *sys.argv[1:]])}
    for source, here, target, there in ((a, of_a, b, on_b), (b, of_b, a, on_a)):
        rows, unknown = worth(here, there)
        if not rows:
            raise SystemExit(f"no workload of {source}'s log was measured on {target}")
        said = losses(rows) | {"left_out": unknown}
        result[f"{source} on {target}"] = said | {"rows": rows}
        print(f"{source}'s log on {target}:", json.dumps(said))
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")


def layers(only: Sequence[str], device: Device) -> dict[int, Recurrences]:
    """The recurrences by the multiprocessors that they have: two directions may run side by side."""
    found: dict[int, Recurrences] = {}
    for row in ROWS:
        if not only or any(part in row.name for part in only):
            layer = row.case.layer()
            cores = (plan_layer(layer, target=device).task.device if row.case.bidirectional else device).cores
            found.setdefault(cores, {}).setdefault(layer.workload.adjoint, (row, layer))
    return found


def spent(log: Path, device: Device) -> dict[Workload, float]:
    """Seconds of the runs that the log has, on a device."""
    found: dict[Workload, float] = {}
    for trial in read(log).trials() if log.exists() else ():
        if trial.device.identity == device.identity:
            found[trial.workload] = max(found.get(trial.workload, 0.0), trial.seconds)
    return found


def search(session: sessions.Session, wanted: Recurrences, log: Path, trials: int, limit: float,
           at_once: int) -> dict[Workload, sessions.Result | str]:
    """What was found of each, or why nothing was; of those that the time did not suffice for nothing."""
    begin, earlier, found = time.monotonic(), spent(log, session.device), dict[Workload, sessions.Result | str]()

    def note(work: Workload, result: sessions.Result | EcornnError) -> None:
        found[work] = str(result) if isinstance(result, EcornnError) else result
        print(f"{time.monotonic() - begin:6.1f} s  {line(wanted[work][0], found[work])}", flush=True)

    def tune(work: Workload) -> None:
        left = limit - (time.monotonic() - begin)
        if left >= LEAST:
            note(work, session.tune_workload(wanted[work][1], work, trials=trials, output=log, early_stop=False,
                                             time_limit=left + earlier.get(work, 0.0)))

    in_threads(session, tune, note, wanted, at_once)
    return found


def line(row: Layer, result: sessions.Result | str) -> str:
    """A layer for people: the default and the best, and in which knobs they differ."""
    if isinstance(result, str):
        return f"{row.name:40} {result}"
    finish, why = result.finish, "".join(f"; {count} failed: {reason}" for reason, count in result.failures.items())
    default, best = finish.default, finish.best
    if best is None or finish.best_us is None or default is None:
        return f"{row.name:40} none ran of {finish.trials}{why}"
    of_default, gain = " failed", ""
    if finish.default_us:
        of_default, gain = f"{finish.default_us:7.3f}", f"{finish.default_us / finish.best_us:5.3f}x"
    changed = " ".join(f"{k}={v}" for k, v in best.config.items()
                       if best.schedule != default.schedule or v != default.config[k])
    return (f"{row.name:40} default {of_default} best {finish.best_us:7.3f} us/step {gain} of {finish.trials:3} trials"
            f"  {best.schedule} {changed or '(the default)'}{why}")


def report(wanted: Recurrences, found: dict[Workload, sessions.Result | str]) -> str:
    """All rows in their order, and what was gained."""
    rows = [line(row, found.get(work, "not begun: the time had passed")) for work, (row, _) in wanted.items()]
    gains = [r.finish.default_us / r.finish.best_us for r in found.values()
             if not isinstance(r, str) and r.finish.best_us and r.finish.default_us]
    total = f"{len(gains)} of {len(wanted)} searched"
    if gains:
        total += (f", geometric mean {statistics.geometric_mean(gains):.3f}x, {sum(g > WON for g in gains)} faster by "
                  f"more than {WON - 1:.0%}, most {max(gains):.2f}x")
    return "\n".join([*rows, total])


def train(log: Path, only: Sequence[str], trials: int, limit: float, at_once: int, timeout: float) -> None:
    """``training``: searches, by the multiprocessors that recurrences have."""
    begin, device, reports = time.monotonic(), present("cuda"), list[str]()
    for cores, wanted in sorted(layers(only, device).items(), reverse=True):
        with sessions.Session(structs.replace(device, cores=cores), timeout=timeout) as session:
            head = f"{len(wanted)} recurrences on {cores} multiprocessors of {device.name}"
            print(head, flush=True)
            found = search(session, wanted, log, trials, limit - (time.monotonic() - begin), at_once)
            reports.append(f"\n{head}\n{report(wanted, found)}")
    print("\n".join(reports) + f"\n{time.monotonic() - begin:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("sizes", "list", "run", "worth", "training"))
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", default=[Path("build/search_tables.jsonl")],
                        help="a table, or the logs of two GPUs [build/search_tables.jsonl]")
    parser.add_argument("--target", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--workloads", nargs="+", metavar="CELL:H:B:T:DTYPE", help="default: twelve, or two on a CPU")
    parser.add_argument("--trials", type=int, help="configurations of a table [2000], or of a layer in training [8]")
    parser.add_argument("--fastest", type=int, metavar="COUNT", help="with --of: no others are listed")
    parser.add_argument("--of", type=Path, help="a table")
    parser.add_argument("--logs", type=Path, help="run: folder of the logs [the user's]")
    parser.add_argument("--limit", type=float, help="seconds after which nothing new begins [training: 240]")
    parser.add_argument("--at-once", type=int, default=8, help="workloads in preparation [%(default)s]")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a build or measurement [%(default)s]")
    parser.add_argument("--only", action="append", default=[], help="training: rows whose name has this; may repeat")
    parser.add_argument("--times", type=Path, nargs="*", default=[], help="worth: logs of either GPU that only say how "
                        "fast configurations are")
    parser.add_argument("--output", type=Path, help="worth: JSON file to write")
    arguments = parser.parse_args()
    if len(arguments.files) != (2 if arguments.action == "worth" else 1):
        parser.error("FILE: expected the logs of two GPUs for worth, and one file otherwise")
    if (arguments.fastest is None) != (arguments.of is None):
        parser.error("--fastest and --of go together")
    import_tvm()
    if arguments.action == "worth":
        return compare(arguments.files, arguments.times, arguments.output)
    (file,), texts = arguments.files, arguments.workloads or list(WORKLOADS[arguments.target])
    device = resolve(H100 if arguments.target == "cuda" else "cpu")
    common = arguments.at_once, arguments.timeout
    if arguments.action == "training":
        train(file, arguments.only, arguments.trials or 8, arguments.limit or 240.0, *common)
    elif arguments.action == "sizes":
        sizes(texts, device)
    elif arguments.action == "run":
        if arguments.logs:
            os.environ["ECORNN_TUNING_LOGS"] = str(arguments.logs)
        run(file, arguments.limit or 1e9, *common, arguments.target)
    else:
        write_list(file, texts, device, arguments.fastest or arguments.trials or 2000, arguments.of)


if __name__ == "__main__":
    main()
