"""Gradients of matrices, added to what is there, in the caller's memory: products over a chunk's rows,

    gradient[j, k] += sum_r value[r, j] * operand[r, k]

in register tiles of some j and vectors of k. Rows of values and operands are pages apart, so both are copied first,
once for all products: panels (panel, row, values of j or vectors of k of a tile). Chunks follow each other, and within
one each element is of one task: how many threads there are changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from ecornn.program import WORKSPACE, Extent
from ecornn.schedules.builder import Expr, TirBuffer
from ecornn.schedules.cpu.memory import Place
from ecornn.schedules.cpu.worker import Worker

TOGETHER = 32  # tiles of j that go through a panel of k: their values stay in the second cache for the next panels
COPIED = 8  # narrow panels that a thread copies side by side: what it reads of a row are whole cache lines


@dataclass(frozen=True)
class Outer:
    """``data[start + j * columns + k]``, j < ``rows`` and k < ``columns``, gets outer products of ``value`` and
    ``operand``; with ``heads`` these are the first one's, those of the others follow, in memory and in both sides."""

    data: TirBuffer
    start: int
    rows: int
    columns: int
    value: Place
    operand: Place
    heads: int = 1


@dataclass(frozen=True)
class Panels:
    """Copies of a place's rows, in panels."""

    data: TirBuffer
    source: Place
    width: int  # elements of a row in a panel
    count: int  # panels of a head
    stride: int  # elements from one panel to the next
    heads: int
    length: int  # elements of a head in a row of ``source``


class OuterProducts:
    """A function's outer products, of chunks of at most ``rooms`` rows, on a CPU of so many vector ``registers``."""

    def __init__(self, worker: Worker, outers: Sequence[Outer], rooms: int, registers: int) -> None:
        self.worker, self.outers = worker, outers
        lanes = worker.e.lanes
        self.height, self.vectors = (8, 3) if registers > 16 else (6, 2)  # of j, and vectors of k, of a tile
        self.panels: dict[tuple[Place, int, int], Panels] = {}
        for outer in outers:
            for place, width, length in ((outer.value, self.height, outer.rows),
                                         (outer.operand, self.vectors * lanes, outer.columns)):
                if (key := (place, width, outer.heads)) not in self.panels:
                    # room for the last row's vector, which may be wider than a panel
                    count, stride = -(-length // width), -(-rooms * width // lanes) * lanes + lanes
                    data = worker.buffer(f"panels_{len(self.panels)}", WORKSPACE, Extent(outer.heads * count * stride))
                    self.panels[key] = Panels(data, place, width, count, stride, outer.heads, length)

    def add(self, rows: Expr) -> None:
        """Adds the products over ``rows`` rows, after a barrier, of what :meth:`copy` has copied."""
        if not self.outers:
            return
        e = self.worker.e
        e.call("ecornn_barrier")
        work = [(outer, self.panels[outer.value, self.height, outer.heads],
                 self.panels[outer.operand, self.vectors * e.lanes, outer.heads]) for outer in self.outers]
        totals = [outer.heads * -(-values.count // TOGETHER) * operands.count for outer, values, operands in work]
        before = 0
        with self.worker.taken("outer", e.index(sum(totals))) as task:
            for some, total in zip(work, totals, strict=True):
                with e.when(e.tirx.And(task >= before, task < before + total)):
                    self._outer(*some, rows, e.let("outer_task", task - before))
                before += total

    def copy(self, rows: Expr) -> None:
        """Fills all panels, some in each task. A vector that reaches past its row is written before the next."""
        e, lanes, made = self.worker.e, self.worker.e.lanes, list(self.panels.values())
        together = [COPIED if p.width % lanes else 1 for p in made]
        totals = [-(-p.count * p.heads // some) for p, some in zip(made, together, strict=True)]
        for p, some, tasks in zip(made, together, self.worker.pooled("copy", totals), strict=True):
            with tasks as task:
                first = e.let("first_panel", task * some)
                count = e.let("panels_here", e.tirx.Min(e.index(some), p.count * p.heads - first))
                with e.loop("row", rows) as row, e.loop("panel", count) as number:
                    panel = first + number
                    inside = (panel * p.width if p.heads == 1 else
                              e.div(panel, p.count) * p.length + e.mod(panel, p.count) * p.width)
                    source = e.let("source", p.source.at(e, row) + inside)
                    into = e.let("into", panel * p.stride + row * p.width)
                    for at in range(0, p.width, lanes):
                        e.vstore(p.data, into + at, e.vload(p.source.data, source + at))

    def _outer(self, outer: Outer, values: Panels, operands: Panels, rows: Expr, task: Expr) -> None:
        """A task: some tiles of j of a panel of k."""
        e, blocks = self.worker.e, -(-values.count // TOGETHER)
        each = -(-values.count // blocks)
        panel = e.let("k_panel", e.mod(task, operands.count))
        head, part = None, e.div(task, operands.count)
        if outer.heads > 1:
            head, part = e.let("head", e.div(part, blocks)), e.mod(part, blocks)
        top = e.let("first_tile", part * each)
        with e.loop("tile", e.tirx.Min(e.index(each), e.index(values.count) - top)) as number:
            self._tile(outer, values, operands, e.let("j_tile", top + number), panel, rows, head)

    def _tile(self, outer: Outer, values: Panels, operands: Panels, tile: Expr, panel: Expr, rows: Expr,
              head: Expr | None) -> None:
        """Adds the products of a tile of j and a panel of k, of a head if there are several."""
        e, lanes, height, vectors = self.worker.e, self.worker.e.lanes, self.height, self.vectors
        j, k = e.let("j", tile * height), e.let("k", panel * operands.width)
        first, left, right = e.index(outer.start), tile, panel
        if head is not None:
            first = e.let("first", first + head * (outer.rows * outer.columns))
            left, right = head * values.count + left, head * operands.count + right
        left = e.let("left", left * values.stride)
        right = e.let("right", right * operands.stride)
        sums = [[e.local(f"outer_{m}_{n}") for n in range(vectors)] for m in range(height)]
        for m, registers in enumerate(sums):
            start = e.let("start", first + (j + m) * outer.columns + k)
            for n, register in enumerate(registers):
                e.prefetch(outer.data, start + n * lanes)
                e.vstore(register, 0, e.splat(0.0))
        with e.loop("row", rows) as row:
            columns = [e.let("column", e.vload(operands.data, right + row * operands.width
                                               + n * lanes)) for n in range(vectors)]
            for m in range(height):
                value = e.let("value", e.splat(e.load(values.data, left + row * height + m)))
                for n in range(vectors):
                    e.vstore(sums[m][n], 0, e.fma(value, columns[n], e.vload(sums[m][n], 0)))
        inside = e.let("inside", e.tirx.And(j + height <= outer.rows, k + vectors * lanes <= outer.columns))
        with e.when(inside):
            for m in range(height):
                start = e.let("start", first + (j + m) * outer.columns + k)
                for n in range(vectors):
                    at = start + n * lanes
                    e.vstore(outer.data, at, e.vload(outer.data, at) + e.vload(sums[m][n], 0))
        with e.when(e.tirx.Not(inside)):  # element by element
            edge = e.local("tile", size=height * vectors * lanes)
            for number, register in enumerate(chain(*sums)):
                e.vstore(edge, number * lanes, e.vload(register, 0))
            high = e.tirx.Min(e.index(height), outer.rows - j)
            wide = e.tirx.Min(e.index(vectors * lanes), outer.columns - k)
            with e.loop("m", high) as m, e.loop("n", wide) as n:
                at = first + (j + m) * outer.columns + k + n
                e.store(outer.data, at, e.load(outer.data, at) + e.load(edge, m * (vectors * lanes) + n))
