"""Outer products added up over all rows of T*B: how they are cut. Gradients of weights are such sums.

    into[m, n] = sum over rows r of values[r, m] * operand[r, n]

Both operands have the rows that are summed over on the outside, so that fragments are read across (``ldmatrix.trans``,
or 32-bit words one by one). The rows go to ``parts`` of blocks, each of which leaves a sum in the workspace ``parts``;
a kernel of its own adds these in order, so that every run has the same bits.

``outer_kernel.py`` has the code; ``outer_wgmma.py`` and ``outer_wgmma_kernel.py`` are the same on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ecornn.device import Device
from ecornn.schedules.gemm.job import Columns
from ecornn.schedules.isa.tensor_core import per_word
from ecornn.schedules.rates import gpu_rates
from ecornn.workload import ITEMSIZE

THREADS = 256
ROW_WARPS, COLUMN_WARPS = 2, 4  # over m, and over n
STAGES = 4
PAD = 8  # values behind a row of a stage, which keep reads across it free of bank conflicts
MOST_PARTS = 16
LEAST_ROWS = 256  # of a part
SLOWER = {"float32": 5, "tf32": 2}  # than 16-bit types


@dataclass(frozen=True)
class OuterJob:
    """Such sums of one pair of operands.

    Attributes
    ----------
    name : of the kernel
    rows : T*B that the sizes are chosen for; any number may come
    mask : of :func:`~ecornn.schedules.timeline.rows_mask`: rows that take no part in their step count as zeros
    """

    name: str
    device: Device
    dtype: str
    arithmetic: str
    values: Columns
    operand: Columns
    rows: int
    mask: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class OuterShape:
    """How one is cut for ``mma``.

    Attributes
    ----------
    m_tiles, n_tiles : m16 and n8 tiles of a warp; of n8 tiles an even number
    down, across : blocks over m and over n
    parts : of the rows
    size : bytes of a value
    """

    m_tiles: int
    n_tiles: int
    down: int
    across: int
    parts: int
    size: int

    @property
    def height(self) -> int:
        """Columns of ``values`` that a block has."""
        return ROW_WARPS * 16 * self.m_tiles

    @property
    def width(self) -> int:
        """Columns of ``operand`` that it has."""
        return COLUMN_WARPS * 8 * self.n_tiles

    @property
    def depth(self) -> int:
        """Rows of a stage."""
        return 64 // self.size

    @property
    def stage_values(self) -> int:
        return self.depth * (self.height + self.width + 2 * PAD)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return STAGES * self.stage_values * self.size

    @property
    def blocks(self) -> int:
        return self.down * self.across * self.parts


def outer_shape(job: OuterJob) -> OuterShape:
    """The tiles of 256 threads, of which a multiprocessor holds two."""
    most = 2 if per_word(job.dtype) == 1 else 4
    m_tiles = next(n for n in (1, 2, 4) if n == most or ROW_WARPS * 16 * n >= job.values.width)
    n_tiles = next(n for n in (2, 4) if n == 4 or COLUMN_WARPS * 8 * n >= job.operand.width)
    tile = OuterShape(m_tiles, n_tiles, 1, 1, 1, job.itemsize)
    down, across = -(-job.values.width // tile.height), -(-job.operand.width // tile.width)
    rate = gpu_rates(job.device).mma_gemm / SLOWER.get(job.arithmetic, 1) / 2
    return replace(tile, down=down, across=across,
                   parts=best_parts(job, down * across, tile.height * tile.width / rate, 2 * job.device.cores))


def best_parts(job: OuterJob, tiles: int, row: float, at_once: int) -> int:
    """Parts of the rows that fill the chip's last turn without too many sums in memory; ``row``: nanoseconds that a
    tile takes for half a row, ``at_once``: blocks."""
    stored = 8.0 * job.values.width * job.operand.width / gpu_rates(job.device).memory_beside  # and loaded

    def expected(parts: int) -> float:
        return -(-tiles * parts // at_once) * (2 * job.rows / parts) * row + parts * stored

    return min(range(1, max(1, min(MOST_PARTS, job.rows // LEAST_ROWS)) + 1), key=expected)
