"""The recurrence of an adjoint: a task that schedules of forward layers carry out, and a program of it alone.

Its graph is a step like a cell's, of which it has ``outputs`` in place of y, products of several terms and transposed
weights. It reads the values that somebody hoisted before, and goes through time the other way than the layer. What it
leaves is for others: products over all steps and sums are made of its outputs, and the gradients of the first states of
its last states.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from ecornn.analysis import StepGraph
from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.heads import most_heads
from ecornn.program import KEPT, Buffer, Extent, Program
from ecornn.schedules.assemble import call_buffers, vector_buffer
from ecornn.schedules.base import Component, Task
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import written
from ecornn.schedules.timeline import piece_buffers


def recurrence_graph(adjoint: Adjoint) -> StepGraph:
    """The step of the recurrence. What it sums over all steps is among its outputs."""
    return replace(adjoint.recurrence, outputs=written(adjoint))


def recurrence_task(layer: Task, adjoint: Adjoint) -> Task:
    """The recurrence of ``adjoint``, of the step of ``layer``."""
    traversal = structs.replace(layer.traversal, reverse=not layer.traversal.reverse, directions=1, backward=True)
    return replace(layer, workload=layer.workload.adjoint, graph=recurrence_graph(adjoint), traversal=traversal)


def beyond(task: Task) -> str | None:
    """None, or what a recurrence has that no schedule carries out yet."""
    graph: StepGraph = task.graph
    heads, whole = most_heads(graph), 64 if task.workload.itemsize == 2 else 32
    if heads > 1 and task.workload.hidden // heads % whole:
        return f"trains heads of a multiple of {whole} units on a GPU, not of {task.workload.hidden // heads}"
    for phase in graph.phases:
        terms = [t for p in phase.products for t in p.terms]
        if len({t.transposed for t in terms}) > 1:
            return f"step {graph.cell!r} multiplies with weights as they are and transposed, in one exchange"
        if any(len({t.operand for t in p.terms}) < len(p.terms) for p in phase.products):
            return f"step {graph.cell!r} multiplies one value twice in one product"
    return None


def assemble_recurrence(task: Task, recurrence: Component, layout: Hoisted, together: int = 1) -> Program:
    """The program that runs ``recurrence`` alone, from ``hoisted``, in ``layout``, to ``outputs``."""
    return Program.running(dict(recurrence.functions), (*recurrence_buffers(task, layout), *recurrence.buffers),
                           recurrence.calls, together=together)


def recurrence_buffers(task: Task, layout: Hoisted) -> list[Buffer]:
    """The buffers that a recurrence shares with what comes before and after it: ``hoisted``; its states before and
    after; rows of the traversal; ``vectors``, as a layer has them; and ``outputs`` (T, B, O, H) in the layer's type."""
    w, graph = task.workload, task.graph
    call = [b for b in call_buffers(graph.states, task.traversal, w.dtype) if b.tensor not in ("x", "y")]
    size = w.batch * len(graph.outputs) * w.hidden
    made = [Buffer("outputs", KEPT, w.dtype, Extent(0, size))] if size else []  # of a step that only states read: none
    kept = [structs.replace(layout.buffer(w.batch), role=KEPT)] if graph.hoisted_outputs else []
    pieces = piece_buffers(task.traversal, w, len(graph.states))
    return [*call, vector_buffer(task), *kept, *made, *pieces]
