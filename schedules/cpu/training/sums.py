"""Sums over all steps and rows: gradients of parameter vectors."""

from __future__ import annotations

from collections.abc import Sequence

from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu.math import vector
from ecornn.schedules.cpu.memory import Place
from ecornn.schedules.cpu.worker import Worker


def add_sums(worker: Worker, totals: TirBuffer, width: int, sums: Sequence[tuple[int, Place]], rows: Expr) -> None:
    """Adds columns of ``rows`` rows to ``totals``. ``sums``: the number of a row of ``totals``, whose rows are
    ``width`` apart, and the place of what is added there."""
    e, lanes = worker.e, worker.e.lanes
    for number, place in sums:
        with worker.tasks("sum", e.index(width // lanes)) as task:
            unit = e.let("unit", task * e.index(lanes))
            total = e.local("total")
            e.vstore(total, 0, e.splat(0.0))
            with e.loop("row", rows) as row:
                e.vstore(total, 0, e.vload(total, 0) + e.vload(place.data, place.at(e, row) + unit))
            at = e.let("at", e.index(number * width) + unit)
            e.vstore(totals, at, e.vload(totals, at) + e.vload(total, 0))


def add_vectors(worker: Worker, totals: TirBuffer, width: int, numbers: dict[Var, int],
                into: Sequence[tuple[TirBuffer, int, Var]]) -> None:
    """Adds to gradients of parameter vectors. ``into``: a buffer, where the gradient starts in it, and the variable of
    the worker's graph that is added; this follows from parameters and ``totals``."""
    e, lanes, hidden = worker.e, worker.e.lanes, worker.shape.hidden
    if not into:
        return
    with worker.tasks("vectors", e.index(-(-hidden // lanes))) as task:
        unit = e.let("unit", task * e.index(lanes))
        valid = e.let("valid", e.index(hidden) - unit)
        values: dict[Var, Expr] = {}

        def value(var: Var) -> Expr:
            if var not in values:
                data, row, stride = ((totals, numbers[var], width) if var in numbers
                                     else (worker.data["vectors"], worker.row[var], worker.shape.width))
                values[var] = e.let(var.name, e.vload(data, e.index(row * stride) + unit))
            return values[var]

        for a in worker.graph.invariants:
            values[a.var] = e.let(a.var.name, vector(e, a.value, value))
        for data, start, var in into:
            at = e.let("gradient_at", e.index(start) + unit)
            total = e.vload_part("gradient", data, at, valid) + value(var)
            e.vstore_part("gradient_part", data, at, total, valid)
