"""What is added up over all steps and rows: gradients of matrices, and of parameter vectors.

A gradient of a matrix is a product over the rows of a chunk, added to what is there, in the caller's memory:

    gradient[j, k] += sum_r value[r, j] * operand[r, k]

in register tiles of some values of j and vectors of k. Chunks follow each other, and within one each element
is one thread's, so that results do not depend on how many threads there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecornn.schedules.builder import Expr, TirBuffer, Var
from ecornn.schedules.cpu.math import vector
from ecornn.schedules.cpu.memory import Place
from ecornn.schedules.cpu.worker import Worker
from ecornn.workload import ITEMSIZE

PANEL = 1 << 13  # bytes of a panel of k, as many rows as that are a block: it stays in the first cache
TOGETHER = 16  # tiles of j that go through a panel: their values stay in the second cache for the next panels


@dataclass(frozen=True)
class Outer:
    """``data[start + j * columns + k]``, j < ``rows`` and k < ``columns``, gets outer products of ``value`` and
    ``operand``."""

    data: TirBuffer
    start: int
    rows: int
    columns: int
    value: Place
    operand: Place


def add_outer(worker: Worker, outer: Outer, rows: Expr, registers: int) -> None:
    """Adds those of ``rows`` rows; the CPU has as many vector ``registers``."""
    e, lanes = worker.e, worker.e.lanes
    height = 4 if registers > 16 else 6
    vectors = min((registers - 2) // (height + 1), -(-outer.columns // lanes))
    size = max(1, PANEL // (ITEMSIZE[e.real] * vectors * lanes))
    panel = e.tirx.decl_buffer([size * vectors * lanes], e.real, "panel", scope="local")
    e.add(e.tirx.AllocBuffer(panel))
    tiles, panels = -(-outer.rows // height), -(-outer.columns // (vectors * lanes))
    blocks = -(-tiles // TOGETHER)
    each = -(-tiles // blocks)
    with e.loop("block", e.ceildiv(rows, size)) as block:
        first = e.let("first_row", block * e.index(size))
        count = e.let("rows_of_block", e.tirx.Min(e.index(size), rows - first))
        with worker.tasks("outer", e.index(blocks * panels)) as task:
            k = e.let("k_panel", e.mod(task, panels) * e.index(vectors * lanes))
            top = e.let("first_tile", e.div(task, panels) * e.index(each))
            with e.loop("row", count) as row:  # a copy: its rows are pages apart
                source = e.let("source", outer.operand.at(e, first + row) + k)
                for n in range(vectors):
                    e.vstore(panel, (row * e.index(vectors) + e.index(n)) * e.index(lanes),
                             e.vload(outer.operand.data, source + e.index(n * lanes)))
            with e.loop("tile", e.tirx.Min(e.index(each), e.index(tiles) - top)) as tile:
                _add_tile(worker, outer, (height, vectors), panel, e.let("j", (top + tile) * e.index(height)), k,
                          first, count)


def _add_tile(worker: Worker, outer: Outer, size: tuple[int, int], panel: TirBuffer, j: Expr, k: Expr, first: Expr,
              rows: Expr) -> None:
    """Adds those of ``rows`` rows from ``first`` on to a tile of so many values of j and vectors of k, which ``panel``
    has."""
    e, lanes, (height, vectors) = worker.e, worker.e.lanes, size
    sums = [[e.local(f"outer_{m}_{n}") for n in range(vectors)] for m in range(height)]
    for m, registers in enumerate(sums):
        e.prefetch(outer.data, e.index(outer.start) + (j + e.index(m)) * e.index(outer.columns) + k)
        for register in registers:
            e.vstore(register, 0, e.splat(0.0))
    with e.loop("row", rows) as row:
        left = e.let("left", outer.value.at(e, first + row) + j)
        columns = [e.let("column", e.vload(panel, (row * e.index(vectors) + e.index(n)) * e.index(lanes)))
                   for n in range(vectors)]
        for m in range(height):
            value = e.let("value", e.splat(e.load(outer.value.data, left + e.index(m))))
            for n in range(vectors):
                e.vstore(sums[m][n], 0, e.fma(value, columns[n], e.vload(sums[m][n], 0)))
    inside = e.let("inside", e.tirx.And(j + e.index(height) <= e.index(outer.rows),
                                        k + e.index(vectors * lanes) <= e.index(outer.columns)))
    with e.when(inside):
        for m in range(height):
            start = e.let("start", e.index(outer.start) + (j + e.index(m)) * e.index(outer.columns) + k)
            for n in range(vectors):
                at = start + e.index(n * lanes)
                e.vstore(outer.data, at, e.vload(outer.data, at) + e.vload(sums[m][n], 0))
    with e.when(e.tirx.Not(inside)):
        _edge(worker, outer, j, k, sums)


def _edge(worker: Worker, outer: Outer, j: Expr, k: Expr, sums: list[list[TirBuffer]]) -> None:
    """Adds what of a tile is within the matrix, element by element."""
    e, lanes, height, vectors = worker.e, worker.e.lanes, len(sums), len(sums[0])
    tile = e.tirx.decl_buffer([height * vectors * lanes], e.real, "tile", scope="local")
    e.add(e.tirx.AllocBuffer(tile))
    for m in range(height):
        for n in range(vectors):
            e.vstore(tile, (m * vectors + n) * lanes, e.vload(sums[m][n], 0))
    high = e.tirx.Min(e.index(height), e.index(outer.rows) - j)
    wide = e.tirx.Min(e.index(vectors * lanes), e.index(outer.columns) - k)
    with e.loop("m", high) as m, e.loop("n", wide) as n:
        at = e.index(outer.start) + (j + m) * e.index(outer.columns) + k + n
        e.store(outer.data, at, e.load(outer.data, at) + e.load(tile, m * e.index(vectors * lanes) + n))


def add_sums(worker: Worker, totals: TirBuffer, width: int, sums: Sequence[tuple[int, Place]], rows: Expr) -> None:
    """Adds columns of ``rows`` rows to ``totals``, whose rows, ``width`` apart, are those numbers."""
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
    """Adds to gradients of parameter vectors: ``into`` has the elements, where in them, and the variable of the
    worker's graph, which is of parameters and of ``totals``."""
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
