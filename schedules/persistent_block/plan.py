"""How a configuration of the block schedule cuts a layer, and what a block needs on chip."""

from __future__ import annotations

from typing import NamedTuple

from ecornn.analysis.heads import most_heads
from ecornn.program import Packing
from ecornn.schedules.base import Knobs, Task, knob
from ecornn.schedules.builder import ceil_div
from ecornn.schedules.cuda.isa.tensor_core import PAIR, per_word, words
from ecornn.schedules.gemm.job import packing_of as packed
from ecornn.schedules.hoisted import hoisted_knob, hoisted_of
from ecornn.schedules.scalars.gate_threads import mask_values
from ecornn.schedules.scalars.pointwise import MATH_TRADES

CHAINS = 4  # dependent sums that a thread has at least: as many cycles as a multiply-add takes
AHEAD, AHEAD_ROWS = 8, 4  # loads of 16 bytes of state that a thread has under way; for multiply-adds of several rows
DEPTHS = (8, 4, 2)  # steps that inputs are copied ahead, in turn for this many bytes at most:
INPUT_BYTES = 32 << 10
RESERVED = 1 << 10  # bytes of shared memory that every block takes besides


class Part(NamedTuple):
    """Products of one phase that read one operand, and where their weights are."""

    phase: int  # its number
    operand: int  # the number of that among the phase's
    products: tuple[int, ...]  # numbers of the phase's products
    pieces: int  # of K that a thread multiplies one after the other: four values, or of mma a pair of k-tiles
    kept: int  # the first ones, whose weights are in registers; those of the others are in shared memory


class BlockKnobs(Knobs):
    heads: int = knob("heads in a block. More: fewer blocks, each with more work a step", absent=1)
    products: str = knob("fma: multiply-adds of float32, for few rows; mma: tensor cores, which always multiply 8 rows "
                         "at a time; wgmma: Hopper's faster instructions, which read the state from shared memory")
    rows: int = knob("batch rows in a block. More: each weight that is loaded serves more rows; fewer: more blocks, "
                     "and a shorter step")
    units: int = knob("units for the lanes that share K, or groups of 8 units for a warp of mma. More: fewer threads, "
                      "which load the state less often and have more registers each")
    lanes: int = knob("lanes that share K of a multiply-add. More: more threads with fewer weights each, which "
                      "exchange more sums")
    registers: int = knob("percent of weights in registers; the rest in shared memory")
    cluster: int = knob("blocks that share the weights and have more rows each; they exchange the state in every step",
                        before=1)
    resident: int = knob("blocks that fit on a multiprocessor. More: while one waits, another computes, but each has "
                         "fewer registers")
    hoisted: str = hoisted_knob()
    math: str = knob(MATH_TRADES + "; relative: like the second, with a polynomial for tanh near 0")


class BlockPlan(NamedTuple):
    """The cut: ``blocks`` of ``rows`` batch rows, each with all weights; or as many clusters of ``cluster`` blocks,
    each with the weights of as many units. With heads a block has those of ``held`` heads, or a cluster that of one,
    and the blocks of the same rows are neighbours. On tensor cores a warp has ``units`` times eight units of all rows;
    with ``fma`` ``lanes`` neighbours share K of ``units`` units of all rows, and then have some of the pairs each."""

    hidden: int
    dtype: str
    arithmetic: str
    blocks: int
    rows: int
    cluster: int
    products: str  # fma, mma or wgmma
    units: int
    lanes: int
    resident: int  # blocks that a multiprocessor has at once
    depth: int  # steps that inputs are copied ahead
    words: int  # of a pair's inputs
    kept: int  # values that a thread keeps for each pair: states, inputs of two steps, what masks say
    operands: tuple[int, ...]  # of each phase
    parts: tuple[Part, ...]
    knobs: BlockKnobs
    heads: int = 1
    held: int = 1

    @property
    def head(self) -> int:  # units of a head; a layer without heads is one
        return self.hidden // self.heads

    @property
    def shares(self) -> int:  # blocks, or clusters, that have the heads of the same rows
        return self.heads // self.held

    @property
    def mma(self) -> bool:  # true where tensor cores multiply
        return self.products != "fma"

    @property
    def wgmma(self) -> bool:
        return self.products == "wgmma"

    @property
    def groups(self) -> int:  # warps of mma, or groups of lanes, that have a block's units of a head
        return ceil_div(self.head // self.cluster, 8 * self.units if self.mma else self.units)

    @property
    def warps(self) -> int:  # of mma of a head; of warpgroups, which read the state of one head, some without units
        return ceil_div(self.groups, 4) * 4 if self.wgmma else self.groups

    @property
    def threads(self) -> int:
        return 32 * self.held * self.warps if self.mma else ceil_div(self.held * self.groups * self.lanes, 32) * 32

    @property
    def tiles(self) -> int:  # n8 tiles of a block's rows
        return ceil_div(self.rows, 8)

    @property
    def row_period(self) -> int:  # the rows, padded to 1, 2 or 4, of mma with few rows, whose columns repeat; else 0
        return 0 if self.rows > 4 else 1 << (self.rows - 1).bit_length()

    @property
    def spread(self) -> int:  # lanes of a quad that share the units of a row where columns repeat
        return 4 // self.row_period

    @property
    def items(self) -> int:  # (unit, batch row) pairs of a thread
        if not self.mma:  # lanes that share K split those that they add up, as often as these can be halved
            pairs = self.units * self.rows
            return pairs >> min(self.lanes.bit_length() - 1, (pairs & -pairs).bit_length() - 1)
        return ceil_div(self.units, self.spread) if self.row_period else self.units * self.tiles * 2

    def chains(self, phase: int) -> int:  # independent sums of each product
        own = max(len(p.products) for p in self.parts if p.phase == phase)
        if self.wgmma:
            return 1
        if self.mma:
            return 2 if ceil_div(own * self.units, 2) * self.tiles < CHAINS else 1
        return ceil_div(CHAINS, own * self.units * self.rows)

    @property
    def loads(self) -> int:  # loads of 16 bytes of state for a piece of K
        return self.tiles if self.mma else self.rows

    def ahead(self, part: Part) -> int:  # pieces that a thread loads before it multiplies
        most = AHEAD if self.mma or self.rows == 1 else AHEAD_ROWS
        return min(part.pieces, max(1, most // self.loads))

    @property
    def buffers(self) -> int:  # of an exchanged operand: two with one phase, since the next step's follows at once
        return 2 if len(self.operands) == 1 else 1

    @property
    def depth_of_k(self) -> int:  # values of K of a head, padded, of FMA; or pairs of k-tiles of mma
        if self.mma:
            return ceil_div(words(self.head, self.dtype), PAIR)
        return ceil_div(self.head, 4 * self.lanes) * 4 * self.lanes

    @property
    def operand_words(self) -> int:  # words of an operand of all rows
        if self.wgmma:
            return self.held * self.depth_of_k * PAIR * self.tiles * 8
        return self.held * self.depth_of_k * self.rows * (PAIR if self.mma else 1)

    @property
    def weights_place(self) -> int:  # first word of weights in shared memory
        return self.buffers * sum(self.operands) * self.operand_words

    def shared_words(self, part: Part) -> int:  # words of the weights of all threads that are in shared memory
        return (part.pieces - part.kept) * self.threads * len(part.products) * self.units * 4

    @property
    def inputs_place(self) -> int:  # first word of the inputs that are copied ahead
        return self.weights_place + sum(map(self.shared_words, self.parts))

    @property
    def barriers_place(self) -> int:  # first word of the barriers of a cluster's states
        return self.inputs_place + self.depth * self.items * self.words * self.threads

    @property
    def shared(self) -> int:  # bytes of shared memory of a block
        return 4 * (self.barriers_place + (4 if self.cluster > 1 else 0))

    @property
    def registers(self) -> int:  # estimate of a thread's registers
        weights = sum(p.kept * len(p.products) * self.units * 4 for p in self.parts)
        sums = [0] * len(self.operands)
        for p in self.parts:
            own = len(p.products) * self.units
            tiles = ceil_div(own, 2) * 4 * self.tiles if self.mma else own * self.rows
            sums[p.phase] += tiles * self.chains(p.phase)
        state = 0 if self.wgmma else max(4 * self.loads * self.ahead(p) for p in self.parts)
        loaded = max((len(p.products) * self.units * 4 for p in self.parts if p.kept < p.pieces), default=0)
        exact = 16 if self.mma and self.arithmetic == "float32" else 0
        item, spare = (2, 30) if self.mma else (4, 40)  # addresses, loop state and the math of gates
        return weights + max(sums) + state + loaded + exact + self.items * (self.kept + item) + spare


def plan_of(task: Task, knobs: BlockKnobs) -> BlockPlan:
    """The plan of a configuration; it need not fit, ``check`` says that."""
    w, graph = task.workload, task.graph
    rows, phases, heads, held = knobs.rows, graph.product_phases, most_heads(graph), knobs.heads
    masks = mask_values(task) + task.traversal.resets  # the marks of the step after, too
    words_of_pair = hoisted_of(task, knobs.hoisted).words()
    plan = BlockPlan(
        hidden=w.hidden, dtype=w.dtype, arithmetic=w.arithmetic, blocks=ceil_div(w.batch, rows) * (heads // held),
        rows=rows, cluster=knobs.cluster, products=knobs.products, units=knobs.units, lanes=knobs.lanes,
        resident=knobs.resident, depth=DEPTHS[0], words=words_of_pair,
        kept=len(graph.states) + len(graph.invariant_outputs) + 2 * words_of_pair + masks,
        operands=tuple(len(p.operands) for p in phases), parts=(), knobs=knobs, heads=heads, held=held)
    pieces = plan.depth_of_k if plan.mma else plan.depth_of_k // (4 * plan.lanes)
    kept = ceil_div(pieces * knobs.registers, 100)
    parts = []
    for number, phase in enumerate(phases):
        for o, operand in enumerate(phase.operands):
            own = tuple(i for i, product in enumerate(phase.products) if operand.same_as(product.term.operand))
            parts += [Part(number, o, own, pieces, kept)] if own else []
    input_bytes = plan.items * plan.words * plan.threads * 4  # of a step
    depth = next((d for d in DEPTHS if d * input_bytes <= INPUT_BYTES), DEPTHS[-1])
    return plan._replace(parts=tuple(parts), depth=depth)


def packing_of(task: Task, plan: BlockPlan, part: Part) -> Packing:
    """The weights of a part, 16 bytes a thread for each (piece, product, unit) of FMA, in float32, or for each (piece,
    eight units, product) of mma: fragments of operand A, whose K is permuted as that of the state is. Of a layer with
    heads it is that of a block for each of ``shares`` blocks, of the threads alone that have units."""
    phase = task.graph.product_phases[part.phase]
    sources = tuple(phase.products[i].term.source for i in part.products)
    K: tuple[int, ...] = (part.pieces, plan.lanes, 4)
    made: tuple[int, ...] = (plan.threads // plan.lanes, plan.units)
    order: tuple[int, ...] = (3, 0, 2, 1, 4, 5)
    if plan.mma:
        warps = plan.threads // 32 if plan.heads == 1 else plan.heads * plan.groups
        made = (plan.cluster * warps, plan.units, 8)
        K, order = (plan.depth_of_k, 4, 2, 2, per_word(plan.dtype)), (1, 4, 2, 0, 3, 5, 6, 7, 8)
        # pair, lane of a quad, k-tile, half of it; of warpgroups K is as in memory: pair, k-tile, half, lane
        if plan.wgmma:
            K, order = (plan.depth_of_k, 2, 2, 4, 2), (1, 4, 2, 0, 3, 7, 5, 6, 8)
    elif plan.heads > 1:
        made, order = (plan.shares, plan.held * plan.groups, plan.units), (1, 4, 0, 3, 2, 5, 6)
    return packed(sources, (len(sources),), made, K, order, plan.dtype if plan.mma else "float32")
