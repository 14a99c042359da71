"""A product over all rows on Hopper, by warpgroup products (``wgmma``): how it is cut.

One block a multiprocessor goes through tiles of 128 rows by the products of up to 32 octets of units. Its
K goes through a ring of stages in shared memory, 128 bytes of every row each, 64 values or 32 of TF32:

    x        rows of 128 bytes, whose 16-byte chunks are exchanged by row (wgmma's 128-byte swizzle), so
             that neither copies nor products have bank conflicts
    weights  core matrices, 8 columns x 16 bytes in one piece, those of 16 bytes of K one behind the other:
             an order that ``bind`` packs, so that one bulk copy fetches a stage's weights

TF32's products take float32 values and leave out what is beyond 10 bits of mantissa. ``bind`` rounds the weights,
adjoints' recurrences raise what they write, so that to cut off is to round (outputs.py), x is cut off: of an
LSTM's error of 3.4e-4 (both rounded) that makes 4.5e-4, where 6.8e-4 would be of both cut off.

``wgmma_kernel.py`` has the code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ecornn.program import Packing
from ecornn.schedules.gemm.job import Job, Operand

THREADS = 384
ROWS = 128  # of a tile; 64 of each multiplying warpgroup
LINE = 32  # words of a row of a stage: the 128 bytes that are swizzled
CHUNK = 16  # bytes of K of a core matrix
COLUMNS = 256  # of a tile at most, as of one wgmma
NARROWER = 4  # times as narrow tiles, at most, where there are few rows
STAGES = 6  # at most; fewer where shared memory is short


@dataclass(frozen=True)
class Shape:
    """How a product is cut.

    Attributes
    ----------
    rows : products of a unit
    octets : groups of 8 units of a tile, an even number
    columns : tiles side by side over the units
    parts : stages' worth of K of each operand
    vectors : parameter vectors, of which a tile's units are kept in shared memory
    size : bytes of a value
    stages : of the ring
    """

    rows: int
    octets: int
    columns: int
    parts: tuple[int, ...]
    vectors: int
    size: int
    stages: int = STAGES

    @property
    def slabs(self) -> int:
        """Stages' worth of K in all."""
        return sum(self.parts)

    @property
    def depth(self) -> int:
        """Values of K of a stage."""
        return LINE * 4 // self.size

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.octets * 8 * self.rows

    @property
    def units(self) -> int:
        return self.octets * 8

    @property
    def moves_registers(self) -> bool:
        """True if the multiplying warps need more registers than an even share."""
        return self.width > COLUMNS // 2

    @property
    def weight_bytes(self) -> int:
        return self.width * LINE * 4

    @property
    def stage_bytes(self) -> int:
        return ROWS * LINE * 4 + self.weight_bytes

    @property
    def vector_floats(self) -> int:
        """Floats of one tile's parameter vectors; each multiplying warpgroup has them for two tiles."""
        return self.vectors * self.units

    @property
    def ring(self) -> int:
        """Bytes of the stages, and of their barriers."""
        return self.stages * (self.stage_bytes + 16)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.ring + 4 * 4 * self.vector_floats


def shape_of(job: Job) -> Shape | None:
    """The tiles; None where this kernel does not serve the job."""
    rows, size = job.rows, job.itemsize
    if (not job.device.can.warpgroups or job.arithmetic == "float32" or not 0 < rows <= COLUMNS // 16
            or any(o.heads > 1 for o in job.operands)
            or any(o.columns.copied(CHUNK // size) * size % 4 for o in job.operands)):
        return None
    pairs, columns = -(-job.units // 16), _columns(job)  # pairs of octets
    parts = tuple(-(-o.columns.width * size // (LINE * 4)) for o in job.operands)
    whole = Shape(rows, -(-pairs // columns) * 2, columns, parts, job.vectors, size)
    room = job.device.shared - (whole.shared - whole.ring)
    stages = min(STAGES, room // (whole.ring // STAGES))
    return None if stages < 2 else replace(whole, stages=stages)


def _columns(job: Job) -> int:
    """Tiles side by side over the units: as wide as they may be, or narrower where that fills the chip's turns."""
    pairs, most = -(-job.units // 16), COLUMNS // (16 * job.rows)
    least = -(-pairs // most)
    if job.expected is None:
        return least
    groups = -(-job.expected // ROWS)

    def expected(columns: int) -> int:
        octets = -(-pairs // columns) * 2
        turns = -(-groups * -(-pairs * 2 // octets) // job.device.cores)
        return turns * (ROWS + octets * 8 * job.rows)  # bytes that are copied, which multiplying does not outrun

    return min(range(least, min(pairs, NARROWER * least) + 1), key=expected)


def packing_of(job: Job, s: Shape, operand: Operand, span: int) -> Packing:
    """(column, slab) tiles of 16-byte chunks of K, n8 tiles, 8 columns, values.

    A thread has columns 2 i and 2 i + 1 of each n8 tile. With a ``span`` of 4 the columns of two octets' n8 tiles are
    dealt out so that these are 4 neighbouring units (:class:`Outputs`).
    """
    chunks = (s.parts[job.operands.index(operand)], LINE * 4 // CHUNK, CHUNK // s.size)
    if span == 2:
        return operand.packing(s.rows, (s.columns, s.octets, 8), chunks, (1, 4, 5, 2, 0, 3, 6), job.arithmetic)
    return operand.packing(s.rows, (s.columns, s.octets // 2, 4, 2, 2), chunks, (1, 6, 7, 2, 4, 0, 3, 5, 8),
                           job.arithmetic)
