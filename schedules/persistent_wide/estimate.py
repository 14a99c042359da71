"""How long a step of a configuration takes, roughly: for ordering configurations, not for reporting."""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.gemm.projection import projection_time
from ecornn.schedules.hoisted import unhidden
from ecornn.schedules.persistent_wide.plan import DEPTH, WidePlan
from ecornn.schedules.rates import GPURates, gpu_rates

HANDED_BYTES = 9.0  # of partial sums that a block gets in a cycle
HELD = 1.75  # times the tensor cores' time of a product: that of one with weights in registers
PRODUCT = 16  # cycles of the smallest product
HANDED_BESIDE = 1.2  # times that long, beside streamed weights
STATE_TURN, WEIGHTS_TURN = 1_250, 2_500  # cycles from a copy's start until its room is free again, but for its bytes
BEHIND = 0.15  # of the shorter of copies and products: what the longer one does not hide
# Of a recurrence's time, how much hides what memory takes: inputs come while products run. By hand, from seven layers
# of 64 to 2048 rows: they took up to 1.65 times what was expected without memory, and 0.9 to 1.1 times what is with it
HIDES = 0.75
GATES, ITEM = 250, 90  # cycles of the gates of a step, and of each of a thread's items


def estimate(task: Task, plan: WidePlan) -> float:
    """Nanoseconds of a step: the projection done ahead and the recurrence, with what memory takes longer."""
    step = recurrence(plan, gpu_rates(task.device))
    return projection_time(task) / task.device.cores + step + memory(task, step)


def memory(task: Task, step: float) -> float:
    """Nanoseconds that memory takes longer. An adjoint reads other values than hoisted ones; its times were fitted."""
    return 0.0 if task.traversal.backward else unhidden(task, step, HIDES)


def recurrence(plan: WidePlan, rates: GPURates) -> float:
    """Nanoseconds of a step's recurrence."""
    return cycles(plan, rates)[0] / rates.clock


def cycles(plan: WidePlan, rates: GPURates) -> tuple[float, float, float]:
    """The cycles of that, in all, of products and of gates; the rest is the exchange that products do not hide."""
    copied = _streaming(plan, rates) if plan.streamed else plan.copied_bytes / _l2(plan, rates)
    multiplied = product_cycles(plan, rates)
    behind = BEHIND * min(copied, multiplied)
    gates = GATES + plan.columns * plan.stride * 4 * plan.rings * 2 / rates.shared + ITEM * plan.share.items
    handed = rates.l2_handover + plan.handed_bytes / HANDED_BYTES if plan.parts > 1 else 0.0
    handed *= HANDED_BESIDE if plan.streamed else 1.0
    return rates.l2_counted + max(copied, multiplied) + behind + handed + gates, multiplied, gates


def _l2(plan: WidePlan, rates: GPURates) -> float:
    """Bytes a cycle that a block gets from L2."""
    return min(rates.l2_bulk, rates.l2_chip / (plan.groups * plan.blocks))


def _streaming(plan: WidePlan, rates: GPURates) -> float:
    """Cycles of copies where weights are streamed, but for those that come while a step waits for state: of what is
    slowest, L2, memory, or the room that chunks of state and of weights come and go through."""
    blocks, ahead = plan.groups * plan.blocks, plan.rings * plan.slots * plan.weight_bytes
    found = [(plan.copied_bytes + plan.streamed_bytes - ahead) / _l2(plan, rates)]
    if plan.stages < plan.chunks:
        turn = STATE_TURN + plan.stage_bytes / rates.l2_bulk
        found.append(plan.copied_bytes * turn / (plan.rings * plan.stages * plan.stage_bytes))
    if plan.slots < plan.streamed:
        turn = WEIGHTS_TURN + plan.weight_bytes / rates.l2_bulk
        found.append(plan.streamed_bytes * turn / ahead)
    if plan.streamed_bytes * blocks > rates.l2_kept:
        from_memory = blocks * plan.streamed_bytes - rates.l2_lasting
        found.append(from_memory / (rates.memory * blocks) * rates.clock)
    return max(found)


def parts_of(task: Task, plan: WidePlan) -> dict[str, float]:
    """Nanoseconds of what :func:`estimate` adds up."""
    rates = gpu_rates(task.device)
    step, products, gates = (one / rates.clock for one in cycles(plan, rates))
    parts = {"product of x": projection_time(task) / task.device.cores, "exchange": step - products - gates,
             "products": products, "gates": gates}
    longer = memory(task, step)
    return parts | ({"memory": longer} if longer else {})


def product_cycles(plan: WidePlan, rates: GPURates) -> float:
    """Cycles of a step's products: of the tensor cores, or of shared memory that feeds them."""
    from_shared = (64 * 16 * 2 + plan.columns * 16 * 2) / rates.shared
    multiplied = rates.wgmma_column * plan.columns
    held, stored = max(HELD * multiplied, PRODUCT), max(multiplied, from_shared, PRODUCT)
    products = plan.rings * DEPTH / 16 * plan.own_tiles * plan.sharers  # of a chunk
    return products * (plan.kept * held + (plan.chunks - plan.kept) * stored)
