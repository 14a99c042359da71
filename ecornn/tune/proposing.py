"""The search of a run: here, or in a process of its own where several runs go on at a time. The process that tunes has
only one interpreter, and one search alone takes half of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from ecornn.cells import Cell
from ecornn.errors import ScheduleError
from ecornn.tune import preparing
from ecornn.tune.journal import Journal
from ecornn.tune.pool import Pool
from ecornn.tune.preparing import Question
from ecornn.tune.record import Choice
from ecornn.tune.search import Search
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.worker import Worker, WorkerError

T = TypeVar("T")
Parts = Mapping[str, Sequence[bytes]]  # of the scans of a space, by schedule, as ``preparing.scan_parts`` has them


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
    from ecornn.tune import folders
    from ecornn.tune.model import CostModel
    from ecornn.tune.similar_cells import lent
    from ecornn.tune.transfer import borrowed, seeds, warm

    task, schedules, model, records = space.task, list(space.schedules.values()), CostModel(seed), folders.read_all()
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
            return self.worker.call(f"{__name__}:{function.__name__}", argument, kind, preparing.LIMIT)
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
    from ecornn.tune import folders

    return bool(all_schedules() and folders.read_all())


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
        _search.space.scans = partial(preparing.joined, _search.space, ask.parts)
    for one in ask.told:
        _search.tell(Candidate.of(one.choice.schedule, one.choice.config), one.time)
    return _search
