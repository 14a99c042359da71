"""The launches of a step, and those of all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecornn.program import Buffer, Launch, Loop
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import PrimFunc
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.scalars.row_sums import parts_of
from ecornn.schedules.step.scalars import Layout, values_of
from ecornn.schedules.step.statistics import rows_kernel

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
