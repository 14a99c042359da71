"""How 256 threads cut a product over all rows into tiles for ``mma``, and what a tile needs of the chip.

``mma_kernel.py`` has the code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from ecornn.program import Packing
from ecornn.schedules.builder import Expr
from ecornn.schedules.cuda.isa.tensor_core import per_word, words
from ecornn.schedules.gemm.job import Job, Operand

THREADS = 256
STAGES = 3  # 2 where shared memory is short
WIDE = 8  # n8 tiles of a warp, about: wider ones read less shared memory a product
WARP_COLUMNS = 4  # warps side by side over units; 2 over rows
SPAN = 2  # pairs of k-tiles (16 words each) of a stage: whole 128-byte lines of x
ROW = SPAN * 16 + 4  # words of a row of x in a stage; the 4 keep ldmatrix free of bank conflicts
LEAST_ROWS = 32  # of a tile: 2 warps of one m16 tile
CHUNK = 128  # the rows done ahead are a multiple of this, and it is one of every block's rows
SPARE_REGISTERS = 50  # addresses and loop state beside accumulators and fragments


@dataclass(frozen=True)
class Shape:
    """How 256 threads cut a product into tiles.

    Attributes
    ----------
    rows, outputs : products of a unit, and values that are made of them
    octets : groups of 8 units a warp computes
    tiles : m16 tiles of a warp
    columns : tiles side by side over the units
    parts : stages' worth of K of each operand, SPAN * 16 words each
    stages : of the pipeline, each in shared memory
    """

    rows: int
    outputs: int
    octets: int
    tiles: int
    columns: int
    parts: tuple[int, ...]
    stages: int

    @property
    def slabs(self) -> int:
        """Stages' worth of K in all."""
        return sum(self.parts)

    @property
    def products(self) -> int:
        """n8 tiles of a warp."""
        return self.octets * max(self.rows, 1)

    @property
    def block_octets(self) -> int:
        return WARP_COLUMNS * self.octets

    @property
    def block_rows(self) -> int:
        return LEAST_ROWS * self.tiles

    @property
    def weight_words(self) -> int:
        """Words of packed weights a block needs for a slab."""
        return SPAN * self.block_octets * self.rows * 128

    @property
    def stage_words(self) -> int:
        return self.block_rows * ROW + self.weight_words

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * self.stage_words * 4 if self.rows else 16

    def registers(self, arithmetic: str) -> int:
        """Estimate of a thread's registers."""
        split = 2 if arithmetic == "float32" else 1
        return (self.tiles * self.products + split * (self.tiles + self.products)) * 4 + SPARE_REGISTERS


def shape_of(job: Job) -> Shape:
    """The tiles of a kernel that has the multiprocessor to itself; its ``shared`` may still be too much."""
    rows = job.rows
    wide = WIDE // 2 if job.arithmetic == "float32" else WIDE  # sums of k-tiles need registers, too
    octets = max(1, wide // max(rows, 1))
    heads = [o.depth for o in job.operands if o.heads > 1]
    octets = max(n for n in range(1, octets + 1) if n == 1 or all(own % (8 * WARP_COLUMNS * n) == 0 for own in heads))
    accumulators = octets * max(rows, 1)
    tiles = 4 if accumulators <= 8 else 2 if accumulators <= 16 else 1
    if job.arithmetic == "float32":
        tiles = min(tiles, 2)
    columns = -(-job.units // (8 * WARP_COLUMNS * octets))
    parts = tuple(-(-words(o.depth, job.dtype) // (SPAN * 16)) for o in job.operands)
    shape = Shape(rows, job.outputs, octets, tiles, columns, parts, STAGES)
    while shape.shared > job.device.shared and (shape.stages, shape.tiles) != (2, 1):
        shape = replace(shape, stages=2) if shape.stages > 2 else replace(shape, tiles=shape.tiles // 2)
    return shape


def blocks_of(job: Job, s: Shape) -> int:
    """Blocks of a kernel that has the GPU to itself. Where the last column is less work than the others, as many as
    have no divisor in common with the columns: each block, and each multiprocessor, then has tiles of all of them."""
    blocks = job.device.cores * (1 if s.tiles * s.products > 16 else 2)
    while spares_warps(job, s) and gcd(blocks, s.columns) > 1:
        blocks -= 1
    return blocks


def spares_warps(job: Job, s: Shape) -> bool:
    """True if warps of the last column have no units and do not multiply padding: in float32, where products take
    long."""
    own = 8 * s.octets
    return job.arithmetic == "float32" and s.columns * WARP_COLUMNS * own - job.units >= own


def shape_within(job: Job, registers: int) -> Shape | None:
    """The largest tiles for which a thread has ``registers``; None where even the smallest need more."""
    whole = shape_of(job)
    for tiles in (4, 2, 1):
        if tiles <= whole.tiles:
            shape = whole if tiles == whole.tiles else replace(whole, tiles=tiles)
            if shape.registers(job.arithmetic) <= registers:
                return shape
    return None


def packing_of(job: Job, s: Shape, operand: Operand) -> Packing:
    """(column, slab) tiles of k-tiles, octets and fragments: a block's weights of a stage are one piece."""
    pairs, n = s.parts[job.operands.index(operand)] * SPAN, per_word(job.dtype)
    return operand.packing(s.rows, (s.columns, s.block_octets, 8), (pairs, 2, 2, 4, n), (1, 4, 2, 0, 3, 7, 5, 6, 8),
                           job.dtype)


def rows_ahead(rows: Expr, ahead: int) -> Expr:
    """The number of ``rows`` = T*B (an expression, int32) that are done ahead: a multiple of ``CHUNK``, or all."""
    common = gcd(ahead, 100)  # TVM's simplifier overflows with 75 / 100
    return rows if ahead == 100 else rows // CHUNK * (ahead // common) // (100 // common) * CHUNK
