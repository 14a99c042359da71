"""Products of a step on tensor cores, weights streamed through shared memory.

Weights are operand A (gates x units, in rows of 16), the state is operand B (batch rows, in columns of 8); warps share
weight rows, batch rows and K. Both come in pairs of k-tiles, 16 words a row, by ``cp.async`` in a pipeline of stages. A
lane's 16 bytes are neighbouring words of a row: K is permuted alike in both operands, and no reads conflict."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd, lcm, prod

from ecornn.analysis import Product
from ecornn.analysis.heads import heads_of
from ecornn.analysis.narrow import narrow_of
from ecornn.program import PACKED, Buffer, Extent
from ecornn.schedules.base import Knobs, Task, knob
from ecornn.schedules.builder import Expr, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda.isa import cp_async, cp_async_commit, cp_async_wait, ld_shared, sync_block
from ecornn.schedules.cuda.isa.tensor_core import PAIR, multiply_pair, per_word, words
from ecornn.schedules.gemm.job import packing_of
from ecornn.schedules.hoisted import hoisted_knob
from ecornn.schedules.scalars.pointwise import MATH_TRADES
from ecornn.schedules.step.scalars import Layout

SPARE_REGISTERS = 44  # of a thread, beside accumulators and fragments: addresses, loops, gate math


class TileKnobs(Knobs):
    units: int = knob("units in a block. Fewer: more blocks; more: fewer reads of the state")
    rows: int = knob("batch rows in a block. Fewer: more blocks; more: fewer reads of weights")
    row_warps: int = knob("warps over weight rows. More: fewer registers for each, but each reads the state")
    batch_warps: int = knob("warps over the batch. More: fewer registers for each, but each reads the weights")
    split: int = knob("warps over K. More: more loads at the same time, but more partial sums to add")
    depth: int = knob("depth of a stage. More: fewer barriers, but more shared memory and padding")
    stages: int = knob("stages of the pipeline. More: more latency is hidden, but more shared memory is needed")
    layout: str = knob("layout of the state. Hidden innermost: writers fill sectors; batch inside blocks: readers do")
    hoisted: str = hoisted_knob()
    math: str = knob(MATH_TRADES)


@dataclass(frozen=True)
class TilePlan:
    knobs: TileKnobs
    hidden: int
    dtype: str
    arithmetic: str  # of the products: dtype, or tf32
    units: int  # of a block
    rows: int  # batch rows of a block
    row_warps: int
    batch_warps: int
    split: int  # warps that share K
    depth: int  # pairs of k-tiles a warp takes from a stage
    stages: int
    gates: tuple[int, ...]  # of each phase
    operands: tuple[int, ...]  # of each phase
    heads: tuple[int, ...]  # of each phase; a block's units are of one
    narrow: tuple[tuple[int, int], ...]  # rows and columns of the matrices of each phase, 0: all

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.batch_warps * self.split

    @property
    def columns(self) -> int:
        return ceil_div(self.hidden, self.units)  # blocks over the hidden units

    @property
    def stage_pairs(self) -> int:
        return self.split * self.depth

    @property
    def pairs(self) -> int:
        """Pairs of k-tiles of one operand, padded to whole stages."""
        return ceil_div(words(self.hidden, self.dtype), PAIR * self.stage_pairs) * self.stage_pairs

    def turns(self, p: int) -> int:
        return self.operands[p] * self.phase_pairs(p) // self.stage_pairs

    def own(self, p: int) -> int:
        return self.narrow[p][1] or self.hidden // self.heads[p]

    def blocks(self, p: int) -> int:
        return ceil_div(self.narrow[p][0], self.units) or self.columns  # blocks over the hidden units that have weights

    def share(self, p: int) -> float:
        """The part of H by H weights that a matrix of phase p has."""
        return 1 / self.heads[p] if self.narrow[p] == (0, 0) else self.own(p) * (self.narrow[p][0] or self.hidden) / (
            self.hidden ** 2)

    def phase_pairs(self, p: int) -> int:
        """Pairs of k-tiles of the values of :meth:`own`, padded to whole stages."""
        return ceil_div(words(self.own(p), self.dtype), PAIR * self.stage_pairs) * self.stage_pairs

    def whole(self, p: int) -> bool:
        """True if :meth:`own` are whole stages of copies, and of whole blocks."""
        return words(self.own(p), self.dtype) == PAIR * self.phase_pairs(p) and self.own(p) % self.units == 0

    def weight_rows(self, p: int) -> int:
        return self.gates[p] * self.units

    def tiles(self, p: int) -> int:
        return self.weight_rows(p) // (16 * self.row_warps)  # m16 tiles of a warp

    @property
    def octets(self) -> int:
        return self.rows // (8 * self.batch_warps)  # n8 tiles of a warp

    def stage_words(self, p: int) -> int:
        return self.stage_pairs * PAIR * (self.weight_rows(p) + self.rows)

    def stride(self, p: int) -> int:
        """Floats between batch rows of the partial sums: 4 modulo 16, so that no banks conflict."""
        return self.weight_rows(p) + 4

    def shared(self, p: int) -> int:
        """Bytes of shared memory: stages while multiplying, partial sums afterwards."""
        return 4 * max(self.stages * self.stage_words(p), self.split * self.rows * self.stride(p))

    def registers(self, p: int) -> int:
        tiles, octets, parts = self.tiles(p), self.octets, 2 if self.arithmetic == "float32" else 1
        return 4 * tiles * octets + parts * (8 * tiles + 4 * octets) + SPARE_REGISTERS

    def layout(self, batch: int) -> Layout:
        """The operands' layout: ``hidden`` innermost, or the ``batch`` inside blocks of a pair of k-tiles."""
        width = self.pairs * PAIR * per_word(self.dtype)
        block = width if self.knobs.layout == "hidden" else PAIR * per_word(self.dtype)
        return Layout(ceil_div(batch, self.rows) * self.rows, width, block)


def unit_step(task: Task) -> int:
    """Units of a block come in multiples of this, so that every phase fills m16 tiles."""
    return lcm(*(16 // gcd(len(p.products), 16) for p in task.graph.phases))


def plan_of(task: Task, knobs: TileKnobs) -> TilePlan:
    phases = task.graph.phases
    return TilePlan(knobs=knobs, hidden=task.workload.hidden, dtype=task.workload.dtype,
                    arithmetic=task.workload.arithmetic, units=knobs.units, rows=knobs.rows, row_warps=knobs.row_warps,
                    batch_warps=knobs.batch_warps, split=knobs.split, depth=knobs.depth, stages=knobs.stages,
                    gates=tuple(len(p.products) for p in phases), operands=tuple(len(p.operands) for p in phases),
                    heads=tuple(heads_of(p) for p in phases), narrow=tuple(narrow_of(p) for p in phases))


def weights_buffer(task: Task, plan: TilePlan, p: int) -> Buffer:
    """Weights (block, operand, pair of k-tiles, gate, unit, 16 words); zeros where a gate does not read an operand."""
    phase, n = task.graph.phases[p], per_word(plan.dtype)
    sources = tuple(row.source(operand) for operand in phase.operands for row in phase.products)
    packing = packing_of(sources, (plan.operands[p], plan.gates[p]), (plan.blocks(p), plan.units),
                         (plan.phase_pairs(p), PAIR * n), (2, 0, 4, 1, 3, 5), plan.dtype,
                         transposed=phase.products[0].terms[0].transposed, heads=plan.heads[p])
    return Buffer(f"recurrent_{p}", PACKED, plan.dtype, Extent(prod(packing.pad)), packing)


class TensorProduct:
    """Emits phase ``p``'s products of one block. ``memory``, float32, 16-byte aligned: stages of weights (pair, weight
    row, word) and state (pair, batch row, word); afterwards partial sums (part of K, batch row, weight row)."""

    def __init__(self, plan: TilePlan, p: int, rows: tuple[Product, ...], memory: TirBuffer, thread: Expr) -> None:
        self.plan, self.p, self.rows = plan, p, rows
        self.memory, self.shared, self.thread = memory, memory.view("uint32"), thread
        warp, self.lane = T.let("warp", thread // 32), T.let("lane", thread % 32)
        self.row_warp = T.let("row_warp", warp % plan.row_warps)
        self.batch_warp = T.let("batch_warp", warp // plan.row_warps % plan.batch_warps)
        self.part = T.let("part", warp // (plan.row_warps * plan.batch_warps))

    def run(self, weights: TirBuffer, column: Expr, operands: TirBuffer, base: Expr, row0: Expr,
            layout: Layout) -> None:
        """Leaves partial sums in shared memory. ``column``, ``row0``: the block's; ``base``: where operands start."""
        plan, p = self.plan, self.p
        turns, own, n = plan.turns(p), plan.own(p), per_word(self.plan.dtype)
        self.head = T.let("head", column * plan.units // own * own) if plan.heads[p] > 1 else None
        # (one chain, m16 tile of weight rows, n8 tile of batch rows, 4)
        acc = T.local("acc", (1, plan.tiles(p), plan.octets, 4), "float32")
        with T.unroll("m", plan.tiles(p)) as m, T.unroll("n", plan.octets) as octet, T.unroll("i", 4) as i:
            T.buffer_store(acc, T.float32(0), [0, m, octet, i])

        def load(turn: Expr) -> None:
            place = T.let("place", turn % plan.stages * plan.stage_words(p))
            size = plan.stage_pairs * plan.weight_rows(p) * PAIR  # words
            first = T.let("first", T.cast(column * turns + turn, "int64") * (size * n))
            for index in self._copies(size // 4):
                cp_async(self.shared.ptr_to([place + index * 4]), weights.ptr_to([first + index * (4 * n)]), 16)
            self._load_operand(operands, base, row0, turn, place, layout)

        T.note("prologue: the first stages of weights and state to shared memory (cp.async)")
        has = True if plan.blocks(p) == plan.columns else T.let("has", column < plan.blocks(p))
        for turn in range(plan.stages - 1):
            if turn < turns:
                with T.when(has):
                    load(T.int32(turn))
            cp_async_commit()
        T.note("main loop: wait for a stage, copy one ahead, multiply (mma)")
        with T.serial("turn", 0, turns if has is True else T.Select(has, turns, 0)) as turn:
            cp_async_wait(plan.stages - 2)
            sync_block()
            with T.when(turn + (plan.stages - 1) < turns):
                load(T.let("turn_ahead", turn + (plan.stages - 1)))
            cp_async_commit()
            self._multiply(acc, T.let("stage", turn % plan.stages * plan.stage_words(p)))
        T.note("partial sums of all warps to shared memory, where the stages were")
        sync_block()  # partial sums overwrite the stages
        row = self.part * plan.rows + self.batch_warp * (plan.octets * 8) + self.lane % 4 * 2
        first = T.let("first", row * plan.stride(p) + self.row_warp * (plan.tiles(p) * 16) + self.lane // 4)
        for m, octet, i in product(range(plan.tiles(p)), range(plan.octets), range(4)):
            place = first + (octet * 8 + i % 2) * plan.stride(p) + m * 16 + i // 2 * 8
            T.buffer_store(self.memory, acc[0, m, octet, i], [place])
        sync_block()

    def _copies(self, count: int) -> Expr:
        """Numbers of this thread's copies, each in a scope where it is below ``count``."""
        threads = self.plan.threads
        for turn in range(ceil_div(count, threads)):
            index = T.let("index", turn * threads + self.thread)
            with T.when((turn + 1) * threads <= count or index < count):
                yield index

    def _load_operand(self, operands: TirBuffer, base: Expr, row0: Expr, turn: Expr, place: Expr,
                      layout: Layout) -> None:
        plan, n = self.plan, per_word(self.plan.dtype)
        stages = plan.phase_pairs(self.p) // plan.stage_pairs  # of one operand
        start = T.let("start", place + plan.stage_pairs * plan.weight_rows(self.p) * PAIR)
        operand = T.let("operand", base + turn // stages * layout.size) if plan.operands[self.p] > 1 else base
        pair0 = T.let("pair0", turn % stages * plan.stage_pairs)
        for index in self._copies(plan.stage_pairs * plan.rows * 4):
            quarter = index % 4
            if layout.block == layout.width:  # neighbouring threads along the hidden axis, as it lies in memory
                pair, row = index // 4 % plan.stage_pairs, index // (4 * plan.stage_pairs)
            else:
                pair, row = index // (4 * plan.rows), index // 4 % plan.rows
            value = (pair0 + pair) * (PAIR * n) + quarter * (4 * n)
            source = operand + layout.place(row0 + row, value if self.head is None else self.head + value)
            cp_async(self.shared.ptr_to([start + (pair * plan.rows + row) * PAIR + quarter * 4]),
                     operands.ptr_to([source]), 16)

    def _multiply(self, acc: TirBuffer, place: Expr) -> None:
        plan, p = self.plan, self.p
        tiles, octets, weight_rows = plan.tiles(p), plan.octets, plan.weight_rows(p)
        a = T.local("a", (2 * tiles, 4), "uint32")  # (half of an m16 tile, 2 words of fragment A of each k-tile)
        b = T.local("b", (octets, 4), "uint32")  # (n8 tile, 2 words of fragment B of each k-tile)
        lane = self.lane * 4  # a lane's row and quarter of 8 rows of 16 words
        with T.unroll("j", plan.depth) as j:
            pair = self.part * plan.depth + j
            rows = place + (pair * weight_rows + self.row_warp * (tiles * 16)) * PAIR + lane
            columns = (place + plan.stage_pairs * weight_rows * PAIR + lane
                       + (pair * plan.rows + self.batch_warp * (octets * 8)) * PAIR)
            for into, count, first in ((a, 2 * tiles, T.let("rows", rows)), (b, octets, T.let("columns", columns))):
                for v in range(count):
                    ld_shared([into[v, i] for i in range(4)], self.shared.ptr_to([first + v * (8 * PAIR)]))
            left, right = ([[of[v, i] for i in range(4)] for v in range(int(of.shape[0]))] for of in (a, b))
            multiply_pair(acc, 0, [row.__getitem__ for row in left], right, plan.arithmetic, apart=True)

    def sums(self, row: Expr, unit: Expr) -> dict[Var, Expr]:
        found, stride = {}, self.plan.stride(self.p)
        for g, source in enumerate(self.rows):
            place = row * stride + g * self.plan.units + unit
            parts = (self.memory[place + part * self.plan.rows * stride] for part in range(1, self.plan.split))
            found[source.var] = T.let(source.var.name, sum(parts, self.memory[place]))
        return found
