"""A product over all rows as a piece of a program.

Hopper's own kernel (``wgmma.py``) takes it where it can: 16-bit types and TF32, rows of whole words, all rows at once;
else that of ``mma.py``.
"""

from __future__ import annotations

from ecornn.program import Buffer, Launch
from ecornn.schedules.base import Component
from ecornn.schedules.gemm.job import Epilogue, Job
from ecornn.schedules.gemm.rows_mma import THREADS, blocks_of, mma_kernel, packing_of, shape_of
from ecornn.schedules.gemm.rows_wgmma import THREADS as HOPPER_THREADS
from ecornn.schedules.gemm.rows_wgmma import packing_of as hopper_packing
from ecornn.schedules.gemm.rows_wgmma import shape_of as hopper_shape
from ecornn.schedules.gemm.rows_wgmma import wgmma_kernel

WGMMA = True  # off only to compare the two kernels


def on_hopper(job: Job) -> bool:
    """Whether it is Hopper's kernel's, if all rows are done at once."""
    return WGMMA and hopper_shape(job) is not None


def over_rows(job: Job, epilogue: Epilogue, ahead: int = 100) -> Component:
    """The kernel, with the packed weights: the first ``ahead`` percent of the rows."""
    hopper = hopper_shape(job) if ahead == 100 and WGMMA else None
    if hopper is not None:
        weights = tuple(o.buffer(hopper_packing(job, hopper, o, epilogue.span), job.dtype) for o in job.operands)
        return Component({job.name: wgmma_kernel(job, hopper, epilogue)}, weights,
                         (Launch(job.name, job.device.cores, HOPPER_THREADS, hopper.shared),))
    shape = shape_of(job)
    blocks = blocks_of(job, shape)
    return Component({job.name: mma_kernel(job, shape, epilogue, blocks, ahead)}, weights_of(job),
                     (Launch(job.name, blocks, THREADS, shape.shared),))


def weights_of(job: Job) -> tuple[Buffer, ...]:
    """The packed weights of ``mma.py``'s kernel."""
    shape = shape_of(job)
    return tuple(o.buffer(packing_of(job, shape, o), job.dtype) for o in job.operands)
