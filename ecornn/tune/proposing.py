"""The parts of a run beside its candidates, in other processes: its defaults, space, expected outputs and search.

One interpreter would be too slow for several runs at a time: one search alone takes half of it."""

from __future__ import annotations

import contextlib
import queue
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ecornn.cells import Cell
from ecornn.cells.naming import received
from ecornn.device import Device
from ecornn.errors import ScheduleError
from ecornn.quick_tvm import import_tvm
from ecornn.schedules import all_schedules
from ecornn.task import make_task
from ecornn.tune import oracle
from ecornn.tune.building import task_of
from ecornn.tune.choose import serving_or_raise
from ecornn.tune.log import Journal, read_all
from ecornn.tune.pool import Pool
from ecornn.tune.search import CostModel, Search
from ecornn.tune.space import PARTS, Candidate, ConfigSpace, Scan
from ecornn.tune.transfer import borrowed, lent, seeds, warm
from ecornn.worker import Worker, WorkerError
from ecornn.workload import Workload

T = TypeVar("T")
Part = tuple[bool, bytes]  # of the scan of a space: True where it is whole, and the numbers that fit
Parts = Mapping[str, tuple[Part, ...]]  # by schedule
LIMIT = 300.0  # seconds


class Question(msgspec.Struct, frozen=True):
    """A question about a layer on a device."""

    cell: str  # a spec for ``received``
    workload: Workload
    device: Device
    schedule: str | None = None  # the only one
    seed: int = 0  # of the data
    out: str = ""  # the file to write
    default: Candidate | None = None  # of the schedule whose space is scanned
    part: int = 0  # of that space


class Origin(msgspec.Struct, frozen=True):
    """The beginning of a search."""

    asked: Question  # of the layer
    defaults: tuple[Candidate, ...]  # of each schedule that serves it
    path: str  # of the log of the run that tunes it,
    run: str  # and that run's name


class Ask(msgspec.Struct, frozen=True):
    count: int
    told: tuple[tuple[Candidate, float | None], ...] = ()  # since the last one; µs per step, None where one failed
    parts: dict[str, tuple[Part, ...]] | None = None  # of the space's scans, once they are needed


def call(pool: Pool, worker: Worker, function: Callable[..., T], argument: Any, kind: type[T]) -> T:
    """The answer of a function of this file in a process of the pool; :class:`ScheduleError` where there is none."""
    try:
        return worker.call(f"{__name__}:{function.__name__}", argument, kind, LIMIT)
    except WorkerError as error:
        pool.must_be_open()
        raise ScheduleError(str(error).removeprefix("ScheduleError: ").removeprefix("DTypeError: ")) from error


def built(pool: Pool, function: Callable[..., T], question: Question, kind: type[T]) -> T:
    """The answer of a function of this file in a build process; see :func:`call`."""
    with pool.one_of(pool.idle_builders) as worker:
        return call(pool, worker, function, question, kind)


def write_answers(question: Question) -> bool:
    """Writes expected outputs, in a worker."""
    from ecornn.tune import adjoint_oracle  # with all that makes adjoints

    write = adjoint_oracle.write if question.workload.backward else oracle.write
    write(Path(question.out), received(question.cell), question.workload, question.seed)
    return True


def answers(pool: Pool, question: Question) -> Callable[[Path], bool]:
    return lambda path: built(pool, write_answers, msgspec.structs.replace(question, out=str(path)), bool)


def choose_defaults(question: Question) -> tuple[Candidate, ...]:
    """Answers :func:`defaults`, in a worker."""
    task = make_task(received(question.cell), question.workload, question.device)
    return tuple(Candidate.of(s.name, s.default(task)) for s in serving_or_raise(task, question.schedule))


def defaults(pool: Pool, question: Question) -> tuple[Candidate, ...]:
    """The default of each schedule that serves, the fastest first; :class:`ScheduleError` where none serves."""
    return built(pool, choose_defaults, question, tuple[Candidate, ...])


def space_of(question: Question, defaults: Sequence[Candidate]) -> ConfigSpace:
    """The space of the schedules that have these defaults, in a worker."""
    task = task_of(question.cell, question.workload, question.device)
    return ConfigSpace(task, [all_schedules()[c.schedule] for c in defaults], defaults)


def scan_part(question: Question) -> Part:
    """A part of a scan (``ConfigSpace.scan_part``), in a worker."""
    assert question.default is not None
    whole, numbers = space_of(question, [question.default]).scan_part(question.default.schedule, question.part)
    return whole, numbers.tobytes()


def scan_parts(pool: Pool, question: Question, space: ConfigSpace) -> Callable[[], Parts]:
    """Starts a scan of the space, and returns a function that waits for the parts of each schedule's scan."""
    def scan(default: Candidate, part: int) -> Part:
        pool.must_be_open()
        one = msgspec.structs.replace(question, default=default, part=part)
        return built(pool, scan_part, one, tuple[bool, bytes])

    threads = ThreadPoolExecutor(len(pool.builders), thread_name_prefix="scan")
    scans = {c.schedule: [threads.submit(scan, c, part) for part in range(PARTS)] for c in space.defaults()}
    threads.shutdown(wait=False)
    return lambda: {name: tuple(part.result() for part in parts) for name, parts in scans.items()}


def joined(space: ConfigSpace, parts: Parts) -> dict[str, Scan]:
    return {name: space.join(name, [(whole, array("q", numbers)) for whole, numbers in each])
            for name, each in parts.items()}


@contextlib.contextmanager
def searching(pool: Pool, cell: Cell, space: ConfigSpace, asked: Question, parts: Callable[[], Parts],
              run: Journal) -> Iterator[Proposals]:
    """The search of a run, in a process of the pool if one is idle. ``parts`` waits for the space's scans."""
    worker = None
    with contextlib.suppress(queue.Empty):
        worker = pool.idle_proposers.get_nowait()
    try:
        yield new_search(cell, space, asked.seed, run) if worker is None else Elsewhere(
            worker, pool, space, Origin(asked, tuple(space.defaults()), str(run.path), run.run), parts)
    finally:
        if worker is not None:
            pool.idle_proposers.put(worker)


def new_search(cell: Cell, space: ConfigSpace, seed: int, run: Journal) -> Search:
    """A search that has learnt from all records but those of ``run``, which it is told of."""
    task, schedules, model, records = space.task, list(space.schedules.values()), CostModel(seed), read_all()
    if others := lent(task, records):
        records.extend(others[1])
    warm(model, cell, task, schedules, records, run)
    return Search(space, model, seed, known=seeds(task, schedules, records), lent=borrowed(task, schedules, records))


class Elsewhere:
    """A search in the process ``worker``, which proposes what one here would. See :class:`Search` for its methods."""

    def __init__(self, worker: Worker, pool: Pool, space: ConfigSpace, origin: Origin,
                 parts: Callable[[], Parts]) -> None:
        self.worker, self.pool, self.space = worker, pool, space
        self.parts: Callable[[], Parts] | None = parts  # None: they are there
        self.tried: dict[Candidate, float | None] = {}
        self.proposed: set[Candidate] = set()  # and not told of yet
        self.told: list[tuple[Candidate, float | None]] = []  # not there yet
        self.first = call(pool, worker, begin, origin, list[Candidate])

    def tell(self, candidate: Candidate, time: float | None) -> None:
        self.tried[candidate] = time
        self.proposed.discard(candidate)
        self.told.append((candidate, time))

    def waiting(self) -> int:
        return sum(c not in self.tried and c not in self.proposed for c in self.first)

    def ask(self, count: int) -> list[Candidate]:
        question = self.question(count, count > self.waiting())
        batch = call(self.pool, self.worker, propose, question, list[Candidate])
        self.proposed.update(batch)
        return batch

    def prepare(self) -> None:
        call(self.pool, self.worker, prepare, self.question(0, True), bool)

    def question(self, count: int, scanned: bool) -> Ask:
        """A question with the times since the last one; with the space's scans, the first time they are needed."""
        scans = None
        if scanned and self.parts is not None:
            scans, self.parts = dict(self.parts()), None
        told, self.told = tuple(self.told), []
        return Ask(count, told, scans)


Proposals = Search | Elsewhere  # what the tuner asks for candidates
_search: Search | None = None  # of this process


def ready(_: None) -> bool:
    """Imports what a search needs, and reads the records, before there is one."""
    import_tvm()
    import xgboost  # noqa: F401

    return bool(all_schedules() and read_all())


def begin(origin: Origin) -> list[Candidate]:
    """Makes this process's search, and returns the candidates that it proposes first."""
    global _search
    asked = origin.asked
    space = space_of(asked, origin.defaults)
    _search = new_search(received(asked.cell), space, asked.seed, Journal(Path(origin.path), origin.run))
    return _search.first


def propose(ask: Ask) -> list[Candidate]:
    return learnt(ask).ask(ask.count)


def prepare(ask: Ask) -> bool:
    learnt(ask).prepare()
    return True


def learnt(ask: Ask) -> Search:
    """This process's search, after it has learnt the times of a question."""
    if _search is None:  # of another process, before this one was started in its place
        raise ScheduleError("the process that searched has ended unexpectedly; run the same command to continue")
    if ask.parts is not None:
        _search.space.scans = partial(joined, _search.space, ask.parts)
    for candidate, time in ask.told:
        _search.tell(candidate, time)
    return _search
