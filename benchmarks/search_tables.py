"""Tables of random configurations, for `search_quality.py` to replay searches on: what they have, and their times.

    python benchmarks/search_tables.py sizes                       # the workloads and their spaces; needs no GPU
    python benchmarks/search_tables.py list table.jsonl            # what a table has; needs no GPU
    python benchmarks/search_tables.py run table.jsonl --logs logs --limit 600
    ecornn log merge -o table.jsonl.xz logs/*.jsonl
    python benchmarks/search_tables.py list again.jsonl --fastest 100 --of benchmarks/results/a_table.jsonl.xz

Of each workload the defaults and then configurations drawn uniformly from all that fit, without repetition, up to
`--trials` of them or the whole space, in an order that is the same in every run. `--fastest` lists only so many of each
table of `--of`, the fastest there: what the best of a table is worth on another GPU. `run` measures on the GPU at hand,
into one log for each workload; the same command again goes on.
"""

from __future__ import annotations

import argparse
import lzma
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ecornn.cells import get
from ecornn.device import Device
from ecornn.errors import EcornnError
from ecornn.schedules.base import Schedule, Task
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.tune.choose import serving_or_raise
from ecornn.tune.log import parse
from ecornn.tune.pool import Closed
from ecornn.tune.record import Choice, Trial
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.workload import Workload

if TYPE_CHECKING:
    from ecornn.tune.session import Session

Wanted = TypeVar("Wanted")
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


def shuffled(space: ConfigSpace) -> Iterator[Candidate]:
    """The defaults, then all others in random order."""
    numbers = [(name, number) for name, fitting in space.fitting.items() for number in fitting]
    random.Random(0).shuffle(numbers)
    seen = dict.fromkeys(c for c in space.defaults() if space.fits(c))
    yield from seen
    yield from (c for c in (Candidate.of(n, space.config(n, number)) for n, number in numbers) if c not in seen)


def first(space: ConfigSpace, count: int) -> list[Candidate]:
    """The configurations of a table of that size."""
    return [c for c, _ in zip(shuffled(space), range(count), strict=False)]


def fastest(path: Path, work: Workload, count: int) -> list[Candidate]:
    """The fastest configurations of a workload in the tables of a log."""
    times = {Candidate.of(t.schedule, t.config): t.times.median for t in trials_of(path)
             if t.workload == work and t.times}
    return sorted(times, key=lambda c: times[c])[:count]


def trials_of(path: Path) -> list[Trial]:
    """Of a log, compressed or not."""
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return list(parse(data, path).trials())


def write_list(path: Path, texts: Sequence[str], device: Device, count: int, of: Path | None = None) -> None:
    """``list``: of each workload ``count`` random configurations, or the fastest ``of`` a log."""
    with path.open("wb") as file:
        for text in texts:
            work = workload_of(text)
            given = fastest(of, work, count) if of else first(ConfigSpace(*task_of(work, device)), count)
            item = Item(text, tuple(Choice(c.schedule, c.config) for c in given))
            file.write(msgspec.json.encode(item) + b"\n")


def in_threads(session: Session, tune: Callable[[Wanted], None], failed: Callable[[Wanted, EcornnError], None],
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
    from ecornn.tune.session import Session

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
    with Session(target, timeout=timeout) as session:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("sizes", "list", "run"))
    parser.add_argument("file", type=Path, nargs="?", default=Path("build/search_tables.jsonl"), help="[%(default)s]")
    parser.add_argument("--target", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--workloads", nargs="+", metavar="CELL:H:B:T:DTYPE", help="default: twelve, or two on a CPU")
    parser.add_argument("--trials", type=int, default=2000, help="configurations of a table [%(default)s]")
    parser.add_argument("--fastest", type=int, metavar="COUNT", help="with --of: no others are listed")
    parser.add_argument("--of", type=Path, help="a table")
    parser.add_argument("--logs", type=Path, help="run: folder of the logs [the user's]")
    parser.add_argument("--limit", type=float, default=1e9, help="run: seconds after which nothing new begins")
    parser.add_argument("--at-once", type=int, default=8, help="run: workloads in preparation [%(default)s]")
    parser.add_argument("--timeout", type=float, default=60.0, help="run: seconds of a build or measurement")
    arguments = parser.parse_args()
    if (arguments.fastest is None) != (arguments.of is None):
        parser.error("--fastest and --of go together")
    from ecornn.quick_tvm import import_tvm

    import_tvm()
    texts = arguments.workloads or list(WORKLOADS[arguments.target])
    device = resolve(H100 if arguments.target == "cuda" else "cpu")
    if arguments.action == "sizes":
        sizes(texts, device)
    elif arguments.action == "run":
        if arguments.logs:
            os.environ["ECORNN_TUNING_LOGS"] = str(arguments.logs)
        run(arguments.file, arguments.limit, arguments.at_once, arguments.timeout, arguments.target)
    else:
        write_list(arguments.file, texts, device, arguments.fastest or arguments.trials, arguments.of)


if __name__ == "__main__":
    main()
