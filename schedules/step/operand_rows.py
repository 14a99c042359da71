"""The rows of x or of a state whose words a lane multiplies: from memory or from shared memory.

A lane of ``warp_product.py`` reads four words of the row lane / 4 of each octet of batch rows. Straight from memory
every block reads all rows. The blocks of a cluster may have them read once for all: each copies a part of every row
into the shared memory of all (a multicast), where the 16 bytes of lanes that read together lie in different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ecornn.schedules.builder import Expr, T, TirBuffer, ceil_div
from ecornn.schedules.cuda.isa.copies import bulk_copy
from ecornn.schedules.cuda.isa.memory import ld_global, ld_shared
from ecornn.schedules.cuda.isa.tensor_core import per_word

PAIR = 16  # words of a pair of k-tiles


class Operand(Protocol):
    """The operand that a product reads beside its weights."""

    def load(self, into: TirBuffer, slot: int, octet: int, pair: Expr, quarter: Expr) -> None:
        """Loads the lane's four words of an octet, zeros beyond the row's end, into ``into[slot, octet]``; ``quarter``
        of the pair's 16 words."""


@dataclass(frozen=True)
class RowsInMemory:
    """Rows of ``width`` values, ``stride`` apart in ``source``, where a row may begin; the lane's row of octet n begins
    at ``starts[n]``."""

    source: TirBuffer
    starts: list[Expr]
    width: int
    stride: int
    dtype: str

    def load(self, into: TirBuffer, slot: int, octet: int, pair: Expr, quarter: Expr) -> None:
        """Loads by the widest loads for which all rows are aligned."""
        n, width = per_word(self.dtype), self.width
        k = T.let("k", pair * (PAIR * n) + quarter * (4 * n))
        at = self.starts[octet] + k
        if whole_pieces(self.stride, self.dtype) and whole_pieces(width, self.dtype):
            words = [into[slot, octet, i] for i in range(4)]
            if width % (PAIR * n) == 0:
                ld_global(words, self.source.ptr_to([at]))
                return
            with T.If(k < width):
                with T.Then():
                    ld_global(words, self.source.ptr_to([at]))
                with T.Else():
                    for i in range(4):
                        T.buffer_store(into, T.uint32(0), [slot, octet, i])
            return
        for i in range(4):
            T.buffer_store(into, T.uint32(0), [slot, octet, i])
            with T.when(k + i * n < width):
                if self.stride % n == 0 and width % n == 0:
                    ld_global([into[slot, octet, i]], self.source.ptr_to([at + i * n]))
                    continue
                half = T.local("half", (2,), "uint32")
                ld_global([half[0]], self.source.ptr_to([at + i * n]), "u16")
                T.buffer_store(half, T.uint32(0), [1])
                with T.when(k + (i * n + 1) < width):
                    ld_global([half[1]], self.source.ptr_to([at + (i * n + 1)]), "u16")
                T.buffer_store(into, T.bitwise_or(half[0], T.shift_left(half[1], T.uint32(16))), [slot, octet, i])


def whole_pieces(values: int, dtype: str) -> bool:
    """True if so many values are whole pieces of 16 bytes."""
    return values * 4 % (16 * per_word(dtype)) == 0


@dataclass(frozen=True)
class StagedRows:
    """Rows in shared memory, from word ``first`` on, 64 bytes modulo 128 apart.

    Attributes
    ----------
    words : the block's shared memory, uint32
    rows : of the block, all of them
    lane_row : that of the lane in an octet
    """

    words: TirBuffer
    first: int
    rows: int
    width: int
    dtype: str
    lane_row: Expr

    def load(self, into: TirBuffer, slot: int, octet: int, pair: Expr, quarter: Expr) -> None:
        at = (self.lane_row + octet * 8) * staged_words(self.width, self.dtype) + pair * PAIR + quarter * 4
        ld_shared([into[slot, octet, i] for i in range(4)], self.words.ptr_to([self.first + at]))

    def clear(self, thread: Expr, threads: int) -> None:
        """Stores zeros behind the end of each row."""
        row, own = staged_words(self.width, self.dtype), self.width // per_word(self.dtype)
        count = self.rows * (row - own)
        with T.serial("turn", 0, ceil_div(count, threads)) as turn:
            item = T.let("item", turn * threads + thread)
            with T.when(item < count):
                T.buffer_store(self.words, T.uint32(0), [self.first + item // (row - own) * row + (
                    own + item % (row - own))])

    def copy(self, source: TirBuffer, start: Expr, row: Expr, part: Expr, parts: int, barrier: Expr) -> None:
        """Copies one of ``parts`` of a row, which begins at ``start`` of ``source``, to all blocks of the cluster."""
        n = per_word(self.dtype)
        pieces = self.width // n // 4
        each = ceil_div(pieces, parts)
        size = T.let("size", T.min(pieces - part * each, each) * 16)
        to = self.first + row * staged_words(self.width, self.dtype) + part * (each * 4)
        with T.when(size > 0):
            bulk_copy(self.words.ptr_to([to]), source.ptr_to([start + part * (each * 4 * n)]), T.cast(size, "uint32"),
                      barrier, ranks=T.uint16((1 << parts) - 1))


def staged_words(width: int, dtype: str) -> int:
    """Words from one row to the next: an odd number of pairs."""
    return (ceil_div(width, PAIR * per_word(dtype)) | 1) * PAIR
