"""Whole step: for one or a few steps a call, each a single launch that multiplies x and the state.

A call of one step is bound by what it reads: all weights once. What any other schedule launches before its recurrence
(the product of x, then what readies the states) costs more than that. Here a launch does all: warps of a block read
their parts of both products straight into registers (``warp_product.py``), the first step reads the caller's own
states, and a call of one step has no workspaces at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from ecornn.analysis.liveness import late_operands
from ecornn.program import WORKSPACE, Buffer, Extent, Launch, Program, Relay
from ecornn.schedules.assemble import assemble, shared_buffers
from ecornn.schedules.base import Component, Config, Knob, Schedule, Task, no_room
from ecornn.schedules.builder import ceil_div
from ecornn.schedules.few_steps import others
from ecornn.schedules.rates import gpu_rates
from ecornn.schedules.scalars.pointwise import math_choices
from ecornn.schedules.step.operand_rows import whole_pieces
from ecornn.schedules.step.whole_step_kernel import StepKnobs, StepPlan, operand_of, plan_of, step_kernel
from ecornn.workload import FEW

# Nanoseconds, of an H100's calls (benchmarks/results/h100_few_steps.txt): of a call beside its steps, and what a step
# hides behind the one before it
CALL, HIDDEN = 7_000, 3_500
LEAST = 2_000  # of a step, whatever is hidden
L2_KEEPS = 0.8  # of L2: weights that are more come from memory in each step
SPARE_REGISTERS = 40  # of a thread, beside sums and operands: addresses, loops, gate math
FINISH = 900  # cycles from the last product until the last store: barriers, sums of the warps, the cell's scalars
TURN, LOAD, ADDED = 40, 8, 2  # cycles of a warp beside products: of a turn, of a load; of a sum of a thread
SLOWER = {"float32": 6, "tf32": 2}  # than products of 16-bit types


class WholeStep(Schedule[StepPlan]):
    """Serves cells with one exchange a step, whose operand is a state."""

    name = "whole_step"
    revision = 1
    kind = "cuda"
    few_steps = True

    def refuses(self, task: Task) -> str | None:
        graph, traversal = task.graph, task.traversal
        if task.workload.seq > FEW:
            return f"is for calls of {FEW} steps at most"
        if not task.device.can.tensor_cores:
            return "needs compute capability 8.0"
        if graph.statistics or graph.hoisted_statistics:
            return f"cell {graph.cell!r} has sums over a batch row"
        if len(graph.phases) != 1 or not graph.phases[0].products:
            return f"cell {graph.cell!r} has {len(graph.product_phases)} recurrent products after each other, not one"
        operands, states = graph.phases[0].operands, tuple(graph.states.values())
        if len(operands) != 1 or not any(operands[0].same_as(s) for s in states) or late_operands(graph):
            return f"cell {graph.cell!r} multiplies something else than a state"
        if traversal.keep is not None:
            return "keeps nothing for a backward pass"
        if next(self._candidates(task), None) is None:
            return f"cell {graph.cell!r} has too many gates for the registers of a thread"
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        w, gates = task.workload, _gates(task)
        units = tuple(u for u in (1, 2, 4, 8, 16, 32) if all(g * u % 8 == 0 for g in gates) and u < max(9, w.hidden))
        rows = tuple(r for r in (8, 16, 24, 32, 48, 64) if r < w.batch + 8)
        pieces = all(whole_pieces(n, w.dtype) for n in (w.hidden, w.input, task.own_input))
        clusters = tuple(n for n in (1, 2, 4, 8) if n == 1 or (pieces and task.device.clusters(n) > 0))
        chained = (False, True) if task.device.can.early_launches else (False,)
        return StepKnobs.offered({"units": units, "rows": rows, "warps": (2, 4, 8, 16), "ahead": (1, 2, 4, 8),
                                  "cluster": clusters, "chained": chained, "math": math_choices(task)})

    def plan(self, task: Task, config: Config) -> StepPlan:
        return plan_of(task, StepKnobs(config))

    def check(self, task: Task, config: Config) -> str | None:
        plan = self.plan(task, config)
        registers = max(share.registers for share in plan.shares) + SPARE_REGISTERS
        if plan.cluster > 1 and 2 * plan.rows > plan.threads:
            return f"{plan.threads} threads to copy {2 * plan.rows} rows"
        return no_room(task.device, plan.shared, plan.threads, registers)

    def default(self, task: Task) -> Config:
        def order(config: Config) -> tuple[float, int, bool]:
            """The estimate, then most warps: of blocks that are expected to take as long those with more were always
            faster, by 3 to 30%."""
            return estimate(task, plan := self.plan(task, config)), -plan.knobs.warps, plan.knobs.ahead == 1

        best = min(self._candidates(task), key=order, default=None)
        assert best is not None, "default() is for tasks that serves() accepts"
        return best

    def expected(self, task: Task) -> float:
        return max(LEAST, estimate(task, self.plan(task, self.default(task))) - HIDDEN) + CALL / task.workload.seq

    def rank(self, task: Task) -> float:
        """The expected time, less what calls of other schedules take beside their steps, which those leave out of
        theirs."""
        return self.expected(task) - others(task) / task.workload.seq

    def _candidates(self, task: Task) -> Iterator[Config]:
        knobs = {k.name: k.values for k in self.knobs(task)} | {"cluster": (1,)}
        knobs["chained"] = knobs["chained"][-1:]
        knobs["math"] = ("exact",) if len(knobs["math"]) == 1 else ("fast",)
        return self.valid(task, knobs)

    def features(self, task: Task, plan: StepPlan) -> dict[str, float]:
        w = task.workload
        blocks = plan.blocks(w.batch)
        return {
            "blocks": blocks, "waves": blocks / task.device.cores, "threads": plan.threads,
            "bytes": blocks * plan.moved, "under_way": plan.under_way,
            "turns": max(share.turns for share in plan.shares),
            "waste": plan.columns * plan.units * plan.rows * ceil_div(w.batch, plan.rows) / (w.hidden * w.batch),
            "shared": plan.shared, "registers": max(share.registers for share in plan.shares),
            "estimate": estimate(task, plan)}

    def program(self, task: Task, plan: StepPlan) -> Program:
        w, graph = task.workload, task.graph
        rows = Extent(w.batch * w.hidden)
        own = (Buffer("states", WORKSPACE, "float32", Extent(len(graph.states) * rows.fixed)),
               Buffer("state_before", WORKSPACE, w.dtype, rows), Buffer("state_after", WORKSPACE, w.dtype, rows),
               *plan.weights(task))
        kernel = step_kernel(task, plan, [*shared_buffers(task, None), *own], plan.knobs.math)
        step = Launch("step", plan.blocks(w.batch), plan.threads, plan.shared, early=plan.chained,
                      cluster=plan.cluster)
        state = operand_of(task)
        steps = Relay((step,), "state_before", "state_after", f"{state}_in", f"{state}_out", w.hidden)
        return assemble(task, lambda kept: Component({"step": kernel}, own, (steps,)), None)


def _gates(task: Task) -> tuple[int, ...]:
    """Weight rows of a unit, of the products of x and of the state."""
    found = len(task.graph.hoisted_products), len(task.graph.phases[0].products)
    return tuple(filter(None, found))


def estimate(task: Task, plan: StepPlan) -> float:
    """Nanoseconds of a step: a launch; then of the multiprocessor with most blocks what it reads, at the rate of L2, or
    at that of what its warps have under way; its products, or the weights of all blocks from memory, where they are
    more than L2 keeps between two steps, if these take longer; and what follows them."""
    device, rates, w = task.device, gpu_rates(task.device), task.workload
    blocks = plan.blocks(w.batch)
    most = ceil_div(blocks, device.cores)
    registers = max(share.registers for share in plan.shares) + SPARE_REGISTERS
    resident = max(1, min(most, device.registers // (plan.threads * registers), rates.threads // plan.threads,
                          device.shared // plan.shared))
    weights = plan.columns * sum(share.pairs * share.weight_bytes for share in plan.shares)
    memory = 0.0 if weights < L2_KEEPS * (device.l2 or 50 << 20) else weights / (rates.memory * device.cores)
    rate = min(rates.l2_beside, resident * plan.under_way / (rates.l2_latency / rates.clock))
    cost, tensor_cores = SLOWER.get(w.arithmetic, 1), min(4, plan.warps * resident)
    tiles = sum(share.pairs * 2 * share.tiles * share.octets for share in plan.shares)
    products = tiles * rates.mma * cost * 4 / tensor_cores
    warp = max(share.turns * (TURN + LOAD * (share.groups + share.octets) + 2 * share.tiles * share.octets * cost *
                              rates.mma * 4) for share in plan.shares)
    sums = sum(share.floats for share in plan.shares) / plan.threads * ADDED
    busy = max(plan.moved / rate, products / rates.clock, warp / resident / rates.clock)
    return rates.launch + max(most * busy, memory) + (rates.l2_latency + FINISH + sums) / rates.clock
