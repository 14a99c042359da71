"""Several logs as one: a union that does not depend on their order, and holds nothing twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ecornn.tune.log import Line
from ecornn.tune.record import AnyRecord, Finish, Start, Trial

KINDS = {Start: 0, Trial: 1, Finish: 2}


@dataclass
class Merged:
    """Lines in the log's order, and those that contradict one of them."""

    lines: list[Line] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[AnyRecord]:
        """The records of the lines."""
        return [line.record for line in self.lines]


def merge(lines: Iterable[Line]) -> Merged:
    """The union of the lines, run by run.

    Equal lines count once. Two lines conflict that are the same event (what was tried, when, in which
    run) with different results: an edited or damaged copy. Of these the one that promises less is kept:
    a failure before a time, a longer time before a shorter. So merging is commutative, associative and
    idempotent, and a run that both logs have goes on with the trials of both.
    """
    kept: dict[Any, Line] = {}
    merged = Merged()
    for line in lines:
        key = event(line.record)
        rival = kept.setdefault(key, line)
        if rival is line:
            continue
        if rival.record == line.record:  # though 0.0 == -0.0, which are not written alike
            kept[key] = min((rival, line), key=lambda one: promise(one.record))
            continue
        winner, loser = sorted((rival, line), key=lambda one: promise(one.record))
        kept[key] = winner
        merged.conflicts.append(f"{loser.full_place}: conflicts with {winner.full_place}, which promises less")
    merged.lines = sorted(kept.values(), key=lambda one: order(one.record))
    return merged


def event(record: AnyRecord) -> bytes:
    """What a record is about, without what came of it; by ``seconds`` also which of several processes that go on with
    one run wrote it."""
    fields: tuple[Any, ...] = (KINDS[type(record)], record.run, record.time)
    if not isinstance(record, Start):
        fields += (record.seconds,)
    if isinstance(record, Trial):
        fields += (record.index, record.stage, record.workload, record.device, record.schedule, record.revision,
                   sorted(record.config.items()), record.seed)
    return msgspec.msgpack.encode(fields)


def promise(record: AnyRecord) -> tuple[float, bytes]:
    """How fast a record says that its subject is, and its text to tell equal ones apart."""
    speed = 0.0
    if isinstance(record, Trial) and record.times is not None:
        speed = 1.0 / record.times.median
    elif isinstance(record, Finish) and record.best_us is not None:
        speed = 1.0 / record.best_us
    return speed, msgspec.json.encode(record)


def order(record: AnyRecord) -> tuple[str, int, int, str, bytes]:
    """Runs stay together: start, trials by number, finish."""
    index = record.index if isinstance(record, Trial) else 0
    return record.run, KINDS[type(record)], index, record.time, msgspec.json.encode(record)
