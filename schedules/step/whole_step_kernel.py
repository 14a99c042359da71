"""The kernel of ``whole_step.py``: how a block is cut, and what it does."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ecornn.analysis import Product
from ecornn.program import Buffer
from ecornn.schedules.base import Knobs, Task, knob
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda.isa.cluster import cluster_arrive, cluster_wait
from ecornn.schedules.cuda.isa.launch import launch_dependents, wait_on_earlier
from ecornn.schedules.cuda.isa.mbarrier import fence_mbarrier_init
from ecornn.schedules.cuda.isa.memory import prefetch_l1
from ecornn.schedules.cuda.isa.threads import sync_block
from ecornn.schedules.cuda.pipeline import Pipeline, Use
from ecornn.schedules.gemm.epilogue import leaves_of_rows
from ecornn.schedules.scalars.pointwise import MATH_TRADES, emit
from ecornn.schedules.step.operand_rows import Operand, RowsInMemory, StagedRows, staged_words
from ecornn.schedules.step.scalars import Layout, StepScalars, declare
from ecornn.schedules.step.warp_product import Share, WarpProduct, add_up, sums


class StepKnobs(Knobs):
    """The knobs of ``whole_step``."""

    units: int = knob("fewer units a block: more blocks; more: fewer reads of x and the state")
    rows: int = knob("fewer batch rows a block: more blocks; more: fewer reads of weights")
    warps: int = knob("more warps that share K: more loads under way, more sums to add")
    ahead: int = knob("more loads ahead of a warp, for registers")
    cluster: int = knob("more blocks that read x and the state once for all: less from L2, a copy that is waited for")
    chained: bool = knob("a launch begins, and reads weights, before the one ahead of it has ended")
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
        """Words of x and the state in shared memory."""
        return sum(self.rows * staged_words(share.width, share.dtype) for share in self.shares if share.staged)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: sums of all warps; x and the state, and a barrier, where these come from there."""
        return 4 * (sum(share.floats for share in self.shares) + (self.staged + 4 if self.staged else 0))

    @property
    def under_way(self) -> int:
        """Bytes that the warps of a block have asked for at a time."""
        return sum(share.warps * (share.slots * share.weight_bytes + (share.slots * share.operand_bytes
                                                                      if not share.staged else 0))
                   for share in self.shares)

    @property
    def moved(self) -> float:
        """Bytes that a block reads."""
        return sum(share.pairs * (share.weight_bytes + share.operand_bytes / self.cluster) for share in self.shares)

    def blocks(self, batch: int) -> int:
        return self.columns * ceil_div(batch, self.rows)

    def weights(self, task: Task) -> list[Buffer]:
        """Packed weights, of the state and, where the cell multiplies it, of x."""
        names = ("input_weights", "recurrent_0")[-len(self.shares):]
        return [share.weights(name, products, self.columns) for name, share, products in
                zip(names, self.shares, products_of(task), strict=True)]


def products_of(task: Task) -> tuple[tuple[Product, ...], ...]:
    """The products of x, if there are any, and those of the state."""
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
    columns = ceil_div(w.hidden, units * cluster) * cluster
    return StepPlan(knobs, units, rows, columns, knobs.chained, cluster, shares)


def operand_of(task: Task) -> str:
    """The name of the state that is multiplied."""
    (operand,) = task.graph.phases[0].operands
    return next(name for name, var in task.graph.states.items() if var.same_as(operand))


class StepStates(StepScalars):
    """Scalars of a step whose first one reads the caller's states, and whose last one leaves nothing for another."""

    def begins(self, row: Expr) -> Expr | None:
        """True if this is a first step before which a row's states are cleared; None: never. Later ones find them
        cleared."""
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
        """Asks for what :meth:`states_before` reads."""
        a = self.arguments
        with T.If(a["t"] == 0):
            with T.Then():
                for name in self.graph.states:
                    prefetch_l1(a[f"{name}_in"].ptr_to([self.at(0, row, unit)]))
            with T.Else():
                for s in range(len(self.graph.states)):
                    prefetch_l1(a["states"].ptr_to([self.at(s, row, unit)]))

    def store_states(self, row: Expr, unit: Expr, values: list[Expr]) -> None:
        with T.when(self.arguments["t"] + 1 < self.arguments["T"]):
            super().store_states(row, unit, values)

    def store_first_operands(self, row: Expr, unit: Expr, states: list[Expr], constants: dict[Var, Expr],
                             t: Expr, parity: Expr) -> None:
        value = states[[*self.graph.states].index(operand_of(self.task))]
        with T.when(t < self.arguments["T"]):
            T.buffer_store(self.arguments["state_after"], T.cast(value, self.task.workload.dtype),
                           [self.at(0, row, unit)])


def step_kernel(task: Task, plan: StepPlan, buffers: list[Buffer], math: str) -> PrimFunc:
    """``step``: step t, whole."""
    w, graph, products = task.workload, task.graph, products_of(task)
    H, shares = w.hidden, plan.shares
    firsts = [sum(share.floats for share in shares[:i]) for i in range(len(shares))]
    with T.kernel("step") as made:
        a = declare(buffers)
        scalars = StepStates(task, Layout(w.batch, H, H), a, math)  # states as the caller's lie
        T.device_entry()
        block, thread = T.block(plan.blocks(w.batch)), T.thread(plan.threads)
        memory = T.shared(plan.shared // 4)  # sums of the shares' warps
        column, row0 = T.let("column", block % plan.columns), T.let("row0", block // plan.columns * plan.rows)
        T.note("programmatic dependent launch: weights may be read before the launch of the step before has ended")
        if plan.chained:
            launch_dependents()
            with T.when(row0 >= a["B"]):  # a launch that has ended has waited for all before it
                wait_on_earlier()
        with T.when(row0 < a["B"]):
            warp, lane = T.let("warp", thread // 32), T.let("lane", thread % 32)
            time = T.let("time", scalars.timeline.at(a["t"]))
            _prefetch(a["vectors"], len(graph.vectors), plan, column, thread, H)

            def start(i: int, row: Expr) -> Expr:
                """The index at which a row of what share i multiplies begins; of rows beyond the batch nobody reads the
                sums."""
                row = T.let("row", T.min(row0 + row, a["B"] - 1))
                if i == len(shares) - 1:
                    return T.let("start", scalars.wide(row) * H)
                return T.let("start", T.cast(time * a["B"] + row, "int64") * w.input)

            T.note("MMA warps: products of x and of the state, each warp a part of K")
            sources = [a["x"], a["state_before"]][-len(shares):]
            words, staged = memory.view("uint32"), []
            if plan.cluster > 1:
                place = sum(share.floats for share in shares)
                for share in shares:
                    staged.append(StagedRows(words, place, plan.rows, share.width, w.dtype, T.let("row", lane // 4)))
                    place += plan.rows * staged_words(share.width, w.dtype)
                rows = Pipeline(words, place, cluster=True)  # all of them, once
                with T.when(thread == 0):
                    rows.init()
                    fence_mbarrier_init()
                for one in staged:
                    one.clear(thread, plan.threads)
                cluster_arrive()

            def before() -> None:
                """Waits for the launch ahead, and brings the operands: nothing but weights may be read before, and
                nothing written."""
                if plan.chained:
                    wait_on_earlier()
                scalars.prefetch(T.min(row0 + thread // plan.units, a["B"] - 1),
                                 T.min(column * plan.units + thread % plan.units, H - 1))
                if plan.cluster > 1:
                    cluster_wait()  # behind it all barriers are there
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
                if plan.cluster > 1:
                    operand: Operand = staged[i]
                else:
                    starts = [start(i, n * 8 + lane // 4) for n in range(share.octets)]
                    operand = RowsInMemory(sources[i], starts, share.width, H if of_state else w.input, w.dtype)
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
            sync_block()
            T.note("CTA barrier: partial sums are in shared memory; add them up")
            for share, first in zip(shares, firsts, strict=True):
                add_up(share, memory, first, thread, plan.threads)
            sync_block()
            T.note("epilogue: the cell's scalars of each (batch row, unit); states and y")
            with T.serial("turn", 0, ceil_div(plan.units * plan.rows, plan.threads)) as turn:
                item = T.let("item", turn * plan.threads + thread)
                row, unit = T.let("row", item // plan.units), T.let("unit", item % plan.units)
                b, j = T.let("b", row0 + row), T.let("j", column * plan.units + unit)
                with T.when(T.And(row < plan.rows, T.And(b < a["B"], j < H))):
                    found = [sums(share, own, memory, first, row, unit) for share, own, first in
                             zip(shares, products, firsts, strict=True)]
                    x_row = T.cast(time * a["B"] + b, "int64") * w.input
                    hoisted = _hoisted(task, scalars, a, x_row, j, found[0] if len(shares) == 2 else {})
                    begins = scalars.begins(b)  # with states of zero
                    products_of_state = found[-1] if begins is None else {
                        var: T.let(var.name, T.Select(begins, T.float32(0), value)) for var, value in found[-1].items()}
                    scalars.finish(0, b, j, products_of_state, hoisted)
    return made()


def _prefetch(vectors: TirBuffer, count: int, plan: StepPlan, column: Expr, thread: Expr, hidden: int) -> None:
    """Asks for the block's part of each parameter vector, which is needed at the end."""
    for first in range(0, count * plan.units, plan.threads):
        item = T.let("item", first + thread)
        unit = T.let("unit", column * plan.units + item % plan.units)
        with T.when(T.And(item < count * plan.units, unit < hidden)):
            prefetch_l1(vectors.ptr_to([item // plan.units * hidden + unit]))


def _hoisted(task: Task, scalars: StepScalars, a: dict[str, TirBuffer], x_row: Expr, unit: Expr,
             found: dict[Var, Expr]) -> list[Expr]:
    """The hoisted values of a unit, from the products of x; other schedules compute them of all steps before the first
    one."""
    env = scalars.constants(unit) | found
    for var, offset in leaves_of_rows(task).items():
        env[var] = T.let(var.name, T.cast(a["x"][x_row + unit + offset], "float32"))
    env = emit(task.graph.hoisted, env)
    return [env[v] for v in task.graph.hoisted_outputs]
