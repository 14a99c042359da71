"""How long a step of a configuration takes, roughly: for ordering configurations, not for reporting."""

from __future__ import annotations

from collections.abc import Iterator

from ecornn.schedules.base import Task
from ecornn.schedules.persistent.plan import LINE, OCTET, PhasePlan, Plan, worker_shape
from ecornn.schedules.projection import projection_time
from ecornn.schedules.tensor_core import per_word

NARROW = 24 * 1024  # bytes of state that arrive within the trip
READ = 0.0048  # nanoseconds a hoisted value of all blocks, in clusters
BESIDE = 180.0  # nanoseconds by which workers slow the recurrence down: 120 by trials, 170 to 300 beside the same cut
COPIED = 36.0  # bytes of x and weights that a worker gets in a nanosecond, while others copy too


def estimate(task: Task, plan: Plan) -> float:
    """Nanoseconds of a step: the projection done ahead, then the slower of recurrence and workers."""
    hoisted = plan.ahead / 100 * projection_time(task, plan.ahead) / task.device.cores
    if plan.cluster:
        values = plan.groups * plan.rows * plan.hidden * len(task.graph.hoisted_outputs)
        return hoisted + READ * values + in_clusters(plan)
    if not plan.workers:
        return hoisted + recurrence(plan)
    return hoisted + max(recurrence(plan) + BESIDE, workers_time(task, plan))


def workers_time(task: Task, plan: Plan) -> float:
    """Nanoseconds that the workers need for a step: for products, or for copies where registers leave small tiles."""
    if not plan.workers:
        return 0.0
    shape = worker_shape(task, plan)
    tiles = task.workload.batch / shape.block_rows * shape.columns if shape else 0.0
    copies = tiles * shape.slabs * shape.stage_words * 4 / COPIED if shape else 0.0
    return (100 - plan.ahead) / 100 * max(projection_time(task, plan.ahead), copies) / plan.workers


def recurrence(plan: Plan) -> float:
    """Nanoseconds of a step's recurrence: a cost of everything that is one after the other.

    The factors, cycles of 1.7 GHz, are a least-squares fit to 2622 trials in the logs of an H100 and an H200 that ship:
    half of them within 7%, nine in ten within 18% (five-fold over layers), beside 6.7 µs that a sequence takes once.
    """
    cycles, exact = 0.0, plan.dtype == "float32"
    for p in plan.phases:
        tiles = -(-p.octets(plan.units) // 2)
        products = p.pairs * 2 * tiles * plan.tiles * (3 if plan.arithmetic == "float32" else 1)  # of a warp
        polled = plan.slot_words(p) * 4 * plan.rows / plan.columns
        trip = 1450 + (0 if plan.units // per_word(plan.dtype) % 8 == 0 else 168)  # 168: shared sectors
        cycles += (trip + 0.0128 * polled + 0.0103 * max(0.0, polled - NARROW)
                   + 239 * (-(-p.pairs // p.polled_pairs) - 1)
                   + products * (4.6 * plan.warps / 4 + 6.2 * -(-plan.warps // 4))
                   + 0.0035 * plan.shared_weight_words(p) * 4
                   + (0.02 if p.slots else 0.017) * _streamed(plan, p)  # rings: of 246 trials half within 9%
                   + 0.0009 * plan.warps * plan.rows * tiles * 64
                   + plan.items * (87 + 1.9 * plan.warps * p.gates + (166 if exact else 0)))
    return (cycles + summing(plan)) / 1.7


def _streamed(plan: Plan, p: PhasePlan) -> int:
    """Bytes of weights of a phase that a block reads from L2 in every step."""
    return plan.warps * p.streamed_pairs * p.octets(plan.units) * OCTET * 4


def summing(plan: Plan) -> float:
    """Cycles of the exchanges of statistics, and of what follows from them.

    By hand, from 40 times of four layers on one H100 (H = 256 and 1024, B = 16), not a fit. Through L2 the lines that
    all blocks read take time, in clusters each message, of which a block sends one to every block.
    """
    cycles, levels = 0.0, (min(32, plan.lanes) - 1).bit_length()
    for e, n in enumerate(plan.sums):
        cycles += 30 * levels
        if plan.cluster:
            cycles += 200 + 110 * n + 10.4 * plan.rows * plan.sum_parts * -(-n // 2)
        else:
            lines = plan.groups * plan.blocks * plan.sum_words(e) / LINE
            cycles += 650 + 0.05 * lines + plan.items * (55 + 110 * n)
    return cycles


def in_clusters(plan: Plan) -> float:
    """The same where state travels inside clusters.

    Fitted to 75 times of 17 layers (H = 64 to 1024, B = 1 to 128; two of them float32) on one H100: half of them within
    6%, nine in ten within 11%.
    """
    cycles = 0.0
    for p in plan.phases:
        products = p.pairs * 2 * -(-p.octets(plan.units) // 2) * plan.tiles  # of a warp
        sends = plan.items * plan.gate_warps * plan.blocks * p.operands
        cycles += (497 + 4.8 * sends
                   + products * (5.4 * -(-plan.warps // 4) + (40 if plan.arithmetic == "float32" else 0))
                   + 0.0056 * plan.shared_weight_words(p) * 4
                   + 0.017 * _streamed(plan, p)
                   + p.gates * (31 + 3.1 * plan.warps * plan.items))
    return (cycles + summing(plan)) / 1.7


def best_ahead(task: Task, plan: Plan) -> Iterator[int]:
    """Values of ``ahead`` worth an estimate, for a cut (with ``ahead`` 100) and its left-over blocks."""
    yield 100
    spare = task.device.cores - plan.groups * plan.blocks
    if spare > 0 and projection_time(task, 0) > 0:
        least = 1 - recurrence(plan) / workers_time(task, plan._replace(ahead=0, workers=spare))  # what would be late
        yield max(0, -(-int(100 * least) // 25) * 25)
