"""Fused step: one launch a step and phase, in plain float32 arithmetic. The fallback.

It serves every cell, size and CUDA GPU. Gates never leave the chip: a launch multiplies, computes the cell's scalars
and stores the new state. The input's products are hoisted out of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ecornn.analysis.heads import heads_of, most_heads, multiplied
from ecornn.analysis.liveness import late_operands, phase_count
from ecornn.analysis.narrow import columns_of
from ecornn.analysis.sums import one_by_one
from ecornn.program import Buffer, Launch, Program
from ecornn.schedules.assemble import assemble, shared_buffers
from ecornn.schedules.backward.assemble import assemble_recurrence, beyond, recurrence_buffers
from ecornn.schedules.base import Component, Config, Knob, SearchedSchedule, Task, joined, no_room
from ecornn.schedules.builder import PrimFunc, T, ceil_div
from ecornn.schedules.hoisted import hoisted_of
from ecornn.schedules.keeping import NOTHING, Stored
from ecornn.schedules.rates import gpu_rates
from ecornn.schedules.scalars.pointwise import math_choices
from ecornn.schedules.step.product import BlockProduct, Tile, project_plainly, weights_buffer
from ecornn.schedules.step.scalars import Layout, StepScalars, begin_and_steps, declare

REGISTERS = 40  # of a thread, beside accumulators: addresses, tiles on their way, gate math
# nanoseconds of a dependent product, a barrier and the copies before it, a weight that a block reads, a product
CHAINED, TILE_BARRIER, WEIGHT, PRODUCT = 2.1, 89.0, 0.2, 0.01


class FusedStep(SearchedSchedule[Tile]):
    """Serves everything that a CUDA GPU of compute capability 8.0 or later can run."""

    name = "fused_step"
    revision = 1
    kind = "cuda"
    backward = True
    heads = True

    def refuses(self, task: Task) -> str | None:
        if not task.device.can.tensor_cores:
            return "needs compute capability 8.0"
        if task.traversal.backward:
            if most_heads(task.graph) > 1:
                return f"step {task.graph.cell!r} has products with heads, of weights that are transposed"
            task = plain(task)
            if reason := beyond(task):
                return reason
        if self.best(task) is None:
            return f"cell {task.graph.cell!r} has too many gates for the registers of a thread"
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        return Tile.offered({"units": (8, 16, 32), "thread_rows": (1, 2, 4, 8), "groups": (1, 2, 4, 8),
                             "split": (1, 2, 4, 8, 16), "depth": (16, 32, 64), "math": math_choices(task)})

    def plan(self, task: Task, config: Config) -> Tile:
        return Tile(config)

    def check(self, task: Task, config: Config) -> str | None:
        task, tile = plain(task), self.plan(task, config)
        if not 32 <= tile.threads <= 1024 or tile.threads % 32:
            return f"{tile.threads} threads a block"
        if tile.depth % tile.split:
            return f"a tile of depth {tile.depth} cannot be split in {tile.split}"
        if tile.groups > 1 and tile.rows >= 2 * task.workload.batch:
            return f"{tile.rows} rows a block for a batch of {task.workload.batch}"
        return no_room(task.device, _shared(task, tile), tile.threads, _gates(task) * tile.thread_rows + REGISTERS)

    def search(self, task: Task) -> Config | None:
        """The first one that fits: blocks as wide as the batch allows and threads to fill them, then less of it."""
        task = plain(task)
        exact = task.workload.dtype == "float32" or task.traversal.backward
        batch, math = task.workload.batch, "exact" if exact else "fast"
        most = max(1, 32 // max(_gates(task), 1))
        rows = 1 << (min(batch, 32) - 1).bit_length()
        thread_rows = min(rows, 1 << (min(most, 8).bit_length() - 1))
        groups = min(8, rows // thread_rows)
        # few blocks: narrower ones keep more multiprocessors busy
        wide = ceil_div(task.workload.hidden, 32) * ceil_div(batch, thread_rows * groups) >= task.device.cores
        units = 32 if wide else 16
        split = max(1, min(16, 512 // (units * groups)))
        tries = [(units, min(each, thread_rows), groups, min(parts, split), depth)
                 for depth in (64, 32, 16) for parts in (split, 4, 2, 1) for each in (thread_rows, 2, 1)]
        tries += [(units, 1, 1, 32 // units, 16) for units in (32, 16, 8)]
        names = ("units", "thread_rows", "groups", "split", "depth")
        configs: Iterator[Config] = ({**dict(zip(names, one, strict=True)), "math": math} for one in tries)
        return next((config for config in configs if self.check(task, config) is None), None)

    def features(self, task: Task, plan: Tile) -> dict[str, float]:
        task, w = plain(task), task.workload
        columns, rows = ceil_div(w.hidden, plan.units), ceil_div(w.batch, plan.rows)
        blocks, weights = columns * rows, multiplied(task.graph, w.hidden)
        return {
            "blocks": blocks, "waves": blocks / task.device.cores, "threads": plan.threads,
            "weight_bytes": weights * w.itemsize * rows, "flops": 2.0 * weights * w.batch,
            "waste": columns * plan.units * rows * plan.rows / (w.hidden * w.batch),
            "barriers": 2.0 * _turns(task, plan), "shared": _shared(task, plan),
            "chain": w.hidden // most_heads(task.graph) / plan.split, "estimate": estimate(task, plan)}

    def recurrence(self, task: Task, plan: Tile) -> Component:
        task = plain(task)
        begin, steps = _parts(task, plan, recurrence_buffers(task, hoisted_of(task)))
        return joined(begin, steps(NOTHING))

    def program(self, task: Task, plan: Tile) -> Program:
        task, inputs = plain(task), hoisted_of(task)
        if task.traversal.backward:
            return assemble_recurrence(task, self.recurrence(task, plan), inputs)
        begin, steps = _parts(task, plan, shared_buffers(task, inputs))
        projection = project_plainly(task, plan, _layout(task, plan), inputs)
        if late_operands(task.graph):  # which the beginning reads
            return assemble(task, lambda kept: joined(begin, steps(kept)), inputs, projection)
        return assemble(task, steps, inputs, joined(begin, projection))


def _parts(task: Task, tile: Tile, around: list[Buffer]) -> tuple[Component, Callable[[Stored], Component]]:
    """The beginning and a function that makes all steps, as :func:`begin_and_steps` has them."""
    layout = _layout(task, tile)
    weights = [weights_buffer(f"recurrent_{p}", task, tile, phase.products, columns_of(phase, task.workload.hidden))
               for p, phase in enumerate(task.graph.phases) if phase.products]

    def phase(p: int, known: list[Buffer], name: str) -> tuple[PrimFunc, Launch]:
        return (_step_kernel(task, tile, layout, known, p, name),
                Launch(name, _grid(task, tile), tile.threads, _shared_of(task, tile, p)))

    return begin_and_steps(task, layout, weights, around, tile.math, hoisted_of(task), phase)


def _layout(task: Task, tile: Tile) -> Layout:
    """The layout of what is exchanged: whole tiles."""
    width = ceil_div(task.workload.hidden, tile.depth) * tile.depth
    return Layout(ceil_div(task.workload.batch, tile.rows) * tile.rows, width, width)


def plain(task: Task) -> Task:
    """The task with products of one operand each: a thread's sums are of one row of weights."""
    several = any(len(product.terms) > 1 for phase in task.graph.phases for product in phase.products)
    return replace(task, graph=one_by_one(task.graph)) if several else task


def _shared_of(task: Task, tile: Tile, p: int) -> int:
    """Bytes of shared memory of a phase's kernel."""
    if not task.graph.phases:
        return tile.shared(0, 0)
    phase = task.graph.phases[p]
    return tile.shared(len(phase.products), len(phase.operands) * tile.heads(task.workload.hidden, heads_of(phase)))


def _shared(task: Task, tile: Tile) -> int:
    """Bytes of shared memory of the kernel that has most."""
    own = (_shared_of(task, tile, p) for p in range(phase_count(task.graph)))
    return max(tile.shared(len(task.graph.hoisted_products), 1), *own)


def _turns(task: Task, tile: Tile) -> int:
    """Tiles along K that a step goes through."""
    hidden = task.workload.hidden
    inputs = [columns_of(p, hidden) for p in task.graph.phases] or [hidden]
    return sum(ceil_div(columns, tile.depth) for columns in inputs)


def estimate(task: Task, tile: Tile) -> float:
    """Nanoseconds of a step, roughly: a model for ordering configurations, not for reporting.

    Launches; then of the multiprocessor with most blocks the barriers, the weights that its blocks read and what its
    threads multiply, one of which is the longest chain. Fitted to 469 trials of 68 layers on an H100 and an H200: half
    of them within 20%, nine in ten within a factor of 1.8."""
    hidden, launches = task.workload.hidden, gpu_rates(task.device).launch * phase_count(task.graph)
    most = ceil_div(_grid(task, tile), task.device.cores)
    weights = multiplied(task.graph, hidden) * tile.units // hidden  # of a block
    chain = weights * tile.rows / tile.threads
    barriers = 2.0 * _turns(task, tile)
    return launches + CHAINED * chain + most * (
        TILE_BARRIER * barriers + WEIGHT * weights + PRODUCT * chain * tile.threads)


def _gates(task: Task) -> int:
    """Gates of the product that has most."""
    return max(map(len, (task.graph.hoisted_products, *(phase.products for phase in task.graph.phases))))


def _grid(task: Task, tile: Tile) -> int:
    return ceil_div(task.workload.hidden, tile.units) * ceil_div(task.workload.batch, tile.rows)


def _step_kernel(task: Task, tile: Tile, layout: Layout, buffers: list[Buffer], p: int, name: str) -> PrimFunc:
    """The kernel ``name``: phase p of step t."""
    w, graph = task.workload, task.graph
    columns = ceil_div(w.hidden, tile.units)
    rows = graph.phases[p].products if graph.phases else ()
    with T.kernel(name) as made:
        a = declare(buffers)
        scalars = StepScalars(task, layout, a, tile.math)
        T.device_entry()
        block, thread = T.block(_grid(task, tile)), T.thread(tile.threads)
        memory = T.shared(_shared_of(task, tile, p) // 4)  # BlockProduct's
        column, row0 = T.let("column", block % columns), T.let("row0", block // columns * tile.rows)
        with T.when(row0 < a["B"]):
            T.note("products of a tile of units by batch rows, in FMA; K is split among the warps")
            heads = heads_of(graph.phases[p]) if graph.phases else 1
            product = BlockProduct(tile, rows, memory, thread, heads, w.hidden)
            if rows:
                base = T.let("base", scalars.operand_base(p, a["t"] % 2 if p == 0 else 0))
                source = a[f"operands_{p}"]
                inputs = columns_of(graph.phases[p], w.hidden)
                product.run(a[f"recurrent_{p}"], column, inputs, lambda o, row, k: T.cast(
                    source[base + scalars.wide(o) * layout.size + layout.place(scalars.wide(row0 + row), k)],
                    "float32"))
            T.note("epilogue: the cell's scalars of each (batch row, unit), operands of the next products, y")
            with T.serial("turn", 0, ceil_div(tile.units * tile.rows, tile.threads)) as turn:
                item = T.let("item", turn * tile.threads + thread)
                row, unit = T.let("row", item // tile.units), T.let("unit", item % tile.units)
                inside = T.And(item < tile.units * tile.rows,
                               T.And(row0 + row < a["B"], column * tile.units + unit < w.hidden))
                with T.when(inside):
                    b, j = T.let("b", row0 + row), T.let("j", column * tile.units + unit)
                    scalars.finish(p, b, j, product.sums(row, unit), scalars.hoisted(b, j))
    return made()
