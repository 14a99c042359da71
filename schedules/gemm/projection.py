"""The input projection hoisted out of time: one product over all T*B rows, on tensor cores.

    out[t, b, q, j] = projected value q of unit j, from x[t, b, :], the input weights and the biases

A schedule may have all rows done before its own kernel runs, or only the first ``ahead`` percent: the
rest is then for blocks of its own to do while others are busy with the recurrence (``persistent``).
"""

from __future__ import annotations

from dataclasses import replace

from ecornn.program import WORKSPACE, Buffer, Extent
from ecornn.schedules.base import Component, Task, joined
from ecornn.schedules.gemm import rows_wgmma
from ecornn.schedules.gemm.aligned import align, x_of
from ecornn.schedules.gemm.epilogue import HoistedValues
from ecornn.schedules.gemm.job import SLOWER, Columns, Job, Operand
from ecornn.schedules.gemm.over_rows import over_rows, weights_of
from ecornn.schedules.gemm.rows_mma import LEAST_ROWS, shape_of
from ecornn.schedules.hoisted import Hoisted, hoisted_of
from ecornn.schedules.rates import gpu_rates, short


def no_projection(task: Task) -> str | None:
    """None, or why a GPU cannot compute the task's projection."""
    if not task.device.can.tensor_cores:
        return "needs tensor cores and asynchronous copies of compute capability 8.0"
    need = shape_of(job_of(task)).shared if task.graph.hoisted_products else 0
    if need > task.device.shared:
        return f"the projection needs {need} bytes of shared memory, {task.device.shared} available"
    return None


def job_of(task: Task) -> Job:
    """The projection as a product over all rows; of a cell without products of x one without operands. Of a short call
    these are a group or two, whose tiles leave most of the chip idle unless they are narrow."""
    w, products = task.workload, task.graph.hoisted_products
    x = Columns("x", task.own_input, w.input)
    operands = (Operand(x, "input_weights", tuple(p.term.source for p in products)),)
    return Job("project", task.device, w.dtype, w.arithmetic, operands if products else (), len(products), w.hidden,
               len(task.graph.vectors), expected=w.seq * w.batch if short(task) else None)


def projection_time(task: Task, ahead: int = 100) -> float:
    """Nanoseconds that one multiprocessor needs for a step's projection, by the kernel that ``ahead`` leads to."""
    w, rates = task.workload, gpu_rates(task.device)
    work = 2.0 * w.batch * w.input * w.hidden * len(task.graph.hoisted_products)
    hopper = ahead == 100 and rows_wgmma.shape_of(job_of(task)) is not None
    return work / (rates.wgmma_gemm if hopper else rates.mma_gemm) * SLOWER.get(w.arithmetic, 1)


def may_be_followed(task: Task) -> bool:
    """Tells whether the launch behind the projection may begin before that has ended, if it waits for it itself: where
    nothing else of a call makes something before the recurrence, and nothing else uses the projection's memory, as what
    is kept and a backward pass may."""
    graph, traversal = task.graph, task.traversal
    if traversal.backward or traversal.keep is not None or graph.hoisted_statistics:
        return False
    return task.device.can.early_launches and bool(graph.hoisted_outputs)


def project(task: Task, layout: Hoisted | None = None, ahead: int = 100, followed: bool = False) -> Component:
    """The projection of a task, writing workspace ``hoisted`` as ``layout`` says, by default in float32; from x,
    ``vectors`` and ``input_weights``. A cell without hoisted outputs needs none.

    Of all rows the first ``ahead`` percent are done (``rows_ahead``); for the others there is a workspace ``ready`` of
    counters, one for each tile's ``height`` of them. ``followed``: as :class:`~ecornn.schedules.gemm.job.Job` has it.
    """
    w, job = task.workload, job_of(task)
    if not task.graph.hoisted_outputs:
        return Component()
    epilogue = HoistedValues(task, layout or hoisted_of(task))
    if ahead == 100:
        operands = tuple(replace(o, columns=x_of(task)) for o in job.operands)
        return joined(align(task), over_rows(replace(job, operands=operands, followed=followed), epilogue))
    ready = Component(buffers=(Buffer("ready", WORKSPACE, "uint32", Extent(1, -(-w.batch // LEAST_ROWS))),))
    if ahead == 0:  # workers read the other packing
        return joined(Component(buffers=weights_of(job)), ready)
    return joined(over_rows(job, epilogue, ahead), ready)
