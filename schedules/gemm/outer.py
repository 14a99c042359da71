"""Outer products added up over all rows of T*B: how they are cut. Gradients of weights are such sums.

    into[m, n] = sum over rows r of values[r, m] * operand[r, n]

Both operands have the rows that are summed over on the outside, so that fragments are read across (``ldmatrix.trans``,
or 32-bit words one by one). Where the tiles fill the chip each block goes through all rows and writes to where the sum
belongs. Else the rows go to ``parts`` of blocks, each of which leaves a sum in the workspace ``parts``; a kernel of its
own adds these in order. So every run has the same bits.

``outer_kernel.py`` has the code; ``outer_wgmma.py`` and ``outer_wgmma_kernel.py`` are the same on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ecornn.device import Device
from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa.memory import ld_global, st_global
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.gemm.job import Columns
from ecornn.schedules.rates import gpu_rates
from ecornn.workload import ITEMSIZE

THREADS = 256
ROW_WARPS, COLUMN_WARPS = 2, 4  # over m, and over n
STAGES = 4
PAD = 8  # values behind a row of a stage, which keep reads across it free of bank conflicts
MOST_PARTS = 16
LEAST_ROWS = 256  # of a part
TOGETHER = 12  # pairs of sums that a thread has loaded at once
SLOWER = {"float32": 5, "tf32": 2}  # than 16-bit types


@dataclass(frozen=True)
class OuterJob:
    """The sums of outer products of one pair of operands.

    Attributes
    ----------
    name : of the kernel
    rows : T*B that the sizes are chosen for; any number may come
    mask : of :func:`~ecornn.schedules.timeline.rows_mask`: rows that take no part in their step count as zeros
    heads : of more than one ``operand`` has the columns of the first; those of the others are behind them, each for its
        own part of ``values``, which has all heads of a gate before those of the next one
    """

    name: str
    device: Device
    dtype: str
    arithmetic: str
    values: Columns
    operand: Columns
    rows: int
    mask: str | None = None
    heads: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Into:
    """The places where sums belong, in a float32 buffer.

    Attributes
    ----------
    row : m -> where its sums start, int64; they lie one behind the other
    add : to what is there; None: where the kernel's scalar ``add`` is not 0
    """

    row: Callable[[Expr], Expr]
    add: bool | Expr | None

    def told(self) -> Into:
        """The same places in a kernel that is being built, which gets the scalar ``add`` if it is needed."""
        return replace(self, add=T.arg("add", T.int32()) != 0) if self.add is None else self

    def store(self, buffer: TirBuffer, m: Expr, n: Expr, value: Expr) -> None:
        """Stores one sum."""
        to = T.let("to", self.row(m) + n)
        T.buffer_store(buffer, with_existing(self.add, buffer[to], value), [to])

    def store_pairs(self, buffer: TirBuffer, m: Expr, first: Expr, width: int,
                    pairs: Sequence[tuple[Expr, Expr]]) -> None:
        """Sums of two neighbours at ``first``, an even n, and at every eighth from there on, as far as they are below
        ``width``, which is even. Of ``TOGETHER`` pairs what is there is loaded before the first one is stored: a
        store that waits for its load would keep the next load waiting, too. Places differ by constants, which
        instructions have in themselves: a gate's number takes a division."""
        to = self._kept(self.row(m) + first)
        for start in range(0, len(pairs), TOGETHER):
            some = pairs[start:start + TOGETHER]
            offsets = [n * 8 for n in range(start, start + len(some))]
            values: Sequence[tuple[Expr, Expr]] = some
            if self.add is not False:
                before = T.local("before", (len(some), 2), "float32")
                if self.add is not True:
                    for k in range(len(some)):
                        for e in range(2):
                            T.buffer_store(before, T.float32(0), [k, e])
                with self._if_added():
                    for k, offset in enumerate(offsets):
                        with T.If(first + offset < width), T.Then():
                            ld_global([before[k, 0], before[k, 1]], buffer.ptr_to([to + offset]), "f32")
                values = [(before[k, 0] + one, before[k, 1] + other) for k, (one, other) in enumerate(some)]
            for offset, pair in zip(offsets, values, strict=True):
                with T.If(first + offset < width), T.Then():
                    st_global(buffer.ptr_to([to + offset]), pair, "f32")

    @contextmanager
    def _if_added(self) -> Iterator[None]:
        """A scope for what is done only where sums are added to what is there."""
        if self.add is True:
            yield
        else:
            with T.If(self.add), T.Then():
                yield

    @staticmethod
    def _kept(value: Expr) -> Expr:
        """A variable that TVM does not put the expression in place of."""
        kept = T.local("to", (1,), "int64")
        T.buffer_store(kept, value, [0])
        return kept[0]


def with_existing(add: bool | Expr | None, before: Expr, value: Expr) -> Expr:
    """``value``, or the sum of it and ``before``, which is not read elsewhere."""
    if isinstance(add, bool):
        return before + value if add else value
    return T.if_then_else(add, before, T.float32(0)) + value


def part_of_sums(part: Expr, height: int, width: int) -> Into:
    """The place of a part's sums in ``parts`` (parts, height, width)."""
    return Into(lambda m: T.cast(part * height + m, "int64") * width, add=False)


@dataclass(frozen=True)
class OuterShape:
    """How a sum of outer products is cut for ``mma``.

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
    if job.heads > 1:  # a tile's values are of one head
        whole = [n for n in (1, 2, 4) if n <= m_tiles and job.operand.width % (ROW_WARPS * 16 * n) == 0]
        m_tiles = max(whole)
    n_tiles = next(n for n in (2, 4) if n == 4 or COLUMN_WARPS * 8 * n >= job.operand.width)
    tile = OuterShape(m_tiles, n_tiles, 1, 1, 1, job.itemsize)
    down, across = -(-job.values.width // tile.height), -(-job.operand.width // tile.width)
    rate = gpu_rates(job.device).mma_gemm / SLOWER.get(job.arithmetic, 1) / 2
    return replace(tile, down=down, across=across,
                   parts=best_parts(job, down * across, tile.height * tile.width / rate, 2 * job.device.cores))


def best_parts(job: OuterJob, tiles: int, row: float, at_once: int) -> int:
    """Parts of the rows that fill the chip's last turn without too many sums in memory; arguments as of
    :func:`expected`."""
    most = max(1, min(MOST_PARTS, job.rows // LEAST_ROWS))
    return min(range(1, most + 1), key=lambda parts: expected(job, tiles, row, at_once, parts))


def expected(job: OuterJob, tiles: int, row: float, at_once: int, parts: int) -> float:
    """Nanoseconds; ``row``: that a tile takes for half a row, ``at_once``: blocks."""
    stored = 8.0 * job.values.width * job.operand.width / gpu_rates(job.device).memory_beside  # and loaded
    return -(-tiles * parts // at_once) * (2 * job.rows / parts) * row + (parts + (parts > 1)) * stored
