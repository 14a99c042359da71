"""Outer products over all rows on Hopper, by warpgroup products (``wgmma``) of 16-bit types: how they are cut.

One block a multiprocessor goes through tiles of 128 columns of ``values`` by up to 256 of ``operand``, those of one
part of the rows after those of another, so that all blocks read much the same rows. Both operands go through a ring of
stages of 64 rows in shared memory, as panels of 64 columns: 128 bytes of each row, one row behind the other, whose
16-byte chunks are exchanged by row (wgmma's 128-byte swizzle). Products read panels across.

``outer_wgmma_kernel.py`` has the code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ecornn.schedules.gemm.outer import OuterJob, best_parts
from ecornn.schedules.rates import gpu_rates

THREADS = 384
DEPTH = 64  # rows of a stage
PANEL = 64  # columns, of 128 bytes in a row
PANEL_BYTES = DEPTH * PANEL * 2
DOWN = 2  # panels of values: one for each multiplying warpgroup
MOST_ACROSS = 4  # panels of the operand
STAGES = 6  # at most


@dataclass(frozen=True)
class OuterHopper:
    """How one is cut.

    Attributes
    ----------
    panels : of the operand
    down, across : tiles over the columns of values and of the operand
    parts : of the rows
    stages : of the ring
    """

    panels: int
    down: int
    across: int
    parts: int = 1
    stages: int = STAGES

    @property
    def height(self) -> int:
        """Columns of ``values`` that a tile has."""
        return DOWN * PANEL

    @property
    def width(self) -> int:
        """Columns of ``operand`` that it has."""
        return self.panels * PANEL

    @property
    def stage_bytes(self) -> int:
        return (DOWN + self.panels) * PANEL_BYTES

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, two mbarriers a stage among them."""
        return self.stages * (self.stage_bytes + 16)


def hopper_shape(job: OuterJob) -> OuterHopper | None:
    """The tiles; None where this kernel does not serve the job."""
    if job.device.arch != "sm_90a" or job.itemsize != 2 or job.values.together(8) < 2 or job.operand.together(8) < 2:
        return None
    panels = -(-job.operand.width // PANEL)
    across = -(-panels // MOST_ACROSS)
    shape = OuterHopper(-(-panels // across), -(-job.values.width // (DOWN * PANEL)), across)
    stages = min(STAGES, job.device.shared // (shape.stage_bytes + 16))
    if stages < 2:
        return None
    row = shape.height * shape.width / gpu_rates(job.device).wgmma_gemm
    return replace(shape, stages=stages, parts=best_parts(job, shape.down * shape.across, row, job.device.cores))
