"""The best of every layer of a log beside its floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ecornn.errors import EcornnError
from ecornn.explain import CHIP_WORDS, FloorTerms, StepSummary, chip_of, floor_terms, summary
from ecornn.report.roles import Kernel, kernel_of
from ecornn.schedules.base import Config, Cut, Schedule, Task
from ecornn.tune.log import Log
from ecornn.tune.lookup import up_to_date
from ecornn.tune.record import Trial
from ecornn.tune.selection import best_lines

T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """The trial that look-up would use for a workload on a device, and the least a step can take there, if known."""

    trial: Trial
    place: str
    floor: FloorTerms | None


def layers(log: Log) -> list[Layer]:
    """The best layers of a log, by device, cell, type, B and H."""
    from ecornn.schedules import revisions

    best = []
    for line in best_lines(log, revisions()):
        assert isinstance(line.record, Trial)
        best.append(Layer(line.record, line.place, floor_of(line.record)))
    return sorted(best, key=lambda one: order(one.trial))


def order(trial: Trial) -> tuple[object, ...]:
    """The sort key that puts layers that are alike next to each other."""
    work = trial.workload
    return (trial.device.name, work.cell, work.dtype, work.precision or "", work.weights or "", str(work.entry),
            work.batch, work.hidden, work.input, work.seq)


def task_of(trial: Trial) -> Task | None:
    """The task of a trial; None where its cell is nobody's here."""
    from ecornn.cells import get
    from ecornn.quick_tvm import import_tvm
    from ecornn.task import make_task

    import_tvm()
    try:
        return make_task(get(trial.workload.cell), trial.workload, trial.device)
    except EcornnError:
        return None


def floor_of(trial: Trial) -> FloorTerms | None:
    """The floor of a layer's step; None of a backward pass, and where it is not known."""
    from ecornn.floor import measured

    if trial.workload.backward or measured(trial.device.name) is None:
        return None
    task = task_of(trial)
    return floor_terms(task) if task is not None and task.graph.product_phases else None


def step_of(task: Task | None) -> StepSummary | None:
    """The step of a task in numbers; None without a task."""
    return summary(task) if task is not None else None


def schedule_of(trial: Trial, task: Task | None) -> Schedule | None:
    """The schedule of a trial; None where it has changed since, or there is no task."""
    from ecornn.schedules import all_schedules

    schedule = all_schedules().get(trial.schedule)
    return schedule if task is not None and schedule is not None and schedule.revision == trial.revision else None


def asked(trial: Trial, task: Task | None, question: Callable[[Schedule, Task, Config], T]) -> T | None:
    """A schedule's answer on the configuration of a trial, with the knobs that it has got since then; None where the
    schedule is not there, or has changed."""
    schedule = schedule_of(trial, task)
    if schedule is None or task is None:
        return None
    try:
        return question(schedule, task, up_to_date(trial, schedule, task).config)
    except (EcornnError, KeyError, ValueError):  # of a knob that there is no more
        return None


def chip(trial: Trial, task: Task | None) -> dict[str, float]:
    """The parts of the chip that a configuration takes, in words, with their numbers."""
    said = asked(trial, task, lambda schedule, task, config: schedule.features(task, schedule.plan(task, config))) or {}
    values = chip_of(said, trial.device)
    return {words: values[name] for name, words in CHIP_WORDS.items() if name in values}


def stages_of(trial: Trial, task: Task | None) -> dict[str, float]:
    """µs of a step by stages, as the schedule's estimate has them."""
    said = asked(trial, task, lambda schedule, task, config: schedule.stages(task, schedule.plan(task, config))) or {}
    return {name: ns / 1e3 for name, ns in said.items()}


def cut_of(trial: Trial, task: Task | None) -> Cut | None:
    """The layout of a trial's layer on the chip."""
    return asked(trial, task, lambda schedule, task, config: schedule.cut(task, schedule.plan(task, config)))


def roles_of(trial: Trial, task: Task | None) -> Kernel | None:
    """The roles and phases of the kernel that runs all steps; None if each step is a launch."""
    return asked(trial, task, lambda schedule, task, config: kernel_of(
        schedule.program(task, schedule.plan(task, config)).functions))


def teraflops(trial: Trial, step: StepSummary | None) -> float | None:
    """Operations of all products of a step, those of x among them, by the measured time; 10^12 a second."""
    work = trial.workload
    if step is None or trial.times is None or not step.multiplications or work.backward:
        return None
    of_x = step.hoisted * work.hidden * work.input * work.batch
    return 2 * (step.multiplications + of_x) / trial.times.median / 1e6
