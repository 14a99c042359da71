"""Uses of records that do not apply: they warm the cost model, are seeds to re-check, and are lent to other cells.

A variant, or a user's cell, that nobody has tuned yet runs well as the built-in cell of the same products runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from msgspec import structs

from ecornn.analysis import analyse
from ecornn.analysis.heads import heads_of
from ecornn.analysis.narrow import narrow_of
from ecornn.analysis.step import StepGraph
from ecornn.cells import BUILTIN, Cell, get
from ecornn.device import Device
from ecornn.errors import ArgumentError
from ecornn.schedules.base import AnySchedule, Config, Task
from ecornn.task import make_task
from ecornn.tune.log import Journal, Log, TrialLine, is_trial
from ecornn.tune.lookup import how_far, listed, moved, unfit, up_to_date
from ecornn.tune.record import Trial, proven
from ecornn.tune.search import CostModel, features
from ecornn.tune.space import Candidate
from ecornn.workload import Workload

NEIGHBOURS = 16  # runs
SURVEYS, BROAD = 12, 60  # runs that have so many trials, of which so many teach
SEEDS = 4  # configurations to re-check
LENDERS, LENT, WORTH = 8, 3, 1.15  # workloads that are near; configurations of each, which are that near its fastest
SAMPLES = 256  # records of each run
TWIN = 0.25  # octaves that another 16-bit data type counts as, or a cell of the same products

Run = tuple[str, Workload, Device]


def octaves(a: Workload, b: Workload) -> float:
    """The distance between the sizes of two workloads, in octaves."""
    return sum(abs(math.log2(getattr(a, n) / getattr(b, n))) for n in ("hidden", "input", "batch"))


def distance(a: Workload, b: Workload) -> float:
    """The distance between two workloads, in octaves; infinite where what is fast for one says little of the other."""
    alike = (a.weights, a.precision, a.entry) == (b.weights, b.precision, b.entry)
    same = a.cell == b.cell or ((of := products_of(a.cell)) is not None and of == products_of(b.cell))
    if not alike or a.itemsize != b.itemsize or not same:
        return math.inf
    return octaves(a, b) + TWIN * ((a.dtype != b.dtype) + (a.cell != b.cell))


def warm(model: CostModel, cell: Cell, task: Task, schedules: Sequence[AnySchedule], log: Log,
         run: Journal | None = None) -> int:
    """Adds the nearest runs of the same architecture and entry, and of whatever cell and data type those that have seen
    a good part of a space; returns how many trials. ``run`` is left out: the search is told of its own trials. The
    model compares times within a run only, so runs of other sizes and of older revisions teach as well."""
    runs: dict[Run, list[Trial]] = {}
    for line in filter(is_trial, log.lines):
        trial = line.record
        if (trial.device.arch == task.device.arch and trial.stage == "search"
                and trial.workload.entry == task.workload.entry and not (run and run.has(line))):
            runs.setdefault((trial.run, trial.workload, trial.device.identity), []).append(trial)

    work = task.workload

    def order(one: Run) -> tuple[object, ...]:
        name, of, on = one
        unlike = sum(getattr(of, n) != getattr(work, n) for n in ("cell", "dtype", "weights", "precision"))
        return distance(of, work), unlike, octaves(of, work), name, on.name

    by_name = {s.name: s for s in schedules}
    ordered = sorted(runs, key=order)
    near = [one for one in ordered if distance(one[1], work) < math.inf][:NEIGHBOURS]
    broad = [one for one in ordered if one not in near and len(runs[one]) >= BROAD][:SURVEYS]
    added = 0
    for one in (*near, *broad):
        name, of, on = one
        known = cell if of.cell == task.workload.cell else built_in(of.cell)
        if known is None:
            continue
        other, trials = make_task(known, of, on), runs[one][-SAMPLES:]
        served: dict[str, bool] = {}
        for trial in trials if one in near else trials[::math.ceil(len(trials) / BROAD)]:
            schedule = by_name.get(trial.schedule)
            config = up_to_date(trial, schedule, other).config
            if schedule is None or not usable(schedule, other, trial, config, served):
                continue
            row = features(schedule, other, Candidate.of(trial.schedule, config))
            model.add(f"{name} {of} {on.name}", row, trial.times.median if proven(trial) and trial.times else None)
            added += 1
    return added


def usable(schedule: AnySchedule, task: Task, trial: Trial, config: Config, served: dict[str, bool]) -> bool:
    """True where the schedule can still do what the trial did; ``served`` keeps answers, which may take a search."""
    if trial.revision == schedule.revision and listed(config, schedule.knobs(task)):
        return schedule.check(task, config) is None
    if schedule.name not in served:
        served[schedule.name] = schedule.serves(task) is None
    return served[schedule.name] and unfit(schedule, task, config) is None


def seeds(task: Task, schedules: Sequence[AnySchedule], log: Log) -> list[Candidate]:
    """The fastest configurations of this workload at any T and revision, those of this GPU first; larger inputs last.
    They prove nothing here, and may not fit."""
    by_name = {s.name: s for s in schedules}
    knobs = {s.name: s.knobs(task) for s in schedules}
    best: dict[Candidate, tuple[float, float, float]] = {}
    for trial in log.trials():
        far = how_far(trial, task.workload, task.device)
        if far is None or far[1] or not proven(trial) or trial.schedule not in knobs:
            continue
        assert trial.times is not None
        config = up_to_date(trial, by_name[trial.schedule], task).config
        if listed(config, knobs[trial.schedule]):
            candidate, rank = Candidate.of(trial.schedule, config), (far[2], far[0], trial.times.median)
            best[candidate] = min(best.get(candidate, rank), rank)
    return sorted(best, key=lambda c: best[c])[:SEEDS]


def borrowed(task: Task, schedules: Sequence[AnySchedule], log: Log) -> list[Candidate]:
    """The fastest configurations of the nearest workloads where they fit, the fastest of each first."""
    by_name = {s.name: s for s in schedules}
    times: dict[Workload, dict[Candidate, float]] = {}
    for trial in log.trials():
        if trial.device.arch == task.device.arch and proven(trial) and trial.schedule in by_name:
            assert trial.times is not None
            one, of = Candidate.of(trial.schedule, trial.config), times.setdefault(trial.workload, {})
            of[one] = min(of.get(one, math.inf), trial.times.median)
    far = {work: distance(work, task.workload) for work in times}
    near = sorted((work for work in times if far[work] < math.inf), key=lambda work: (far[work], str(work)))[:LENDERS]
    ranked = {work: sorted(times[work], key=lambda c: times[work][c])[:LENT] for work in near}
    fitting: dict[Candidate, None] = {}
    for place, work in product(range(LENT), near):
        most = WORTH * times[work][ranked[work][0]]
        for one in (c for c in ranked[work][place:place + 1] if times[work][c] <= most):
            schedule = by_name[one.schedule]
            earlier = {k.name: k.before for k in schedule.knobs(task) if k.before is not None}
            config = dict(moved(earlier | one.config, schedule, work, task))
            if unfit(schedule, task, config) is None:
                fitting[Candidate.of(one.schedule, config)] = None
    return list(fitting)


def lent(task: Task, log: Log) -> tuple[str, Log] | None:
    """The built-in cell with as many states and the same recurrent products, and its trials as the task's cell's. None
    where the log has times of that itself, or with statistics. Of several the one of which this is a variant."""
    work, trials = task.workload, defaultdict[str, list[TrialLine]](list)
    for line in filter(is_trial, log.lines):
        trials[line.record.workload.cell].append(line)

    def of(name: str) -> Iterator[TrialLine]:
        named = structs.replace(work, cell=name)
        return (line for line in trials[name] if how_far(line.record, named, task.device))

    if task.graph.statistics or task.graph.hoisted_statistics or any(proven(line.record) for line in of(work.cell)):
        return None
    for name in sorted(BUILTIN, key=lambda name: name != work.cell.partition("(")[0]):
        lines = list(of(name))
        named = structs.replace(work, cell=name)
        if lines and products(make_task(get(name), named, task.device).graph) == products(task.graph):
            return name, Log([replace(line, record=structs.replace(line.record, workload=structs.replace(
                line.record.workload, cell=work.cell))) for line in lines])
    return None


def products(graph: StepGraph) -> tuple[object, ...]:
    """A key of what choices depend on most: states, and rows, operands, heads or narrow part of each product."""
    return len(graph.states), *((len(p.products), len(p.operands), heads_of(p), narrow_of(p))
                                for p in graph.product_phases)


@cache
def products_of(name: str) -> tuple[object, ...] | None:
    cell = built_in(name)
    return None if cell is None else products(analyse(cell, 8, 8))


def built_in(name: str) -> Cell | None:
    try:
        return get(name)
    except ArgumentError:
        return None
