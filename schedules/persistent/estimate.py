"""How long a step of a configuration takes, roughly: for ordering configurations, not for reporting."""

from __future__ import annotations

from collections.abc import Iterator

from ecornn.schedules.base import Task
from ecornn.schedules.persistent.plan import Plan
from ecornn.schedules.projection import shape_of
from ecornn.schedules.tensor_core import per_word

FENCE = 1000  # cycles until a gate warp that has released its writes goes on to the next slice
PROJECTION = 2100.0  # products and additions a nanosecond and multiprocessor, measured on an H100; float32: a fifth


def estimate(task: Task, plan: Plan) -> float:
    """Nanoseconds of a step: the projection done ahead, then the slower of recurrence and workers."""
    beside = (100 - plan.ahead) / 100 * projection(task) / max(plan.workers, 1)
    return plan.ahead / 100 * projection(task) / task.device.cores + max(recurrence(plan), beside)


def recurrence(plan: Plan) -> float:
    """Nanoseconds of a step's recurrence: all slices' work, or one's with its trip through L2.

    Polling at 40 bytes a cycle and SM, products at one mma in 16 cycles and scheduler, weights in
    shared memory and partial sums at 128 bytes a cycle, weights in L2 at 24, and the latency of the
    gate math.
    """
    chain = work = 0.0
    for p in plan.phases:
        tiles = -(-p.octets(plan.units) // 2)
        cost = 3 if plan.dtype == "float32" else 1
        sums = plan.warps * plan.rows * tiles * 16 * 4 / 128
        products = (plan.slot_words(p) * 4 * plan.rows / plan.columns / 40
                    + p.pairs * 2 * tiles * plan.tiles * cost * -(-plan.warps // 4) * 16
                    + plan.shared_weight_words(p) * 4 / 128
                    + plan.warps * p.streamed_pairs * p.octets(plan.units) * 512 / 24
                    + (500 if p.streamed_pairs else 0) + 100 * (-(-p.pairs // p.polled_pairs) - 1)
                    + 10 * plan.warps ** 0.5 + sums)
        gates = 60 * plan.items + 10 * plan.warps ** 0.5 + sums
        # units that do not fill sectors of the exchange share them with another block
        trip = 900 + (0 if plan.units // per_word(plan.dtype) % 8 == 0 else 300)
        chain += trip + products + gates
        work += plan.turns * max(products + 60, gates + FENCE if plan.turns > 1 else 0)
    return max(chain, work) / 1.7


def projection(task: Task) -> float:
    """Nanoseconds that one multiprocessor needs for a step's projection."""
    w = task.workload
    work = 2.0 * w.batch * w.input * w.hidden * shape_of(task).rows
    return work / PROJECTION * (5 if w.dtype == "float32" else 1)


def best_ahead(task: Task, plan: Plan) -> Iterator[int]:
    """Values of ``ahead`` worth an estimate, for a cut (with ``ahead`` 100) and its left-over blocks."""
    yield 100
    spare = task.device.cores - plan.groups * plan.blocks
    work = projection(task)
    if spare > 0 and work > 0:
        least = 1 - recurrence(plan) * spare / work  # what the workers cannot do in time
        yield max(0, -(-int(100 * least) // 25) * 25)
