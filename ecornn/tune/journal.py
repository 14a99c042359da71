"""One run in a log file: found again by what it searches, and gone on with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ecornn.device import Device
from ecornn.schedules.base import Schedule
from ecornn.tune.log import append, read
from ecornn.tune.record import AnyRecord, Finish, Start, Trial
from ecornn.workload import Workload


def digest_of(workload: Workload, device: Device, schedules: Sequence[Schedule], seed: int) -> str:
    """Equal for runs that search the same: trials of one serve the other."""
    revisions = sorted((s.name, s.revision) for s in schedules)
    return hashlib.sha256(msgspec.json.encode((workload, device, revisions, seed))).hexdigest()[:12]


@dataclass
class Journal:
    """The records of one run, those found at first and those added since.

    ``run`` is the digest of what is searched and the number of the run in the file.
    """

    path: Path
    run: str
    trials: list[Trial] = field(default_factory=list)
    finish: Finish | None = None
    problems: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, digest: str, resume: bool) -> Journal:
        """The latest run of that digest; a new one without ``resume`` or where there is none.

        Raises :class:`~ecornn.errors.RecordError` where the file exists and cannot be read.
        """
        log = read(path) if path.exists() else None
        records = [line.record for line in log.lines] if log else []
        runs = {r.run for r in records if isinstance(r, Start) and r.run.startswith(digest + "-")}
        number = max((int(r.rpartition("-")[2]) for r in runs if r.rpartition("-")[2].isdecimal()),
                     default=0)
        if not resume or not number:
            number += 1
        journal = cls(path, f"{digest}-{number}", problems=log.problems if log else [])
        for record in records:
            if record.run == journal.run:
                journal.take(record)
        return journal

    def take(self, record: AnyRecord) -> None:
        """Keeps a record in memory."""
        if isinstance(record, Trial):
            self.trials.append(record)
        elif isinstance(record, Finish):
            self.finish = record

    def add(self, record: AnyRecord) -> None:
        """Appends a record to the file, and keeps it."""
        append(self.path, record)
        self.take(record)

    @property
    def search(self) -> list[Trial]:
        """The trials of the search, without the final comparison."""
        return [t for t in self.trials if t.stage == "search"]

    @property
    def seconds(self) -> float:
        """Wall time that the run has taken so far, over all its sessions."""
        return max((t.seconds for t in self.trials), default=0.0)

    def finished(self, trials: int, time_limit: float | None, early_stop: bool = False) -> bool:
        """Whether nothing is left to do for a run of ``trials`` trials and ``time_limit`` seconds, that
        may or may not stop early."""
        if self.finish is None:
            return False
        if self.finish.reason == "converged" and early_stop:
            return True
        if self.finish.reason == "space" or self.finish.trials >= trials:
            return True
        return self.finish.reason == "time" and time_limit is not None and (
            self.finish.seconds >= time_limit)
