"""The launches of a step, and those of all steps; among them statistics: a kernel with a block for each batch row.

That has all phases that follow one another without a product: a thread owns some units of the row, so what it kept of
them for a later phase it finds again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ecornn.program import Buffer, Launch, Loop
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import Expr, PrimFunc, T, ceil_div
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.scalars.row_sums import Env, RowSums, parts_of
from ecornn.schedules.step.scalars import Layout, StepScalars, declare, values_of

# a phase, the buffers that its kernel may use, and the kernel's name -> the kernel and its launch
Phase = Callable[[int, list[Buffer], str], tuple[PrimFunc, Launch]]


def loop(task: Task, layout: Layout, own: Sequence[Buffer], buffers: Sequence[Buffer], math: str, inputs: Hoisted,
         phase: Phase, kept: Stored) -> Component:
    """All steps: of each a launch for every product and for every pass over rows; values that are ``kept`` are stored
    by the one that makes them, states by the last one. ``own`` are those of ``buffers`` that only the recurrence
    uses."""
    functions, steps, parts, w = {}, [], list(parts_of(task.graph)), task.workload
    for number, part in enumerate(parts, 1):
        first = part[0] if isinstance(part, tuple) else part
        # a pass over rows leaves a phase with a product to the launch behind it
        finished = tuple(p for p in part if not task.graph.phases[p].products) if isinstance(part, tuple) else (part,)
        stores = (number == len(parts) and kept) or any(values_of(task.graph, kept, p) for p in finished)
        known = [*buffers, *(kept.buffers(w.batch, w.hidden, w.dtype) if stores else ())]
        name = keeping(f"{'rows' if isinstance(part, tuple) else 'step'}_{first}", kept if stores else NOTHING)
        if isinstance(part, tuple):
            functions[name], launch = rows_kernel(task, name, part, layout, known, math, inputs)
        else:
            functions[name], launch = phase(part, known, name)
        steps.append(launch)
    return Component(functions, tuple(own), (Loop(tuple(steps)),))


MOST_THREADS = 1024


def rows_kernel(task: Task, name: str, phases: tuple[int, ...], layout: Layout, buffers: list[Buffer], math: str,
                inputs: Hoisted) -> tuple[PrimFunc, Launch]:
    """The kernel ``name`` and its launch: statistics of the phases, and all scalars of those without a product."""
    w, graph = task.workload, task.graph
    threads = min(MOST_THREADS, ceil_div(w.hidden, 32) * 32)
    words = max(RowSums.words(threads, graph.phases[p].statistics) for p in phases)
    with T.kernel(name) as made:
        a = declare(buffers)
        scalars = StepScalars(task, layout, a, math, inputs)
        T.device_entry()
        row, thread = T.named("row", T.cta_id([w.batch])), T.thread(threads)
        memory = T.shared(words)  # (statistic, warp)
        with T.when(row < a["B"]):
            T.note("a CTA a batch row: statistics over its units, then the scalars of phases without a product")
            sums, found = RowSums(threads, thread, memory), Env()

            def units(function: Callable[[Expr], None]) -> None:
                with T.serial("turn", 0, ceil_div(w.hidden, threads)) as turn:
                    unit = T.let("unit", turn * threads + thread)
                    with T.when(unit < w.hidden):
                        function(unit)

            def visit(p: int, known: Env, function: Callable[[Env, Expr], None]) -> None:
                units(lambda unit: function(scalars.before(p, row, unit, known), unit))

            def finish(p: int, known: Env, unit: Expr) -> None:
                scalars.finish(p, row, unit, known, scalars.hoisted(row, unit))

            for p in phases:
                each = partial(visit, p, dict(found))
                found |= sums.statistics(graph.phases[p].statistics, w.hidden, each)
                with T.when(thread == 0):
                    scalars.store_statistics(p, row, found)
                if not graph.phases[p].products:
                    units(partial(finish, p, dict(found)))
    return made(), Launch(name, w.batch, threads, 4 * words)
