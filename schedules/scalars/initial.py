"""The operands of the first step, from the call's states: by a small kernel ahead of that of all steps, or in it."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.analysis.liveness import before_first, late_operands
from ecornn.program import Launch
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import emit, invariants, vectors_at
from ecornn.schedules.sequence_kernel import SequenceKernel
from ecornn.schedules.timeline import row_arguments

BLOCKS, THREADS = 128, 256  # of the kernel ahead


@dataclass(frozen=True)
class Head:
    """The ``first`` unit of a head, and how many it has."""

    first: Expr
    units: int


def declare_start(task: Task, hoisted: Hoisted, math: str) -> SequenceKernel:
    """Declares what the kernel ahead reads: ``T, B, <state>_in ..., vectors, [hoisted,]`` and masks."""
    kinds = {f"{s}_in": task.workload.dtype for s in task.graph.states} | {"vectors": "float32"}
    kinds |= {"hoisted": hoisted.dtype} if late_operands(task.graph) else {}
    steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
    arguments = {name: T.pointer(name, kind) for name, kind in kinds.items()} | row_arguments(task.traversal)
    return SequenceKernel(task, hoisted, math, arguments, steps, batch)


def start_thread() -> Expr:
    """The number of a thread of the kernel ahead, among those of all blocks."""
    return T.let("first", T.block(BLOCKS) * THREADS + T.thread(THREADS))


def start_launch(early: bool = False) -> Launch:
    """The launch of the kernel ahead, ``start``."""
    return Launch("start", BLOCKS, THREADS, early=early)


def initial_values(kernel: SequenceKernel, at: tuple[Expr, Expr, Expr], head: Head | None = None) -> list[Expr]:
    """A word of the first operands, as one or two float32 values; ``at``: its first unit, row, operand number."""
    unit, row, operand = at
    return [initial_operand(kernel, T.let("own_unit", unit + e), row, operand, head)
            for e in range(per_word(kernel.task.workload.dtype))]


def initial_operand(kernel: SequenceKernel, unit: Expr, row: Expr, operand: Expr, head: Head | None = None) -> Expr:
    """An operand of the first phase for the states that the call was given, float32; zero beyond units and rows.
    ``unit``: of the ``head``'s if there is one."""
    task, arguments, timeline = kernel.task, kernel.arguments, kernel.timeline
    graph, H, batch = task.graph, task.workload.hidden, kernel.batch
    count = H if head is None else head.units
    nearest = T.min(unit, count - 1)
    at, b = T.let("at", nearest if head is None else head.first + nearest), T.let("b", T.min(row, batch - 1))
    vectors = arguments["vectors"]
    env = invariants(graph, vectors_at(graph.vectors, vectors, H, at), kernel.math) if graph.prologue else {}
    from_row, inside = b, T.And(unit < count, row < batch)
    if task.traversal.sequences:
        number = T.let("number", timeline.number(0, b))
        from_row, inside = T.cast(timeline.sequence(T.max(number, 0)), "int64"), T.And(inside, number >= 0)
    given = [T.let(f"{name}_given", T.cast(arguments[f"{name}_in"][from_row * H + at], "float32"))
             for name in graph.states]
    env |= zip(graph.states.values(), timeline.started(timeline.fresh(0, b, timeline.limit(b)), given), strict=True)
    if late_operands(graph):
        first = T.cast(timeline.at(T.int32(0)) * batch + b, "int64")
        values = kernel.hoisted.values(kernel.hoisted.load(arguments["hoisted"], first, at))[0]
        env |= zip(graph.hoisted_outputs, values, strict=True)
    env = emit(before_first(graph), env, kernel.math)
    value = env[graph.phases[0].operands[0]]
    for i, other in enumerate(graph.phases[0].operands[1:], 1):
        value = T.Select(operand == i, env[other], value)
    return T.let("operand", T.Select(inside, value, T.float32(0)))
