"""How long a step of a configuration takes, roughly: for ordering configurations, not for reporting."""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.persistent_wide.plan import DEPTH, Plan
from ecornn.schedules.projection import projection_time

TRIP = 2700.0  # cycles from the last store of a state to the first chunk of it
BLOCK_BYTES, CHIP_BYTES = 48.0, 4800.0  # of state from L2, a cycle: to a block, and to all of them (an H100)
# cycles from the store of the last partial sum to when another block has it, and bytes of them a cycle to a block
HANDOVER, HANDED_BYTES = 600.0, 9.0
HELD = 0.875  # cycles of a product and column where weights are in registers; 0.5 would be the tensor cores' rate
SHARED_BYTES = 128.0  # that products read from shared memory, a cycle


def estimate(task: Task, plan: Plan) -> float:
    """Nanoseconds of a step: the projection done ahead and the recurrence."""
    return projection_time(task) / task.device.cores + recurrence(plan)


def recurrence(plan: Plan) -> float:
    """Nanoseconds of a step's recurrence; cycles are of 1.7 GHz."""
    copied = plan.copied_bytes / min(BLOCK_BYTES, CHIP_BYTES / (plan.groups * plan.blocks))
    multiplied = product_cycles(plan)
    behind = 0.15 * min(copied, multiplied)  # of one that the other does not hide
    gates = 250 + plan.columns * plan.stride * 4 * plan.rings * 2 / SHARED_BYTES + 90 * plan.share.items
    handed = HANDOVER + plan.handed_bytes / HANDED_BYTES if plan.parts > 1 else 0.0
    return (TRIP + max(copied, multiplied) + behind + handed + gates) / 1.7


def product_cycles(plan: Plan) -> float:
    """Cycles of a step's products: of the tensor cores, or of shared memory that feeds them."""
    from_shared = (64 * 16 * 2 + plan.columns * 16 * 2) / SHARED_BYTES
    held, stored = max(HELD * plan.columns, 16), max(plan.columns / 2, from_shared, 16)
    products = plan.rings * DEPTH / 16 * plan.own_tiles * plan.sharers  # of a chunk
    return products * (plan.kept * held + (plan.chunks - plan.kept) * stored)
