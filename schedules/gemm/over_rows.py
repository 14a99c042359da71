"""A product over all rows as a piece of a program.

Hopper's own kernel (``rows_wgmma.py``) takes it where it can: 16-bit types and TF32, rows of whole words, all rows at
once; else that of ``rows_mma.py``.
"""

from __future__ import annotations

from ecornn.program import Buffer, Launch
from ecornn.schedules.base import Component
from ecornn.schedules.gemm import rows_mma, rows_wgmma
from ecornn.schedules.gemm.job import Epilogue, Job
from ecornn.schedules.gemm.mma_mainloop import THREADS
from ecornn.schedules.gemm.wgmma_mainloop import THREADS as HOPPER_THREADS


def over_rows(job: Job, epilogue: Epilogue, ahead: int = 100) -> Component:
    """The kernel, with the packed weights: the first ``ahead`` percent of the rows."""
    hopper = rows_wgmma.shape_of(job) if ahead == 100 else None
    if hopper is not None:
        weights = (o.buffer(rows_wgmma.packing_of(job, hopper, o, epilogue.span), job.dtype) for o in job.operands)
        return Component({job.name: rows_wgmma.wgmma_kernel(job, hopper, epilogue)}, tuple(weights),
                         (Launch(job.name, job.device.cores, HOPPER_THREADS, hopper.shared),))
    shape = rows_mma.shape_of(job)
    blocks = rows_mma.blocks_of(job, shape)
    return Component({job.name: rows_mma.mma_kernel(job, shape, epilogue, blocks, ahead)}, weights_of(job),
                     (Launch(job.name, blocks, THREADS, shape.shared),))


def weights_of(job: Job) -> tuple[Buffer, ...]:
    """The packed weights of ``rows_mma.py``'s kernel."""
    shape = rows_mma.shape_of(job)
    return tuple(o.buffer(rows_mma.packing_of(job, shape, o), job.dtype) for o in job.operands)
