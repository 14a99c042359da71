"""The tuning loop: ask the search for a batch, evaluate it, record it, tell the search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from ecornn.schedules import generation
from ecornn.tune.choose import Environment
from ecornn.tune.log import RESERVED, Journal
from ecornn.tune.pool import COMPARED, ProcessEvaluator
from ecornn.tune.proposing import Proposals
from ecornn.tune.record import Choice, Finish, Outcome, Reason, Start, Trial
from ecornn.tune.space import Candidate

AHEAD = 0.25  # of all trials: pending while more are proposed
OVERHEAD, WARM = 0.5, 3  # of a comparison: seconds, and runs of each finalist before its samples
FINALISTS = 3  # fastest of the search, measured once more together with the default
# Stop early once, at this confidence, fewer than RATE of further trials would be faster by GAIN.
CONFIDENCE, RATE, GAIN = 0.95, 0.05, 0.01


@dataclass(frozen=True)
class Settings:
    """The options of a run."""

    trials: int  # of the search, in all
    seed: int
    time_limit: float | None = None  # seconds
    batch: int = 8  # candidates between two trainings of the model
    early_stop: bool = False  # end once more trials are unlikely to help
    started: float | None = None  # when it began or went on, by ``time.monotonic``; None: with :meth:`Tuner.run`


@dataclass(frozen=True)
class Progress:
    """The state of a run: ``done`` of ``total`` trials, the latest one, and the best so far."""

    done: int
    total: int
    trial: Trial
    best: Choice | None
    best_us: float | None  # µs per step
    default_us: float | None = None  # of the untuned default, None until it has run
    left_s: float | None = None  # that the search takes at most, by its pace and the time limit; None: no pace yet


class Tuner:
    """One run. ``report`` is called after every trial, and ``stage`` with words that say what comes now."""

    def __init__(self, search: Proposals, evaluator: ProcessEvaluator, journal: Journal, settings: Settings,
                 environment: Environment, report: Callable[[Progress], None] = lambda _: None,
                 stage: Callable[[str], None] = lambda _: None) -> None:
        self.search, self.evaluator, self.journal = search, evaluator, journal
        self.settings, self.environment = settings, environment
        self.report, self.stage = report, stage
        self.space, self.task = search.space, search.space.task
        self.best: Candidate | None = None
        self.best_us: float | None = None
        self.without_gain = 0  # trials since the last one that was faster by more than GAIN

    def run(self) -> Finish:
        """Tunes to the end and returns the finish record, which is in the log by then, as every trial that was done is
        wherever this is stopped. Trials that the journal already has are not made again."""
        started = self.settings.started
        self.begin = (time.monotonic() if started is None else started) - self.journal.seconds
        for old in self.journal.search:
            self.learn(Candidate.of(old.schedule, old.config), old.times.median if old.times else None)
        if not self.journal.search:
            self.journal.add(Start(
                run=self.journal.run, workload=self.task.workload, device=self.task.device,
                schedules={s.name: s.revision for s in self.space.schedules.values()},
                trials=self.settings.trials, seed=self.settings.seed, **structs.asdict(self.environment)))
        self.stage("building and measuring candidates")
        reason = self.loop()
        self.evaluator.drop()
        return self.conclude(reason)

    def elapsed(self) -> float:
        """Seconds of this run, earlier sessions included."""
        return time.monotonic() - self.begin

    def left(self, reserved: float = 0.0) -> float | None:
        """Seconds until ``reserved`` seconds before the time limit; None without one."""
        limit = self.settings.time_limit
        return None if limit is None else max(0.0, limit - self.elapsed() - min(reserved, RESERVED * limit))

    def for_search(self) -> float | None:
        """Seconds until the search must end, so that the comparison after it is within the time limit, too."""
        sequence = (self.best_us or 0.0) * 1e-6 * self.task.workload.seq
        return self.left(OVERHEAD + (COMPARED + WARM) * (FINALISTS + 1) * sequence)

    def expected(self, made: int, seconds: float) -> float | None:
        """Seconds until the search has ended at the latest, where ``made`` trials took ``seconds``; None: unknown."""
        pace = (self.settings.trials - len(self.search.tried)) * seconds / made if made else None
        return min((one for one in (pace, self.for_search()) if one is not None), default=None)

    def loop(self) -> Reason:
        """Searches; returns why it ended. Up to ``AHEAD`` of all trials are proposed before the last are done, so that
        no process waits and most are proposed with something learnt. What is pending at the end is given up."""
        given = prepared = self.settings.trials <= len(self.search.first)  # nothing will be ranked
        ahead = self.evaluator.spare if given else min(self.evaluator.spare, int(AHEAD * self.settings.trials))
        default, known, began = self.space.defaults()[0], len(self.search.tried), time.monotonic()
        while True:
            if self.for_search() == 0 and self.search.tried:
                return "time"
            if self.settings.early_stop and self.without_gain >= stop_after():
                return "converged"
            left = self.settings.trials - len(self.search.tried)
            if left <= 0:
                return "trials"
            while self.evaluator.pending <= ahead:
                # Idle processes build more than what is left, and the last trials are those that are done first: one
                # build may take as long as ten others, for which no search should wait.
                most = max(left - self.evaluator.pending, 0 if given else self.evaluator.idle)
                batch = self.search.ask(min(self.batch(ahead), most)) if most > 0 else []
                if not batch:
                    break
                self.evaluator.submit(batch, self.best_us)
            if not self.evaluator.pending:
                return "space"
            if not prepared:  # the first candidates are being built
                self.search.prepare()
                prepared = True
            try:  # the first result is worth waiting for, whatever the limit
                candidate, outcome = self.evaluator.next(self.for_search() if self.best else None)
            except TimeoutError:
                return "time"
            self.learn(candidate, outcome.times.median if outcome.times else None)
            trial = self.record(candidate, outcome, "search")
            self.report(Progress(len(self.search.tried), self.settings.trials, trial, choice(self.best), self.best_us,
                                 self.search.tried.get(default),
                                 self.expected(len(self.search.tried) - known, time.monotonic() - began)))

    def batch(self, ahead: int) -> int:
        """The number of candidates to propose next. Beside measurements known ones are built first, since drawing takes
        a scan of the space; otherwise the default, alone, so that its time is seen soon."""
        if ahead:
            return self.search.waiting() or self.settings.batch
        return self.settings.batch if self.search.tried else 1

    def learn(self, candidate: Candidate, us: float | None) -> None:
        """Tells the search the time of a candidate, in µs per step (None: it failed), and keeps the best."""
        self.search.tell(candidate, us)
        gained = us is not None and (self.best_us is None or us < self.best_us * (1 - GAIN))
        self.without_gain = 0 if gained else self.without_gain + 1
        if us is not None and (self.best_us is None or us < self.best_us):
            self.best, self.best_us = candidate, us

    def record(self, candidate: Candidate, outcome: Outcome, stage: str) -> Trial:
        trial = Trial(
            run=self.journal.run, index=len(self.journal.trials), stage=stage, workload=self.task.workload,
            device=self.task.device, schedule=candidate.schedule, config=candidate.config, seed=self.settings.seed,
            revision=self.space.schedules[candidate.schedule].revision, generation=generation(),
            seconds=round(self.elapsed(), 3), **structs.asdict(self.environment), **structs.asdict(outcome))
        self.journal.add(trial)
        return trial

    def conclude(self, reason: Reason) -> Finish:
        """Measures the fastest of many noisy times and the default once more, in turns, and finishes the run."""
        default = self.space.defaults()[0]
        times = {c: t for c, t in self.search.tried.items() if t is not None}
        ranked = sorted(times, key=lambda c: times[c])
        finalists = ranked[:FINALISTS] + [c for c in ranked[FINALISTS:] if c == default]
        times = {c: times[c] for c in finalists}
        self.stage(f"comparing the fastest {len(finalists)} in turns")
        outcomes = self.evaluator.compare(finalists, self.left()) if len(finalists) > 1 else []
        for candidate, outcome in zip(finalists, outcomes, strict=False):  # of all, or of none
            self.record(candidate, outcome, "final")
            if outcome.times:
                times[candidate] = outcome.times.median
            else:
                del times[candidate]
        best = min(times, key=lambda c: times[c], default=None)
        finish = Finish(
            run=self.journal.run, reason=reason, trials=len(self.search.tried), seconds=round(self.elapsed(), 3),
            best=choice(best), best_us=times[best] if best else None, default=choice(default),
            default_us=times.get(default))
        self.journal.add(finish)
        return finish


def stop_after() -> int:
    """Trials in a row without a gain after which a search has converged: were a share ``RATE`` of further ones faster
    by more than ``GAIN``, so many would have a probability of at most 1 - ``CONFIDENCE``. The search proposes the most
    promising candidates first, so the bound is on the safe side for those still to come."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - RATE))


def choice(candidate: Candidate | None) -> Choice | None:
    return Choice(candidate.schedule, candidate.config) if candidate else None
