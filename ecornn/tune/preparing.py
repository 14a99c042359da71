"""What a run needs beside its candidates, computed by the processes that build: of many runs at a time the process
that tunes has only one interpreter."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from ecornn.device import Device
from ecornn.errors import ScheduleError
from ecornn.tune.pool import Pool
from ecornn.tune.process import WorkerError
from ecornn.tune.record import Choice
from ecornn.tune.space import PARTS, ConfigSpace, Scan
from ecornn.workload import Workload

T = TypeVar("T")
LIMIT = 300.0  # seconds


class Question(msgspec.Struct, frozen=True):
    """About a layer on a device. ``cell`` is a spec for ``load_cell``; ``schedule`` the one that is asked for, or
    None; ``seed`` of the data; ``out`` the file that is to be written; ``default`` of the schedule whose space is
    scanned, and ``part`` of it."""

    cell: str
    workload: Workload
    device: Device
    schedule: str | None = None
    seed: int = 0
    out: str = ""
    default: Choice | None = None
    part: int = 0


def write_answers(question: Question) -> bool:
    """In a worker: ``write`` of the oracle."""
    from ecornn.cells.naming import load_cell
    from ecornn.tune import adjoint_oracle, oracle

    write = adjoint_oracle.write if question.workload.backward else oracle.write
    write(Path(question.out), load_cell(question.cell), question.workload, question.seed)
    return True


def choose_defaults(question: Question) -> tuple[Choice, ...]:
    """In a worker: the default of each schedule that serves, what is expected to be fastest first."""
    from ecornn.cells.naming import load_cell
    from ecornn.task import make_task
    from ecornn.tune.choose import serving_or_raise

    task = make_task(load_cell(question.cell), question.workload, question.device)
    return tuple(Choice(s.name, dict(s.default(task))) for s in serving_or_raise(task, question.schedule))


def write_space(question: Question) -> bool:
    """In a worker: ``ConfigSpace.scan_part``."""
    from ecornn.schedules import all_schedules
    from ecornn.tune.building import task_of

    assert question.default is not None
    task, name = task_of(question.cell, question.workload, question.device), question.default.schedule
    whole, numbers = ConfigSpace(task, [all_schedules()[name]], [question.default]).scan_part(name, question.part)
    Path(question.out).write_bytes(msgspec.msgpack.encode((whole, numbers.tobytes())))
    return True


def answers(pool: Pool, question: Question) -> Callable[[Path], None]:
    """Writes inputs and expected outputs to the path that it is given."""
    def write(path: Path) -> None:
        ask(pool, f"{__name__}:write_answers", msgspec.structs.replace(question, out=str(path)), bool)

    return write


def defaults(pool: Pool, question: Question) -> tuple[Choice, ...]:
    """The default of each schedule that serves, what is expected to be fastest first.

    Raises :class:`ScheduleError` where none serves, or for an unknown name.
    """
    return ask(pool, f"{__name__}:choose_defaults", question, tuple[Choice, ...])


def scan_parts(pool: Pool, question: Question, space: ConfigSpace) -> Callable[[], dict[str, list[bytes]]]:
    """Has the space scanned, from now on, and returns what waits for it: the parts of each schedule's scan."""
    def scan(default: Choice, part: int) -> bytes:
        pool.must_be_open()
        with tempfile.TemporaryDirectory(dir=pool.folder.name, ignore_cleanup_errors=True) as folder:
            out = Path(folder, "space")
            one = msgspec.structs.replace(question, default=default, part=part, out=str(out))
            ask(pool, f"{__name__}:write_space", one, bool)
            return out.read_bytes()

    threads = ThreadPoolExecutor(len(pool.builders), thread_name_prefix="scan")
    found = {c.schedule: [threads.submit(scan, Choice(c.schedule, c.config), part) for part in range(PARTS)]
             for c in space.defaults()}
    threads.shutdown(wait=False)
    return lambda: {name: [part.result() for part in parts] for name, parts in found.items()}


def joined(space: ConfigSpace, parts: Mapping[str, Sequence[bytes]]) -> dict[str, Scan]:
    """What ``space.scan`` returns, from :func:`scan_parts`."""
    def scan(part: bytes) -> Scan:
        whole, numbers = msgspec.msgpack.decode(part, type=tuple[bool, bytes])
        return whole, array("q", numbers)

    return {name: space.join(name, [scan(part) for part in each]) for name, each in parts.items()}


def ask(pool: Pool, function: str, question: Question, kind: type[T]) -> T:
    """What ``function`` ("module:name") of a build process says. Raises :class:`ScheduleError` where it raises."""
    with pool.one_of(pool.idle_builders) as worker:
        try:
            return worker.call(function, question, kind, LIMIT)
        except WorkerError as error:
            pool.must_be_open()
            raise ScheduleError(str(error).removeprefix("ScheduleError: ").removeprefix("DTypeError: ")) from error
