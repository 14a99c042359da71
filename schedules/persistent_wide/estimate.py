"""How long a step of a configuration takes, roughly: for ordering configurations, not for reporting."""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.gemm.projection import projection_time
from ecornn.schedules.persistent_wide.plan import DEPTH, WidePlan
from ecornn.schedules.rates import GPURates, gpu_rates

HANDED_BYTES = 9.0  # of partial sums that a block gets in a cycle
HELD = 1.75  # times the tensor cores' time of a product: that of one with weights in registers
PRODUCT = 16  # cycles of the smallest product
BEHIND = 0.15  # of the shorter of copies and products: what the longer one does not hide
GATES, ITEM = 250, 90  # cycles of the gates of a step, and of each of a thread's items


def estimate(task: Task, plan: WidePlan) -> float:
    """Nanoseconds of a step: the projection done ahead and the recurrence."""
    return projection_time(task) / task.device.cores + recurrence(plan, gpu_rates(task.device))


def recurrence(plan: WidePlan, rates: GPURates) -> float:
    """Nanoseconds of a step's recurrence."""
    return cycles(plan, rates)[0] / rates.clock


def cycles(plan: WidePlan, rates: GPURates) -> tuple[float, float, float]:
    """The cycles of that, in all, of products and of gates; the rest is the exchange that products do not hide."""
    copied = plan.copied_bytes / min(rates.l2_bulk, rates.l2_chip / (plan.groups * plan.blocks))
    if plan.streamed:
        copied += _streamed(plan, rates)
    multiplied = product_cycles(plan, rates)
    behind = BEHIND * min(copied, multiplied)
    gates = GATES + plan.columns * plan.stride * 4 * plan.rings * 2 / rates.shared + ITEM * plan.share.items
    handed = rates.l2_handover + plan.handed_bytes / HANDED_BYTES if plan.parts > 1 else 0.0
    return rates.l2_counted + max(copied, multiplied) + behind + handed + gates, multiplied, gates


def _streamed(plan: WidePlan, rates: GPURates) -> float:
    """Cycles that streamed weights take, but for those that come while a step waits for state."""
    blocks, ahead = plan.groups * plan.blocks, plan.rings * plan.slots * plan.weight_bytes
    found = (plan.streamed_bytes - ahead) / min(rates.l2_bulk, rates.l2_chip / blocks)
    if plan.streamed_bytes * blocks > rates.l2_kept:
        from_memory = blocks * plan.streamed_bytes - rates.l2_lasting
        found = max(found, from_memory / (rates.memory * blocks) * rates.clock)
    return found


def parts_of(task: Task, plan: WidePlan) -> dict[str, float]:
    """Nanoseconds of what :func:`estimate` adds up."""
    rates = gpu_rates(task.device)
    step, products, gates = (one / rates.clock for one in cycles(plan, rates))
    return {"product of x": projection_time(task) / task.device.cores, "exchange": step - products - gates,
            "products": products, "gates": gates}


def product_cycles(plan: WidePlan, rates: GPURates) -> float:
    """Cycles of a step's products: of the tensor cores, or of shared memory that feeds them."""
    from_shared = (64 * 16 * 2 + plan.columns * 16 * 2) / rates.shared
    multiplied = rates.wgmma_column * plan.columns
    held, stored = max(HELD * multiplied, PRODUCT), max(multiplied, from_shared, PRODUCT)
    products = plan.rings * DEPTH / 16 * plan.own_tiles * plan.sharers  # of a chunk
    return products * (plan.kept * held + (plan.chunks - plan.kept) * stored)
