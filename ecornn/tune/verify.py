"""Whether records still hold: some of them built and measured again on the device at hand."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ecornn.cells import BUILTIN
from ecornn.device import Device
from ecornn.tune.evaluate import Outcome, ProcessEvaluator
from ecornn.tune.log import Line
from ecornn.tune.lookup import HERE, how_far, unusable, up_to_date
from ecornn.tune.preparing import Question, answers
from ecornn.tune.record import Trial
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
    """Up to ``count`` records that can be measured on the device, drawn at random, and how many of the
    others there are for each reason."""
    left: dict[str, int] = {}
    fit = []
    for line in lines:
        reason = unfit(line, device)
        if reason is None:
            fit.append(line)
        else:
            left[reason] = left.get(reason, 0) + 1
    drawn = random.Random(seed).sample(fit, min(count, len(fit)))
    return sorted(drawn, key=lambda line: (line.path, line.number)), left


def unfit(line: Line, device: Device) -> str | None:
    """Why a record cannot be compared with a time measured on the device now; None: it can."""
    from ecornn.schedules import all_schedules
    from ecornn.task import make_task

    trial = line.record
    assert isinstance(trial, Trial)
    distance = how_far(trial, trial.workload, device)
    if distance is None or distance[0] != HERE:
        return "of another device"
    if trial.workload.cell not in BUILTIN:
        return "of a cell that is not built in"
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
    """What comes of one record now."""
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
        return Check(line, evaluator.next()[1])
