"""How a configuration of the persistent schedule cuts a layer, and what it needs on chip."""

from __future__ import annotations

from math import gcd, lcm
from typing import NamedTuple

from ecornn.analysis.heads import most_heads
from ecornn.analysis.narrow import columns_of
from ecornn.program import Packing
from ecornn.schedules.base import Knobs, Task, knob, register_limit
from ecornn.schedules.builder import Expr, ceil_div
from ecornn.schedules.cuda.isa.tensor_core import PAIR, UNPACKED, per_word, words
from ecornn.schedules.cuda.pipeline import BARRIER_WORDS
from ecornn.schedules.gemm import job
from ecornn.schedules.gemm.mma_mainloop import THREADS
from ecornn.schedules.gemm.projection import job_of
from ecornn.schedules.gemm.rows_mma import shape_within
from ecornn.schedules.hoisted import hoisted_knob
from ecornn.schedules.scalars.gate_threads import mask_values
from ecornn.schedules.scalars.pointwise import MATH_TRADES

RINGS = ((1 << 12, 32), (1 << 14, 16), (1 << 62, 8))  # words of a step's exchange, at most; slots with fewer fences
BARRIER = 16  # bytes of an mbarrier, so that what follows is aligned
AHEAD_BYTES = 48 << 10  # of streamed weights a block has room for: what L2 sends while a step waits for state
FLIGHT = 32  # loads of 16 bytes a lane has in flight while it polls, at most
LINE = 32  # words of a line of L2
WRITTEN = {"float32": 15, "tf32": 4}  # instructions for a product of a k-tile, about: it is three, of split words; else
WRITTEN_16BIT = 2
UNROLLED = 6500  # of these in code without loops: with 8000 it no longer fits where a multiprocessor keeps code
SPARE_REGISTERS = 44  # addresses, loop state and gate math beside weights and accumulators


class PhasePlan(NamedTuple):  # which a search makes by the ten thousand, in a sixth of a dataclass's time
    """One recurrent product of the step."""

    gates: int  # rows a unit has, padded to ``interleave``
    interleave: int  # gates of one unit that stand in neighbouring rows (1, 2, 4 or 8)
    operands: int  # exchanged vectors that the product reads
    warp_pairs: int  # pairs of k-tiles of one operand that a warp owns
    register_pairs: int  # of a warp's ``pairs``, those with weights in registers, behind the streamed
    shared_pairs: int  # the following ones, with weights in shared memory
    polled_pairs: int  # pairs of state that a warp waits for and multiplies at a time
    units: int  # of the operands that are exchanged: those of a group, or the first ones of narrow products
    slots: int = 0  # of a warp's ring in shared memory, for streamed pairs (``Stream``); 0: these go into registers

    @property
    def pairs(self) -> int:  # pairs of k-tiles of all operands that a warp owns
        return self.operands * self.warp_pairs

    @property
    def streamed_pairs(self) -> int:  # the first pairs, which a warp reads from L2 in every step
        return self.pairs - self.register_pairs - self.shared_pairs

    def octets(self, units: int) -> int:  # groups of 8 weight rows a block has; two make an m16 tile
        return self.gates * units // 8


class PersistentKnobs(Knobs):
    groups: int = knob("groups of batch rows. More: smaller exchanges and products for each group, but fewer SMs")
    units: int = knob("units in a block. Fewer: less work a step; more: fewer blocks to wait for")
    warps: int = knob("warps that multiply. More: less work for each, but more partial sums to add")
    gate_warps: int = knob("warps that compute gates. More: gates take less time, but each thread has fewer registers")
    chains: int = knob("2: shorter chains of dependent products, but one more accumulator")
    registers: int = knob("percent of weights in registers; the rest is in shared memory, and in L2 if it does not fit "
                          "there")
    interleave: int = knob("4: three gates are padded to four, for smaller steps of units and wider loads; 0: none")
    ahead: int = knob("percent of the input projection computed before the recurrence; the rest runs at the same "
                      "time, on blocks that the recurrence does not use", before=100)
    fences: str = knob("fences for products and gates in every step, for products only, or rarely. Fewer: less "
                       "waiting, but polls begin immediately and slow the stores that they wait for", before="every")
    hoisted: str = hoisted_knob()
    carrier: str = knob("how blocks exchange the state: through L2, among many blocks, or inside a cluster of at most "
                        "16. A cluster takes half the time, but fewer clusters than groups of blocks fit", before="l2")
    math: str = knob(MATH_TRADES)


class PersistentPlan(NamedTuple):
    """The cut: ``groups`` of ``blocks`` blocks, each group with all weights and its own batch rows. Of a layer with
    heads a group has a head, as of a layer of ``own`` units; the heads of the same rows are neighbours."""

    hidden: int
    dtype: str
    arithmetic: str  # of the products: dtype, or tf32
    stored: str  # weights: dtype, or int8
    groups: int
    blocks: int
    units: int
    rows: int  # batch rows of a group
    warps: int  # share the products
    gate_warps: int  # do the pointwise part
    chains: int  # independent accumulators that share the k-tiles of one product tile
    ahead: int  # percent of the projection that is done before; the rest runs beside the recurrence
    workers: int  # blocks that do that rest
    fences: str  # of exchange.py: in every step, of products in every step, or rare
    cluster: bool  # whether each group is a cluster, in which state travels as ``Cluster`` says
    sums: tuple[int, ...]  # statistics of each exchange of them, as sums.py says
    kept: int  # values that a gate thread keeps for each item: states, inputs of two steps, what masks say, scales
    phases: tuple[PhasePlan, ...]
    knobs: PersistentKnobs
    heads: int = 1

    @property
    def scaled(self) -> bool:  # weights are integers, and sums are multiplied with the scales of their rows
        return self.stored == "int8"

    @property
    def lane_words(self) -> int:  # of 8 weight rows and a pair of k-tiles, which are 4 of what is multiplied
        return 2 if self.scaled else 4

    @property
    def octet_words(self) -> int:  # words of 8 weight rows and a pair of k-tiles
        return 32 * self.lane_words

    @property
    def own(self) -> int:  # units of a group
        return self.hidden // self.heads

    @property
    def threads(self) -> int:  # threads that work on the recurrence
        return 32 * (self.warps + self.gate_warps)

    @property
    def block_threads(self) -> int:  # threads of every block
        return max(self.threads, THREADS) if self.workers else self.threads

    @property
    def columns(self) -> int:  # columns of operand B: the batch rows of a group, padded to 8
        return ceil_div(self.rows, 8) * 8

    @property
    def lanes(self) -> int:  # gate threads of a batch row, in turn if there are fewer; with statistics more than units
        return lanes_of(self.units) if self.sums else self.units

    @property
    def items(self) -> int:  # (unit, batch row) pairs of a gate thread
        return ceil_div(self.lanes * self.rows, 32 * self.gate_warps)

    @property
    def sum_parts(self) -> int:  # of a row's statistic: of every block, of each of its warps that has units of the row
        return self.blocks * max(1, self.lanes // 32)

    @property
    def sum_padded(self) -> int:  # parts that a row's sums have room for in a cluster, so that what follows is aligned
        return self.sum_parts + self.sum_parts % 2

    def row_quads(self, exchange: int) -> int:  # 16 bytes of two statistics of a row; of a warp's only row a sector
        return max(ceil_div(self.sums[exchange], 2), 2 if self.lanes >= 32 else 1)

    def sum_quads(self, exchange: int) -> int:  # 16 bytes of a part of the sums through L2, padded to a power of two
        return 1 << (self.rows * self.row_quads(exchange) - 1).bit_length()

    def sum_stride(self, exchange: int) -> int:  # words between parts through L2: whole lines, which have one writer
        return ceil_div(self.sum_quads(exchange) * 4, LINE) * LINE

    def sum_words(self, exchange: int) -> int:  # words of one slot of a group's exchange of statistics
        if self.cluster:
            return self.sums[exchange] * self.rows * self.sum_padded * 2
        return self.sum_stride(exchange) * self.sum_parts

    @property
    def between_words(self) -> int:  # words of shared memory for what one gate warp read of sums through L2
        return 0 if self.cluster else max((self.sum_quads(e) * 4 for e in range(len(self.sums))), default=0)

    @property
    def held(self) -> bool:  # product warps poll only after their own block's gate warps have sent the operands: polls
        # disturb what others wait for, and gate warps wait for statistics meanwhile
        return bool(self.sums) and not self.cluster

    @property
    def tiles(self) -> int:  # n8 tiles of a group's batch rows
        return self.columns // 8

    def stride(self, phase: PhasePlan) -> int:  # floats between rows of partial sums: 4 modulo 16, without conflicts
        return ceil_div(phase.octets(self.units), 2) * 16 + 4

    def code(self, phase: PhasePlan, pairs: int) -> int:
        """Instructions for the products of so many pairs."""
        of_weights = 4 * UNPACKED[self.dtype] if self.scaled else 0
        return (pairs * 2 * ceil_div(phase.octets(self.units), 2)
                * (self.tiles * WRITTEN.get(self.arithmetic, WRITTEN_16BIT) + of_weights))

    def stretches(self, phase: PhasePlan) -> list[tuple[int, int, bool]]:
        """First and last pairs of a warp, and whether the code of these is a loop over the turns in which they are
        polled: all of a phase without one, or if that is too much code, those apart that are kept alike."""
        streamed, kept = phase.streamed_pairs, phase.streamed_pairs + phase.register_pairs
        straight = streamed and not phase.slots  # into registers, which are told apart in code alone
        if self.code(phase, phase.pairs) <= UNROLLED or self.cluster or phase.operands > 1 or straight:
            return [(0, phase.pairs, False)]
        found = [(0, streamed, True), (streamed, kept, False), (kept, phase.pairs, True)]
        return [(first, end, rolled) for first, end, rolled in found if first < end]

    def turns(self, phase: PhasePlan) -> int:  # times that a warp polls in a step
        return sum(ceil_div(end - first, phase.polled_pairs) for first, end, _ in self.stretches(phase))

    def written(self, phase: PhasePlan) -> int:  # pairs that the code has, loops once
        polled, counts = phase.polled_pairs, [(end - first, rolled) for first, end, rolled in self.stretches(phase)]
        return sum(polled + n % polled if rolled and n >= 2 * polled else n for n, rolled in counts)

    @property
    def sum_floats(self) -> int:  # floats of one buffer of partial sums
        return max(self.warps * self.columns * self.stride(p) for p in self.phases)

    def shared_weight_words(self, phase: PhasePlan) -> int:
        return self.warps * phase.shared_pairs * phase.octets(self.units) * self.octet_words

    def stream_words(self, phase: PhasePlan) -> int:
        """Words of shared memory of a phase's rings, and of an mbarrier for each slot."""
        return self.warps * phase.slots * (phase.octets(self.units) * self.octet_words + BARRIER // 4)

    def streamed_bytes(self, phase: PhasePlan) -> int:  # of weights that a block reads from L2 in every step
        return self.warps * phase.streamed_pairs * phase.octets(self.units) * self.octet_words * 4

    @property
    def streamed(self) -> int:  # of all phases
        return sum(map(self.streamed_bytes, self.phases))

    @property
    def ring(self) -> int:  # slots of an exchange; exchange.py says why four at least, or in a cluster two
        if self.cluster:
            return 2
        words = self.groups * sum(self.slot_words(p) for p in self.phases)
        return 4 if self.fences == "every" else next(slots for most, slots in RINGS if words <= most)

    def released(self, t: Expr) -> Expr | bool:  # whether owners of words have a fence at the end of step t
        return True if self.fences == "every" else t % (self.ring - 4) == self.ring - 5

    def acquired(self, t: Expr) -> Expr | bool:  # whether readers have a fence in step t
        return t % (self.ring - 4) == 1 if self.fences == "rare" else True

    @property
    def shared(self) -> int:  # bytes of shared memory that the recurrence needs
        if not self.cluster:
            return 4 * (self.exchange_words + 2 * self.gate_warps * self.between_words)
        return 4 * (self.exchange_words + self.ring * sum(slot + BARRIER_WORDS for slot, _ in self.sent))

    @property
    def exchange_words(self) -> int:  # words of shared memory before what a cluster exchanges: partial sums and weights
        return 2 * self.sum_floats + sum(self.shared_weight_words(p) + self.stream_words(p) for p in self.phases)

    @property
    def sent(self) -> list[tuple[int, int]]:
        """A cluster's exchanges, of states and then of statistics: words of a slot, bytes for a block in a step."""
        state = [(self.slot_words(p), p.operands * self.rows * words(p.units, self.dtype) * 4) for p in self.phases]
        return state + [(self.sum_words(e), n * self.rows * self.sum_parts * 8) for e, n in enumerate(self.sums)]

    @property
    def registers(self) -> int:  # estimate of a thread's registers: of product warps or of gate warps, which need more
        weights = sum(p.register_pairs * p.octets(self.units) * self.lane_words for p in self.phases)
        work = max((p.polled_pairs * 4 + ceil_div(p.octets(self.units), 2) * 4 * self.chains) * self.tiles
                   + (2 * self.lane_words * p.octets(self.units) if p.streamed_pairs and not p.slots else 0)
                   for p in self.phases)
        products = weights + work + (16 if self.arithmetic == "float32" else 8 if self.scaled else 0)
        gates = self.items * (self.kept + 8) + self.warps * max(p.gates for p in self.phases)
        return max(products, gates) + SPARE_REGISTERS

    def slot_words(self, phase: PhasePlan) -> int:  # words of one slot of a group's exchange for a phase
        return phase.operands * self.warps * phase.warp_pairs * self.tiles * 128


def _interleave(gates: int, wanted: int) -> int:
    return wanted if wanted and gates > 2 else gcd(gates, 8)


def unit_step(task: Task, interleave: int) -> int:
    """Units of a block come in multiples of this, so that weight rows fill octets."""
    steps = [8 // _interleave(len(p.products), interleave) for p in task.graph.product_phases]
    return lcm(*steps, 2)


def lanes_of(units: int) -> int:
    """Threads for the units of a row where they add values: a power of two, or whole warps."""
    return 1 << (units - 1).bit_length() if units <= 32 else ceil_div(units, 32) * 32


def plan_of(task: Task, knobs: PersistentKnobs, chains: int | None = None, ahead: int | None = None) -> PersistentPlan:
    """The plan of a configuration, or with other ``chains`` or ``ahead``; it need not fit, ``check`` says that."""
    return placed(task, whole(task, knobs, chains, ahead), knobs.registers)


def whole(task: Task, knobs: PersistentKnobs, chains: int | None = None, ahead: int | None = None) -> PersistentPlan:
    """The plan with all weights in registers and one turn of polling, whether or not there is room: no step takes less
    time, whatever ``registers`` is, which is not read."""
    w = task.workload
    chains, ahead = chains or knobs.chains, knobs.ahead if ahead is None else ahead
    groups, units, warps, graph = knobs.groups, knobs.units, knobs.warps, task.graph
    phases, heads = [], most_heads(graph)
    for phase in graph.product_phases:
        interleave, operands = _interleave(len(phase.products), knobs.interleave), len(phase.operands)
        gates, exchanged = ceil_div(len(phase.products), interleave) * interleave, columns_of(phase, w.hidden)
        warp_pairs = ceil_div(ceil_div(words(exchanged, w.dtype), PAIR), warps)
        pairs = operands * warp_pairs
        phases.append(PhasePlan(gates, interleave, operands, warp_pairs, pairs, 0, pairs, exchanged))
    rows, blocks, groups = ceil_div(w.batch, groups), ceil_div(w.hidden // heads, units), groups * heads
    cluster = knobs.carrier == "cluster"
    return PersistentPlan(
        hidden=w.hidden, dtype=w.dtype, arithmetic=w.arithmetic, stored=w.stored, groups=groups, blocks=blocks,
        units=units, rows=rows, warps=warps, gate_warps=knobs.gate_warps, chains=chains, ahead=ahead,
        workers=0 if ahead == 100 else task.device.cores - groups * blocks, fences="rare" if cluster else knobs.fences,
        cluster=cluster, sums=tuple(len(p.statistics) for p in graph.phases if p.statistics),
        kept=len(graph.states) + 2 * len(graph.hoisted_outputs) + mask_values(task) + 4 * len(graph.statistics)
        + 4 * len(graph.hoisted_statistics) + (sum(len(p.products) for p in graph.product_phases) if w.weights else 0),
        phases=tuple(phases), knobs=knobs, heads=heads)


def placed(task: Task, plan: PersistentPlan, registers: int) -> PersistentPlan:
    """The :func:`whole` plan with ``registers`` percent of the weights in registers, and the rest where there is room;
    as many pairs are polled at a time as registers and code allow."""
    phases = _in_registers(plan, registers)
    pair_bytes = [4 * plan.warps * p.octets(plan.units) * plan.octet_words for p in phases]
    needed = [(p.pairs - p.register_pairs) * size for p, size in zip(phases, pair_bytes, strict=True)]
    room = max(0, task.device.shared - plan.shared)
    if sum(needed) <= room:
        phases = [p._replace(shared_pairs=p.pairs - p.register_pairs) for p in phases]
    else:
        phases = [_kept(task, plan, p, size, room * need // sum(needed))
                  for p, size, need in zip(phases, pair_bytes, needed, strict=True)]
    plan = plan._replace(phases=tuple(phases))
    limit = register_limit(task.device, plan.block_threads)
    while (max(p.polled_pairs for p in phases) * plan.tiles > FLIGHT or plan.registers > limit
           or any(plan.code(p, plan.written(p)) > UNROLLED and len(plan.stretches(p)) > 1 for p in phases)):
        if all(p.polled_pairs == 1 for p in phases):
            break
        phases = [p._replace(polled_pairs=ceil_div(p.polled_pairs, 2)) for p in phases]
        plan = plan._replace(phases=tuple(phases))
    return plan


def fewest_registers(plan: PersistentPlan, registers: int) -> int:
    """The registers that no plan of :func:`placed` goes below, found sooner than one of these."""
    return plan._replace(phases=tuple(p._replace(shared_pairs=p.pairs - p.register_pairs, polled_pairs=1)
                                      for p in _in_registers(plan, registers))).registers


def _in_registers(plan: PersistentPlan, registers: int) -> list[PhasePlan]:
    return [p._replace(register_pairs=ceil_div(p.pairs * registers, 100)) for p in plan.phases]


def _kept(task: Task, plan: PersistentPlan, p: PhasePlan, size: int, room: int) -> PhasePlan:
    """A phase of which not all fits in ``room`` bytes of shared memory, where a pair of all warps takes ``size``; some
    of the room is for rings, if there are bulk copies to fill them."""
    left, ring = p.pairs - p.register_pairs, size + BARRIER * plan.warps
    slots = min(left, max(2, ceil_div(AHEAD_BYTES, size)), room // ring) if task.device.can.bulk_copies else 0
    if slots < 2:
        return p._replace(shared_pairs=min(room // size, left))
    return p._replace(shared_pairs=min((room - slots * ring) // size, left - slots), slots=slots)


def worker_shape(task: Task, plan: PersistentPlan) -> job.Shape | None:
    """The tiles of the projection beside the recurrence; None where its threads have too few registers."""
    return shape_within(job_of(task), register_limit(task.device, plan.block_threads))


def block_shared(task: Task, plan: PersistentPlan) -> int:
    """Bytes of dynamic shared memory of every block."""
    shape = worker_shape(task, plan) if plan.workers else None
    return max(plan.shared, shape.shared if shape else 0)


def packing_of(task: Task, plan: PersistentPlan, index: int) -> Packing:
    """Recurrent weights of a phase: (block, warp, operand, pair, octet, lane, tile, half) words, 16 bytes a lane."""
    phase, p = task.graph.product_phases[index], plan.phases[index]
    padding = [("", 0)] * (p.gates - len(phase.products))
    sources = [source for operand in phase.operands
               for source in [*(product.source(operand) for product in phase.products), *padding]]
    e, n = p.interleave, per_word(plan.dtype)
    return job.packing_of(tuple(sources), (p.operands, p.gates // e, e),
                          (plan.heads * plan.blocks, plan.units * e // 8, 8 // e),
                          (plan.warps, p.warp_pairs, 4, 2, 2, n), (3, 6, 0, 7, 1, 4, 5, 2, 8, 9, 10, 11), plan.stored,
                          transposed=phase.products[0].terms[0].transposed, heads=plan.heads)
