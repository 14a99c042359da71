"""Outer products over all rows on Hopper, by warpgroup products (``wgmma``) of 16-bit types: how they are cut.

One block a multiprocessor goes through tiles of 128 columns of ``values`` by up to 256 of ``operand``, those of one
part of the rows after those of another, so that all blocks read much the same rows. Both operands go through a ring of
stages of 64 rows in shared memory, as panels of 64 columns: 128 bytes of each row, one row behind the other, whose
16-byte chunks are exchanged by row (wgmma's 128-byte swizzle). Products read panels across.

``outer_wgmma_kernel.py`` has the code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ecornn.schedules.gemm.outer import OuterJob, best_parts, expected
from ecornn.schedules.rates import gpu_rates

THREADS = 384
DEPTH = 64  # rows of a stage
PANEL = 64  # columns, of 128 bytes in a row
PANEL_BYTES = DEPTH * PANEL * 2
DOWN = 2  # panels of values: one for each multiplying warpgroup
MOST_ACROSS, LEAST_ACROSS = 4, 2  # panels of the operand, where it has as many
STAGES = 6  # at most


@dataclass(frozen=True)
class OuterHopper:
    """How a sum of outer products is cut for ``wgmma``.

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
    """The tiles; None where this kernel does not serve the job. Narrower ones than necessary where they fill the chip's
    turns better."""
    if not job.device.can.warpgroups or job.itemsize != 2 or job.heads > 1 or job.operand.width % 2:
        return None
    if job.values.copied(8) < 2 or job.operand.copied(8) < 2:
        return None
    panels = -(-job.operand.width // PANEL)
    made = [_cut(job, panels, across) for across in range(-(-panels // MOST_ACROSS), -(-panels // LEAST_ACROSS) + 1)]
    return min((one for one in made if one is not None), key=lambda one: one[0], default=(0.0, None))[1]


def _cut(job: OuterJob, panels: int, across: int) -> tuple[float, OuterHopper] | None:
    """Tiles of which so many lie side by side, and nanoseconds."""
    shape = OuterHopper(-(-panels // across), -(-job.values.width // (DOWN * PANEL)), across)
    stages = min(STAGES, job.device.shared // (shape.stage_bytes + 16))
    if stages < 2:
        return None
    widest, area = MOST_ACROSS * PANEL, shape.height * shape.width
    # what a tile multiplies for each byte that it copies, of the widest one's
    reuse = shape.width * (shape.height + widest) / (widest * (shape.height + shape.width))
    row, tiles = area / (gpu_rates(job.device).wgmma_gemm * reuse), shape.down * shape.across
    parts = best_parts(job, tiles, row, job.device.cores)
    return expected(job, tiles, row, job.device.cores, parts), replace(shape, stages=stages, parts=parts)
