"""Lines of logs worth showing, sharing and keeping; several logs as one; a check that records still hold here."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from ecornn.cells import BUILTIN, get
from ecornn.device import Device
from ecornn.errors import EcornnError
from ecornn.quick_tvm import import_tvm
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Value
from ecornn.targets import KNOWN
from ecornn.task import make_task
from ecornn.tune.log import Line, Log, TrialLine, is_trial
from ecornn.tune.lookup import HERE, Evidence, best_evidence, drift, how_far, unfit, up_to_date
from ecornn.tune.pool import ProcessEvaluator
from ecornn.tune.proposing import Question, answers
from ecornn.tune.record import AnyRecord, Finish, Outcome, Start, Trial, proven
from ecornn.tune.session import Session
from ecornn.tune.space import Candidate
from ecornn.workload import Workload

Subject = tuple[Workload, Device]  # the device as its identity
KINDS = {Start: 0, Trial: 1, Finish: 2}
AT_ONCE = 8  # builds, while one is measured


def best_lines(log: Log, revisions: Mapping[str, int]) -> list[TrialLine]:
    """The trial of each workload and device that look-up would choose, were all of them able to run: the least time to
    expect, but not a stale one whose configuration has failed since. ``revisions``: present ones of the schedules."""
    gone = failing(log.lines, revisions)
    best = []
    for subject, candidates in by_subject(log.lines).items():
        usable = [one for c, one in evidence(candidates, revisions).items()
                  if not one.stale or c not in gone.get(subject, {})]
        if usable:
            best.append(min(usable, key=lambda one: one.order).line)
    return best


def evidence(candidates: Mapping[Candidate, Sequence[TrialLine]],
             revisions: Mapping[str, int]) -> dict[Candidate, Evidence]:
    drifts = drift([line for same in candidates.values() for line in same])
    return {c: best_evidence(same, revisions.get(c.schedule), drifts) for c, same in candidates.items()}


def by_subject(lines: Iterable[Line]) -> dict[Subject, dict[Candidate, list[TrialLine]]]:
    """The trials whose time counts, by workload and device, then by configuration."""
    return _grouped(line for line in filter(is_trial, lines) if proven(line.record))


def failing(lines: Iterable[Line], revisions: Mapping[str, int]) -> dict[Subject, dict[Candidate, list[TrialLine]]]:
    """The failures at the present revision of each schedule, by workload and device, then by configuration."""
    return _grouped(line for line in filter(is_trial, lines) if line.record.error is not None
                    and line.record.revision == revisions.get(line.record.schedule))


def _grouped(lines: Iterable[TrialLine]) -> dict[Subject, dict[Candidate, list[TrialLine]]]:
    """The lines by workload and device, then by configuration, with the knobs that schedules have got since then."""
    grouped: dict[Subject, dict[Candidate, list[TrialLine]]] = {}
    for line in lines:
        trial = line.record
        candidate = Candidate.of(trial.schedule, {**before(trial.schedule), **trial.config})
        grouped.setdefault((trial.workload, trial.device.identity), {}).setdefault(candidate, []).append(line)
    return grouped


@cache
def before(name: str) -> dict[str, Value]:
    """The values of a schedule's later knobs that say what was done before it had them: the same for all layers."""
    schedule = all_schedules().get(name)
    if schedule is None:
        return {}
    import_tvm()
    device = KNOWN["sm_90a"] if schedule.kind == "cuda" else Device("llvm", "generic", "any", 1)
    knobs = schedule.knobs(make_task(get("lstm"), Workload("lstm", 64, 64), device))
    return {knob.name: knob.before for knob in knobs if knob.before is not None}


def under_way(lines: Sequence[Line]) -> set[str]:
    """The runs with a start and no finish that knows all their trials: a finished run may get more trials or time."""
    started: set[str] = set()
    finishes: dict[str, list[Finish]] = {}
    trials: dict[str, list[Trial]] = {}
    for line in lines:
        record = line.record
        if isinstance(record, Start):
            started.add(record.run)
        elif isinstance(record, Finish):
            finishes.setdefault(record.run, []).append(record)
        elif record.stage == "search":
            trials.setdefault(record.run, []).append(record)

    def ends(finish: Finish) -> bool:  # came after all trials, which may be fewer than it counts: a pruned run goes on
        of = trials.get(finish.run, [])
        tried = {Candidate.of(trial.schedule, trial.config) for trial in of}
        return len(tried) <= finish.trials and all(trial.time <= finish.time for trial in of)

    return {run for run in started if not any(map(ends, finishes.get(run, ())))}


def worth_keeping(lines: Sequence[Line], revisions: Mapping[str, int], keep: int) -> list[Line]:
    """The lines that look-up and the cost model could use, in order: for each workload and device those of the ``keep``
    fastest configurations; stale ones only where there are none of the present ``revisions``, with failures since; of
    unfinished runs everything; of finished ones start and finish, where a trial stays."""
    going = under_way(lines)
    staying: set[int] = set()
    runs: set[str] = set()
    gone = failing(lines, revisions)
    for subject, candidates in by_subject(lines).items():
        current = {c: [line for line in same if line.record.revision == revisions.get(c.schedule)] or same
                   for c, same in candidates.items()}
        ranks = {c: one.order for c, one in evidence(candidates, revisions).items()}
        for candidate in sorted(current, key=lambda c: ranks[c])[:keep]:
            stay = current[candidate]
            if stay[0].record.revision != revisions.get(candidate.schedule):
                stay = [*stay, *gone.get(subject, {}).get(candidate, [])]
            staying.update(id(line) for line in stay)
            runs.update(line.record.run for line in stay)
    return [line for line in lines if id(line) in staying or line.record.run in going
            or (line.record.run in runs and not isinstance(line.record, Trial))]


@dataclass
class Merged:
    """The lines of a union, in a log's order, and a text for each line that contradicts one of them."""

    lines: list[Line] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[AnyRecord]:
        return [line.record for line in self.lines]


def merge(lines: Iterable[Line]) -> Merged:
    """The union of the lines, run by run. Of two lines for the same event the one that promises less is kept: a
    failure, or the longer time. So merging is commutative, associative and idempotent."""
    events: dict[bytes, Line] = {}
    merged = Merged()
    for line in lines:
        key = event(line.record)
        rival = events.setdefault(key, line)
        if rival is line:
            continue
        winner, loser = sorted((rival, line), key=lambda one: promise(one.record))
        events[key] = winner
        if rival.record != line.record:  # 0.0 == -0.0, which are not written alike
            merged.conflicts.append(f"{loser.full_place}: conflicts with {winner.full_place}, which promises less")
    merged.lines = sorted(events.values(), key=lambda one: order(one.record))
    return merged


def event(record: AnyRecord) -> bytes:
    """A key of what a record is about, without what came of it; ``seconds`` tells apart processes of one run."""
    fields: tuple[Any, ...] = (KINDS[type(record)], record.run, record.time)
    if not isinstance(record, Start):
        fields += (record.seconds,)
    if isinstance(record, Trial):
        fields += (record.index, record.stage, record.workload, record.device, record.schedule, record.revision,
                   sorted(record.config.items()), record.seed)
    return msgspec.msgpack.encode(fields)


def promise(record: AnyRecord) -> tuple[float, bytes]:
    """A key for sorting: the speed that a record promises, and its text, which tells equal ones apart."""
    speed = 0.0
    if isinstance(record, Trial) and record.times is not None:
        speed = 1.0 / record.times.median
    elif isinstance(record, Finish) and record.best_us is not None:
        speed = 1.0 / record.best_us
    return speed, msgspec.json.encode(record)


def order(record: AnyRecord) -> tuple[str, int, int, str, bytes]:
    """A key for sorting that keeps runs together: start, trials by number, finish."""
    index = record.index if isinstance(record, Trial) else 0
    return record.run, KINDS[type(record)], index, record.time, msgspec.json.encode(record)


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
    """Up to ``count`` records that the device can measure, drawn at random, and the number left out for each reason."""
    left: Counter[str] = Counter()
    fit: list[TrialLine] = []
    for line in random.Random(seed).sample(lines, len(lines)):
        distance, reason = how_far(line.record, line.record.workload, device), None
        if distance is None or distance[0] != HERE:
            reason = "of another device"
        elif line.record.workload.cell not in BUILTIN:
            reason = "of cells that are not built in or have options"
        elif len(fit) < count:  # whether a configuration still fits takes a tenth of a second
            reason = incomparable(line.record, device)
            fit += [line] if reason is None else []
        if reason is not None:
            left[reason] += 1
    return sorted(fit, key=lambda line: (line.path, line.number)), left


def incomparable(trial: Trial, device: Device) -> str | None:
    """The reason why a record's time says nothing of one measured on the device now; None: they can be compared."""
    task = make_task(BUILTIN[trial.workload.cell], trial.workload, device)
    schedule = all_schedules().get(trial.schedule)
    if schedule is None or schedule.kind != device.kind or schedule.serves(task):
        return "with schedules that do not serve this layer"
    if trial.revision != schedule.revision:
        return "stale (another revision of their schedule)"
    return unfit(schedule, task, up_to_date(trial, schedule, task).config)


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
