"""Block schedule: one launch for the whole sequence, of blocks that each hold all recurrent weights, or a head's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import prod

from ecornn.analysis.heads import heads_of, most_heads
from ecornn.program import PACKED, Buffer, Extent, Launch, Program
from ecornn.schedules.assemble import assemble
from ecornn.schedules.base import Component, Config, Knob, SearchedSchedule, Task, register_limit
from ecornn.schedules.builder import ceil_div
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.gemm.projection import may_be_followed, no_projection, project, projection_time
from ecornn.schedules.hoisted import Hoisted, hoisted_choices, hoisted_of, preferred, saved
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.persistent_block.kernel import SIZES, block_kernel
from ecornn.schedules.persistent_block.plan import RESERVED, BlockKnobs, BlockPlan, Part, packing_of, plan_of
from ecornn.schedules.rates import gpu_rates, others
from ecornn.schedules.scalars.pointwise import MATH_FOR
from ecornn.schedules.timeline import together
from ecornn.workload import FEW

# Cycles of a chain
LOAD = 28  # until a value from shared memory is there
SUM = 22  # a level of a sum over lanes
GATES = {"exact": 233, "relative": 120, "fast": 115, "approx": 90}  # from sums to the new state
MMA = 29  # an mma that waits for the one before
WGMMA, WGMMA_EACH = 72, 41  # the fence between stores and warpgroup products; each of these until the next one
IDLE = 155  # where a row has fewer units in a warp of mma than lanes of a quad share
BARRIER = 26  # of the block, and for each of its warps:
BARRIER_WARP = 2.0

# Cycles of a multiprocessor's quarter for each of its warps, where nothing waits
ISSUE = 1.35  # a multiply-add
SENT = 4.0  # a word that goes to another block; not fitted
SHUFFLED = 3.6  # a value that goes to another lane
ITEM = {"exact": 46, "relative": 16, "fast": 14.5, "approx": 9}  # scalars of a value of a pair: sums, gates, states
BESIDE = 29  # of a pair: loads and stores of memory, of inputs and y
TENSOR = 8.0  # an m16n8k16 product of a warp; of float32 it is three and
TENSOR_SPLIT, TENSOR_ROUND = 3.4, 2.0  # splitting a word of float32, or rounding it
WARPGROUP = 5.8  # an m64n8k16 product of a warp's four
SHARED = 7.7  # 16 bytes of a lane from shared memory, all different
BROADCAST = 2.5  # the same where lanes load the same

MEMORY = 0.905  # of memory's rate, which is reached
TURN = 6_000.0  # nanoseconds of a sequence that a further turn of blocks costs: loading weights, mostly


def estimate(task: Task, plan: BlockPlan) -> float:
    """Nanoseconds of a step, roughly: for ordering configurations, not for reporting. The projection, and then the
    recurrence, as often as blocks take turns; each takes at least as long as memory does for all rows. The recurrence
    is a chain: state is loaded, multiplied, added up over lanes; gates are computed and stored; the block's threads
    wait for each other. Blocks that share a multiprocessor hide each other's waiting, but not what they issue. Cycles
    are near an H100's latencies, fitted to 117 configurations of 12 layers (benchmarks/results/h100_block.txt):
    estimates are 11% off in the root mean square, 34% at most."""
    w, turns = task.workload, turns_of(task, plan)
    hoisted, rates = hoisted_of(task, plan.knobs.hoisted), gpu_rates(task.device)
    memory = MEMORY * rates.memory * task.device.cores
    values = w.batch * hoisted.row * (2 if hoisted.packed else 4)
    before, after = (values + w.batch * width * w.itemsize for width in (w.input, w.hidden))
    together = min(plan.resident, ceil_div(plan.blocks, task.device.cores))  # of clusters one
    alone, busy = cycles(task, plan)
    step = turns * (max(alone + busy, together * busy) / rates.clock) + (turns - 1) * TURN / w.seq
    return max(projection_time(task) / task.device.cores, before / memory) + max(step, after / memory)


def turns_of(task: Task, plan: BlockPlan) -> int:
    """The number of times that blocks, or clusters, take turns."""
    at_once = task.device.cores * plan.resident if plan.cluster == 1 else task.device.clusters(plan.cluster)
    return ceil_div(plan.blocks, at_once)


def cycles(task: Task, plan: BlockPlan) -> tuple[float, float]:
    """Cycles of one block's step: those it waits, and those its warps issue one after the other in a quarter."""
    turns = ceil_div(plan.threads, 128)  # warps of a quarter
    waits = issued = 0.0
    graph, math, three = task.graph, plan.knobs.math, 3 if plan.arithmetic == "float32" else 1
    for phase in range(len(plan.operands)):
        parts = [p for p in plan.parts if p.phase == phase]
        own = sum((_tensor if plan.mma else _added)(plan, part) for part in parts)
        # products of a part that wait for each other
        longest = max((p.pieces * 2 * three / plan.chains(phase) for p in parts), default=0) if plan.mma else 0
        if plan.wgmma:
            products = longest * WGMMA_EACH + WGMMA
        elif plan.mma:  # of several tiles one hides what another waits for
            products = max(0.0, longest * MMA - own)
        else:
            products = SUM * (plan.lanes.bit_length() - 1)
        waits += LOAD + BARRIER + BARRIER_WARP * plan.threads / 32 + products
        issued += turns * own
        if not plan.mma:
            issued += turns * SHUFFLED * _shuffles(plan, sum(len(p.products) for p in parts))
    items = float(plan.items)
    if plan.cluster > 1 and plan.tiles > 1:  # of a last tile of few rows most lanes have no pair
        items *= plan.rows / (8 * plan.tiles)
    values = len(graph.prologue) + sum(len(p.assigns) + len(p.products) for p in graph.phases)
    if plan.mma and plan.row_period and plan.spread > plan.units:
        waits += IDLE
    if plan.cluster > 1:
        waits += gpu_rates(task.device).cluster_exchange - LOAD - BARRIER
        issued += turns * plan.items * (SENT * plan.cluster + SHUFFLED) / per_word(plan.dtype)
    waits += GATES[math] * (1 if len(plan.operands) == 1 else 0.7 * len(plan.operands))
    issued += turns * items * (ITEM[math] * values + BESIDE)
    return waits, issued


def _added(plan: BlockPlan, part: Part) -> float:
    """Cycles that a warp issues for the multiply-adds of a part."""
    own = len(part.products) * plan.units
    return part.pieces * plan.rows * (own * 4 * ISSUE + BROADCAST) + (part.pieces - part.kept) * own * SHARED


def _tensor(plan: BlockPlan, part: Part) -> float:
    """Cycles that a warp issues for the mma of a part."""
    own = len(part.products) * plan.units
    products = part.pieces * 2 * ceil_div(own, 2) * plan.tiles
    if plan.wgmma:
        return products * WARPGROUP
    three = plan.arithmetic == "float32"
    each = (TENSOR_SPLIT if three else TENSOR_ROUND) if plan.dtype == "float32" else 0.0  # of a word
    split = part.pieces * (own + plan.tiles) * 4 * each
    return (products * TENSOR * (3 if three else 1) + split + part.pieces * plan.tiles * SHARED
            + (part.pieces - part.kept) * own * SHARED)


def _shuffles(plan: BlockPlan, products: int) -> int:
    """Values that a lane hands to another one."""
    pairs, lanes, found = plan.units * plan.rows, plan.lanes, 0
    while lanes > 1:
        lanes //= 2
        pairs = pairs // 2 if pairs % 2 == 0 else pairs
        found += pairs * products
    return found


DOUBT = 1.05  # what it must be expected to gain
CALL = 11_500  # nanoseconds of a call beside its steps, of whole_step 7000: its launches are two
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
UNITS, LANES, RESIDENT = (1, 2, 4), (1, 2, 4, 8, 16), (1, 2, 3, 4)
REGISTERS = (100, 75, 50, 25, 0)  # percent
ITEMS = 16  # (unit, batch row) pairs of a thread, at most
THREADS, QUAD = 1024, 4
CODE = 4096  # multiply-adds of unrolled code, at most


class PersistentBlock(SearchedSchedule[BlockPlan]):
    """Serves small layers and heads: cells with recurrent products whose weights fit in one multiprocessor."""

    name = "persistent_block"
    revision = 1
    latest = 3
    kind = "cuda"
    sequences = True
    heads = True

    def refuses(self, task: Task) -> str | None:
        graph, w = task.graph, task.workload
        if not graph.product_phases:
            return f"cell {graph.cell!r} has no recurrent product"
        if graph.statistics:
            return f"cell {graph.cell!r} has statistics of all units"
        if any(len(product.terms) != 1 for phase in graph.product_phases for product in phase.products):
            return f"cell {graph.cell!r} adds products of several values"
        if len({heads_of(phase) for phase in graph.product_phases}) > 1:
            return f"cell {graph.cell!r} has products with different numbers of heads"
        if fault := no_projection(task):
            return fault
        most = max(self._clusters(task))
        if self._weights(task) > most * (task.device.shared + 4 * task.device.registers) or self.best(task) is None:
            where = "one multiprocessor" if most == 1 else f"{most} multiprocessors"
            return f"the recurrent weights of {w} do not fit on {where} of {task.device.name}"
        return None

    @staticmethod
    def _clusters(task: Task) -> tuple[int, ...]:
        """Blocks that may share the weights, each with as many eights of units."""
        (first, *more), w = task.graph.product_phases, task.workload
        head = w.hidden // most_heads(task.graph)
        one = more or len(first.operands) > 1 or len(task.graph.phases) > 1
        return tuple(n for n in SIZES if n == 1 or (
            not one and w.batch > QUAD and head % (8 * n) == 0 and task.device.clusters(n) > 0))

    @staticmethod
    def _weights(task: Task) -> int:
        w = task.workload
        own = w.hidden // most_heads(task.graph)
        return sum(len(p.products) for p in task.graph.product_phases) * own * own * w.itemsize

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        w, heads = task.workload, most_heads(task.graph)
        held = [n for n in range(1, heads + 1) if heads % n == 0]
        # of those that make the same number of blocks, the fewest
        at_once = [task.device.clusters(n) if n > 1 else task.device.cores for n in self._clusters(task)]
        fair = {ceil_div(w.batch * heads, n * blocks * turns) for blocks in at_once for turns in (1, 2) for n in held}
        kinds = ("fma", "mma", "wgmma") if task.device.can.warpgroups and w.dtype != "float32" else ("fma", "mma")
        rows = {r for r in {*ROWS, *fair} if r <= min(w.batch, ROWS[-1])}
        several: dict[str, tuple[int, ...]] = {"heads": tuple(held)} if heads > 1 else {}
        return BlockKnobs.offered({
            **several, "products": kinds, "rows": tuple(sorted(rows)), "units": UNITS, "lanes": LANES,
            "registers": REGISTERS, "cluster": self._clusters(task), "resident": RESIDENT,
            "hoisted": hoisted_choices(task), "math": math_for(task)})

    def plan(self, task: Task, config: Config) -> BlockPlan:
        return plan_of(task, BlockKnobs(config))

    def check(self, task: Task, config: Config) -> str | None:
        device, w, knobs = task.device, task.workload, BlockKnobs(config)
        rows, units, lanes, resident = knobs.rows, knobs.units, knobs.lanes, knobs.resident
        mma, wide = knobs.products != "fma", knobs.products == "wgmma"
        each = 8 * units if mma else units  # of a warp, or a group of lanes
        if mma and lanes > 1:
            return "lanes above 1 is only possible with products=fma"
        if wide and knobs.registers != 100:
            return "products=wgmma needs registers=100"
        heads, held, cluster = most_heads(task.graph), knobs.heads, knobs.cluster
        head, blocks = w.hidden // heads, ceil_div(w.batch, rows) * (heads // held)
        own = head // cluster
        if cluster > 1 and (knobs.products != "mma" or resident > 1 or rows <= QUAD or held > 1):
            return f"clusters need products=mma, more than {QUAD} rows, heads=1 and resident=1"
        if cluster > 1 and head % (8 * units * cluster):
            return "the units of a head do not divide evenly into the warps of a cluster"
        if blocks <= device.cores * (resident - 1):
            return f"resident={resident} is of no use for {blocks} blocks on {device.cores} multiprocessors"
        if units > 1 and each - each // units >= own:
            return "a warp would have more units than the layer"
        if heads > 1 and own % each:
            return f"{each} units do not divide a head of {head}"
        if not mma and 4 * (lanes - 1) >= head:
            return "a lane would have no part of K"
        groups = ceil_div(own, each)
        groups = held * (ceil_div(groups, 4) * 4 if wide else groups)  # warps, or groups of lanes
        threads = (groups if mma else ceil_div(groups * lanes, 32)) * 32
        if threads > THREADS:
            return f"a block would have {threads} threads; at most {THREADS} are possible"
        plan = self.plan(task, config)
        if plan.items > ITEMS:
            return f"each thread would have {plan.items} items; at most {ITEMS} are possible"
        if knobs.registers != 100 and all(p.kept == p.pieces for p in plan.parts):
            return "all weights fit into registers, which is registers=100"
        if sum(p.pieces * len(p.products) for p in plan.parts) * units * 4 > CODE:
            return "the unrolled code of a thread would have too many products"
        limit = register_limit(device, plan.threads, plan.resident)
        if plan.registers > limit:
            return f"it needs about {plan.registers} registers per thread, but {limit} are available"
        room = min(device.shared, (device.shared + RESERVED) // resident - RESERVED)
        return (f"it needs {plan.shared} bytes of shared memory, but {room} are available" if plan.shared > room
                else None)

    def generation(self, task: Task) -> int:
        return 3 if most_heads(task.graph) > 1 else 1 if BlockKnobs(self.default(task)).cluster == 1 else 2

    def rebatched(self, config: Config, batch: int, task: Task) -> Config:
        """Keeps rows of a block and blocks at once, while there are as many."""
        knobs = BlockKnobs(config)
        rows = min(knobs.rows, task.workload.batch)
        if knobs.cluster > 1:
            return {**config, "rows": rows}
        blocks = ceil_div(task.workload.batch, rows) * (most_heads(task.graph) // knobs.heads)
        return {**config, "rows": rows, "resident": min(knobs.resident, ceil_div(blocks, task.device.cores))}

    def expected(self, task: Task) -> float:
        return estimate(task, self.plan(task, self.default(task)))

    def rank(self, task: Task) -> float:
        """Calls of few steps are known to take less beside these than with others."""
        plan, w = self.plan(task, self.default(task)), task.workload
        few = w.seq <= FEW and plan.cluster == 1 and len(task.graph.phases) == 1
        return estimate(task, plan) * DOUBT - ((others(task) - CALL) / w.seq if few else 0)

    def beside(self, task: Task) -> float:
        return gpu_rates(task.device).sequence

    def search(self, task: Task) -> Config | None:
        """The valid configuration of least estimated time, and of these, whole tiles."""
        found = min(self.candidates(task), default=None,
                    key=lambda config: (estimate(task, plan := self.plan(task, config)), plan.rows % 8 != 0))
        if found is None:
            return None
        other = {**found, "hoisted": preferred(task, estimate(task, self.plan(task, found)))}
        return other if self.check(task, other) is None else found

    def candidates(self, task: Task) -> Iterator[Config]:
        """The cuts that keep as many weights in registers as possible."""
        knobs = {k.name: k.values for k in self.knobs(task)}
        cut = tuple(n for n in ("heads", "products", "rows", "units", "lanes", "cluster", "resident") if n in knobs)
        math, hoisted = math_for(task), "same" if saved(task) else "float32"
        for values in product(*(knobs[name] for name in cut)):
            for registers in REGISTERS:
                config: Config = {**dict(zip(cut, values, strict=True)), "registers": registers,
                                  "hoisted": hoisted, "math": math[1]}
                if (reason := self.check(task, config)) is None:
                    yield config
                if reason is None or "registers per thread" not in reason:
                    break  # fewer in registers only help where these are what is missing

    def features(self, task: Task, plan: BlockPlan) -> dict[str, float]:
        waits, issued = cycles(task, plan)
        return {"blocks": plan.blocks * plan.cluster, "threads": plan.threads, "turns": turns_of(task, plan),
                "items": plan.items, "registers": plan.registers, "shared": plan.shared, "waits": waits,
                "issued": issued, "depth": plan.depth, "shared_weights": sum(map(plan.shared_words, plan.parts)),
                "estimate": estimate(task, plan)}

    def together(self, task: Task, plan: BlockPlan) -> int:
        return together(task.traversal, plan.blocks // plan.shares, plan.rows)

    def program(self, task: Task, plan: BlockPlan) -> Program:
        layout = hoisted_of(task, plan.knobs.hoisted)
        # Weights, which nothing of a call makes, are loaded meanwhile; but clusters that take what multiprocessors are
        # free then are two to some of them, for all steps.
        early = may_be_followed(task) and plan.cluster == 1
        return assemble(task, partial(_recurrence, task, plan, layout, early=early), layout,
                        project(task, layout, followed=early), together=self.together(task, plan))


def math_for(task: Task) -> tuple[str, ...]:
    """The ways to compute scalars; the second one is the default."""
    return ("exact", "relative") if task.workload.dtype == "float32" else MATH_FOR[task.workload.dtype]


def _recurrence(task: Task, plan: BlockPlan, layout: Hoisted, kept: Stored = NOTHING, *, early: bool) -> Component:
    packings = [packing_of(task, plan, part) for part in plan.parts]
    buffers = tuple(Buffer(f"recurrent_{i}", PACKED, packing.dtype, Extent(prod(packing.pad)), packing)
                    for i, packing in enumerate(packings))
    name = keeping("persistent_block", kept)
    return Component({name: block_kernel(task, plan, layout, kept, early)}, buffers, (
        Launch(name, plan.blocks * plan.cluster, plan.threads, plan.shared, cluster=plan.cluster, early=early),))
