"""Whether records still hold: some of them built and measured again on the device at hand."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ecornn.cells import BUILTIN
from ecornn.device import Device
from ecornn.errors import EcornnError
from ecornn.tune.evaluate import ProcessEvaluator
from ecornn.tune.log import Line
from ecornn.tune.lookup import HERE, how_far, unusable, up_to_date
from ecornn.tune.preparing import Question, answers
from ecornn.tune.record import Outcome, Trial
from ecornn.tune.session import Session
from ecornn.tune.space import Candidate

AT_ONCE = 8  # builds, while one is measured


@dataclass(frozen=True)
class Check:
    """A record and what came of it now.

    ``drift`` is the new median over the recorded one, or None where it failed.
    """

    line: Line
    outcome: Outcome

    @property
    def drift(self) -> float | None:
        trial = self.line.record
        assert isinstance(trial, Trial) and trial.times is not None
        return self.outcome.times.median / trial.times.median if self.outcome.times else None


def sample(lines: Sequence[Line], device: Device, count: int, seed: int) -> tuple[list[Line], dict[str, int]]:
    """Up to ``count`` records that can be measured on the device, drawn at random, and how many were left out for each
    reason: all that are of something else, and of the others those that were drawn."""
    left: dict[str, int] = {}
    fit: list[Line] = []
    for line in random.Random(seed).sample(lines, len(lines)):
        reason = strange(line, device)
        if reason is None and len(fit) < count:  # whether a configuration still fits takes a tenth of a second
            reason = unfit(line, device)
            if reason is None:
                fit.append(line)
        if reason is not None:
            left[reason] = left.get(reason, 0) + 1
    return sorted(fit, key=lambda line: (line.path, line.number)), left


def strange(line: Line, device: Device) -> str | None:
    """Why a record is of something else; None: it is of the device and of a cell that everybody has."""
    trial = line.record
    assert isinstance(trial, Trial)
    distance = how_far(trial, trial.workload, device)
    if distance is None or distance[0] != HERE:
        return "of another device"
    return None if trial.workload.cell in BUILTIN else "of a cell that is not built in or has options"


def unfit(line: Line, device: Device) -> str | None:
    """Why a record's time says nothing of a time measured on the device now; None: it can be compared."""
    from ecornn.schedules import all_schedules
    from ecornn.task import make_task

    trial = line.record
    assert isinstance(trial, Trial)
    task = make_task(BUILTIN[trial.workload.cell], trial.workload, device)
    schedule = all_schedules().get(trial.schedule)
    if schedule is None or schedule.kind != device.kind or schedule.serves(task):
        return "of schedules that do not serve this"
    return unusable(schedule, task, up_to_date(trial, schedule, task))


def verify(lines: Sequence[Line], session: Session) -> Iterator[Check]:
    """Builds and measures each record's configuration on the session's device, in the order of the lines."""
    threads = ThreadPoolExecutor(1 if session.pool.quiet else AT_ONCE)
    try:
        yield from threads.map(lambda line: measured(line, session), lines)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def measured(line: Line, session: Session) -> Check:
    """What comes of one record now; whatever goes wrong with it says nothing of the others."""
    from ecornn.schedules import all_schedules
    from ecornn.task import make_task

    trial = line.record
    assert isinstance(trial, Trial)
    cell = BUILTIN[trial.workload.cell]
    task = make_task(cell, trial.workload, session.device)
    config = up_to_date(trial, all_schedules()[trial.schedule], task).config
    asked = Question(cell.name, trial.workload, session.device, seed=session.seed)
    with ProcessEvaluator(task, cell.name, answers(session.pool, asked), session.pool, limit=session.timeout,
                          seed=session.seed) as evaluator:
        evaluator.submit([Candidate.of(trial.schedule, config)], None)
        try:
            return Check(line, evaluator.next()[1])
        except EcornnError as error:  # its answers need more memory than there is, say
            session.pool.must_be_open()
            return Check(line, Outcome(error=str(error)[:2000]))
