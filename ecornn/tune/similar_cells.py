"""Records of built-in cells, for cells that multiply as these do: a variant, or a user's cell, that nobody has tuned
yet runs well as the built-in cell of the same products runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from msgspec import structs

from ecornn.analysis.heads import heads_of
from ecornn.analysis.narrow import narrow_of
from ecornn.analysis.step import StepGraph
from ecornn.cells import Cell
from ecornn.errors import ArgumentError
from ecornn.schedules.base import Task
from ecornn.task import make_task
from ecornn.tune.log import Log, TrialLine, is_trial
from ecornn.tune.lookup import how_far
from ecornn.tune.record import proven


def lent(task: Task, log: Log) -> tuple[str, Log] | None:
    """The built-in cell that has as many states and the same recurrent products, and its trials as trials of the task's
    cell. None where the log has times of that itself, and for cells with statistics, which wait at other places.

    Of several such cells the one of which this is a variant, else the first in the order of ``ecornn.cells.BUILTIN``.
    """
    from ecornn.cells import BUILTIN, get

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
    """A key of what a schedule's choices depend on most: states, and rows, operands and heads of each product, or its
    narrow part, which no built-in cell has."""
    return len(graph.states), *((len(p.products), len(p.operands), heads_of(p), narrow_of(p))
                                for p in graph.product_phases)


def akin(one: str, other: str) -> bool:
    """True for two built-in cells that multiply alike."""
    first, second = products_of(one), products_of(other)
    return first is not None and first == second


@cache
def products_of(name: str) -> tuple[object, ...] | None:
    """The :func:`products` of a built-in cell."""
    from ecornn.analysis import analyse

    cell = built_in(name)
    return None if cell is None else products(analyse(cell, 8, 8))


def built_in(name: str) -> Cell | None:
    """The built-in cell of that name; None where there is none."""
    from ecornn.cells import get

    try:
        return get(name)
    except ArgumentError:
        return None
