"""Products of a step whose operands go from memory straight to registers: the warps of a block share K.

Weights are operand A of tensor cores, in groups of eight rows (of gates x units); operand B is octets of batch rows. A
lane reads 16 bytes of either, as in ``mma_product.py``: K is permuted alike in both. One warp of one block reads a
weight, so shared memory gains nothing. A warp asks for the next ``ahead`` pairs of k-tiles before it multiplies the
first one, without barriers. The sums of all warps meet in shared memory, and are added in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from ecornn.analysis import Product
from ecornn.program import PACKED, Buffer, Extent, Packing
from ecornn.schedules.builder import Expr, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda.isa import bulk_copy, ld_global, ld_shared, sync_warp
from ecornn.schedules.cuda.isa.tensor_core import PAIR, multiply_pair, per_word, words


@dataclass(frozen=True)
class RowsInMemory:
    """Rows of ``width`` values, ``stride`` apart in ``source``; the lane's row of octet n begins at ``starts[n]``."""

    source: TirBuffer
    starts: list[Expr]
    width: int
    stride: int
    dtype: str

    def load(self, into: TirBuffer, slot: int, octet: int, pair: Expr, quarter: Expr) -> None:
        """Loads a lane's ``quarter`` of a pair, zeros beyond the row, by the widest loads that all rows allow."""
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
    return values * 4 % (16 * per_word(dtype)) == 0  # true if so many values are whole pieces of 16 bytes


@dataclass(frozen=True)
class StagedRows:
    """Rows in shared memory, from word ``first`` on, 64 bytes modulo 128 apart."""

    words: TirBuffer  # the block's shared memory, uint32
    first: int
    rows: int  # of the block, all of them
    width: int
    dtype: str
    lane_row: Expr  # the lane's, in an octet

    def load(self, into: TirBuffer, slot: int, octet: int, pair: Expr, quarter: Expr) -> None:
        at = (self.lane_row + octet * 8) * staged_words(self.width, self.dtype) + pair * PAIR + quarter * 4
        ld_shared([into[slot, octet, i] for i in range(4)], self.words.ptr_to([self.first + at]))

    def clear(self, thread: Expr, threads: int) -> None:
        row, own = staged_words(self.width, self.dtype), self.width // per_word(self.dtype)
        behind = row - own
        with T.strided("item", self.rows * behind, thread, threads) as item:
            T.buffer_store(self.words, T.uint32(0), [self.first + item // behind * row + (own + item % behind)])

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


Operand = RowsInMemory | StagedRows  # that a product reads beside its weights

GROUP = 8 * PAIR  # words of a group of weight rows


@dataclass(frozen=True)
class Share:
    """A product of a block, and the warps that share it."""

    dtype: str
    arithmetic: str
    units: int  # of the block
    rows: int  # batch rows of the block
    gates: int  # weight rows of a unit
    width: int  # K
    warps: int  # that share K
    ahead: int  # pairs of k-tiles that each of them asks for ahead
    staged: bool = False  # what it multiplies comes from shared memory, not ahead from memory

    @property
    def groups(self) -> int:
        return self.gates * self.units // 8  # groups of eight weight rows

    @property
    def tiles(self) -> int:
        return ceil_div(self.groups, 2)  # m16 tiles, of which the last one may have one group

    @property
    def octets(self) -> int:
        return self.rows // 8  # n8 tiles

    @property
    def pairs(self) -> int:
        return ceil_div(words(self.width, self.dtype), PAIR)  # pairs of k-tiles

    @property
    def turns(self) -> int:
        return ceil_div(self.pairs, self.warps)  # pairs of a warp

    @property
    def slots(self) -> int:
        return min(self.ahead, self.turns)  # pairs that a warp keeps in registers

    @property
    def stride(self) -> int:
        """Floats between batch rows of the sums: 4 modulo 8, so that no banks conflict."""
        return self.gates * self.units + 4

    @property
    def floats(self) -> int:
        return self.warps * self.rows * self.stride  # floats of the sums of all warps

    @property
    def registers(self) -> int:
        parts = 2 if self.arithmetic == "float32" else 1
        return 4 * (self.tiles * self.octets + self.slots * self.groups + self.operand_slots * self.octets
                    + (parts - 1) * (2 * self.tiles + self.octets))

    @property
    def operand_slots(self) -> int:
        return 1 if self.staged else self.slots  # pairs of what it multiplies that a warp keeps in registers

    @property
    def weight_bytes(self) -> int:
        return self.groups * GROUP * 4  # bytes of weights of a pair of k-tiles

    @property
    def operand_bytes(self) -> int:
        return self.octets * GROUP * 4  # bytes of what is multiplied, of a pair of k-tiles

    def weights(self, name: str, products: tuple[Product, ...], columns: int) -> Buffer:
        """Packed weights: (block, pair of k-tiles, gate, unit, 16 words)."""
        n = PAIR * per_word(self.dtype)
        pad, cut = (self.gates, columns * self.units, self.pairs * n), (columns, self.units, self.pairs, n)
        packing = Packing(tuple(p.term.source for p in products), pad, (self.gates, *cut), (1, 3, 0, 2, 4), self.dtype)
        return Buffer(name, PACKED, self.dtype, Extent(pad[0] * pad[1] * pad[2]), packing)


class WarpProduct:
    """Emits a share of a block's products; its sums: ``memory``, from ``first`` on, (warp, batch row, weight row)."""

    def __init__(self, share: Share, memory: TirBuffer, first: int, warp: Expr, lane: Expr) -> None:
        self.share, self.memory, self.first, self.warp, self.lane = share, memory, first, warp, lane

    def run(self, weights: TirBuffer, column: Expr, operand: Operand, before: Callable[[], None]) -> None:
        """Leaves the warp's sums in shared memory. ``column``: the block's; ``before`` emits what reads must await."""
        share, n = self.share, per_word(self.share.dtype)
        self.acc = T.local("acc", (1, share.tiles, share.octets, 4), "float32")  # of one chain
        self.a = T.local("a", (share.slots, share.groups, 4), "uint32")  # words of a lane's row
        self.b = T.local("b", (share.operand_slots, share.octets, 4), "uint32")
        with T.unroll("m", share.tiles) as m, T.unroll("n", share.octets) as o, T.unroll("i", 4) as i:
            T.buffer_store(self.acc, T.float32(0), [0, m, o, i])
        block = T.let("weights_of", T.cast(column, "int64") * (share.pairs * share.groups * GROUP * n))

        def load_weights(slot: int, pair: Expr) -> None:
            first = T.let("first", block + T.cast(pair * (share.groups * GROUP * n) + self.lane * (4 * n), "int64"))
            for g in range(share.groups):
                ld_global([self.a[slot, g, i] for i in range(4)], weights.ptr_to([first + g * (GROUP * n)]))

        def load_operand(slot: int, pair: Expr) -> None:
            for o in range(share.octets):
                operand.load(self.b, slot, o, pair, self.lane % 4)

        def multiply(slot: int, pair: Expr) -> None:
            if share.staged:
                load_operand(0, pair)
            self._multiply(slot, 0 if share.staged else slot)

        ahead = (load_weights,) if share.staged else (load_weights, load_operand)
        for load in (load_weights, load_operand):
            for slot in range(share.slots if load in ahead else 0):
                with self._pair(slot) as pair:
                    load(slot, pair)
            if load is load_weights:
                before()
        sync_warp()  # so that no load waits behind a product for a register to become free
        if share.turns <= share.slots:
            for slot in range(share.slots):
                with self._pair(slot) as pair:
                    multiply(slot, pair)
        else:
            with T.serial("round", 0, ceil_div(share.turns, share.slots)) as r:
                for slot in range(share.slots):
                    with self._pair(r * share.slots + slot, share.turns % share.slots != 0) as pair:
                        multiply(slot, pair)
                    with self._pair(r * share.slots + (slot + share.slots)) as pair:
                        for load in ahead:
                            load(slot, pair)
        self._store()

    @contextmanager
    def _pair(self, turn: Expr | int, beyond: bool | None = None) -> Iterator[Expr]:
        """The pair of a turn, in a scope where there is one; ``beyond``: whether the turn may be behind the last."""
        share = self.share
        pair = T.let("pair", turn * share.warps + self.warp)
        beyond = not isinstance(turn, int) if beyond is None else beyond
        with T.when((share.pairs % share.warps == 0 and not beyond) or pair < share.pairs):
            yield pair

    def _multiply(self, slot: int, operand: int) -> None:
        share = self.share
        rows = [[self.a[slot, v, i] for i in range(4)] for v in range(share.groups)]
        rows += [[T.uint32(0)] * 4] * (share.groups % 2)
        columns = [[self.b[operand, n, i] for i in range(4)] for n in range(share.octets)]
        multiply_pair(self.acc, 0, [row.__getitem__ for row in rows], columns, share.arithmetic, apart=True)

    def _store(self) -> None:
        share = self.share
        row = self.warp * share.rows + self.lane % 4 * 2
        first = T.let("first", row * share.stride + self.lane // 4 + self.first)
        for m, n, i in product(range(share.tiles), range(share.octets), range(4)):
            if 2 * m + i // 2 < share.groups:
                place = first + (n * 8 + i % 2) * share.stride + m * 16 + i // 2 * 8
                T.buffer_store(self.memory, self.acc[0, m, n, i], [place])


def add_up(share: Share, memory: TirBuffer, first: int, thread: Expr, threads: int) -> None:
    """Adds the sums of all warps where those of the first one are; all threads, between two barriers."""
    if share.warps == 1:
        return
    rows = share.gates * share.units
    with T.strided("item", share.rows * rows, thread, threads) as item:
        place = T.let("place", item // rows * share.stride + item % rows + first)
        others = (memory[place + warp * (share.rows * share.stride)] for warp in range(1, share.warps))
        T.buffer_store(memory, sum(others, memory[place]), [place])


def sums(share: Share, products: tuple[Product, ...], memory: TirBuffer, first: int, row: Expr,
         unit: Expr) -> dict[Var, Expr]:
    """The finished products of a row and a unit of the block."""
    return {p.var: T.let(p.var.name, memory[row * share.stride + unit + (g * share.units + first)])
            for g, p in enumerate(products)}
