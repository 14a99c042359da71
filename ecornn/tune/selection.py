"""Which lines of logs are worth showing, sharing and keeping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from ecornn.device import Device
from ecornn.schedules.base import Value
from ecornn.targets import KNOWN
from ecornn.tune.log import Line, Log
from ecornn.tune.lookup import best_evidence, drift
from ecornn.tune.record import Finish, Start, Trial
from ecornn.tune.space import Candidate
from ecornn.tune.tolerance import proven
from ecornn.workload import Workload

Subject = tuple[Workload, Device]  # the device as its identity


def best_lines(log: Log, revisions: Mapping[str, int]) -> list[Line]:
    """The trial of each workload and device that look-up would choose, were all of them able to run: the least time to
    expect, where ``revisions`` are the present ones of the schedules. Not a stale one whose configuration has failed
    since."""
    gone = failing(log.lines, revisions)
    found = []
    for subject, candidates in by_subject(log.lines).items():
        drifts = drift([line for same in candidates.values() for line in same])
        evidence = {c: best_evidence(same, revisions.get(c.schedule), drifts) for c, same in candidates.items()}
        usable = [one for c, one in evidence.items() if not one.stale or c not in gone.get(subject, {})]
        if usable:
            found.append(min(usable, key=lambda one: one.order).line)
    return found


def by_subject(lines: Sequence[Line]) -> dict[Subject, dict[Candidate, list[Line]]]:
    """The trials whose time counts, by workload and device, then by configuration."""
    found: dict[Subject, dict[Candidate, list[Line]]] = {}
    for line in lines:
        trial = line.record
        if isinstance(trial, Trial) and proven(trial):
            found.setdefault((trial.workload, trial.device.identity), {}).setdefault(now(trial), []).append(line)
    return found


def now(trial: Trial) -> Candidate:
    """What a trial tried, with the knobs that its schedule has got since then, as look-up reads it."""
    return Candidate.of(trial.schedule, {**before(trial.schedule), **trial.config})


@cache
def before(name: str) -> dict[str, Value]:
    """What was done before a schedule had its later knobs. Some layer is asked about: it is the same for all."""
    from ecornn.cells import get
    from ecornn.schedules import all_schedules
    from ecornn.task import make_task
    from ecornn.tune.quick_tvm import import_tvm

    schedule = all_schedules().get(name)
    if schedule is None:
        return {}
    import_tvm()
    device = KNOWN["sm_90a"] if schedule.kind == "cuda" else Device("llvm", "generic", "any", 1)
    knobs = schedule.knobs(make_task(get("lstm"), Workload("lstm", 64, 64), device))
    return {knob.name: knob.before for knob in knobs if knob.before is not None}


def failing(lines: Sequence[Line], revisions: Mapping[str, int]) -> dict[Subject, dict[Candidate, list[Line]]]:
    """The failures at the present revision of each schedule."""
    found: dict[Subject, dict[Candidate, list[Line]]] = {}
    for line in lines:
        trial = line.record
        if isinstance(trial, Trial) and trial.error is not None and trial.revision == revisions.get(trial.schedule):
            found.setdefault((trial.workload, trial.device.identity), {}).setdefault(now(trial), []).append(line)
    return found


def under_way(lines: Sequence[Line]) -> set[str]:
    """The runs with a start and no finish that knows all their trials: a finished run goes on where it gets more trials
    or time. Trials without a start are what `export --best` took of their run."""
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
    return {run for run in started if not any(ends(one, trials.get(run, ())) for one in finishes.get(run, ()))}


def ends(finish: Finish, trials: Sequence[Trial]) -> bool:
    """Whether a run's finish came after these trials, which may be fewer than it counts: a pruned run goes on, too."""
    tried = {Candidate.of(trial.schedule, trial.config) for trial in trials}
    return len(tried) <= finish.trials and all(trial.time <= finish.time for trial in trials)


def worth_keeping(lines: Sequence[Line], revisions: Mapping[str, int], keep: int) -> list[Line]:
    """What look-up and the cost model could use, in the order of ``lines``.

    Of each workload and device every record of the ``keep`` fastest configurations; a stale one only
    where the configuration is not known at its schedule's present revision (``revisions``), with the failures that say
    that it works no more. Of runs that were started and are not finished, everything; of finished ones, their start
    and finish where a trial stays.
    """
    going = under_way(lines)
    kept: set[int] = set()
    runs: set[str] = set()
    gone = failing(lines, revisions)
    for subject, candidates in by_subject(lines).items():
        drifts = drift([line for same in candidates.values() for line in same])
        current = {c: [line for line in same if line.record.revision == revisions.get(c.schedule)]  # type: ignore[union-attr]
                   or same for c, same in candidates.items()}
        ranks = {c: best_evidence(same, revisions.get(c.schedule), drifts).order for c, same in candidates.items()}
        fastest = sorted(current, key=lambda c: ranks[c])[:keep]
        for candidate in fastest:
            stay = current[candidate]
            if stay[0].record.revision != revisions.get(candidate.schedule):  # type: ignore[union-attr]
                stay = [*stay, *gone.get(subject, {}).get(candidate, [])]
            kept.update(id(line) for line in stay)
            runs.update(line.record.run for line in stay)
    return [line for line in lines if id(line) in kept or line.record.run in going
            or (line.record.run in runs and not isinstance(line.record, Trial))]
