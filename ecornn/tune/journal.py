"""One run in a log file: found again by what it searches, and gone on with; and what it gained."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from ecornn.device import Device
from ecornn.errors import RecordError
from ecornn.schedules.base import AnySchedule
from ecornn.tune.log import TORN, Line, append, is_compressed, read
from ecornn.tune.record import AnyRecord, Choice, Finish, Start, Trial
from ecornn.tune.timing import bounds
from ecornn.workload import Workload

RESERVED = 0.25  # of a time limit, at most: for the comparison after the search


def digest_of(workload: Workload, device: Device, schedules: Sequence[AnySchedule], seed: int,
              only: Sequence[Choice] | None = None) -> str:
    """A digest that is equal for runs that search the same: trials of one serve the other. ``only``: a list of choices
    that is tried instead."""
    revisions = sorted((s.name, s.revision) for s in schedules)
    known = (workload, device.identity, revisions, seed, *(only or ()))
    return hashlib.sha256(msgspec.json.encode(known)).hexdigest()[:12]


@dataclass
class Journal:
    """The records of one run, those found at first and those added since. ``run`` is the digest of what is searched and
    the number of the run in the file."""

    path: Path
    run: str
    trials: list[Trial] = field(default_factory=list)
    finish: Finish | None = None
    problems: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, digest: str, resume: bool) -> Journal:
        """The latest run of that digest; a new one without ``resume``, where there is none, and where no candidate of
        it ran: a compiler that was missing then may be there now. Raises :class:`~ecornn.errors.RecordError` where the
        file exists and cannot be read, or has text but no record, and where it is compressed."""
        if is_compressed(path):  # before anything is built
            raise RecordError(f"{path} is compressed, so that nothing is appended to it; name a .jsonl")
        log = read(path) if path.exists() else None
        strange = [problem for problem in log.problems if not problem.endswith(TORN)] if log else []
        if log and strange and not log.lines and not log.newer:
            raise RecordError(f"{path} is no tuning log: {strange[0]}; move it away, or name another file (--output): "
                              "nothing is added to what cannot be read")
        records = [line.record for line in log.lines] if log else []
        runs = (r.run.removeprefix(digest + "-") for r in records
                if isinstance(r, Start) and r.run.startswith(digest + "-"))
        number = max((int(run) for run in runs if run.isdecimal()), default=0)
        failed = any(isinstance(r, Finish) and r.run == f"{digest}-{number}" and r.best is None for r in records)
        if not resume or not number or failed:
            number += 1
        journal = cls(path, f"{digest}-{number}", problems=log.problems if log else [])
        for record in records:
            if record.run == journal.run:
                journal.take(record)
        return journal

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other processes and threads from the run, within a context: they would try the same and disturb its
        times. Raises :class:`~ecornn.errors.RecordError` where another one does, or where the folder cannot be
        written."""
        real = self.path.resolve()  # of a link, what it points at
        place = real.with_name(f".{real.name[:150]}.{self.run.rpartition('-')[0]}.lock")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()  # or say why not
            lock = FileLock(place, timeout=0)
            lock.acquire()
        except Timeout:
            raise RecordError(f"another process tunes this layer into {self.path}; wait for it or stop it") from None
        except OSError as error:
            raise RecordError(f"cannot write to the folder of the tuning log {self.path}: {error}") from error
        try:
            yield
        finally:
            place.unlink(missing_ok=True)
            lock.release()

    def take(self, record: AnyRecord) -> None:
        """Adds a record in memory."""
        if isinstance(record, Trial):
            self.trials.append(record)
        elif isinstance(record, Finish):
            self.finish = record

    def add(self, record: AnyRecord) -> None:
        """Appends a record to the file, and adds it in memory."""
        append(self.path, record)
        self.take(record)

    def has(self, line: Line) -> bool:
        """True for a record of this run. Another file may have a run of the same name: someone else's same search."""
        return line.record.run == self.run and line.path.resolve() == self.path.resolve()

    @property
    def search(self) -> list[Trial]:
        """The trials of the search, without the final comparison."""
        return [t for t in self.trials if t.stage == "search"]

    @property
    def seconds(self) -> float:
        """Wall time that the run has taken so far, over all its sessions."""
        return max((t.seconds for t in self.trials), default=0.0)

    def finished(self, trials: int, time_limit: float | None, early_stop: bool = False) -> bool:
        """True where nothing is left to do for a run of ``trials`` trials and ``time_limit`` seconds, that may stop
        early or not. A share of the time is reserved for the comparison at the end, which may need less."""
        if self.finish is None:
            return False
        reason = self.finish.reason
        return (reason == "space" or (reason == "converged" and early_stop) or self.finish.trials >= trials or (
            reason == "time" and time_limit is not None and self.finish.seconds >= (1 - RESERVED) * time_limit))


@dataclass(frozen=True)
class Gain:
    """How many times as fast as the untuned default the best of a run is."""

    ratio: float  # of both medians
    low: float  # at 95% confidence for each of them
    high: float
    settled: bool  # both were known to a few percent, so that the ratio may be said


def gain_of(run: Journal) -> Gain | None:
    """The gain of a finished run, by the last times of best and default; None where one of them has none, or where they
    are the same."""
    if run.finish is None or run.finish.best == run.finish.default:
        return None
    best, default = (next(((t.times, t.noisy) for t in reversed(run.trials) if t.times is not None
                           and t.choice == choice), None) for choice in (run.finish.best, run.finish.default))
    if best is None or default is None:
        return None
    (best_low, best_high), (low, high) = bounds(best[0].runs), bounds(default[0].runs)
    return Gain(default[0].median / best[0].median, low / best_high, high / best_low, not (best[1] or default[1]))


def words(gain: Gain, default_us: float) -> str:
    """A gain in words: the ratio where it is known, otherwise its bounds."""
    if gain.settled:
        return f"{gain.ratio:.2f} times as fast as the untuned default ({default_us:.4g} µs)"
    said = f"{gain.low:.2f} to {gain.high:.2f} times as fast as the untuned default; times did not settle"
    return said if gain.low > 1 else f"{said}, and it may be no faster"
