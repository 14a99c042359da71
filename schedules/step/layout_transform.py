"""Layout transform: one launch a step and phase on tensor cores, weights and state laid out for it.

For layers whose weights do not fit on chip, and large batches. A block streams a contiguous piece of weights for each
stage, with all gates of a unit; the state has the hidden axis innermost, or the batch inside blocks of it."""

from __future__ import annotations

from collections.abc import Iterator

from ecornn.analysis.heads import most_heads
from ecornn.program import Buffer, Launch, Program
from ecornn.schedules.assemble import assemble, shared_buffers
from ecornn.schedules.backward.assemble import assemble_recurrence, beyond, recurrence_buffers
from ecornn.schedules.base import Component, Config, Knob, SearchedSchedule, Task, joined, no_room
from ecornn.schedules.builder import Expr, PrimFunc, T, ceil_div
from ecornn.schedules.gemm.projection import no_projection
from ecornn.schedules.hoisted import Hoisted, gained, hoisted_choices, hoisted_of, preferred
from ecornn.schedules.keeping import NOTHING, Stored
from ecornn.schedules.rates import gpu_rates
from ecornn.schedules.scalars.pointwise import math_choices
from ecornn.schedules.step.mma_product import TensorProduct, TileKnobs, TilePlan, plan_of, unit_step, weights_buffer
from ecornn.schedules.step.scalars import Layout, StepScalars, begin_and_steps, declare

AHEAD = 4  # items of a thread whose hoisted values are read before the product
MOST_ROWS = 256  # weight rows of a block
SLOWER = {"float32": 6, "tf32": 2}  # than products of 16-bit types
ITEM = 60  # cycles of the scalars of an item


class LayoutTransform(SearchedSchedule[TilePlan]):
    """Serves every cell with a recurrent product."""

    name = "layout_transform"
    revision = 2
    kind = "cuda"
    backward = True
    heads = True
    doubt = 1.6  # LSTM 256x64x2048 on an H200 took 33 us a step, 20.5 were expected

    def refuses(self, task: Task) -> str | None:
        if task.traversal.backward and (reason := beyond(task)):
            return reason
        if not any(phase.products for phase in task.graph.phases):
            return f"cell {task.graph.cell!r} has no recurrent product"
        if fault := no_projection(task):
            return fault
        if next(self._candidates(task), None) is None:
            if (heads := most_heads(task.graph)) > 1:
                return (f"cell {task.graph.cell!r} has heads of {task.workload.hidden // heads} units, which do not "
                        "fill tiles of tensor cores")
            return f"cell {task.graph.cell!r} has too many gates for a block"
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        w, step = task.workload, unit_step(task)
        gates = max(len(p.products) for p in task.graph.phases)
        units = tuple(u for u in (step << n for n in range(7))
                      if u == step or (u * gates <= MOST_ROWS and u < 2 * w.hidden))
        rows = {ceil_div(w.batch, 8 * n) * 8 for n in (1, 2, 3, 4, 6, 8)}
        rows = {r for r in rows if r <= 256} | {r for r in (64, 128, 256) if r < w.batch}
        return TileKnobs.offered({
            "units": units, "rows": tuple(sorted(rows)), "row_warps": (1, 2, 4, 8), "batch_warps": (1, 2, 4),
            "split": (1, 2, 4, 8), "depth": (1, 2, 4), "stages": (2, 3, 4, 6), "layout": ("hidden", "batch"),
            "hoisted": hoisted_choices(task), "math": math_choices(task)})

    def plan(self, task: Task, config: Config) -> TilePlan:
        return plan_of(task, TileKnobs(config))

    def check(self, task: Task, config: Config) -> str | None:
        if (units := TileKnobs(config).units) % (step := unit_step(task)):
            return f"units={units} is not a multiple of {step}"
        plan, device = self.plan(task, config), task.device
        if plan.threads > 1024:
            return f"a block would have {plan.threads} threads; at most 1024 are possible"
        if plan.rows % (8 * plan.batch_warps):
            return f"{plan.rows} batch rows do not divide into tiles for {plan.batch_warps} warps"
        for p in range(len(plan.gates)):
            if plan.heads[p] > 1 and not plan.whole(p):
                return (f"units={plan.units} and stages of {plan.stage_pairs} pairs of k-tiles do not divide a head of "
                        f"{plan.own(p)}")
            if plan.weight_rows(p) % (16 * plan.row_warps):
                return f"{plan.weight_rows(p)} weight rows do not divide into tiles for {plan.row_warps} warps"
            if fault := no_room(device, plan.shared(p), plan.threads, plan.registers(p)):
                return fault
        return None

    def search(self, task: Task) -> Config | None:
        best = min(self._candidates(task), key=lambda c: estimate(task, self.plan(task, c)), default=None)
        return None if best is None else {**best, "hoisted": preferred(task, estimate(task, self.plan(task, best)))}

    def expected(self, task: Task) -> float:
        if not task.traversal.backward:
            return super().expected(task)
        plan = self.plan(task, self.default(task))
        return estimate(task, plan) - gained(task, plan.knobs.hoisted)

    def _candidates(self, task: Task) -> Iterator[Config]:
        """Valid configurations, but for layouts, which the tuner tries, and the deepest stages: ptxas may spill."""
        knobs = {k.name: k.values for k in self.knobs(task)} | {"layout": ("batch",), "stages": (4, 2), "depth": (1, 2)}
        knobs["hoisted"] = ("float32",)
        knobs["math"] = ("exact",) if len(knobs["math"]) == 1 else ("fast",)
        return self.valid(task, knobs)

    def features(self, task: Task, plan: TilePlan) -> dict[str, float]:
        w, phases = task.workload, range(len(plan.gates))
        rows, width = ceil_div(w.batch, plan.rows), plan.pairs * (32 if w.dtype != "float32" else 16)
        blocks = plan.columns * rows
        products = sum(plan.gates[p] * plan.operands[p] * plan.share(p) for p in phases)
        return {
            "blocks": blocks, "waves": blocks / task.device.cores, "threads": plan.threads,
            "weight_bytes": products * w.hidden * width * w.itemsize * rows,
            "state_bytes": sum(plan.operands) * plan.columns * rows * plan.rows * width * w.itemsize,
            "flops": 2.0 * products * w.hidden * w.hidden * w.batch,
            "waste": plan.columns * plan.units * rows * plan.rows * width / (w.hidden * w.batch * w.hidden),
            "turns": sum(map(plan.turns, phases)), "shared": max(map(plan.shared, phases)),
            "registers": max(map(plan.registers, phases)),
            "estimate": estimate(task, plan) - gained(task, plan.knobs.hoisted)}

    def recurrence(self, task: Task, plan: TilePlan) -> Component:
        inputs = hoisted_of(task, plan.knobs.hoisted)
        return self._recurrence(task, plan, inputs, recurrence_buffers(task, inputs), NOTHING)

    def program(self, task: Task, plan: TilePlan) -> Program:
        inputs = hoisted_of(task, plan.knobs.hoisted)
        if task.traversal.backward:
            return assemble_recurrence(task, self.recurrence(task, plan), inputs)
        around = shared_buffers(task, inputs)
        return assemble(task, lambda kept: self._recurrence(task, plan, inputs, around, kept), inputs)

    @staticmethod
    def _recurrence(task: Task, plan: TilePlan, inputs: Hoisted, around: list[Buffer], kept: Stored) -> Component:
        """The states of the call into workspaces, then all steps; ``around``: buffers of others that these use."""
        math, layout = plan.knobs.math, plan.layout(task.workload.batch)
        weights = [weights_buffer(task, plan, p) for p, gates in enumerate(plan.gates) if gates]
        blocks = plan.columns * ceil_div(task.workload.batch, plan.rows)

        def phase(p: int, known: list[Buffer], name: str) -> tuple[PrimFunc, Launch]:
            return (_step_kernel(task, plan, layout, inputs, known, p, blocks, name),
                    Launch(name, blocks, plan.threads, plan.shared(p)))

        begin, steps = begin_and_steps(task, layout, weights, around, math, inputs, phase)
        return joined(begin, steps(kept))


def estimate(task: Task, plan: TilePlan) -> float:
    """Nanoseconds of a step, roughly: a launch; the busiest multiprocessor's longest of copies, products and fragments;
    a barrier a stage and, with few blocks, latency; partial sums. Half of 61 trials on an H100 are within 11%."""
    device, rates = task.device, gpu_rates(task.device)
    most = ceil_div(plan.columns * ceil_div(task.workload.batch, plan.rows), device.cores)
    cost, cycles = SLOWER.get(plan.arithmetic, 1), 0.0
    for p in range(len(plan.gates)):
        resident = max(1, min(device.shared // plan.shared(p), rates.threads // plan.threads,
                              device.registers // (plan.threads * plan.registers(p)), most))
        tiles, octets, warps = plan.tiles(p), plan.octets, plan.row_warps * plan.batch_warps
        pairs = plan.turns(p) * plan.stage_pairs  # of a block
        copies = plan.turns(p) * plan.stage_words(p) * 4 / rates.l2_copied
        products = pairs * warps * 2 * tiles * octets * cost / 2 * rates.mma * 4 / min(4, warps * plan.split)
        fragments = pairs * warps * (2 * tiles + octets) * 512 / rates.fragments
        waiting = plan.turns(p) * (rates.barrier + rates.l2_latency / (plan.stages - 1)) / resident
        sums = (2 * plan.split * plan.rows * plan.stride(p) * 4 / rates.shared
                + plan.units * plan.rows / plan.threads * ITEM)
        cycles += rates.tensor_launch + most * (max(copies, products, fragments, waiting) + sums)
    return cycles / rates.clock


def _step_kernel(task: Task, plan: TilePlan, layout: Layout, inputs: Hoisted, buffers: list[Buffer], p: int,
                 blocks: int, name: str) -> PrimFunc:
    """The kernel ``name``: phase p of step t."""
    H = task.workload.hidden
    with T.kernel(name) as made:
        a = declare(buffers)
        scalars = StepScalars(task, layout, a, plan.knobs.math, inputs)
        T.device_entry()
        block, thread = T.block(blocks), T.thread(plan.threads)
        memory = T.shared(plan.shared(p) // 4)  # TensorProduct's
        column, row0 = T.let("column", block % plan.columns), T.let("row0", block // plan.columns * plan.rows)
        with T.when(row0 < a["B"]):
            product = TensorProduct(plan, p, task.graph.phases[p].products, memory, thread)

            def place(turn: Expr) -> tuple[Expr, ...]:
                """An item's row and unit in the block, and its batch row and unit in the layer."""
                item = T.let("item", turn * plan.threads + thread)
                row, unit = T.let("row", item // plan.units), T.let("unit", item % plan.units)
                return row, unit, T.let("place", row0 + row), T.let("place", column * plan.units + unit)

            items, ahead = ceil_div(plan.units * plan.rows, plan.threads), []
            for i in range(items if items <= AHEAD else 0):  # on their way while the product is computed
                *_, b, j = place(i)
                ahead.append(scalars.hoisted(T.let("ahead", T.min(b, a["B"] - 1)), T.let("ahead", T.min(j, H - 1))))
            T.note("products of a tile of units by batch rows, on tensor cores")
            base = T.let("base", scalars.operand_base(p, a["t"] % 2 if p == 0 else 0))
            product.run(a[f"recurrent_{p}"], column, a[f"operands_{p}"], base, scalars.wide(row0), layout)

            def finish(turn: Expr, hoisted: list[Expr] | None) -> None:
                row, unit, b, j = place(turn)
                with T.when(T.And(row < plan.rows, T.And(b < a["B"], j < H))):
                    scalars.finish(p, b, j, product.sums(row, unit),
                                   scalars.hoisted(b, j) if hoisted is None else hoisted)

            T.note("epilogue: the cell's scalars of each (batch row, unit), operands of the next products, y")
            for i, hoisted in enumerate(ahead):
                finish(i, hoisted)
            if items > AHEAD:
                with T.serial("turn", 0, items) as turn:
                    finish(turn, None)
    return made()
