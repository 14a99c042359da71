"""Tables of random configurations, for `search_quality.py` to replay searches on.

    python benchmarks/search_tables.py list                              # the workloads and their spaces; needs no GPU
    python benchmarks/search_tables.py build --trials 500 --seconds 600  # into the build cache; needs no GPU
    python benchmarks/search_tables.py run --table h100_search_tables.jsonl --trials 2000 --seconds 600
    CUDA_VISIBLE_DEVICES=3 python benchmarks/search_tables.py run --table part3.jsonl --part 3/8 --known before.jsonl.xz
    python benchmarks/search_tables.py run --table again.jsonl --fastest 100 --of benchmarks/results/a_table.jsonl.xz

Of each workload the defaults and then configurations drawn uniformly from all that fit, without repetition, up to
`--trials` of them or the whole space. The order is the same in every run, and the log keeps every one, so that the
same command goes on where it was stopped, and a larger `--trials` makes the tables larger. Workloads take turns of
`--turn` trials: a run that ends early leaves tables of the same size. Builds go on while others are measured, by as
many processes as there are processors; what is slower than the best of its table by a factor is timed once. What
`build` made (in the order of `run`, for the GPU of `--known` or else an H100, on any machine with the same sources and
CUDA compiler; `prebuilding.py` carries it), `run` takes from the cache (`ECORNN_CACHE`).

`--part` K/N takes every N-th of what `--known` logs (of whatever GPU) lack, from the K-th on, for GPUs side by side
that share the work; their logs together are the table. `--fastest` measures only so many of each table of `--of`, the
fastest there: what the best of a table is worth on another GPU.
"""

from __future__ import annotations

import argparse
import lzma
import os
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from msgspec import structs
from prebuilding import builders, request
from prebuilding import prebuild as fill

from ecornn.cells import get
from ecornn.device import Device
from ecornn.schedules.base import GENERATION, Schedule, Task
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.tune import Session
from ecornn.tune.choose import candidates, serving_or_raise
from ecornn.tune.evaluate import ProcessEvaluator
from ecornn.tune.log import append, parse
from ecornn.tune.pool import Closed, Pool
from ecornn.tune.preparing import Question, answers, ask
from ecornn.tune.record import Choice, Outcome, Trial
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.workload import Workload

RUN, H100 = "search-table", "sm_90a"
# Cells, H from 128 to 2816, B from 1 to 128 and data types; CELL:H:B:T:DTYPE.
WORKLOADS = {
    "cuda": ("lstm:128:1:100:bfloat16", "lstm:800:20:100:bfloat16", "lstm:1024:64:100:float16",
             "lstm:2048:128:100:bfloat16", "lstm:256:32:100:float32", "gru:512:8:100:float32",
             "gru:1024:4:100:bfloat16", "gru:256:128:100:float16", "gru:2816:1:100:float16",
             "gru:1536:16:100:bfloat16", "rnn_tanh:2048:64:100:bfloat16", "rnn_relu:650:16:100:float16"),
    "cpu": ("lstm:128:4:50:float32", "gru:256:8:50:float32"),
}
LANES = 3  # workloads under way: while the last builds of one's turn are made, others are built and measured


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


class Wanted(Question, frozen=True):
    """Which configurations a table of ``count`` has."""

    count: int = 0


def choose(wanted: Wanted) -> tuple[Choice, ...]:
    """In a worker: to scan a space takes seconds."""
    from ecornn.tune.quick_tvm import import_tvm

    import_tvm()  # without PyTorch, also where the worker is one that pretends and has imported nothing
    space = ConfigSpace(*task_of(wanted.workload, wanted.device))
    return tuple(Choice(c.schedule, c.config) for c in first(space, wanted.count))


def chosen(pool: Pool, texts: Sequence[str], device: Device, count: int) -> Iterator[list[Candidate]]:
    """The configurations of the tables, in the order of ``texts``."""
    def one(text: str) -> list[Candidate]:
        work = workload_of(text)
        wanted = Wanted(get(work.cell).name, work, device, count=count)
        found = ask(pool, f"{Path(__file__).stem}:choose", wanted, tuple[Choice, ...])
        return [Candidate.of(c.schedule, c.config) for c in found]

    with ThreadPoolExecutor(len(texts)) as threads:
        yield from threads.map(one, texts)


def fastest(path: Path, texts: Sequence[str], count: int) -> list[list[Candidate]]:
    """The fastest configurations of the tables of a log, for each of ``texts``."""
    found, trials = [], trials_of(path)
    for text in texts:
        times = {Candidate.of(t.schedule, t.config): t.times.median for t in trials
                 if t.workload == workload_of(text) and t.times}
        found.append(sorted(times, key=lambda c: times[c])[:count])
    return found


def trials_of(path: Path) -> list[Trial]:
    """Of a log, compressed or not."""
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return list(parse(data, path).trials())


def lacking(work: Workload, wanted: Sequence[Candidate], known: Sequence[Trial],
            part: tuple[int, int]) -> list[Candidate]:
    """This part of what the known trials lack."""
    have = {Candidate.of(t.schedule, t.config) for t in known if t.workload == work}
    return [c for c in wanted if c not in have][part[0]::part[1]]


class Table:
    """One workload's: what is missing, and the log that keeps what is measured."""

    def __init__(self, work: Workload, session: Session, path: Path, made: Sequence[Trial],
                 wanted: Sequence[Candidate], lacking: Sequence[Candidate]) -> None:
        self.task = make_task(get(work.cell), work, session.device)
        self.session, self.path = session, path
        self.revisions = {s.name: s.revision for s in candidates(session.device)}
        known = {Candidate.of(t.schedule, t.config): t for t in made
                 if (t.workload, t.device.identity) == (work, session.device.identity)
                 and t.revision == self.revisions.get(t.schedule)}
        self.places = {c: place for place, c in enumerate(wanted)}
        self.missing = [c for c in lacking if c not in known]
        self.done, self.wanted = len(lacking) - len(self.missing), len(lacking)
        self.best = min((t.times.median for t in known.values() if t.times), default=None)
        asked = Question(get(work.cell).name, work, session.device)
        self.evaluator = ProcessEvaluator(self.task, asked.cell, answers(session.pool, asked), session.pool,
                                          limit=session.timeout, seed=0)

    def turn(self, count: int, out_of_time: threading.Event) -> int:
        """Measures the next ``count``; returns how many there was time for."""
        chunk, self.missing = self.missing[:count], self.missing[count:]
        self.evaluator.submit(chunk, self.best)
        for made in range(len(chunk)):
            candidate, outcome = self.evaluator.next()
            if out_of_time.is_set():
                self.evaluator.drop()
                return made
            self.keep(candidate, outcome)
        return len(chunk)

    def keep(self, candidate: Candidate, outcome: Outcome) -> None:
        """Appends a trial to the log."""
        self.done += 1
        if outcome.times is not None:
            self.best = min(self.best or outcome.times.median, outcome.times.median)
        here = self.session.environment
        append(self.path, Trial(
            run=RUN, index=self.places[candidate], stage="search", workload=self.task.workload, device=self.task.device,
            schedule=candidate.schedule, revision=self.revisions[candidate.schedule], generation=GENERATION,
            config=candidate.config, versions=here.versions, clocks=here.clocks, seed=0, seconds=0.0,
            **structs.asdict(outcome)))
        # Thousands of modules would fill the disk.
        path, _ = self.evaluator.modules.pop(candidate, (None, None))
        if path is not None:
            path.unlink(missing_ok=True)


def measure(texts: list[str], target: str, path: Path, trials: int, seconds: float, turn: int,
            known: Sequence[Path] = (), part: tuple[int, int] = (0, 1),
            given: Sequence[Sequence[Candidate]] | None = None) -> None:
    """Fills the tables until they have ``trials``, or what is ``given`` for each of ``texts``, or ``seconds`` have
    passed; see ``--known`` and ``--part``."""
    began, out_of_time, made = time.monotonic(), threading.Event(), 0
    made_before = trials_of(path) if path.exists() else []
    elsewhere = [trial for each in known for trial in trials_of(each)]
    timer = threading.Timer(seconds, out_of_time.set)
    timer.daemon = True
    timer.start()
    waiting: queue.Queue[Table | None] = queue.Queue()
    left = len(texts)  # tables that are not full

    def lane() -> None:
        nonlocal made, left
        try:
            while (table := waiting.get()) is not None:
                now = table.turn(turn, out_of_time)
                made += now  # read after the turn: other lanes add to it meanwhile
                taken = time.monotonic() - began
                best = f"best {table.best:.4g} µs/step" if table.best else "none ran"
                print(f"{taken:6.0f} s {made / taken:5.1f} trials/s  {table.task.workload}: {table.done} of "
                      f"{table.wanted}, {best}", flush=True)
                left -= not table.missing
                if out_of_time.is_set() or not left:
                    break
                if table.missing:
                    waiting.put(table)
        except Closed:
            return
        except BaseException:
            out_of_time.set()  # the main thread raises it once the other lanes are done
            raise
        finally:
            waiting.put(None)  # the other lanes end, too

    with Session(target) as session, ExitStack() as stack:
        session.environment  # noqa: B018  before threads ask for it
        lanes = 1 if session.pool.quiet else LANES
        with ThreadPoolExecutor(lanes) as threads:
            futures = [threads.submit(lane) for _ in range(lanes)]
            try:
                every = given or chosen(session.pool, texts, session.device, trials)
                for work, wanted in zip(map(workload_of, texts), every, strict=True):
                    if out_of_time.is_set():
                        break
                    table = Table(work, session, path, made_before, wanted, lacking(work, wanted, elsewhere, part))
                    stack.enter_context(table.evaluator)
                    left -= not table.missing
                    if table.missing:
                        waiting.put(table)
                if not left or out_of_time.is_set():  # perhaps before any table was queued
                    waiting.put(None)
                for future in futures:
                    future.result()
            except BaseException:
                out_of_time.set()
                waiting.put(None)
                session.pool.close()
                raise
    taken = time.monotonic() - began
    print(f"{made} trials in {taken:.0f} s, {made / taken:.1f} a second")


def prebuild(texts: list[str], trials: int, seconds: float, turn: int, processes: int, known: Sequence[Path] = (),
             part: tuple[int, int] = (0, 1)) -> None:
    """Fills the build cache, in the order in which ``measure`` asks, for the GPU of ``known`` or an H100."""
    began = time.monotonic()
    elsewhere = [trial for each in known for trial in trials_of(each)]
    device = elsewhere[0].device if elsewhere else resolve(H100)
    with builders(processes) as pool:
        works = [workload_of(text) for text in texts]
        tables = [[request(get(work.cell).name, work, device, c) for c in lacking(work, wanted, elsewhere, part)]
                  for work, wanted in zip(works, chosen(pool, texts, device, trials), strict=True)]
        turns = [one for at in range(0, trials, turn) for table in tables for one in table[at:at + turn]]
        fill(pool, turns, seconds - (time.monotonic() - began))


def sizes(texts: list[str], device: Device) -> None:
    """Prints how many configurations fit."""
    for text in texts:
        task, schedules = task_of(workload_of(text), device)
        space = ConfigSpace(task, schedules)
        parts = ", ".join(f"{name} {'' if name in space.whole else 'a sample of '}{len(numbers)}"
                          for name, numbers in space.fitting.items())
        print(f"{task.workload}: {len(space)} of {space.combinations()} ({parts})", flush=True)


def part_of(text: str) -> tuple[int, int]:
    """From ``K/N``, 0 <= K < N."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1")
    return int(part), int(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "build", "run"))
    parser.add_argument("--target", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--workloads", nargs="+", metavar="CELL:H:B:T:DTYPE", help="default: twelve, or two on a CPU")
    parser.add_argument("--trials", type=int, default=2000, help="configurations of a table [%(default)s]")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing new begins")
    parser.add_argument("--turn", type=int, default=32, help="trials of one workload after the other [%(default)s]")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="build: [%(default)s]")
    parser.add_argument("--table", type=Path, default=Path("build/search_tables.jsonl"), help="the log [%(default)s]")
    parser.add_argument("--known", type=Path, nargs="+", default=[], help="logs of trials that need not be made again")
    parser.add_argument("--part", type=part_of, default=(0, 1), metavar="K/N", help="see above [all]")
    parser.add_argument("--fastest", type=int, metavar="COUNT", help="with --of: no others are measured")
    parser.add_argument("--of", type=Path, help="a table")
    arguments = parser.parse_args()
    if (arguments.fastest is None) != (arguments.of is None):
        parser.error("--fastest and --of go together")
    from ecornn.tune.quick_tvm import import_tvm

    import_tvm()
    texts = arguments.workloads or list(WORKLOADS[arguments.target])
    if arguments.action == "list":
        sizes(texts, resolve(H100 if arguments.target == "cuda" else "cpu"))
    elif arguments.action == "build":
        prebuild(texts, arguments.trials, arguments.seconds, arguments.turn, arguments.processes, arguments.known,
                 arguments.part)
    else:
        given = fastest(arguments.of, texts, arguments.fastest) if arguments.of else None
        measure(texts, arguments.target, arguments.table, arguments.trials, arguments.seconds, arguments.turn,
                arguments.known, arguments.part, given)


if __name__ == "__main__":
    main()
