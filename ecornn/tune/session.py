"""Tuning one workload after the other with processes that stay warm."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ecornn.boundary import public
from ecornn.build.link import find_compiler
from ecornn.build.nvcc import chosen_nvcc
from ecornn.cells import Cell
from ecornn.cells.naming import importing, spec_of
from ecornn.device import Device
from ecornn.errors import ArgumentError, ScheduleError
from ecornn.interrupts import safe_interrupts
from ecornn.layer_spec import LayerSpec, usual_dtype
from ecornn.notebook import beside, in_notebook, table
from ecornn.quick_tvm import require_tvm
from ecornn.schedules import all_schedules, config_text
from ecornn.task import make_task
from ecornn.tune import choose, loggers, proposing
from ecornn.tune.choose import Environment, present
from ecornn.tune.log import Gain, Journal, digest_of, gain_of, log_path, words
from ecornn.tune.pool import Closed, Entries, Pool, ProcessEvaluator
from ecornn.tune.record import Choice, Finish, first_line
from ecornn.tune.remote import Tracker
from ecornn.tune.search import CostModel, Search, require_xgboost
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.tune.tuner import Progress, Settings, Tuner
from ecornn.worker import MARK
from ecornn.workload import BATCH, SEQ, Workload

TRIALS = {"llvm": 48, "cuda": 128}
TIMEOUT = 60.0  # seconds
FORWARD = 0.5  # of the time for a layer that trains, at most, if backward needs the rest


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes
    ----------
    finish : the run's last record: best and default with µs per step
    log : the file with every trial
    resumed : number of trials that the log already had
    fresh : number of trials made now; 0 where the run was finished before
    failures : reason, in its first 60 characters -> number of trials that failed for it
    noisy : number of timings that were noisy, those of the final comparison among them
    gain : how much faster than the default the best is, and how surely; None without times of both
    curve : number, µs a step and the best until then of each trial that ran
    backward : the result for the recurrence of the adjoint, where that was tuned, too"""

    workload: Workload
    device: Device
    finish: Finish
    log: Path
    resumed: int
    fresh: int
    failures: dict[str, int]
    noisy: int = 0
    gain: Gain | None = None
    curve: tuple[tuple[int, float, float], ...] = field(default=(), repr=False)
    backward: Result | None = None

    @property
    def best(self) -> Choice | None:
        """Schedule and knobs of the fastest, or None where every trial failed."""
        return self.finish.best

    def _repr_html_(self) -> str:
        from ecornn import svg

        finish, rows = self.finish, [("layer", self.workload), ("device", f"{self.device.name} ({self.device.arch})")]
        if finish.best is not None and finish.best_us is not None:
            rows += [("best", f"{finish.best.schedule} {config_text(finish.best.config)}"),
                     ("time", f"{finish.best_us:.4g} µs a step, {finish.best_us * self.workload.seq / 1e3:.4g} ms for "
                              f"T={self.workload.seq}")]
        if self.gain is not None and finish.default_us is not None and finish.best != finish.default:
            rows.append(("gain", words(self.gain, finish.default_us)))
        rows += [("trials", f"{finish.trials} in {finish.seconds:.0f} s"),
                 *(("failed", f"{count}: {reason}") for reason, count in self.failures.items()), ("log", self.log)]
        own = beside(table(rows), svg.curve(self.curve, finish.default_us) if self.curve else "")
        return own + (self.backward._repr_html_() if self.backward is not None else "")


class Session:
    """Tunes for one device; a context manager around the worker processes, which are started by the first run that has
    something to do. Several threads may tune, each a workload: one builds while another's candidates are measured.
    Where a thread is still at work at the end of the context, its run is stopped.

    Parameters
    ----------
    target : ``cuda`` or ``cpu``; default: the GPU if there is one, or what the servers have. A
        :class:`~ecornn.device.Device` with fewer multiprocessors than the GPU: for layers that share it with others,
        see ``overlap`` of ``ecornn.compile``
    timeout : seconds that one build, and one measurement, may take
    seed : of the searches and of the data
    tracker : measure on the servers that are registered there, not on this machine
    entries : functions of the worker processes, for tests

    Raises :class:`~ecornn.errors.DeviceError` without the device."""

    @public
    def __init__(self, target: str | Device | None = None, *, timeout: float = TIMEOUT, seed: int = 0,
                 tracker: Tracker | None = None, entries: Entries | None = None) -> None:
        require_tvm()
        if os.environ.get(MARK) or importing():
            raise ScheduleError("tune() was called while the script with the cell was imported again; put the call "
                                "under `if __name__ == \"__main__\":`")
        require("target", target, isinstance(target, (str, Device, type(None))), "str or Device, or None")
        require("tracker", tracker, isinstance(tracker, (Tracker, type(None))), "Tracker, or None")
        timeout, seed = seconds("timeout", timeout), whole("seed", seed, 0, 1 << 30)
        self.timeout, self.seed, self.tracker, self.entries = timeout, seed, tracker, entries or Entries()
        self._pool: Pool | None = None
        self._ended, self._lock = False, threading.RLock()
        self._environment: Environment | None = None
        if tracker is None:
            self.device = present(target)
        else:
            self.device, self._environment = tracker.describe(target)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes, and so the runs of all threads."""
        with self._lock:  # no thread starts another pool
            self._ended = True
        if self._pool is not None and not self._pool.closed:
            self._pool.close()

    @property
    def pool(self) -> Pool:
        """The worker processes, started at the first use."""
        with self._lock:
            if self._ended:
                raise Closed("the session has ended")
            if self._pool is None or self._pool.closed:  # by Ctrl-C
                quiet = self.device.kind == "llvm"
                self._pool = (self.tracker.pool(self.entries, quiet, self.device) if self.tracker is not None
                              else Pool(self.entries, quiet=quiet, poisoned=not quiet))
            return self._pool

    @property
    def environment(self) -> Environment:
        """The software and clocks of the machine that measures, as records have them."""
        with self._lock:
            if self._environment is None:
                self._environment = choose.environment(self.device)
            return self._environment

    @public
    def tune(self, cell: str | Cell, *, hidden: int, input: int | None = None, batch: int = BATCH, seq: int = SEQ,
             dtype: str | None = None, weights: str | None = None, precision: str | None = None,
             training: bool = False, trials: int | None = None, time_limit: float | None = None, resume: bool = True,
             early_stop: bool = True, output: Path | None = None, schedule: str | None = None,
             only: Sequence[Choice] | None = None, report: Callable[[Progress], None] | None = None,
             begin: Callable[[ConfigSpace, int], None] = lambda *_: None,
             logger: loggers.Logger | None = None) -> Result:
        """Searches schedules and knobs for one layer; see :func:`ecornn.tune.tune`. With ``only`` it tries these
        choices and no others."""
        layer = self.layer(cell, hidden=hidden, input=input, batch=batch, seq=seq, dtype=dtype, weights=weights,
                           precision=precision, training=training)
        options: dict[str, Any] = {} if report is None else {"report": report}
        with contextlib.ExitStack() as stack:
            if report is None and in_notebook():
                from rich.console import Console

                from ecornn.tune.meter import Meter

                shown = stack.enter_context(stack.enter_context(Meter(Console())).layer("", training))
                options = {"report": shown.report, "stage": shown.stage}
            return self.tune_layer(layer, trials=trials, time_limit=time_limit, resume=resume, early_stop=early_stop,
                                   output=output, schedule=schedule, only=only, begin=begin, logger=logger,
                                   **options)

    def layer(self, cell: str | Cell, *, dtype: str | None = None, precision: str | None = None,
              **properties: Any) -> LayerSpec:
        """The layer that :meth:`tune` would tune, in the usual data type of the device where none is given."""
        return LayerSpec(cell, dtype=dtype or usual_dtype(self.device.kind, precision), precision=precision,
                         **properties)

    @public
    @safe_interrupts()
    def tune_layer(self, layer: LayerSpec, *, time_limit: float | None = None, schedule: str | None = None,
                   only: Sequence[Choice] | None = None, **options: Any) -> Result:
        """Searches schedules and knobs for a layer, and for its backward pass where that has any. ``options`` are those
        of :meth:`tune_workload`."""
        limit = None if time_limit is None else seconds("time_limit", time_limit)

        def search(workload: Workload, time_limit: float | None, only: Sequence[Choice] | None = None) -> Result:
            return self.tune_workload(layer, workload, time_limit=time_limit, only=only, schedule=schedule, **options)

        if not layer.training or not self.tunes_backward(layer, schedule):
            return search(layer.workload, limit, only)
        forward = search(layer.workload, None if limit is None else limit * FORWARD, only)
        left = None if limit is None else max(limit * (1 - FORWARD), limit - forward.finish.seconds)
        return replace(forward, backward=search(layer.workload.adjoint, left))

    def tunes_backward(self, layer: LayerSpec, schedule: str | None = None) -> bool:
        """True where the adjoint of a layer that trains has something to search on this device. Raises, before anything
        is tried, what a search of it would raise, and where the layer cannot train."""
        whole = layer.stack.parts(layer.workload)[0].traversal
        choose.serving(make_task(layer.loaded, layer.workload, self.device, whole), schedule)
        if not any(s.backward for s in choose.candidates(self.device)):
            return False
        choose.searched(layer.workload.adjoint, self.device, schedule)
        choose.serving(make_task(layer.loaded, layer.workload.adjoint, self.device), schedule)
        return True

    @public
    def tune_workload(self, layer: LayerSpec, workload: Workload, *, trials: int | None = None,
                      time_limit: float | None = None, resume: bool = True, early_stop: bool = True,
                      output: Path | None = None, schedule: str | None = None, only: Sequence[Choice] | None = None,
                      report: Callable[[Progress], None] = lambda _: None,
                      begin: Callable[[ConfigSpace, int], None] = lambda *_: None,
                      stage: Callable[[str], None] = lambda _: None,
                      logger: loggers.Logger | None = None) -> Result:
        """Searches schedules and knobs for one entry of ``layer``: ``workload`` is its own, or that one's ``adjoint``.
        Options are those of :meth:`tune`; ``stage`` is called with words that say what comes now."""
        started = time.monotonic()
        spec = layer.cell if isinstance(layer.cell, str) else spec_of(layer.cell)
        wanted = TRIALS[self.device.kind] if trials is None else whole("trials", trials, 1, 100_000)
        wanted = wanted if only is None else 0  # a list is done once its run is: what does not fit is no trial
        limit = None if time_limit is None else seconds("time_limit", time_limit)
        require("output", output, isinstance(output, (str, Path, type(None))), "str or Path, or None")
        require("report", report, callable(report), "a function")
        require("begin", begin, callable(begin), "a function")
        require("logger", logger, logger is None or callable(getattr(logger, "log", 0)), "an object with log, or None")
        path = Path(output or log_path(workload, self.device))
        digest = digest_of(workload, self.device, choose.searched(workload, self.device, schedule), self.seed, only)
        run = Journal.open(path, digest, resume)
        before = len(run.search)

        def logged(now: Progress) -> None:
            report(now)
            if logger is not None:
                logger.log(loggers.of_trial(now, sum(trial.error is not None for trial in run.search)))

        if not run.finished(wanted, limit, early_stop):
            with run.alone():
                run = Journal.open(path, digest, resume)  # another process may have gone on until now
                before = len(run.search)
                if not run.finished(wanted, limit, early_stop):
                    settings = Settings(wanted, self.seed, limit, early_stop=early_stop, started=started)
                    self._search(layer.loaded, spec, workload, run, settings, schedule, only, logged, begin, stage)
        assert run.finish is not None
        failures = Counter(first_line(t.error, 60) for t in run.search if t.error)
        result = Result(workload, self.device, run.finish, run.path, before, len(run.search) - before, dict(failures),
                        sum(t.noisy for t in run.trials), gain_of(run), tuple(run.curve()))
        if logger is not None:
            logger.log(loggers.of_result(workload, self.device, result.finish, result.gain))
        return result

    def _search(self, cell: Cell, spec: str, workload: Workload, run: Journal, settings: Settings,
                schedule: str | None, only: Sequence[Choice] | None, report: Callable[[Progress], None],
                begin: Callable[[ConfigSpace, int], None], stage: Callable[[str], None]) -> None:
        """Carries out the rest of a run."""
        require_xgboost()
        stage("starting processes")
        if self.entries == Entries():  # a BuildError where nothing could be built here
            find_compiler()
            if self.device.kind == "cuda":
                chosen_nvcc()
        device, pool = self.device, self.pool  # its processes start while this one looks at the cell
        task = make_task(cell, workload, device)
        asked = proposing.Question(spec, workload, device, schedule, self.seed)
        # Where a workload takes a second, or several are searched at once, the search for its defaults would be most of
        # what this process does.
        given = proposing.defaults(pool, asked) if only is not None or pool.proposers else None
        schedules = (choose.serving_or_raise(task, schedule) if given is None else
                     [all_schedules()[c.schedule] for c in given])
        space = ConfigSpace(task, schedules, given)
        begin(space, len(run.search))  # before anything that would disturb what a caller may time now
        stage("listing what can be tried")
        if only is None:  # before anything is built: all but the first candidates are drawn from it
            parts = proposing.scan_parts(pool, asked, space)
            space.scans = lambda: proposing.joined(space, parts())
        with contextlib.ExitStack() as stack:
            evaluator = stack.enter_context(ProcessEvaluator(
                task, spec, proposing.answers(pool, asked), pool, limit=self.timeout, seed=self.seed,
                earlier=run.search))
            search: proposing.Proposals
            if only is None:
                stage("learning from records of other layers")
                search = stack.enter_context(proposing.searching(pool, cell, space, asked, parts, run))
            else:
                known = [Candidate.of(c.schedule, c.config) for c in only if c.schedule in space.schedules]
                search = Search(space, CostModel(self.seed), self.seed, known=known, defaults=False)
                settings = replace(settings, trials=len(search.first))
            # Where builds go on meanwhile, a small batch is proposed with the latest results in sight. Elsewhere it
            # keeps the builders busy, and no longer than a user would wait for its first time.
            most = min(16, 4 * len(pool.builders)) if pool.quiet else 8
            settings = replace(settings, batch=max(4, min(most, settings.trials // 6)))
            Tuner(search, evaluator, run, settings, self.environment, report, stage).run()


@public
def tune(cell: str | Cell, *, hidden: int, input: int | None = None, batch: int = BATCH, seq: int = SEQ,
         dtype: str | None = None, weights: str | None = None, precision: str | None = None, training: bool = False,
         target: str | Device | None = None, trials: int | None = None, timeout: float = TIMEOUT,
         time_limit: float | None = None, seed: int = 0, resume: bool = True, early_stop: bool = True,
         output: Path | None = None, schedule: str | None = None, tracker: Tracker | None = None,
         report: Callable[[Progress], None] | None = None,
         begin: Callable[[ConfigSpace, int], None] = lambda *_: None, logger: loggers.Logger | None = None,
         entries: Entries | None = None) -> Result:
    """Searches schedules and knobs for one layer; the records are used by ``ecornn.compile``.

    Parameters
    ----------
    cell : a built-in cell's name, ``FILE.py:NAME``, or a Cell; one of a notebook is sent to the worker processes
    hidden, input, batch, seq : H, I (default: H), B and T
    dtype : default float32 on a CPU and bfloat16 on a GPU
    weights, precision : as for ``ecornn.compile``
    training : searches the recurrence of the backward pass, too, on a GPU: ``backward`` of the result. On a CPU that
        has no knobs. What ``forward`` of a module that trains does besides ``run``, a store more, needs no search
    target, timeout, seed, tracker, entries : as for :class:`ecornn.tune.Session`
    trials : default 48 on a CPU and 128 on a GPU; with ``training`` of each of the two searches
    time_limit : seconds for the whole run, earlier sessions included; None: no limit. With ``training`` half of them
        are for forward, at most, and the rest for backward
    resume : go on with the same run if the log has it, and return at once if it is finished
    early_stop : end before all trials are made, after 59 in a row that were not faster by 1%: at 95%
        confidence fewer than one in twenty further ones would be
    output : log file; default: one for this workload and device in the user's folder
    schedule : only this schedule
    report, begin : called after each trial; and before the first, with what was resumed. A notebook shows in one line
        how the search goes, unless ``report`` does something else
    logger : an object whose ``log`` is called with a dictionary after each trial, and at the end with the result:
        ``ecornn.tune.loggers.TensorBoard(folder)``, ``ecornn.tune.loggers.WandB(run)``, or one of your own. Nothing
        here calls ``finish`` of it, since it may log several searches

    Raises :class:`~ecornn.errors.EcornnError` subclasses: ``ArgumentError`` for bad arguments, ``DeviceError`` without
    the device, ``ScheduleError`` where no schedule serves the workload, ``RecordError`` where the log cannot be read or
    written, ``ServerError`` where no server behind the tracker measures any more.

    For many layers, a :class:`ecornn.tune.Session` keeps the worker processes between them."""
    with Session(target, timeout=timeout, seed=seed, tracker=tracker, entries=entries) as session:
        return session.tune(cell, hidden=hidden, input=input, batch=batch, seq=seq, dtype=dtype, weights=weights,
                            precision=precision, training=training, trials=trials, time_limit=time_limit, resume=resume,
                            early_stop=early_stop, output=output, schedule=schedule, report=report, begin=begin,
                            logger=logger)


def require(name: str, value: Any, holds: bool, allowed: str) -> None:
    """Raises :class:`ArgumentError` for ``value`` unless that ``holds`` which is ``allowed``."""
    if not holds:
        raise ArgumentError(name, value, allowed)


def whole(name: str, value: Any, low: int, high: int) -> int:
    """Returns ``value``, an integer from ``low`` to ``high``. Raises :class:`ArgumentError` for anything else."""
    require(name, value, isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
            f"an integer from {low} to {high}")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """Returns ``value``, a finite number above 0. Raises :class:`ArgumentError` for anything else."""
    require(name, value, isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf,
            "seconds, a finite number above 0")
    return float(value)
