"""Which lines of logs are worth showing, sharing and keeping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecornn.device import Device
from ecornn.tune.log import Line, Log
from ecornn.tune.record import Finish, Trial
from ecornn.tune.space import Candidate
from ecornn.tune.tolerance import proven
from ecornn.workload import Workload

Subject = tuple[Workload, Device]


def best_lines(log: Log, revisions: Mapping[str, int]) -> list[Line]:
    """The fastest trial of each workload and device: of its schedule's present revision (``revisions``) if there is
    one, of the final comparison if there was one. Not a stale one whose configuration has failed since."""
    best: dict[Subject, tuple[tuple[bool, bool, float], Line]] = {}
    gone = failing(log.lines, revisions)
    for line in log.lines:
        trial = line.record
        if isinstance(trial, Trial) and proven(trial):
            assert trial.times is not None
            key, stale = (trial.workload, trial.device), trial.revision != revisions.get(trial.schedule)
            rank = stale, trial.stage != "final", trial.times.median
            if stale and Candidate.of(trial.schedule, trial.config) in gone.get(key, {}):
                continue
            if key not in best or rank < best[key][0]:
                best[key] = rank, line
    return [line for _, line in best.values()]


def failing(lines: Sequence[Line], revisions: Mapping[str, int]) -> dict[Subject, dict[Candidate, list[Line]]]:
    """The failures at the present revision of each schedule."""
    found: dict[Subject, dict[Candidate, list[Line]]] = {}
    for line in lines:
        trial = line.record
        if isinstance(trial, Trial) and trial.error is not None and trial.revision == revisions.get(trial.schedule):
            candidate = Candidate.of(trial.schedule, trial.config)
            found.setdefault((trial.workload, trial.device), {}).setdefault(candidate, []).append(line)
    return found


def worth_keeping(lines: Sequence[Line], revisions: Mapping[str, int], keep: int) -> list[Line]:
    """What look-up and the cost model could use, in the order of ``lines``.

    Of each workload and device every record of the ``keep`` fastest configurations; a stale one only
    where the configuration is not known at its schedule's present revision (``revisions``), with the failures that say
    that it works no more. Of runs that are not finished, everything; of finished ones, their start and finish where a
    trial stays.
    """
    finished = {line.record.run for line in lines if isinstance(line.record, Finish)}
    of: dict[Subject, dict[Candidate, list[Line]]] = {}
    for line in lines:
        trial = line.record
        if isinstance(trial, Trial) and proven(trial):
            candidate = Candidate.of(trial.schedule, trial.config)
            of.setdefault((trial.workload, trial.device), {}).setdefault(candidate, []).append(line)
    kept: set[int] = set()
    runs: set[str] = set()
    gone = failing(lines, revisions)
    for subject, candidates in of.items():
        current = {c: [line for line in same if line.record.revision == revisions.get(c.schedule)]  # type: ignore[union-attr]
                   or same for c, same in candidates.items()}
        fastest = sorted(current, key=lambda c: min(_median(line) for line in current[c]))[:keep]
        for candidate in fastest:
            stay = current[candidate]
            if stay[0].record.revision != revisions.get(candidate.schedule):  # type: ignore[union-attr]
                stay = [*stay, *gone.get(subject, {}).get(candidate, [])]
            kept.update(id(line) for line in stay)
            runs.update(line.record.run for line in stay)
    return [line for line in lines if id(line) in kept or line.record.run not in finished
            or (line.record.run in runs and not isinstance(line.record, Trial))]


def _median(line: Line) -> float:
    trial = line.record
    assert isinstance(trial, Trial) and trial.times is not None
    return trial.times.median
