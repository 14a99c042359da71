"""Tuning a layer from Python."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ecornn.cells import Cell
from ecornn.device import Device
from ecornn.errors import DeviceError, ScheduleError
from ecornn.workload import Workload, rounded

if TYPE_CHECKING:
    from ecornn.schedules.base import Schedule, Task
    from ecornn.tune.evaluate import Entries
    from ecornn.tune.record import Choice, Finish, Trial
    from ecornn.tune.space import ConfigSpace
    from ecornn.tune.tuner import Progress

TRIALS = {"llvm": 48, "cuda": 128}
TIMEOUT = 60.0  # seconds
BUILDERS = 8  # at most; each holds TVM's compiler in memory


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
    """

    workload: Workload
    device: Device
    finish: Finish
    log: Path
    resumed: int
    fresh: int
    failures: dict[str, int]

    @property
    def best(self) -> Choice | None:
        """Schedule and knobs of the fastest, or None where every trial failed."""
        return self.finish.best


def tune(cell: str | Cell, *, hidden: int, input: int | None = None, batch: int = 20, seq: int = 300,
         dtype: str | None = None, weights: str | None = None, target: str | Device | None = None,
         trials: int | None = None, timeout: float = TIMEOUT, time_limit: float | None = None, seed: int = 0,
         resume: bool = True, output: Path | None = None, schedule: str | None = None,
         report: Callable[[Progress], None] = lambda _: None,
         begin: Callable[[ConfigSpace, int], None] = lambda *_: None,
         entries: Entries | None = None) -> Result:
    """Searches schedules and knobs for one layer; the records are used by ``ecornn.compile``.

    Parameters
    ----------
    cell : a built-in cell's name, ``FILE.py:NAME``, or a Cell whose class a process can import
    hidden, input, batch, seq : H, I (default: H), B and T
    dtype : default float32 on a CPU and bfloat16 on a GPU
    weights : as for ``ecornn.compile``
    target : ``cuda`` or ``cpu``; default: the GPU if there is one
    trials : default 48 on a CPU and 128 on a GPU
    timeout : seconds that one build, and one measurement, may take
    time_limit : seconds for the whole run, earlier sessions included; None: no limit
    seed : of the search and of the data
    resume : go on with the same run if the log has it, and return at once if it is finished
    output : log file; default: one for this workload and device in the user's folder
    schedule : only this schedule
    report, begin : called after each trial; and before the first, with what was resumed
    entries : functions of the worker processes, for tests

    Raises :class:`~ecornn.errors.EcornnError` subclasses: ``ArgumentError`` for bad arguments,
    ``DeviceError`` without the device, ``ScheduleError`` where no schedule serves the workload,
    ``RecordError`` where the log cannot be read or written.
    """
    from ecornn.tune import evaluate, folders, journal, oracle, tuner
    from ecornn.tune.cell_spec import load_cell, spec_of
    from ecornn.tune.environment import environment
    from ecornn.tune.model import CostModel
    from ecornn.tune.process import MARK
    from ecornn.tune.search import Search
    from ecornn.tune.space import ConfigSpace
    from ecornn.tune.transfer import seeds, warm

    if os.environ.get(MARK):
        raise ScheduleError("tune() was called while a worker process imported the script with the "
                            "cell; put the call under `if __name__ == \"__main__\":`")
    found = load_cell(cell) if isinstance(cell, str) else cell
    spec = cell if isinstance(cell, str) else spec_of(cell)
    task, schedules = plan(found, hidden, input, batch, seq, dtype, weights, target, schedule)
    workload, device = task.workload, task.device
    wanted = trials or TRIALS[device.kind]
    path = output or folders.log_path(workload, device)
    run = journal.Journal.open(path, journal.digest_of(workload, device, schedules, seed), resume)
    before = len(run.search)
    if run.finish is not None and run.finished(wanted, time_limit):
        return Result(workload, device, run.finish, path, before, 0, failures(run.search))
    space, model = ConfigSpace(task, schedules), CostModel(seed)
    records = folders.read_all()
    warm(model, found, task, schedules, records)
    settings = tuner.Settings(wanted, seed, time_limit, max(4, min(16, wanted // 6)))
    begin(space, before)
    with evaluate.ProcessEvaluator(
            task, spec, lambda file: oracle.write(file, found, task, seed),
            builders=max(1, min(BUILDERS, len(os.sched_getaffinity(0)))), limit=timeout, seed=seed,
            entries=entries or evaluate.Entries()) as evaluator:
        search = Search(space, model, seed, known=seeds(task, schedules, records))
        finish = tuner.Tuner(search, evaluator, run, settings, environment(device), report).run()
    return Result(workload, device, finish, path, before, len(run.search) - before, failures(run.search))


def plan(cell: Cell, hidden: int, input: int | None, batch: int, seq: int, dtype: str | None,
         weights: str | None, target: str | Device | None, schedule: str | None) -> tuple[Task, list[Schedule]]:
    """The task and the schedules that serve it, preferred ones first.

    Raises :class:`~ecornn.errors.ScheduleError` where none does, with each one's reason.
    """
    from ecornn.task import make_task
    from ecornn.tune.choose import serving_or_raise

    device = present(target)
    chosen = dtype or ("float32" if device.kind == "llvm" else "bfloat16")
    work = Workload(cell.identity(), hidden, hidden if input is None else input, batch, seq, chosen,
                    rounded(weights, chosen))
    task = make_task(cell, work, device)
    return task, serving_or_raise(task, schedule)


def present(target: str | Device | None) -> Device:
    """The device to measure on, as it is and not as the largest product of its architecture.

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
                          "device must be in this machine")
    return here


def failures(trials: list[Trial]) -> dict[str, int]:
    """How often each reason of failure occurs among trials."""
    return dict(Counter(t.error.splitlines()[0][:60] for t in trials if t.error))
