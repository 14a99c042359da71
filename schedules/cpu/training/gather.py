"""The rows of a chunk of time that other parts of the backward pass read: what forward left, and the gradient of y.

The state before a step is the one after the step before, of which y, or what forward kept, has the rows; the first
state of a sequence; or zeros where a sequence starts anew. Rows that take no part in a step have finite values, and
gradients of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from ecornn.schedules.builder import Expr
from ecornn.schedules.cpu.memory import Place
from ecornn.schedules.cpu.timeline import Timeline
from ecornn.schedules.cpu.worker import Worker


@dataclass(frozen=True)
class Copy:
    """Rows to be copied: ``length`` elements of each row of ``source``, one for each step and batch row, to ``to``.

    ``kind``: ``at``, those of the step itself; ``live``, these, or zeros where a row takes no part; ``before``, those
    of the step before, where ``first`` has the rows before the first step.
    """

    kind: str
    to: Place
    source: Place
    length: int
    first: Place | None = None


def gather(worker: Worker, timeline: Timeline, low: Expr, rows: Expr, copies: Sequence[Copy]) -> None:
    """Copies ``rows`` rows from step ``low`` on; ``timeline`` is the layer's."""
    e = worker.e
    if not copies:
        return
    with worker.tasks("gather", rows) as row:
        b, t = e.let("b", e.mod(row, worker.batch)), e.let("at_step", low + e.div(row, worker.batch))
        at = e.let("source_row", t * worker.batch + b)
        limit = timeline.limit(b)
        for copy in copies:
            if copy.kind == "before":
                _before(worker, timeline, copy, row, b, t, at, limit)
            elif copy.kind == "live" and timeline.traversal.lengths:
                live = e.let("live", t < limit)
                with e.when(live):
                    _row(worker, copy, row, copy.source, at)
                with e.when(e.tirx.Not(live)):
                    _row(worker, copy, row, None, at)
            else:
                _row(worker, copy, row, copy.source, at)


def _before(worker: Worker, timeline: Timeline, copy: Copy, row: Expr, b: Expr, t: Expr, at: Expr,
            limit: Expr) -> None:
    e, reverse = worker.e, timeline.traversal.reverse
    after = t + e.index(1)
    begins = e.let("begins", after >= limit if reverse else e.tirx.EQ(t, e.index(0)))
    previous = e.let("previous", at + worker.batch if reverse else at - worker.batch)
    fresh = None
    if timeline.traversal.resets:
        inside = e.let("inside", after < limit if reverse else t < limit)
        mark = e.tirx.Select(inside, after if reverse else t, e.index(0)) * worker.batch + b
        marked = e.load(timeline.data["resets"], mark) != e.tirx.const(0, "uint8")
        fresh = e.let("fresh", e.tirx.And(inside, marked))
        with e.when(fresh):
            _row(worker, copy, row, None, at)
    with nullcontext() if fresh is None else e.when(e.tirx.Not(fresh)):
        with e.when(begins):
            _row(worker, copy, row, copy.first, b)
        with e.when(e.tirx.Not(begins)):
            _row(worker, copy, row, copy.source, previous)


def _row(worker: Worker, copy: Copy, row: Expr, source: Place | None, at: Expr) -> None:
    """One row from row ``at`` of ``source``; zeros where that is None."""
    e, lanes = worker.e, worker.e.lanes
    into = e.let("into", copy.to.at(e, row))
    start = None if source is None else e.let("from", source.at(e, at))
    whole, left = divmod(copy.length, lanes)

    def move(unit: Expr, valid: int) -> None:
        if source is None or start is None:
            value = e.splat(0.0)
        elif valid == lanes:
            value = e.vload(source.data, start + unit)
        else:
            value = e.vload_part("rest", source.data, start + unit, e.index(valid))
        e.vstore(copy.to.data, into + unit, value)

    with e.loop("vector", whole) as vector:
        move(vector * e.index(lanes), lanes)
    if left:
        move(e.index(whole * lanes), left)
