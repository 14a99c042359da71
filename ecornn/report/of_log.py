"""The content of the page: the searches of a log, with the effect of each knob, and the best of every layer beside its
floor, with what its schedule says of it, and the lines of code that each knob makes."""

from __future__ import annotations

import difflib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from ecornn.cells import get
from ecornn.errors import EcornnError
from ecornn.explain import CHIP_WORDS, FloorTerms, StepSummary, chip_of, floor_terms
from ecornn.floor import measured
from ecornn.quick_tvm import import_tvm
from ecornn.report.roles import Kernel, kernel_of
from ecornn.schedules import all_schedules, revisions
from ecornn.schedules.base import Config, Cut, Knob, Schedule, Task, Value
from ecornn.task import make_task
from ecornn.tune.log import Journal, Log
from ecornn.tune.lookup import up_to_date
from ecornn.tune.record import Choice, Trial, first_line
from ecornn.tune.selection import best_lines

T = TypeVar("T")
MOST = 3000  # lines that are compared


class SearchRun(Journal):
    @property
    def time(self) -> str:
        """The time at which its last record was written."""
        return max(r.time for r in (*self.trials, self.finish) if r)

    @property
    def best(self) -> Trial | None:
        """The last trial of the configuration that the run found best; where the log no longer has that, as after
        ``ecornn log prune``, and of a run that was stopped, the fastest that it has."""
        if self.finish is not None and (best := self.last(self.finish.best)) is not None:
            return best
        return min((t for t in self.search if t.times), key=lambda t: t.times.median, default=None)  # type: ignore[union-attr]

    @property
    def default(self) -> Trial | None:
        """The last trial of the untuned default; None in a run that was stopped, which does not name it."""
        return self.last(self.finish.default) if self.finish is not None else None

    def last(self, choice: Choice | None) -> Trial | None:
        """The last trial of a configuration that has a time."""
        return next((t for t in reversed(self.trials) if t.times is not None and t.choice == choice), None)

    @property
    def failures(self) -> list[tuple[str, int]]:
        """Reasons and how many trials failed for each, the most frequent first."""
        return Counter(first_line(t.error, 90) for t in self.search if t.error).most_common()


def searches(log: Log) -> list[SearchRun]:
    """The runs of a log that measured anything, the latest first."""
    runs: dict[tuple[Path, str], SearchRun] = {}
    for line in log.lines:
        runs.setdefault((line.path, line.record.run), SearchRun(line.path, line.record.run)).take(line.record)
    for run in runs.values():
        run.trials.sort(key=lambda trial: trial.stage == "final")  # the comparison at the end
    return sorted((r for r in runs.values() if any(t.times for t in r.search)), key=lambda r: r.time, reverse=True)


@dataclass(frozen=True)
class AtValue:
    """Trials with one value of a knob, µs a step; ``chosen``: the best has it."""

    value: Value
    fastest: float
    median: float
    chosen: bool


@dataclass(frozen=True)
class Effect:
    knob: str
    share: float  # of the variance of log times that its values alone explain: between values / total
    importance: float | None  # its share of what the trees of the cost model gain; None without one
    trades: str  # the schedule's own line about it
    values: list[AtValue]


def effects(run: SearchRun, task: Task | None) -> list[Effect]:
    """The effects of knobs that took more than one value, the one that explains most first."""
    if (best := run.best) is None:
        return []
    schedule = all_schedules().get(best.schedule)
    trades = {knob.name: knob.trades for knob in schedule.knobs(task)} if task is not None and schedule else {}
    timed = [t for t in run.search if t.times is not None and t.schedule == best.schedule]
    weights, every = importance(run, task), []
    for knob in best.config:
        groups: dict[tuple[str, Value], list[float]] = {}  # True is 1, as a key
        for trial in timed:
            if knob in trial.config and trial.times is not None:
                value = trial.config[knob]
                groups.setdefault((type(value).__name__, value), []).append(trial.times.median)
        if len(groups) < 2:
            continue
        values = [AtValue(value, min(times), statistics.median(times), value == best.config[knob])
                  for (_, value), times in sorted(groups.items(), key=lambda g: (g[0][0], g[0][1]))]
        every.append(Effect(knob, explained(list(groups.values())), weights.get(knob), trades.get(knob, ""), values))
    return sorted(every, key=lambda e: (-(e.importance or 0.0), -e.share, e.knob))


def explained(groups: list[list[float]]) -> float:
    """The share of the groups in the total sum of squares of the logs; 0 where all are equal."""
    logs = [[math.log(t) for t in group] for group in groups]
    mean = statistics.fmean(v for group in logs for v in group)
    total = sum((v - mean) ** 2 for group in logs for v in group)
    between = sum(len(group) * (statistics.fmean(group) - mean) ** 2 for group in logs)
    return between / total if total > 0 else 0.0


def importance(run: SearchRun, task: Task | None) -> dict[str, float]:
    """Knobs of the best's schedule by their share of the total gain of the cost model's trees, trained on this run
    alone. A schedule's other features of a candidate have the rest. {} where there is too little to learn, or no
    XGBoost."""
    from ecornn.tune.search import CostModel, features
    from ecornn.tune.space import Candidate

    if task is None or run.best is None or find_spec("xgboost") is None:
        return {}
    model, known = CostModel(), all_schedules()
    for trial in run.search:
        schedule = known.get(trial.schedule)
        if schedule is None or schedule.revision != trial.revision:
            continue
        try:
            row = features(schedule, task, Candidate.of(trial.schedule, trial.config))
        except (EcornnError, KeyError, ValueError):  # of a knob, or a value of one, that there is no more
            continue
        model.add("run", row, trial.times.median if trial.times else None)
    gains: dict[str, float] = {}
    for column, gain in model.gains().items():
        name = column.partition("=")[0]
        gains[name] = gains.get(name, 0.0) + gain
    total, prefix = sum(gains.values()), f"{run.best.schedule}."
    if not total:
        return {}
    return {name[len(prefix):]: gain / total for name, gain in gains.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Layer:
    """The trial that look-up would use for a workload on a device, and the least a step can take there, if known."""

    trial: Trial
    place: str
    floor: FloorTerms | None


def layers(log: Log) -> list[Layer]:
    """The best layers of a log, by device, cell, type, B and H."""
    def alike(one: Layer) -> tuple[object, ...]:
        work = one.trial.workload
        return (one.trial.device.name, work.cell, work.dtype, work.precision or "", work.weights or "",
                str(work.entry), work.batch, work.hidden, work.input, work.seq)

    return sorted((Layer(line.record, line.place, floor_of(line.record)) for line in best_lines(log, revisions())
                   if isinstance(line.record, Trial)), key=alike)


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
    """The function of a program that knobs change most."""

    name: str
    lines: list[tuple[str, list[str]]]  # each with the knobs that would change it
    others: dict[str, Value]  # the values of knobs that these were compared with
    alone: list[str]  # knobs without another value that goes with the rest


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
        if (other := _other(schedule, task, config, knob)) is None:
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
