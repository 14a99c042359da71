"""Tuning one workload after the other with processes that stay warm."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from ecornn.cells import Cell
from ecornn.device import Device
from ecornn.errors import DeviceError, ScheduleError
from ecornn.tune.pool import Entries, Pool
from ecornn.workload import Workload, declared, rounded

if TYPE_CHECKING:
    from ecornn.tune.environment import Environment
    from ecornn.tune.journal import Journal
    from ecornn.tune.record import Choice, Finish
    from ecornn.tune.remote import Tracker
    from ecornn.tune.space import ConfigSpace
    from ecornn.tune.tuner import Progress

TRIALS = {"llvm": 48, "cuda": 128}
TIMEOUT = 60.0  # seconds


@dataclass(frozen=True)
class Result:
    """What a run found.

    Attributes
    ----------
    finish : the run's last record: best and default with µs per step
    log : the file with every trial
    resumed : trials that the log already had
    fresh : trials made now; 0 where the run was finished before
    failures : reason -> number of trials that failed for it, its first 60 characters
    noisy : trials whose time did not settle
    """

    workload: Workload
    device: Device
    finish: Finish
    log: Path
    resumed: int
    fresh: int
    failures: dict[str, int]
    noisy: int = 0

    @property
    def best(self) -> Choice | None:
        """Schedule and knobs of the fastest, or None where every trial failed."""
        return self.finish.best


class Session:
    """Tunes for one device; a context manager around the worker processes, which are started by the
    first run that has something to do. Several threads may tune, each a workload: one builds while another's
    candidates are measured. Where a thread is still at work at the end of the context, its run is stopped.

    Parameters
    ----------
    target : ``cuda`` or ``cpu``; default: the GPU if there is one. A :class:`~ecornn.device.Device` with fewer
        multiprocessors than the GPU: for layers that share it with others, see ``overlap`` of ``ecornn.compile``
    timeout : seconds that one build, and one measurement, may take
    seed : of the searches and of the data
    tracker : measure on the servers that are registered there, not on this machine
    entries : functions of the worker processes, for tests

    Raises :class:`~ecornn.errors.DeviceError` without the device.
    """

    def __init__(self, target: str | Device | None = None, *, timeout: float = TIMEOUT, seed: int = 0,
                 tracker: Tracker | None = None, entries: Entries | None = None) -> None:
        from ecornn.tune.process import MARK

        if os.environ.get(MARK):
            raise ScheduleError("tune() was called while a worker process imported the script with the "
                                "cell; put the call under `if __name__ == \"__main__\":`")
        self.timeout, self.seed, self.tracker, self.entries = timeout, seed, tracker, entries or Entries()
        self._pool: Pool | None = None
        self._environment: Environment | None = None
        self._lock = threading.RLock()
        if tracker is None:
            self.device = present(target)
        else:
            self.device, self._environment = tracker.describe(target)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    @property
    def pool(self) -> Pool:
        """The worker processes, started at the first use."""
        with self._lock:
            if self._pool is None:
                quiet = self.device.kind == "llvm"
                self._pool = (self.tracker.pool(self.entries, quiet, self.device) if self.tracker is not None
                              else Pool(self.entries, quiet=quiet, poisoned=not quiet))
            return self._pool

    @property
    def environment(self) -> Environment:
        """What records say of the machine that measures."""
        with self._lock:
            if self._environment is None:
                from ecornn.tune.environment import environment

                self._environment = environment(self.device)
            return self._environment

    def tune(self, cell: str | Cell, *, hidden: int, input: int | None = None, batch: int = 20, seq: int = 300,
             dtype: str | None = None, weights: str | None = None, precision: str | None = None,
             trials: int | None = None, time_limit: float | None = None, resume: bool = True,
             early_stop: bool = True, output: Path | None = None, schedule: str | None = None,
             only: Sequence[Choice] | None = None,
             report: Callable[[Progress], None] = lambda _: None,
             begin: Callable[[ConfigSpace, int], None] = lambda *_: None) -> Result:
        """Searches schedules and knobs for one layer; see :func:`ecornn.tune.tune`. With ``only`` it tries these
        and no others."""
        from ecornn.tune import evaluate, folders, journal, preparing, tuner
        from ecornn.tune.cell_spec import load_cell, spec_of
        from ecornn.tune.choose import candidates, serving_or_raise

        found = load_cell(cell) if isinstance(cell, str) else cell
        spec = cell if isinstance(cell, str) else spec_of(cell)
        device = self.device
        kind = dtype or ("float32" if device.kind == "llvm" or precision else "bfloat16")
        workload = Workload(found.identity(), hidden, hidden if input is None else input, batch, seq,
                            kind, rounded(weights, kind), declared(precision))
        wanted = len(only) if only is not None else trials or TRIALS[device.kind]
        path = output or folders.log_path(workload, device)
        run = journal.Journal.open(
            path, journal.digest_of(workload, device, candidates(device, schedule), self.seed), resume)
        before = len(run.search)
        if run.finish is not None and run.finished(wanted, time_limit, early_stop):
            return result(run, workload, device, before)
        pool = self.pool  # its processes start while this one looks at the cell

        from ecornn.schedules import all_schedules
        from ecornn.task import make_task
        from ecornn.tune.kindred import lent
        from ecornn.tune.model import CostModel
        from ecornn.tune.search import Search
        from ecornn.tune.space import Candidate, ConfigSpace
        from ecornn.tune.transfer import seeds, warm

        task = make_task(found, workload, device)
        asked = preparing.Question(spec, workload, device, schedule, self.seed)
        # Where a workload takes a second, the search for its defaults would be most of what this process does.
        given = preparing.defaults(pool, asked) if only is not None else None
        schedules = serving_or_raise(task, schedule) if given is None else [all_schedules()[c.schedule] for c in given]
        space = ConfigSpace(task, schedules, given)
        if only is None:  # before anything is built: all but the first candidates are drawn from it
            space.scans = preparing.scans(pool, asked, space)
        with evaluate.ProcessEvaluator(task, spec, preparing.answers(pool, asked), pool, limit=self.timeout,
                                       seed=self.seed) as evaluator:
            model = CostModel(self.seed)
            begin(space, before)
            if only is None:
                records = folders.read_all()
                if others := lent(task, records):
                    records.extend(others[1])
                warm(model, found, task, schedules, records, run.run)
                search = Search(space, model, self.seed, known=seeds(task, schedules, records))
            else:
                known = [Candidate.of(c.schedule, c.config) for c in only if c.schedule in space.schedules]
                search = Search(space, model, self.seed, known=known, defaults=False)
                wanted = len(search.first)
            # Where builds go on meanwhile, a small batch is proposed with the latest results in sight. Elsewhere it
            # keeps the builders busy, and no longer than a user would wait for its first time.
            most = min(16, 4 * len(pool.builders)) if pool.quiet else 8
            settings = tuner.Settings(wanted, self.seed, time_limit, max(4, min(most, wanted // 6)), early_stop)
            tuner.Tuner(search, evaluator, run, settings, self.environment, report).run()
        return result(run, workload, device, before)


def result(run: Journal, workload: Workload, device: Device, before: int) -> Result:
    """Of a run that is finished, and had ``before`` trials when it began."""
    assert run.finish is not None
    failures = Counter(t.error.splitlines()[0][:60] for t in run.search if t.error)
    return Result(workload, device, run.finish, run.path, before, len(run.search) - before, dict(failures),
                  sum(t.noisy for t in run.search))


def present(target: str | Device | None) -> Device:
    """The device to measure on, as it is and not as the largest product of its architecture; with fewer multiprocessors
    where ``target`` is a device that has fewer: a share of a GPU, as sequences that run at the same time have.

    Raises :class:`~ecornn.errors.DeviceError` where it is not in this machine.
    """
    from ecornn.device import resolve
    from ecornn.tune.choose import default_target

    device = resolve(target if target is not None else default_target())
    if device.kind == "llvm":
        return device
    here = resolve("cuda")
    if here.arch != device.arch:
        raise DeviceError("target", target, f"'cpu' or 'cuda' ({here.arch}): tuning measures, so the "
                          "device must be in this machine, or behind a tracker")
    return structs.replace(here, cores=min(here.cores, target.cores)) if isinstance(target, Device) else here
