"""How long a step of a configuration takes, roughly: for ordering configurations, not for reporting.

A step is a chain: state is loaded, multiplied, added up over lanes; gates are computed and stored; the block's threads
wait for each other. Blocks that share a multiprocessor hide each other's waiting, but not what they issue. Cycles began
as latencies of an H100's instructions and are fitted, close to these, to 117 configurations of 12 layers
(benchmarks/results/h100_block.txt), of which estimates are 11% off in the root mean square, 34% at most.
"""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.builder import ceil_div
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.gemm.projection import projection_time
from ecornn.schedules.hoisted import hoisted_of
from ecornn.schedules.persistent_block.plan import BlockPlan, Part
from ecornn.schedules.rates import GPURates, gpu_rates

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
    """Nanoseconds of a step: the projection, then the recurrence, as often as blocks take turns; of each at least what
    memory takes, for what it reads and writes of all rows."""
    w, turns = task.workload, turns_of(task, plan)
    hoisted, rates = hoisted_of(task, plan.knobs.hoisted), gpu_rates(task.device)
    memory = MEMORY * rates.memory * task.device.cores
    values = w.batch * hoisted.row * (2 if hoisted.packed else 4)
    before, after = (values + w.batch * width * w.itemsize for width in (w.input, w.hidden))
    step = turns * recurrence(task, plan, rates) + (turns - 1) * TURN / w.seq
    return max(projection_time(task) / task.device.cores, before / memory) + max(step, after / memory)


def turns_of(task: Task, plan: BlockPlan) -> int:
    """The number of times that blocks, or clusters, take turns."""
    at_once = task.device.cores * plan.resident if plan.cluster == 1 else task.device.clusters(plan.cluster)
    return ceil_div(plan.blocks, at_once)


def recurrence(task: Task, plan: BlockPlan, rates: GPURates) -> float:
    """Nanoseconds of a step of the blocks of a multiprocessor."""
    together = min(plan.resident, ceil_div(plan.blocks, task.device.cores))  # of clusters one
    alone, busy = cycles(task, plan, plan.knobs.math)
    return max(alone + busy, together * busy) / rates.clock


def cycles(task: Task, plan: BlockPlan, math: str) -> tuple[float, float]:
    """Cycles of one block's step: those it waits, and those its warps issue one after the other in a quarter."""
    turns = ceil_div(plan.threads, 128)  # warps of a quarter
    waits = issued = 0.0
    graph = task.graph
    for phase in range(len(plan.operands)):
        parts = [p for p in plan.parts if p.phase == phase]
        own = sum(map(_tensor if plan.mma else _added, [plan] * len(parts), parts))
        if plan.wgmma:
            products = _longest(plan, parts) * WGMMA_EACH + WGMMA
        elif plan.mma:  # of several tiles one hides what another waits for
            products = max(0.0, _longest(plan, parts) * MMA - own)
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
    if plan.wgmma:
        return part.pieces * 2 * ceil_div(own, 2) * plan.tiles * WARPGROUP
    products = part.pieces * 2 * ceil_div(own, 2) * plan.tiles
    three = plan.arithmetic == "float32"
    split = 0.0 if plan.dtype != "float32" else part.pieces * (own + plan.tiles) * 4 * (
        TENSOR_SPLIT if three else TENSOR_ROUND)
    return (products * TENSOR * (3 if three else 1) + split + part.pieces * plan.tiles * SHARED
            + (part.pieces - part.kept) * own * SHARED)


def _longest(plan: BlockPlan, parts: list[Part]) -> float:
    """Products of a part that wait for each other."""
    three = 3 if plan.arithmetic == "float32" else 1
    return max(p.pieces * 2 * three / plan.chains(p.phase) for p in parts) if parts else 0


def _shuffles(plan: BlockPlan, products: int) -> int:
    """Values that a lane hands to another one."""
    pairs, lanes, found = plan.units * plan.rows, plan.lanes, 0
    while lanes > 1:
        lanes //= 2
        pairs = pairs // 2 if pairs % 2 == 0 else pairs
        found += pairs * products
    return found
