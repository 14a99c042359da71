"""How long a step of a configuration takes, roughly: for ordering configurations, not for reporting."""

from __future__ import annotations

from collections.abc import Iterator

from ecornn.schedules.base import Task
from ecornn.schedules.builder import ceil_div
from ecornn.schedules.cuda.isa.tensor_core import UNPACKED, per_word
from ecornn.schedules.gemm.projection import projection_time
from ecornn.schedules.hoisted import unhidden
from ecornn.schedules.persistent.plan import LINE, PersistentPlan, PhasePlan, worker_shape
from ecornn.schedules.rates import GPURates, gpu_rates

NARROW = 24 * 1024  # bytes of state that arrive within the trip
READ = 0.0048  # nanoseconds a hoisted value of all blocks, in clusters
BESIDE = 180.0  # nanoseconds by which workers slow the recurrence down: 120 by trials, 170 to 300 beside the same cut

# The share of a recurrence's time that hides what memory takes. By hand, from 20 cuts of ten layers of 64 to 1056 rows:
# they took up to 1.9 times what was expected without memory, and 0.85 to 1.15 times what is expected with it
HIDES = 0.33

# Cycles of a step through L2, a least-squares fit
POLLED, POLLED_MORE = 0.0128, 0.0103  # of a byte of state that a block polls, and beyond NARROW besides
POLL = 239  # of a further turn of polling
TILE, TILE_TURN = 4.6, 6.2  # of an m16n8 product: of a quarter of the warps, and of each turn of four warps
SHARED, ADDED = 0.0035, 0.0009  # of a byte of weights in shared memory; of a partial sum that is stored
STREAMED, STREAMED_RING = 0.017, 0.02  # of a byte of weights from L2; through a ring: of 246 trials half within 9%
ITEM, ITEM_SUM, ITEM_EXACT = 87, 1.9, 166  # of an item of a gate thread, a partial sum of it, its exact functions

UNPACK = 1.25  # of an instruction that makes operands of 8-bit integers, in each turn of four warps, by hand

# What is different where a step has several operands, as that of an adjoint: fitted to 190 times of 13 of these
# (benchmarks/results/h200_adjoint_cuts.jsonl.xz), half of which are within 7% then
GATHERED = 1.045  # of all cycles
GATHERED_WARP, GATHERED_LESS = 0.0855, 0.0242  # of a byte of state for each warp, and less of it in all

# The same of a step in a cluster
SENT = 4.8  # of an operand that is sent to a block
CLUSTER_TILE, CLUSTER_SPLIT = 5.4, 40  # of an m16n8 product in each turn of four warps, and more in float32
CLUSTER_SHARED = 0.0056  # of a byte of weights in shared memory
GATE, GATE_SUM = 31, 3.1  # of a gate, and of a partial sum of it

# Cycles of an exchange of statistics, by hand
SHUFFLE = 30  # of a level of a sum over lanes
CLUSTER_SUMS, CLUSTER_STATISTIC, CLUSTER_MESSAGE = 200, 110, 10.4  # of one in a cluster, each statistic, each message
RING_SUMS, RING_LINE = 650, 0.05  # of one through L2, and of a line that all blocks read
RING_ITEM, RING_STATISTIC = 55, 110  # of an item, and of each statistic of it


def estimate(task: Task, plan: PersistentPlan) -> float:
    """Nanoseconds of a step: the projection done ahead, the slower of recurrence and workers, what memory adds."""
    hoisted, rates = before(task, plan), gpu_rates(task.device)
    if plan.cluster:
        return hoisted + read(task, plan) + sum(cluster_stages(plan, rates)) / rates.clock
    if task.traversal.backward:
        return hoisted + gathered(plan, rates)
    step = recurrence(plan, rates)
    memory = unhidden(task, step, HIDES)
    return hoisted + (max(step + BESIDE, workers_time(task, plan)) if plan.workers else step) + memory


def before(task: Task, plan: PersistentPlan) -> float:
    """Nanoseconds of a step's share of the projection that is done ahead."""
    return plan.ahead / 100 * projection_time(task, plan.ahead) / task.device.cores


def read(task: Task, plan: PersistentPlan) -> float:
    """Nanoseconds for a step's hoisted values, in clusters."""
    return READ * (plan.groups * plan.rows * plan.own * len(task.graph.hoisted_outputs))


def parts_of(task: Task, plan: PersistentPlan) -> dict[str, float]:
    """The parts of :func:`estimate`, name -> nanoseconds, but for what runs beside the recurrence."""
    rates = gpu_rates(task.device)
    of_x = before(task, plan) + (read(task, plan) if plan.cluster else 0.0)
    cycles = (cluster_stages if plan.cluster else stages)(plan, rates)
    exchange, products, gates = (each / rates.clock for each in cycles)
    parts = {"product of x": of_x, "exchange": exchange, "products": products, "gates": gates}
    longer = 0.0 if plan.cluster or task.traversal.backward else unhidden(task, recurrence(plan, rates), HIDES)
    return parts | ({"memory": longer} if longer else {})


def gathered(plan: PersistentPlan, rates: GPURates) -> float:
    """Nanoseconds of a step's recurrence; of several operands a warp waits for so much that the warps count."""
    time = recurrence(plan, rates)
    several = [p for p in plan.phases if p.operands > 1]
    polled = sum(plan.slot_words(p) * 4 * plan.rows / plan.columns for p in several)
    return GATHERED * time + polled * (GATHERED_WARP / plan.warps - GATHERED_LESS) / rates.clock if several else time


def workers_time(task: Task, plan: PersistentPlan) -> float:
    """Nanoseconds that the workers need for a step: for products, or for copies where registers leave small tiles."""
    if not plan.workers:
        return 0.0
    copies = 0.0
    if shape := worker_shape(task, plan):
        tiles = task.workload.batch / shape.height * shape.columns
        copies = tiles * shape.slabs * shape.stage_bytes / gpu_rates(task.device).l2_beside
    return (100 - plan.ahead) / 100 * max(projection_time(task, plan.ahead), copies) / plan.workers


def recurrence(plan: PersistentPlan, rates: GPURates) -> float:
    """Nanoseconds of a step's recurrence, part after part, beside 6.7 µs a sequence. Factors are a least-squares fit to
    2622 trials of shipped logs (H100, H200): half within 7%, nine in ten within 18% (five-fold over layers)."""
    return sum(stages(plan, rates)) / rates.clock


def stages(plan: PersistentPlan, rates: GPURates) -> tuple[float, float, float]:
    """The cycles of :func:`recurrence`: until state has arrived, of products, of what follows from them."""
    arrival = multiplied = computed = 0.0
    exact = plan.dtype == "float32"
    for p in plan.phases:
        tiles = ceil_div(p.octets(plan.units), 2)
        products = p.pairs * 2 * tiles * plan.tiles * (3 if plan.arithmetic == "float32" else 1)  # of a warp
        polled = plan.slot_words(p) * 4 * plan.rows / plan.columns
        trip = rates.l2_exchange + (0 if plan.units // per_word(plan.dtype) % 8 == 0 else rates.l2_shared_sector)
        arrival += trip + POLLED * polled + POLLED_MORE * max(0.0, polled - NARROW) + POLL * (plan.turns(p) - 1)
        multiplied += (products * (TILE * plan.warps / 4 + TILE_TURN * ceil_div(plan.warps, 4))
                       + SHARED * plan.shared_weight_words(p) * 4
                       + (STREAMED_RING if p.slots else STREAMED) * plan.streamed_bytes(p) + _unpacked(plan, p))
        computed += (ADDED * plan.warps * plan.rows * tiles * 64
                     + plan.items * (ITEM + ITEM_SUM * plan.warps * p.gates + (ITEM_EXACT if exact else 0)))
    return arrival, multiplied, computed + summing(plan)


def _unpacked(plan: PersistentPlan, p: PhasePlan) -> float:
    """Cycles that make operands of integers."""
    words = p.pairs * 2 * ceil_div(p.octets(plan.units), 2) * 4  # of a warp's fragments
    return UNPACK * UNPACKED[plan.dtype] * words * ceil_div(plan.warps, 4) if plan.scaled else 0.0


def summing(plan: PersistentPlan) -> float:
    """Cycles of exchanges of statistics and what follows: by hand, from 40 times of four layers on an H100 (H = 256 and
    1024, B = 16). Through L2 the lines that all blocks read take time, in clusters a block's message to each."""
    cycles, levels = 0.0, (min(32, plan.lanes) - 1).bit_length()
    for e, n in enumerate(plan.sums):
        cycles += SHUFFLE * levels
        if plan.cluster:
            messages = plan.rows * plan.sum_parts * ceil_div(n, 2)
            cycles += CLUSTER_SUMS + CLUSTER_STATISTIC * n + CLUSTER_MESSAGE * messages
        else:
            lines = plan.groups * plan.blocks * plan.sum_words(e) / LINE
            cycles += RING_SUMS + RING_LINE * lines + plan.items * (RING_ITEM + RING_STATISTIC * n)
    return cycles


def cluster_stages(plan: PersistentPlan, rates: GPURates) -> tuple[float, float, float]:
    """The same three as :func:`stages`, inside clusters. Fitted to 75 times of 17 layers (H = 64 to 1024, B = 1 to 128;
    two of them float32) on one H100: half of them within 6%, nine in ten within 11%."""
    arrival = multiplied = computed = 0.0
    split = CLUSTER_SPLIT if plan.arithmetic == "float32" else 0
    for p in plan.phases:
        products = p.pairs * 2 * ceil_div(p.octets(plan.units), 2) * plan.tiles  # of a warp
        arrival += rates.cluster_exchange + SENT * plan.items * plan.gate_warps * plan.blocks * p.operands
        multiplied += (products * (CLUSTER_TILE * ceil_div(plan.warps, 4) + split)
                       + CLUSTER_SHARED * plan.shared_weight_words(p) * 4 + STREAMED * plan.streamed_bytes(p)
                       + _unpacked(plan, p))
        computed += p.gates * (GATE + GATE_SUM * plan.warps * plan.items)
    return arrival, multiplied, computed + summing(plan)


def best_ahead(task: Task, plan: PersistentPlan) -> Iterator[int]:
    """Values of ``ahead`` worth an estimate, for a cut (with ``ahead`` 100) and its left-over blocks."""
    yield 100
    spare = task.device.cores - plan.groups * plan.blocks
    if spare > 0 and projection_time(task, 0) > 0:
        late = workers_time(task, plan._replace(ahead=0, workers=spare))
        least = 1 - recurrence(plan, gpu_rates(task.device)) / late
        yield max(0, ceil_div(int(100 * least), 25) * 25)
