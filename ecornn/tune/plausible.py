"""Which times of records no device can have had: a record is a line of text, and a search may have gone wrong.

Two bounds, far below what was ever measured. The arithmetic of a step at rates that no core reaches: of the records
that ship, the fastest takes 13 times as long. And a fifth of the schedule's estimate, where it has one: they take 0.45
times as long at least.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ecornn.schedules.base import Schedule, Task
from ecornn.tune.record import Trial
from ecornn.tune.tolerance import LEAST

RATES = {"cuda": 50_000.0, "llvm": 3_000.0}  # operations a nanosecond of a multiprocessor, or of a core
SHARE = 0.2  # of an estimate


def possible(trial: Trial, task: Task) -> bool:
    """Whether a core can be so fast; ``task``: of the same cell and hidden size."""
    work, graph, times = trial.workload, task.graph, trial.times
    products = work.hidden * sum(len(phase.products) for phase in graph.phases)
    operations = 2 * work.batch * work.hidden * (products + work.input * len(graph.hoisted_products))
    rate = RATES.get(trial.device.kind, max(RATES.values())) * max(1, trial.device.cores)
    return times is None or times.median >= max(LEAST, operations / rate / 1000)


def credible(trial: Trial, task: Task, schedule: Schedule) -> bool:
    """Whether the schedule thinks so, too, of a trial whose configuration is one for the task's batch."""
    work = trial.workload
    if trial.times is None or trial.device.arch != task.device.arch:
        return True
    asked = replace(task, workload=msgspec.structs.replace(task.workload, seq=work.seq))
    expected = schedule.features(asked, schedule.plan(asked, trial.config)).get("estimate", 0.0)
    return trial.times.median * 1000 >= SHARE * expected * min(1.0, work.batch / task.workload.batch)
