"""The launches of a step, and those of all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecornn.program import Buffer, Launch, Loop
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import PrimFunc
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import keeping, kept_buffers
from ecornn.schedules.scalars.row_sums import parts_of
from ecornn.schedules.step.scalars import Layout
from ecornn.schedules.step.statistics import rows_kernel

# a phase, the buffers that its kernel may use, and the kernel's name -> the kernel and its launch
Phase = Callable[[int, list[Buffer], str], tuple[PrimFunc, Launch]]


def loop(task: Task, layout: Layout, own: Sequence[Buffer], buffers: Sequence[Buffer], math: str, inputs: Hoisted,
         phase: Phase, kept: tuple[str, ...]) -> Component:
    """All steps: of each a launch for every product and for every pass over rows; the last one stores the states
    ``kept``. ``own`` are those of ``buffers`` that only the recurrence uses."""
    functions, steps, parts, w = {}, [], list(parts_of(task.graph)), task.workload
    for number, part in enumerate(parts, 1):
        stored = kept if number == len(parts) else ()
        known = [*buffers, *kept_buffers(stored, w.batch, w.hidden, w.dtype)]
        first = part[0] if isinstance(part, tuple) else part
        name = keeping(f"{'rows' if isinstance(part, tuple) else 'step'}_{first}", stored)
        if isinstance(part, tuple):
            functions[name], launch = rows_kernel(task, name, part, layout, known, math, inputs)
        else:
            functions[name], launch = phase(part, known, name)
        steps.append(launch)
    return Component(functions, tuple(own), (Loop(tuple(steps)),))
