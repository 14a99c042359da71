"""The parts of a run beside its candidates, in other processes: its defaults, space, expected outputs and search.

The process that tunes has only one interpreter for several runs at a time, and one search alone takes half of it. So
processes that build compute what a run needs, and a search has a process of its own where several go on."""

from __future__ import annotations

import contextlib
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from ecornn.cells import Cell
from ecornn.device import Device
from ecornn.errors import ScheduleError
from ecornn.tune.journal import Journal
from ecornn.tune.pool import Pool
from ecornn.tune.record import Choice
from ecornn.tune.search import Search
from ecornn.tune.space import PARTS, Candidate, ConfigSpace, Scan
from ecornn.worker import Worker, WorkerError
from ecornn.workload import Workload

T = TypeVar("T")
Parts = Mapping[str, Sequence[bytes]]  # of the scans of a space, by schedule, as ``scan_parts`` has them
LIMIT = 300.0  # seconds


class Origin(msgspec.Struct, frozen=True):
    """The beginning of a search: the layer, the default of each schedule that serves it, and the run that tunes it: its
    log's path and its name."""

    asked: Question
    defaults: tuple[Choice, ...]
    path: str
    run: str


class Told(msgspec.Struct, frozen=True):
    """The time of a candidate in µs per step, None where it failed."""

    choice: Choice
    time: float | None


class Ask(msgspec.Struct, frozen=True):
    """A question for ``count`` candidates, with the times that came since the last one, and with the ``parts`` of the
    space's scans once they are needed."""

    count: int
    told: tuple[Told, ...] = ()
    parts: dict[str, tuple[bytes, ...]] | None = None


@contextlib.contextmanager
def searching(pool: Pool, cell: Cell, space: ConfigSpace, asked: Question, parts: Callable[[], Parts],
              run: Journal) -> Iterator[Proposals]:
    """The search of a run, in a process of the pool if one is idle. ``parts`` waits for the space's scans."""
    with pool.proposer() as worker:
        if worker is None:
            yield new_search(cell, space, asked.seed, run)
        else:
            defaults = tuple(Choice(c.schedule, c.config) for c in space.defaults())
            yield Elsewhere(worker, pool, space, Origin(asked, defaults, str(run.path), run.run), parts)


def new_search(cell: Cell, space: ConfigSpace, seed: int, run: Journal) -> Search:
    """A search that has learnt from all records but those of ``run``, which it is told of."""
    from ecornn.tune.log import read_all
    from ecornn.tune.model import CostModel
    from ecornn.tune.transfer import borrowed, lent, seeds, warm

    task, schedules, model, records = space.task, list(space.schedules.values()), CostModel(seed), read_all()
    if others := lent(task, records):
        records.extend(others[1])
    warm(model, cell, task, schedules, records, run)
    return Search(space, model, seed, known=seeds(task, schedules, records), lent=borrowed(task, schedules, records))


class Elsewhere:
    """A search in the process ``worker``, which proposes what one here would."""

    def __init__(self, worker: Worker, pool: Pool, space: ConfigSpace, origin: Origin,
                 parts: Callable[[], Parts]) -> None:
        self.worker, self.pool, self.space = worker, pool, space
        self.parts: Callable[[], Parts] | None = parts  # None: they are there
        self.tried: dict[Candidate, float | None] = {}
        self.proposed: set[Candidate] = set()  # and not told of yet
        self.told: list[Told] = []  # not there yet
        self.first = [Candidate.of(c.schedule, c.config) for c in self.call(begin, origin, tuple[Choice, ...])]

    def tell(self, candidate: Candidate, time: float | None) -> None:
        """See :class:`Search`."""
        self.tried[candidate] = time
        self.proposed.discard(candidate)
        self.told.append(Told(Choice(candidate.schedule, candidate.config), time))

    def waiting(self) -> int:
        """See :class:`Search`."""
        return sum(c not in self.tried and c not in self.proposed for c in self.first)

    def ask(self, count: int) -> list[Candidate]:
        """See :class:`Search`."""
        choices = self.call(propose, self.question(count, count > self.waiting()), tuple[Choice, ...])
        batch = [Candidate.of(c.schedule, c.config) for c in choices]
        self.proposed.update(batch)
        return batch

    def prepare(self) -> None:
        """See :class:`Search`."""
        self.call(prepare, self.question(0, True), bool)

    def question(self, count: int, scanned: bool) -> Ask:
        """A question with the times since the last one; with the scans of the space where they are needed and that
        process has none."""
        scans = None
        if scanned and self.parts is not None:
            scans = {name: tuple(parts) for name, parts in self.parts().items()}
            self.parts = None
        told, self.told = tuple(self.told), []
        return Ask(count, told, scans)

    def call(self, function: Callable[..., object], argument: Origin | Ask, kind: type[T]) -> T:
        """Calls one of the functions below there. Raises :class:`ScheduleError` where it raises or the process is
        lost."""
        try:
            return self.worker.call(f"{__name__}:{function.__name__}", argument, kind, LIMIT)
        except WorkerError as error:
            self.pool.must_be_open()
            raise ScheduleError(str(error).removeprefix("ScheduleError: ")) from error


Proposals = Search | Elsewhere  # what the tuner asks for candidates
_search: Search | None = None  # of this process


def ready(_: None) -> bool:
    """Imports what a search needs, and reads the records, before there is one."""
    from ecornn.quick_tvm import import_tvm

    import_tvm()
    import xgboost  # noqa: F401

    from ecornn.schedules import all_schedules
    from ecornn.tune.log import read_all

    return bool(all_schedules() and read_all())


def begin(origin: Origin) -> tuple[Choice, ...]:
    """Makes this process's search, and returns the candidates that it proposes first."""
    global _search
    from ecornn.cells.naming import load_cell
    from ecornn.schedules import all_schedules
    from ecornn.tune.building import task_of

    asked = origin.asked
    task = task_of(asked.cell, asked.workload, asked.device)
    space = ConfigSpace(task, [all_schedules()[c.schedule] for c in origin.defaults], origin.defaults)
    _search = new_search(load_cell(asked.cell), space, asked.seed, Journal(Path(origin.path), origin.run))
    return tuple(Choice(c.schedule, c.config) for c in _search.first)


def propose(ask: Ask) -> tuple[Choice, ...]:
    """Proposes candidates."""
    return tuple(Choice(c.schedule, c.config) for c in learnt(ask).ask(ask.count))


def prepare(ask: Ask) -> bool:
    """Does what the first ranking needs."""
    learnt(ask).prepare()
    return True


def learnt(ask: Ask) -> Search:
    """This process's search, after it has learnt the times of a question."""
    if _search is None:  # of another process, before this one was started in its place
        raise ScheduleError("the process that searched was lost; the same command goes on")
    if ask.parts is not None:
        _search.space.scans = partial(joined, _search.space, ask.parts)
    for one in ask.told:
        _search.tell(Candidate.of(one.choice.schedule, one.choice.config), one.time)
    return _search


class Question(msgspec.Struct, frozen=True):
    """A question about a layer on a device. ``cell`` is a spec for ``load_cell``; ``schedule`` the only one, or None;
    ``seed`` that of the data; ``out`` the file to write; ``default`` that of the schedule whose space is scanned, and
    ``part`` which part of it."""

    cell: str
    workload: Workload
    device: Device
    schedule: str | None = None
    seed: int = 0
    out: str = ""
    default: Choice | None = None
    part: int = 0


def write_answers(question: Question) -> bool:
    """Writes expected outputs, in a worker."""
    from ecornn.cells.naming import load_cell
    from ecornn.tune import adjoint_oracle, oracle

    write = adjoint_oracle.write if question.workload.backward else oracle.write
    write(Path(question.out), load_cell(question.cell), question.workload, question.seed)
    return True


def choose_defaults(question: Question) -> tuple[Choice, ...]:
    """Answers :func:`defaults`, in a worker."""
    from ecornn.cells.naming import load_cell
    from ecornn.task import make_task
    from ecornn.tune.choose import serving_or_raise

    task = make_task(load_cell(question.cell), question.workload, question.device)
    return tuple(Choice(s.name, dict(s.default(task))) for s in serving_or_raise(task, question.schedule))


def write_space(question: Question) -> bool:
    """Writes a part of a scan (``ConfigSpace.scan_part``), in a worker."""
    from ecornn.schedules import all_schedules
    from ecornn.tune.building import task_of

    assert question.default is not None
    task, name = task_of(question.cell, question.workload, question.device), question.default.schedule
    whole, numbers = ConfigSpace(task, [all_schedules()[name]], [question.default]).scan_part(name, question.part)
    Path(question.out).write_bytes(msgspec.msgpack.encode((whole, numbers.tobytes())))
    return True


def answers(pool: Pool, question: Question) -> Callable[[Path], None]:
    """A function that writes inputs and expected outputs to the path that it is given."""
    def write(path: Path) -> None:
        ask(pool, f"{__name__}:write_answers", msgspec.structs.replace(question, out=str(path)), bool)

    return write


def defaults(pool: Pool, question: Question) -> tuple[Choice, ...]:
    """The default of each schedule that serves, the one that is expected to be fastest first. Raises
    :class:`ScheduleError` where none serves, or for an unknown name."""
    return ask(pool, f"{__name__}:choose_defaults", question, tuple[Choice, ...])


def scan_parts(pool: Pool, question: Question, space: ConfigSpace) -> Callable[[], dict[str, list[bytes]]]:
    """Starts a scan of the space, and returns a function that waits for the parts of each schedule's scan."""
    def scan(default: Choice, part: int) -> bytes:
        pool.must_be_open()
        with tempfile.TemporaryDirectory(dir=pool.folder.name, ignore_cleanup_errors=True) as folder:
            out = Path(folder, "space")
            one = msgspec.structs.replace(question, default=default, part=part, out=str(out))
            ask(pool, f"{__name__}:write_space", one, bool)
            return out.read_bytes()

    threads = ThreadPoolExecutor(len(pool.builders), thread_name_prefix="scan")
    scans = {c.schedule: [threads.submit(scan, Choice(c.schedule, c.config), part) for part in range(PARTS)]
             for c in space.defaults()}
    threads.shutdown(wait=False)
    return lambda: {name: [part.result() for part in parts] for name, parts in scans.items()}


def joined(space: ConfigSpace, parts: Mapping[str, Sequence[bytes]]) -> dict[str, Scan]:
    """The result of ``space.scan``, from the parts of :func:`scan_parts`."""
    def scan(part: bytes) -> Scan:
        whole, numbers = msgspec.msgpack.decode(part, type=tuple[bool, bytes])
        return whole, array("q", numbers)

    return {name: space.join(name, [scan(part) for part in each]) for name, each in parts.items()}


def ask(pool: Pool, function: str, question: Question, kind: type[T]) -> T:
    """The answer of ``function`` ("module:name") in a build process. Raises :class:`ScheduleError` where it raises."""
    with pool.one_of(pool.idle_builders) as worker:
        try:
            return worker.call(function, question, kind, LIMIT)
        except WorkerError as error:
            pool.must_be_open()
            raise ScheduleError(str(error).removeprefix("ScheduleError: ").removeprefix("DTypeError: ")) from error
