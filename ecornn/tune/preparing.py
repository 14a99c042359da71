"""The needs of a run beside its candidates: defaults, the space and expected outputs. Processes that build compute
them, since the one that tunes has only one interpreter for several runs at a time."""

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
from ecornn.tune.record import Choice
from ecornn.tune.space import PARTS, ConfigSpace, Scan
from ecornn.worker import WorkerError
from ecornn.workload import Workload

T = TypeVar("T")
LIMIT = 300.0  # seconds


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
