"""The program around a recurrence: what is the same whatever schedule goes through time.

A schedule makes the recurrence alone: its kernels, the buffers that only they use, their launches. Around it come the
tensors of the call, parameter vectors, the projection of x over all steps, the pass over its rows where these have
statistics, and products over all steps that follow. A task that trains has another recurrence, which keeps states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ecornn.program import ENTRIES, FORWARD, PACKED, RUN, TENSORS, Buffer, Entry, Extent, Packing, Program
from ecornn.schedules.base import Component, Task, joined, prepared
from ecornn.schedules.chunks import chunk_for, in_chunks, shorter
from ecornn.schedules.gemm.projection import project
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import NOTHING, Stored, stored
from ecornn.schedules.rates import short
from ecornn.schedules.scalars.row_sums import normalize
from ecornn.schedules.timeline import piece_buffers
from ecornn.workload import Traversal


def assemble(task: Task, recurrence: Callable[[Stored], Component], layout: Hoisted | None,
             projection: Component | None = None, deferred: bool = False, together: int = 1) -> Program:
    """The program that runs a recurrence; of a task that trains, with the entry ``forward``, too. ``recurrence`` gives
    one that stores these values of each step; ``layout``: of the workspace ``hoisted`` (None: none, the recurrence
    multiplies x itself), which ``projection`` fills first, by default :func:`~ecornn.schedules.gemm.projection.project`
    of all rows; ``deferred``: the recurrence applies statistics of hoisted values itself, from ``row_sums``."""
    before = Component() if layout is None else joined(
        projection or project(task, layout), normalize(task, layout, deferred))
    put = prepared if short(task) else joined
    made = put(before, recurrence(NOTHING))
    pieces = piece_buffers(task.traversal, task.workload, len(task.graph.states))
    run = Program.running(dict(made.functions), (*shared_buffers(task, layout), *made.buffers, *pieces), made.calls,
                          together=together)
    if task.traversal.keep is None:
        return run
    w, what = task.workload, stored(task)
    storing, kept = recurrence(what), what.buffers(w.batch, w.hidden, w.dtype)
    assert set(storing.buffers) <= set(run.buffers)
    part = replace(put(before, storing), buffers=tuple({b.name: b for b in run.buffers}.values()))
    if (steps := chunk_for(task, part.buffers)) is not None:
        around = (*shared_buffers(task, layout), *pieces, *kept)
        handed = [(f"{s}_in", f"{s}_out") for s in task.graph.states]
        steps = shorter(task, steps, part.buffers)
        part = in_chunks(part, around, task, steps, handed, task.traversal.reverse, "chunk_")
    return replace(run, functions={**run.functions, **part.functions},
                   buffers=tuple({b.name: b for b in (*run.buffers, *part.buffers, *kept)}.values()),
                   entries={**run.entries, FORWARD: Entry(part.calls, tuple(b.name for b in (*part.buffers, *kept)))})


def shared_buffers(task: Task, layout: Hoisted | None) -> list[Buffer]:
    """The buffers that any kernel of the program may use: the tensors of the call, ``vectors`` (V, H), float32, the
    cell's parameter vectors, and ``hoisted``, if there is a ``layout`` and the step has hoisted outputs."""
    w, graph = task.workload, task.graph
    found = [*call_buffers(graph.states, task.traversal, w.dtype), vector_buffer(task)]
    return [*found, layout.buffer(w.batch)] if layout is not None and graph.hoisted_outputs else found


def vector_buffer(task: Task) -> Buffer:
    size = max(1, len(task.graph.vectors)), task.workload.hidden
    packing = Packing(tuple(v.source for v in task.graph.vectors) or (("", 0),), size, size, (0, 1), "float32")
    return Buffer("vectors", PACKED, "float32", Extent(size[0] * size[1]), packing)


def call_buffers(states: Iterable[str], traversal: Traversal, dtype: str) -> list[Buffer]:
    """The tensors that a call exchanges: x, y, each state before and after, and the rows that the traversal reads."""
    return tensor_buffers(ENTRIES[RUN], traversal, dtype, states)


def tensor_buffers(tensors: Iterable[str], traversal: Traversal, dtype: str, states: Iterable[str] = (),
                   parameters: Iterable[str] = ()) -> list[Buffer]:
    """The buffers of ``tensors``; an optional tensor has one only if the traversal reads it."""
    found = []
    for tensor in tensors:
        kind = TENSORS[tensor]
        if kind.by_state or kind.by_parameter:
            found += [Buffer.of(tensor, dtype, name) for name in (states if kind.by_state else parameters)]
        elif not kind.optional or getattr(traversal, tensor):
            found.append(Buffer.of(tensor, dtype))
    return found
