"""The H100 workloads whose records ship: LSTM, GRU and vanilla layers in the usual sizes, a few configurations each.

    python benchmarks/tune_h100_set.py list set.jsonl          # which workloads, and the candidates of each
    python benchmarks/tune_h100_set.py build set.jsonl         # into the build cache; needs no GPU
    python benchmarks/tune_h100_set.py run set.jsonl --logs logs --limit 600

Candidates are the defaults of the two preferred schedules, the fastest configurations known, and what the cost model
ranks highest, of all and of those near the default; it has seen the records at hand, of the nearest cell and data
type if need be. A list has one workload a line, the most important first. `run` measures on the GPU at hand, each
workload's candidates and then the best again, into one log for each workload; `ecornn log merge` makes one of them.
The same command again goes on. What `build` made, on any machine with the same sources and the same CUDA compiler,
`run` takes from the cache (`ECORNN_CACHE`), so that only the GPU is waited for.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import structs

from ecornn.tune.record import Choice, Trial
from ecornn.workload import Workload

SEQ = 100
TARGET = "sm_90a"
# Hidden sizes and batches from the most to the least asked for; the rank of a workload is the sum of its places.
HIDDEN = (512, 1024, 256, 768, 800, 128, 1536, 650, 1500, 2048, 2816)
BATCH = (1, 16, 32, 64, 4, 8, 128)
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
DTYPES = ("bfloat16", "float16", "float32")
# What records must have in common with a workload for the model to learn from them; the first that some have.
LIKENESSES: tuple[Callable[[Workload], object], ...] = (
    lambda w: (w.cell, w.dtype), lambda w: w.dtype, lambda w: None)
NEAR = 200  # single steps from a default, at random
# What a place costs: of a cell, of a data type.
STEP = {"cell": 2.5, "dtype": 5.0}


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload and what to try: these candidates, or without any ``trials`` of a search. ``input`` 0: H."""

    cell: str
    hidden: int
    batch: int
    dtype: str
    candidates: tuple[Choice, ...] = ()
    seq: int = SEQ
    input: int = 0
    trials: int = 0
    precision: str | None = None


def workloads() -> list[tuple[str, int, int, str]]:
    """(cell, H, B, dtype), the most important first."""
    def rank(one: tuple[str, int, int, str]) -> float:
        cell, hidden, batch, dtype = one
        return (STEP["cell"] * CELLS.index(cell) + STEP["dtype"] * DTYPES.index(dtype)
                + HIDDEN.index(hidden) + BATCH.index(batch))

    return sorted(itertools.product(CELLS, HIDDEN, BATCH, DTYPES), key=rank)


def proposed(cell: str, hidden: int, batch: int, dtype: str, count: int) -> tuple[Choice, ...]:
    """The preferred schedule's default, the fastest configurations known, what the model ranks highest, and last the
    next schedule's default, up to ``count``."""
    from ecornn.cells import get
    from ecornn.targets import resolve
    from ecornn.task import make_task
    from ecornn.tune.choose import serving_or_raise
    from ecornn.tune.log import Log, read_all
    from ecornn.tune.model import CostModel
    from ecornn.tune.search import Search
    from ecornn.tune.space import Candidate, ConfigSpace
    from ecornn.tune.transfer import borrowed, seeds, warm

    found, device = get(cell), resolve(TARGET)
    task = make_task(found, Workload(found.identity(), hidden, hidden, batch, SEQ, dtype), device)
    schedules, log = serving_or_raise(task), read_all()
    space, model = ConfigSpace(task, schedules[:1]), CostModel()
    for likeness in LIKENESSES:
        near = [line for line in log.lines if isinstance(line.record, Trial)
                and likeness(line.record.workload) == likeness(task.workload)]
        taken = [replace(line, record=structs.replace(line.record, workload=structs.replace(
            line.record.workload, cell=task.workload.cell, dtype=dtype))) for line in near]
        if warm(model, found, task, schedules[:1], Log(taken)):
            break
    others = [Candidate.of(s.name, s.default(task)) for s in schedules[1:2]]
    default, rng = space.defaults()[0], random.Random(0)
    known = [*seeds(task, schedules[:1], log), *borrowed(task, schedules[:1], log)][:(count - 1) // 2]
    search = Search(space, model, 0, known=[default, *known], defaults=False)
    picked = search.first[:count - len(others)]
    room = count - len(others) - len(picked)
    if room and model.fit():
        steps = [n for _ in range(NEAR) if (n := space.neighbour(default, rng))]
        steps += [n for s in steps[:NEAR] if (n := space.neighbour(s, rng))]
        near = [c for c in dict.fromkeys(steps) if c not in picked]
        scores = model.score(model.table([search.row(c) for c in near]))
        picked += search.top(zip(near, scores, strict=True), (room + 1) // 2)
        search.first = picked
    return tuple(Choice(c.schedule, c.config) for c in [*search.ask(count - len(others)), *others])


def read(path: Path) -> list[Item]:
    """The workloads of a list."""
    return [msgspec.json.decode(line, type=Item) for line in path.read_bytes().splitlines()]


def write_list(path: Path, count: int, candidates: int) -> None:
    """``list``: goes on behind the lines that the file has."""
    from ecornn.errors import ScheduleError
    from ecornn.quick_tvm import import_tvm

    import_tvm()
    done = {(i.cell, i.hidden, i.batch, i.dtype) for i in (read(path) if path.exists() else [])}
    with path.open("ab") as file:
        for one in workloads()[:count]:
            if one in done:
                continue
            try:
                item = Item(*one, proposed(*one, candidates))
            except ScheduleError as error:
                print(f"{one}: {error}")
                continue
            file.write(msgspec.json.encode(item) + b"\n")
            file.flush()
            print(*one, *(c.schedule for c in item.candidates))


def prebuild(path: Path, processes: int, limit: float) -> None:
    """``build``: every module that ``run`` will ask for, where the cache lacks it."""
    from prebuilding import builders, request
    from prebuilding import prebuild as fill

    from ecornn.layer_spec import LayerSpec
    from ecornn.targets import resolve
    from ecornn.tune.space import Candidate

    device, every = resolve(TARGET), []
    for item in read(path):
        work = LayerSpec(item.cell, item.hidden, item.input or item.hidden, item.batch, item.seq, item.dtype,
                         precision=item.precision).workload
        every += [request(item.cell, work, device, Candidate.of(c.schedule, c.config)) for c in item.candidates]
    with builders(processes) as pool:
        fill(pool, every, limit)


def run(path: Path, limit: float, at_once: int, timeout: float, target: str = "cuda") -> None:
    """``run``: measures; one line a workload."""
    from ecornn.errors import EcornnError
    from ecornn.quick_tvm import import_tvm
    from ecornn.tune.pool import Closed
    from ecornn.tune.session import Session

    import_tvm()
    begin, items = time.monotonic(), read(path)
    trials = failed = 0

    def tune(item: Item) -> None:
        nonlocal trials, failed
        if time.monotonic() - begin > limit:
            return
        size = f"{item.seq}x{item.batch}x{item.input or item.hidden}x{item.hidden}"
        name = f"{item.cell} {item.precision or item.dtype} {size}"
        try:
            result = session.tune(item.cell, hidden=item.hidden, input=item.input or None, batch=item.batch,
                                  seq=item.seq, dtype=item.dtype, precision=item.precision,
                                  only=item.candidates or None, trials=item.trials or None, early_stop=False)
        except Closed:
            return
        except EcornnError as error:
            failed += 1
            print(f"{name}: {error}", flush=True)
            return
        trials += result.fresh
        best, us = result.best, result.finish.best_us
        why = "".join(f"; {count} failed: {reason}" for reason, count in result.failures.items())
        text = f"{us:.4g} µs/step {best.schedule}" if best and us else "none ran"
        seconds = time.monotonic() - begin
        print(f"{seconds:6.1f} s {trials / seconds:5.2f} trials/s  {name}: {text}{why}", flush=True)

    with Session(target, timeout=timeout) as session:
        session.environment  # noqa: B018  before threads ask for it
        threads = ThreadPoolExecutor(at_once)
        try:
            list(threads.map(tune, items))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    print(f"{trials} trials, {failed} workloads failed, {time.monotonic() - begin:.0f} s")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "build", "run"))
    parser.add_argument("file", type=Path, help="the list")
    parser.add_argument("--workloads", type=int, default=240, help="list: how many [%(default)s]")
    parser.add_argument("--candidates", type=int, default=5, help="list: of each [%(default)s]")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="build: [%(default)s]")
    parser.add_argument("--logs", type=Path, help="run: folder of the logs [the user's]")
    parser.add_argument("--limit", type=float, default=1e9, help="build, run: seconds after which nothing new begins")
    parser.add_argument("--at-once", type=int, default=8, help="run: workloads in preparation [%(default)s]")
    parser.add_argument("--timeout", type=float, default=60.0, help="run: seconds of a build or measurement")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda", help="run: [%(default)s]")
    args = parser.parse_args()
    if args.action == "list":
        write_list(args.file, args.workloads, args.candidates)
    elif args.action == "build":
        prebuild(args.file, args.processes, args.limit)
    else:
        if args.logs:
            os.environ["ECORNN_TUNING_LOGS"] = str(args.logs)
        run(args.file, args.limit, args.at_once, args.timeout, args.target)


if __name__ == "__main__":
    main()
