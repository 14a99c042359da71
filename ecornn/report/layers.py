"""The best of every layer of a log beside its floor; what its schedule says of it, and the lines of code that each knob
makes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ecornn.cells import get
from ecornn.errors import EcornnError
from ecornn.explain import CHIP_WORDS, FloorTerms, StepSummary, chip_of, floor_terms, summary
from ecornn.floor import measured
from ecornn.quick_tvm import import_tvm
from ecornn.report.roles import Kernel, kernel_of
from ecornn.schedules import all_schedules, revisions
from ecornn.schedules.base import Config, Cut, Knob, Schedule, Task, Value
from ecornn.task import make_task
from ecornn.tune.log import Log
from ecornn.tune.lookup import up_to_date
from ecornn.tune.record import Trial
from ecornn.tune.selection import best_lines

T = TypeVar("T")
MOST = 3000  # lines that are compared


@dataclass(frozen=True)
class Layer:
    """The trial that look-up would use for a workload on a device, and the least a step can take there, if known."""

    trial: Trial
    place: str
    floor: FloorTerms | None


def layers(log: Log) -> list[Layer]:
    """The best layers of a log, by device, cell, type, B and H."""
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
    import_tvm()
    try:
        return make_task(get(trial.workload.cell), trial.workload, trial.device)
    except EcornnError:
        return None


def floor_of(trial: Trial) -> FloorTerms | None:
    """The floor of a layer's step; None of a backward pass, and where it is not known."""
    if trial.workload.backward or measured(trial.device.name) is None:
        return None
    task = task_of(trial)
    return floor_terms(task) if task is not None and task.graph.product_phases else None


def step_of(task: Task | None) -> StepSummary | None:
    """The step of a task in numbers; None without a task."""
    return summary(task) if task is not None else None


def asked(trial: Trial, task: Task | None, question: Callable[[Schedule, Task, Config], T]) -> T | None:
    """A schedule's answer on the configuration of a trial, with the knobs that it has got since then; None without a
    task, and where the schedule is not there, or has changed."""
    schedule = all_schedules().get(trial.schedule)
    if task is None or schedule is None or schedule.revision != trial.revision:
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


@dataclass(frozen=True)
class MarkedCode:
    """The function of a program that knobs change most: its lines, each with the knobs that would change it, and the
    other values that these were compared with; ``alone``: knobs without another value that goes with the rest."""

    name: str
    lines: list[tuple[str, list[str]]]
    others: dict[str, Value]
    alone: list[str]


def marked(trial: Trial, task: Task | None) -> MarkedCode | None:
    """The code of a trial; None where its schedule has changed since, or its code is too long to compare."""
    return asked(trial, task, _marked)


def _marked(schedule: Schedule, task: Task, config: Config) -> MarkedCode | None:
    functions = _functions(schedule, task, config)
    if sum(map(len, functions.values())) > MOST:
        return None
    knobs: dict[str, list[list[str]]] = {name: [[] for _ in lines] for name, lines in functions.items()}
    others: dict[str, Value] = {}
    alone = []
    for knob in schedule.knobs(task):
        other = _other(schedule, task, config, knob)
        if other is None:
            alone.append(knob.name)
            continue
        others[knob.name] = other
        changed = _functions(schedule, task, {**config, knob.name: other})
        for name, lines in functions.items():
            for number in _made(lines, changed.get(name, [])):
                knobs[name][number].append(knob.name)
    name = max(functions, key=lambda one: sum(map(bool, knobs[one])))
    return MarkedCode(name, list(zip(functions[name], knobs[name], strict=True)), others, alone)


def _functions(schedule: Schedule, task: Task, config: Config) -> Mapping[str, list[str]]:
    """TVM's text of each function."""
    program = schedule.program(task, schedule.plan(task, config))
    return {name: function.script().splitlines() for name, function in program.functions.items()}


def _other(schedule: Schedule, task: Task, config: Config, knob: Knob) -> Value | None:
    """The nearest other value that is possible with the rest."""
    values = list(knob.values)
    here = values.index(config[knob.name]) if config.get(knob.name) in values else 0
    near = sorted(values, key=lambda one: abs(values.index(one) - here))
    return next((value for value in near if value != config.get(knob.name)
                 and schedule.check(task, {**config, knob.name: value}) is None), None)


def _made(lines: list[str], other: list[str]) -> list[int]:
    """The numbers of lines that the other code has not, in its order."""
    compared = difflib.SequenceMatcher(None, [line.strip() for line in other], [line.strip() for line in lines],
                                       autojunk=False)
    return [number for what, _, _, first, last in compared.get_opcodes() if what in ("replace", "insert")
            for number in range(first, last)]
