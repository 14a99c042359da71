"""A check that records still hold: some of them are built and measured again on the device at hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ecornn.cells import BUILTIN
from ecornn.device import Device
from ecornn.errors import EcornnError
from ecornn.schedules import all_schedules
from ecornn.task import make_task
from ecornn.tune.log import TrialLine
from ecornn.tune.lookup import HERE, how_far, unusable, up_to_date
from ecornn.tune.pool import ProcessEvaluator
from ecornn.tune.proposing import Question, answers
from ecornn.tune.record import Outcome, Trial
from ecornn.tune.session import Session
from ecornn.tune.space import Candidate

AT_ONCE = 8  # builds, while one is measured


@dataclass(frozen=True)
class Check:
    """A record and the outcome of its configuration now."""

    line: TrialLine
    outcome: Outcome

    @property
    def drift(self) -> float | None:
        """The new median over the recorded one; None where it failed."""
        recorded, times = self.line.record.times, self.outcome.times
        return times.median / recorded.median if times and recorded else None


def sample(lines: Sequence[TrialLine], device: Device, count: int, seed: int) -> tuple[list[TrialLine], dict[str, int]]:
    """Up to ``count`` records that can be measured on the device, drawn at random, and the number of those left out for
    each reason: all that are of something else, and of the others those that were drawn."""
    left: Counter[str] = Counter()
    fit: list[TrialLine] = []
    for line in random.Random(seed).sample(lines, len(lines)):
        distance, reason = how_far(line.record, line.record.workload, device), None
        if distance is None or distance[0] != HERE:
            reason = "of another device"
        elif line.record.workload.cell not in BUILTIN:
            reason = "of a cell that is not built in or has options"
        elif len(fit) < count:  # whether a configuration still fits takes a tenth of a second
            reason = unfit(line.record, device)
            fit += [line] if reason is None else []
        if reason is not None:
            left[reason] += 1
    return sorted(fit, key=lambda line: (line.path, line.number)), left


def unfit(trial: Trial, device: Device) -> str | None:
    """The reason why a record's time says nothing of one measured on the device now; None: they can be compared."""
    task = make_task(BUILTIN[trial.workload.cell], trial.workload, device)
    schedule = all_schedules().get(trial.schedule)
    if schedule is None or schedule.kind != device.kind or schedule.serves(task):
        return "of schedules that do not serve this"
    return unusable(schedule, task, up_to_date(trial, schedule, task))


def verify(lines: Sequence[TrialLine], session: Session) -> Iterator[Check]:
    """Builds and measures each record's configuration on the session's device, in the order of the lines."""
    threads = ThreadPoolExecutor(1 if session.pool.quiet else AT_ONCE)
    try:
        yield from threads.map(lambda line: measured(line, session), lines)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def measured(line: TrialLine, session: Session) -> Check:
    """Measures one record's configuration now; whatever goes wrong with it says nothing of the others."""
    trial, cell = line.record, BUILTIN[line.record.workload.cell]
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
