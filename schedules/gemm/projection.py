"""The input projection hoisted out of time: one product over all T*B rows, on tensor cores.

    out[t, b, q, j] = projected value q of unit j, from x[t, b, :], the input weights and the biases

This file says what it needs, and which kernel computes it: that of ``mma.py`` and ``mma_kernel.py``, or Hopper's
own (``wgmma.py``), which :func:`project` takes where it can: 16-bit types and TF32, rows of x that are whole words, all
rows at once.

A schedule may have all rows done before its own kernel runs, or only the first ``ahead`` percent: the
rest is then for blocks of its own to do while others are busy with the recurrence (``persistent``).
"""

from __future__ import annotations

from ecornn.program import PACKED, WORKSPACE, Buffer, Extent, Launch, Packing
from ecornn.schedules.base import Component, Task
from ecornn.schedules.gemm.mma import LEAST_ROWS, SPAN, THREADS, shape_of
from ecornn.schedules.gemm.mma_kernel import projection_kernel
from ecornn.schedules.gemm.wgmma import THREADS as HOPPER_THREADS
from ecornn.schedules.gemm.wgmma import Shape as HopperShape
from ecornn.schedules.gemm.wgmma import packing_of as hopper_packing
from ecornn.schedules.gemm.wgmma import shape_of as hopper_shape
from ecornn.schedules.gemm.wgmma_kernel import wgmma_kernel
from ecornn.schedules.hoisted import Hoisted, in_float32
from ecornn.schedules.isa.tensor_core import per_word
from ecornn.schedules.rates import gpu_rates

WGMMA = True  # off only to compare the two kernels
SLOWER = {"float32": 5, "tf32": 2}  # than 16-bit types


def on_wgmma(task: Task, ahead: int) -> bool:
    """Whether the rows done ahead are Hopper's kernel's."""
    return _hopper(task, ahead) is not None


def projection_time(task: Task, ahead: int = 100) -> float:
    """Nanoseconds that one multiprocessor needs for a step's projection, by the kernel that ``ahead`` leads to."""
    w, rates = task.workload, gpu_rates(task.device)
    work = 2.0 * w.batch * w.input * w.hidden * len(task.graph.hoisted_products)
    return work / (rates.wgmma_gemm if on_wgmma(task, ahead) else rates.mma_gemm) * SLOWER.get(w.arithmetic, 1)


def _hopper(task: Task, ahead: int) -> HopperShape | None:
    return hopper_shape(task) if ahead == 100 and WGMMA else None  # workers read the other packing


def project(task: Task, layout: Hoisted | None = None, ahead: int = 100) -> Component:
    """The projection of a task, writing workspace ``hoisted`` as ``layout`` says, by default in float32; from x,
    ``vectors`` and ``input_weights``. A cell without hoisted outputs needs none.

    Of all rows the first ``ahead`` percent are done (``rows_ahead``); for the others there is a workspace ``ready`` of
    counters, one for each ``block_rows`` of them.
    """
    w, graph, shape = task.workload, task.graph, shape_of(task)
    if not shape.outputs:
        return Component()
    layout = layout or in_float32(task)
    hopper = _hopper(task, ahead)
    if hopper:
        return Component({"project": wgmma_kernel(task, hopper, layout)},
                         (_weights(task, hopper_packing(task, hopper, layout.span)),),
                         (Launch("project", task.device.cores, HOPPER_THREADS, hopper.shared),))
    buffers = []
    if shape.rows:
        n, c, o = per_word(w.dtype), shape.columns, shape.block_octets
        units, pairs = c * o * 8, shape.slabs * SPAN
        inputs = pairs * 16 * n
        packing = Packing(tuple(p.term.source for p in graph.hoisted_products),
                          (shape.rows, units, inputs), (shape.rows, c, o, 8, pairs, 2, 2, 4, n),
                          (1, 4, 2, 0, 3, 7, 5, 6, 8), w.dtype)
        buffers.append(_weights(task, packing))
    if ahead < 100:
        buffers.append(Buffer("ready", WORKSPACE, "uint32", Extent(1, -(-w.batch // LEAST_ROWS))))
    if ahead == 0:
        return Component(buffers=tuple(buffers))
    blocks = task.device.cores * (1 if shape.tiles * shape.products > 16 else 2)
    return Component({"project": projection_kernel(task, shape, layout, blocks, ahead)}, tuple(buffers),
                     (Launch("project", blocks, THREADS, shape.shared),))


def _weights(task: Task, packing: Packing) -> Buffer:
    rows, units, inputs = packing.pad
    return Buffer("input_weights", PACKED, task.workload.dtype, Extent(rows * units * inputs), packing)
