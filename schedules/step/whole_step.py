"""Whole step: for one or a few steps a call, each a single launch that multiplies x and the state.

A call of one step is bound by reading all weights once, and other schedules' launches before the recurrence cost more.
Here warps of a block read their parts of both products straight into registers (``warp_product.py``), the first step
reads the caller's own states, and a call of one step has no workspaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate

from ecornn.analysis import Product
from ecornn.analysis.liveness import late_operands
from ecornn.program import WORKSPACE, Buffer, Extent, Launch, Program, Relay
from ecornn.schedules.assemble import assemble, shared_buffers
from ecornn.schedules.base import Component, Config, Knob, Knobs, SearchedSchedule, Task, knob, no_room
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda import isa
from ecornn.schedules.cuda.pipeline import Pipeline, Use
from ecornn.schedules.gemm.job import leaves_of_rows
from ecornn.schedules.rates import gpu_rates, others
from ecornn.schedules.scalars.pointwise import MATH_TRADES, emit, math_choices
from ecornn.schedules.step import warp_product
from ecornn.schedules.step.scalars import Layout, StepScalars, declare
from ecornn.schedules.step.warp_product import Operand, RowsInMemory, Share, StagedRows, WarpProduct, staged_words
from ecornn.workload import FEW


class StepKnobs(Knobs):
    units: int = knob("units in a block. Fewer: more blocks; more: fewer reads of x and the state")
    rows: int = knob("batch rows in a block. Fewer: more blocks; more: fewer reads of weights")
    warps: int = knob("warps that share K. More: more loads at the same time, but more sums to add")
    ahead: int = knob("loads that a warp issues ahead. More: less waiting, but more registers")
    cluster: int = knob("blocks that share a read of x and the state. More: fewer reads of L2, but a copy to wait for")
    chained: bool = knob("true: a launch begins, and reads weights, before the previous launch has ended")
    math: str = knob(MATH_TRADES)


@dataclass(frozen=True)
class StepPlan:
    """How a block is cut: ``shares`` of its warps multiply x, where the cell does, and the state."""

    knobs: StepKnobs
    units: int
    rows: int
    columns: int  # blocks over the hidden units
    chained: bool  # the next launch may begin before this one has ended
    cluster: int  # blocks that read x and the state once for all
    shares: tuple[Share, ...]

    @property
    def warps(self) -> int:
        return sum(share.warps for share in self.shares)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def staged(self) -> int:
        return sum(self.rows * staged_words(share.width, share.dtype) for share in self.shares if share.staged)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: sums of all warps; x and the state, and a barrier, where these come from there."""
        return 4 * (sum(share.floats for share in self.shares) + (self.staged + 4 if self.staged else 0))

    @property
    def under_way(self) -> int:
        """Bytes that the warps of a block have asked for at a time."""
        return sum(share.warps * share.slots * (share.weight_bytes + (0 if share.staged else share.operand_bytes))
                   for share in self.shares)

    @property
    def moved(self) -> float:
        return sum(share.pairs * (share.weight_bytes + share.operand_bytes / self.cluster) for share in self.shares)

    def blocks(self, batch: int) -> int:
        return self.columns * ceil_div(batch, self.rows)

    def weights(self, task: Task) -> list[Buffer]:
        """Packed weights, of the state and, where the cell multiplies it, of x."""
        names = ("input_weights", "recurrent_0")[-len(self.shares):]
        return [share.weights(name, products, self.columns) for name, share, products in
                zip(names, self.shares, products_of(task), strict=True)]


def products_of(task: Task) -> tuple[tuple[Product, ...], ...]:
    return tuple(filter(None, (task.graph.hoisted_products, task.graph.phases[0].products)))


def plan_of(task: Task, knobs: StepKnobs) -> StepPlan:
    """The plan of a configuration; it need not fit. Warps are shared out by how much each product reads."""
    w, products = task.workload, products_of(task)
    units, rows, warps, ahead, cluster = knobs.units, knobs.rows, knobs.warps, knobs.ahead, knobs.cluster
    widths = (task.own_input, w.hidden)[-len(products):]
    sizes = [width * (8 * rows + len(own) * units) for width, own in zip(widths, products, strict=True)]
    first = max(1, min(warps - 1, round(warps * sizes[0] / sum(sizes))))
    parts = (first, warps - first) if len(products) == 2 else (warps,)
    shares = tuple(Share(w.dtype, w.arithmetic, units, rows, len(own), width, part, ahead, cluster > 1)
                   for own, width, part in zip(products, widths, parts, strict=True))
    return StepPlan(knobs, units, rows, ceil_div(w.hidden, units * cluster) * cluster, knobs.chained, cluster, shares)


def operand_of(task: Task) -> str:
    (operand,) = task.graph.phases[0].operands
    return next(name for name, var in task.graph.states.items() if var.same_as(operand))


class StepStates(StepScalars):
    """Scalars of a step whose first one reads the caller's states, and whose last one leaves nothing for another."""

    def begins(self, row: Expr) -> Expr | None:
        """True if this is a first step before which a row's states are cleared, which later ones find; None: never."""
        fresh = self.timeline.fresh(T.int32(0), row, self.timeline.limit(row))
        return None if fresh is None else T.let("begins", T.And(self.arguments["t"] == 0, fresh))

    def states_before(self, row: Expr, unit: Expr) -> list[Expr]:
        a, found = self.arguments, []
        for s, name in enumerate(self.graph.states):
            value = T.local(f"{name}_before", (1,), "float32")
            with T.If(a["t"] == 0):
                with T.Then():
                    T.buffer_store(value, T.cast(a[f"{name}_in"][self.at(0, row, unit)], "float32"), [0])
                with T.Else():
                    T.buffer_store(value, a["states"][self.at(s, row, unit)], [0])
            found.append(T.let(f"{name}_before", value[0]))
        return self.timeline.started(self.begins(row), found)

    def prefetch(self, row: Expr, unit: Expr) -> None:
        a = self.arguments
        with T.If(a["t"] == 0):
            with T.Then():
                for name in self.graph.states:
                    isa.prefetch_l1(a[f"{name}_in"].ptr_to([self.at(0, row, unit)]))
            with T.Else():
                for s in range(len(self.graph.states)):
                    isa.prefetch_l1(a["states"].ptr_to([self.at(s, row, unit)]))

    def store_states(self, row: Expr, unit: Expr, values: list[Expr]) -> None:
        with T.when(self.arguments["t"] + 1 < self.arguments["T"]):
            super().store_states(row, unit, values)

    def store_first_operands(self, row: Expr, unit: Expr, states: list[Expr], constants: dict[Var, Expr],
                             t: Expr, parity: Expr) -> None:
        value = states[[*self.graph.states].index(operand_of(self.task))]
        with T.when(t < self.arguments["T"]):
            T.buffer_store(self.arguments["state_after"], T.cast(value, self.task.workload.dtype),
                           [self.at(0, row, unit)])


def step_kernel(task: Task, plan: StepPlan, buffers: list[Buffer]) -> PrimFunc:
    """``step``: step t, whole."""
    w, graph, products = task.workload, task.graph, products_of(task)
    H, shares = w.hidden, plan.shares
    *firsts, floats = accumulate((share.floats for share in shares), initial=0)
    with T.kernel("step") as made:
        a = declare(buffers)
        scalars = StepStates(task, Layout(w.batch, H, H), a, plan.knobs.math)  # states as the caller's lie
        T.device_entry()
        block, thread = T.block(plan.blocks(w.batch)), T.thread(plan.threads)
        memory = T.shared(plan.shared // 4)  # sums of the shares' warps
        column, row0 = T.let("column", block % plan.columns), T.let("row0", block // plan.columns * plan.rows)
        T.note("programmatic dependent launch: weights may be read before the launch of the step before has ended")
        if plan.chained:
            isa.launch_dependents()
            with T.when(row0 >= a["B"]):  # a launch that has ended has waited for all before it
                isa.wait_on_earlier()
        with T.when(row0 < a["B"]):
            warp, lane = T.let("warp", thread // 32), T.let("lane", thread % 32)
            time = T.let("time", scalars.timeline.at(a["t"]))
            count = len(graph.vectors) * plan.units
            for first in range(0, count, plan.threads):  # the block's part of each vector is needed at the end
                item = T.let("item", first + thread)
                unit = T.let("unit", column * plan.units + item % plan.units)
                with T.when(T.And(item < count, unit < H)):
                    isa.prefetch_l1(a["vectors"].ptr_to([item // plan.units * H + unit]))

            def start(i: int, row: Expr) -> Expr:
                """The index where a row begins of what share i multiplies; nobody reads sums of rows behind B."""
                row = T.let("row", T.min(row0 + row, a["B"] - 1))
                of_state = i == len(shares) - 1
                return T.let("start", scalars.wide(row) * H if of_state
                             else T.cast(time * a["B"] + row, "int64") * w.input)

            T.note("MMA warps: products of x and of the state, each warp a part of K")
            sources = [a["x"], a["state_before"]][-len(shares):]
            words, staged = memory.view("uint32"), []
            if plan.cluster > 1:
                place = floats
                for share in shares:
                    staged.append(StagedRows(words, place, plan.rows, share.width, w.dtype, T.let("row", lane // 4)))
                    place += plan.rows * staged_words(share.width, w.dtype)
                rows = Pipeline(words, place, cluster=True)  # all of them, once
                with T.when(thread == 0):
                    rows.init()
                    isa.fence_mbarrier_init()
                for one in staged:
                    one.clear(thread, plan.threads)
                isa.cluster_arrive()

            def before() -> None:
                """Waits for the launch ahead, and brings operands: only weights are read before, nothing written."""
                if plan.chained:
                    isa.wait_on_earlier()
                scalars.prefetch(T.min(row0 + thread // plan.units, a["B"] - 1),
                                 T.min(column * plan.units + thread % plan.units, H - 1))
                if plan.cluster > 1:
                    isa.cluster_wait()  # behind it all barriers are there
                    with T.when(thread == 0):
                        rows.expect(0, sum(plan.rows * share.width * w.itemsize for share in shares))
                    for i, one in enumerate(staged):
                        own = T.let("own_row", thread - i * plan.rows)
                        with T.when(T.And(own >= 0, own < plan.rows)):
                            one.copy(sources[i], start(i, own), own, block % plan.cluster, plan.cluster,
                                     rows.full_barrier(0))
                    rows.wait(Use(0, T.uint32(0)))

            def multiply(i: int) -> None:
                """Emits share i, which is of x unless it is the last one."""
                share, of_state = shares[i], i == len(shares) - 1
                operand: Operand = staged[i] if plan.cluster > 1 else RowsInMemory(
                    sources[i], [start(i, n * 8 + lane // 4) for n in range(share.octets)], share.width,
                    H if of_state else w.input, w.dtype)
                own = warp if i == 0 else T.let("own_warp", warp - shares[0].warps)
                WarpProduct(share, memory, firsts[i], own, lane).run(
                    a["recurrent_0" if of_state else "input_weights"], column, operand, before)

            with ExitStack() as scope:
                if len(shares) == 2:
                    scope.enter_context(T.If(warp < shares[0].warps))
                    with T.Then():
                        multiply(0)
                    scope.enter_context(T.Else())
                multiply(len(shares) - 1)
            isa.sync_block()
            T.note("CTA barrier: partial sums are in shared memory; add them up")
            for share, first in zip(shares, firsts, strict=True):
                warp_product.add_up(share, memory, first, thread, plan.threads)
            isa.sync_block()
            T.note("epilogue: the cell's scalars of each (batch row, unit); states and y")
            with T.serial("turn", 0, ceil_div(plan.units * plan.rows, plan.threads)) as turn:
                item = T.let("item", turn * plan.threads + thread)
                row, unit = T.let("row", item // plan.units), T.let("unit", item % plan.units)
                b, j = T.let("b", row0 + row), T.let("j", column * plan.units + unit)
                with T.when(T.And(row < plan.rows, T.And(b < a["B"], j < H))):
                    found = [warp_product.sums(share, own, memory, first, row, unit) for share, own, first in
                             zip(shares, products, firsts, strict=True)]
                    x_row = T.cast(time * a["B"] + b, "int64") * w.input
                    hoisted = _hoisted(task, scalars, a, x_row, j, found[0] if len(shares) == 2 else {})
                    begins = scalars.begins(b)  # with states of zero
                    products_of_state = found[-1] if begins is None else {
                        var: T.let(var.name, T.Select(begins, T.float32(0), value)) for var, value in found[-1].items()}
                    scalars.finish(0, b, j, products_of_state, hoisted)
    return made()


def _hoisted(task: Task, scalars: StepScalars, a: dict[str, TirBuffer], x_row: Expr, unit: Expr,
             found: dict[Var, Expr]) -> list[Expr]:
    """The hoisted values of a unit, from the products of x; other schedules compute them of all steps in advance."""
    env = scalars.constants(unit) | found
    for var, offset in leaves_of_rows(task).items():
        env[var] = T.let(var.name, T.cast(a["x"][x_row + unit + offset], "float32"))
    env = emit(task.graph.hoisted, env)
    return [env[v] for v in task.graph.hoisted_outputs]


# Nanoseconds of an H100's calls (benchmarks/results/h100_few_steps.txt), beside steps; what a step hides behind another
CALL, HIDDEN = 7_000, 3_500
LEAST = 2_000  # of a step, whatever is hidden
L2_KEEPS = 0.8  # of L2: weights that are more come from memory in each step
SPARE_REGISTERS = 40  # of a thread, beside sums and operands: addresses, loops, gate math
FINISH = 900  # cycles from the last product until the last store: barriers, sums of the warps, the cell's scalars
TURN, LOAD, ADDED = 40, 8, 2  # cycles of a warp beside products: of a turn, of a load; of a sum of a thread
SLOWER = {"float32": 6, "tf32": 2}  # than products of 16-bit types


class WholeStep(SearchedSchedule[StepPlan]):
    """Serves cells with one exchange a step, whose operand is a state."""

    name = "whole_step"
    revision = 1
    kind = "cuda"
    few_steps = True

    def refuses(self, task: Task) -> str | None:
        graph, traversal = task.graph, task.traversal
        if task.workload.seq > FEW:
            return f"serves calls of at most {FEW} steps"
        if not task.device.can.tensor_cores:
            return "needs compute capability 8.0"
        if graph.statistics or graph.hoisted_statistics:
            return f"cell {graph.cell!r} has sums over a batch row"
        if len(graph.phases) != 1 or not graph.phases[0].products:
            return f"cell {graph.cell!r} has {len(graph.product_phases)} recurrent products in sequence; expected one"
        operands, states = graph.phases[0].operands, tuple(graph.states.values())
        if len(operands) != 1 or not any(operands[0].same_as(s) for s in states) or late_operands(graph):
            return f"cell {graph.cell!r} multiplies a value that is not a state"
        if traversal.keep is not None:
            return "does not keep values for a backward pass"
        if next(self._candidates(task), None) is None:
            return f"cell {graph.cell!r} has too many gates for the registers of a thread"
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        w, gates = task.workload, [len(own) for own in products_of(task)]
        units = tuple(u for u in (1, 2, 4, 8, 16, 32) if all(g * u % 8 == 0 for g in gates) and u < max(9, w.hidden))
        rows = tuple(r for r in (8, 16, 24, 32, 48, 64) if r < w.batch + 8)
        pieces = all(warp_product.whole_pieces(n, w.dtype) for n in (w.hidden, w.input, task.own_input))
        can = task.device.can
        clusters = tuple(n for n in (1, 2, 4, 8) if n == 1 or (pieces and can.multicast and task.device.clusters(n)))
        chained = (False, True) if can.early_launches else (False,)
        return StepKnobs.offered({"units": units, "rows": rows, "warps": (2, 4, 8, 16), "ahead": (1, 2, 4, 8),
                                  "cluster": clusters, "chained": chained, "math": math_choices(task)})

    def plan(self, task: Task, config: Config) -> StepPlan:
        return plan_of(task, StepKnobs(config))

    def check(self, task: Task, config: Config) -> str | None:
        plan = self.plan(task, config)
        registers = max(share.registers for share in plan.shares) + SPARE_REGISTERS
        if plan.cluster > 1 and 2 * plan.rows > plan.threads:
            return f"{plan.threads} threads are too few to copy {2 * plan.rows} rows"
        return no_room(task.device, plan.shared, plan.threads, registers)

    def search(self, task: Task) -> Config | None:
        def order(config: Config) -> tuple[float, int, bool]:  # with equal estimates more warps were 3 to 30% faster
            return estimate(task, plan := self.plan(task, config)), -plan.knobs.warps, plan.knobs.ahead == 1

        return min(self._candidates(task), key=order, default=None)

    def expected(self, task: Task) -> float:
        return max(LEAST, estimate(task, self.plan(task, self.default(task))) - HIDDEN) + CALL / task.workload.seq

    def rank(self, task: Task) -> float:
        """The expected time, less what other schedules' calls take beside steps, which those leave out of theirs."""
        return self.expected(task) - others(task) / task.workload.seq

    def _candidates(self, task: Task) -> Iterator[Config]:
        knobs = {k.name: k.values for k in self.knobs(task)} | {"cluster": (1,)}
        knobs["chained"] = knobs["chained"][-1:]
        knobs["math"] = ("exact",) if len(knobs["math"]) == 1 else ("fast",)
        return self.valid(task, knobs)

    def features(self, task: Task, plan: StepPlan) -> dict[str, float]:
        w, blocks = task.workload, plan.blocks(task.workload.batch)
        return {
            "blocks": blocks, "waves": blocks / task.device.cores, "threads": plan.threads,
            "bytes": blocks * plan.moved, "under_way": plan.under_way, "turns": max(s.turns for s in plan.shares),
            "waste": plan.columns * plan.units * plan.rows * ceil_div(w.batch, plan.rows) / (w.hidden * w.batch),
            "shared": plan.shared, "registers": max(s.registers for s in plan.shares), "estimate": estimate(task, plan)}

    def program(self, task: Task, plan: StepPlan) -> Program:
        w, state = task.workload, operand_of(task)
        rows = Extent(w.batch * w.hidden)
        own = (Buffer("states", WORKSPACE, "float32", Extent(len(task.graph.states) * rows.fixed)),
               Buffer("state_before", WORKSPACE, w.dtype, rows), Buffer("state_after", WORKSPACE, w.dtype, rows),
               *plan.weights(task))
        kernel = step_kernel(task, plan, [*shared_buffers(task, None), *own])
        step = Launch("step", plan.blocks(w.batch), plan.threads, plan.shared, early=plan.chained, cluster=plan.cluster)
        steps = Relay((step,), "state_before", "state_after", f"{state}_in", f"{state}_out", w.hidden)
        return assemble(task, lambda kept: Component({"step": kernel}, own, (steps,)), None)


def estimate(task: Task, plan: StepPlan) -> float:
    """Nanoseconds of a step: a launch, then the slowest of the busiest multiprocessor's reads (L2's rate, or its warps'
    under way), products, and weights of all blocks from memory, where L2 does not keep them; and what follows."""
    device, rates, w = task.device, gpu_rates(task.device), task.workload
    most = ceil_div(plan.blocks(w.batch), device.cores)
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
