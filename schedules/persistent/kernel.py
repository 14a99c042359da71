"""The persistent kernel: one launch for the whole sequence, recurrent weights on chip throughout.

Blocks form groups; a group serves its own batch rows and holds all recurrent weights, or those of a head, a block the
rows of ``units`` hidden units. In every block

* product warps split the hidden axis (K) among them. Each waits for its part of the exchanged state, which it reads
  straight into operand B, multiplies it with its weights (operand A: registers, or shared memory where they do not
  fit), and leaves partial sums in shared memory;
* gate warps add partial sums, compute the cell's scalars, send the new state, and then do the rest (y, wipes, the next
  step's inputs).

State travels through L2, or, where a group is a cluster, inside it (``exchange.py``); statistics, which gate warps
exchange among themselves, likewise (``sums.py``). Blocks that are left over may work on the input projection meanwhile
(``ProjectionWorkers``). Partial sums have two buffers, each with a named barrier that all warps of the recurrence wait
at: gate warps for the sums, product warps for the gate warps, which have by then read the other buffer. That makes
product warps poll at the same time, too, and costs nothing: gate warps wait for longer."""

from __future__ import annotations

import operator
from functools import partial
from itertools import product

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var
from ecornn.schedules.cuda.isa import fence_gpu, ld_acquire, named_barrier_sync, red_release, wait_on_earlier
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.gemm.job import HoistedValues
from ecornn.schedules.gemm.mma_mainloop import THREADS
from ecornn.schedules.gemm.projection import job_of
from ecornn.schedules.gemm.rows_mma import Team, rows_ahead
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import Stored, keeping
from ecornn.schedules.persistent.exchange import Carrier, Cluster, Ring, word_of
from ecornn.schedules.persistent.plan import PersistentPlan, PhasePlan, block_shared, worker_shape
from ecornn.schedules.persistent.products import FULL, SENT, Position, products
from ecornn.schedules.persistent.sums import ClusterSums, RingSums, Sums
from ecornn.schedules.scalars.gate_threads import Ended, GateThreads, Share, partial_sums
from ecornn.schedules.scalars.pointwise import emit
from ecornn.schedules.sequence_kernel import SequenceKernel

BARRIER = 5  # named barrier of a team of workers; the recurrence has others in its own blocks


class ProjectionWorkers:
    """The input projection beside the recurrence, by left-over blocks: the workers' code, and the gate warps' wait.
    Workers take tiles of rows in the order of time and count the finished ones in ``ready``, one counter for each group
    of rows: store, barrier of the team, fence, add; acquire load, load. Gate warps wait for the rows that they are
    about to fetch, two steps ahead of their use, of groups that they have not yet seen finished. Workers wait for
    nobody."""

    def __init__(self, kernel: SequenceKernel, plan: PersistentPlan) -> None:
        shape = worker_shape(kernel.task, plan)
        assert shape is not None, "check() refuses what has no room for the projection"
        self.task, self.plan, self.shape, self.arguments = kernel.task, plan, shape, kernel.arguments
        self.batch, self.steps, self.hoisted = kernel.batch, kernel.steps, kernel.hoisted
        self.rows = T.let("rows", self.steps * self.batch)
        self.first = T.let("first", rows_ahead(self.rows, plan.ahead))
        self.seen = T.variable("seen", "int32", T.int32(0))  # groups of rows

    @staticmethod
    def declare(task: Task, layout: Hoisted) -> dict[str, TirBuffer]:
        return {**job_of(task).declare_inputs(HoistedValues(task, layout)), "ready": T.pointer("ready", "uint32")}

    def work(self, worker: Expr, thread: Expr, shared: TirBuffer) -> None:
        """A worker block's whole life; for its first ``THREADS`` threads."""
        def done(group: Expr) -> None:
            fence_gpu()
            red_release(self.arguments["ready"].ptr_to([group]))
        T.note("projection CTAs: tiles of the input's product for later steps; a counter says how many are done")
        epilogue, barrier = HoistedValues(self.task, self.hoisted), partial(named_barrier_sync, BARRIER, THREADS)
        team = Team(job_of(self.task), self.shape, epilogue, self.arguments, shared, thread, barrier)
        team.run(self.first, self.rows, worker, self.plan.workers, done)

    def wait(self, t: Expr) -> None:
        T.note("gate warps: wait until projection CTAs have counted all tiles of step t")
        last = T.let("last", T.min(t + 1, self.steps) * self.batch - 1)
        count = T.local("count", (1,), "uint32")  # finished tiles of a group
        with T.While(self.first + self.seen[0] * self.shape.height <= last):
            T.buffer_store(count, T.uint32(0), [0])
            with T.While(count[0] < T.uint32(self.shape.columns)):
                ld_acquire(count[0], self.arguments["ready"].ptr_to([self.seen[0]]))
            T.buffer_store(self.seen, self.seen[0] + 1, [0])


class Gates(GateThreads):
    def __init__(self, kernel: SequenceKernel, plan: PersistentPlan, carrier: Carrier, shared: TirBuffer,
                 group: Expr, member: Expr, thread: Expr, beside: ProjectionWorkers | None) -> None:
        """``shared``: the block's memory, float32; ``member``: the block in its group; ``thread``: of gate threads."""
        share = Share(plan.lanes, plan.rows, plan.gate_warps * 32)
        rows, first = group, member * plan.units
        self.head_first: Expr = 0  # unit of the group
        if plan.heads > 1:
            self.head_first = T.let("head_first", group % plan.heads * plan.own)
            rows, first = T.let("rows_group", group // plan.heads), T.let("first", self.head_first + first)
        super().__init__(kernel, share, rows, first, thread, None if plan.lanes == plan.units else plan.units)
        self.plan, self.carrier, self.shared, self.beside, self.early = plan, carrier, shared, beside, kernel.early
        if plan.lanes != plan.units:  # the others read the partial sums of a unit that there is
            self.local = [T.let("local", T.Select(mine, unit, 0))
                          for mine, unit in zip(self.owner, self.local, strict=True)]
        # of each item, those of the rows of each phase
        self.scales = [T.local("scales", (self.items, len(phase.products)), "float32")
                       for phase in self.graph.product_phases] if plan.scaled else []
        self.sums: Sums | None = None
        if plan.sums:
            statistics = [p.statistics for p in self.graph.phases if p.statistics]
            if isinstance(carrier, Cluster):
                self.sums = ClusterSums(plan, statistics, carrier, group, member, thread, self.steps)
            else:
                rings = [self.arguments[f"sums_{e}"] for e in range(len(plan.sums))]
                self.sums = RingSums(plan, statistics, rings, shared, group, member, thread)

    def run(self) -> None:
        T.note("gate warps, prologue: each thread's constants, states and the inputs of the first two steps")
        if self.early:
            wait_on_earlier()
        self.begin()
        self._load_scales()
        self._fetch(T.int32(0))
        self._advance()
        self._fetch(T.int32(1))
        with T.serial("t", 0, self.steps) as t:
            self._step(t)

    def _load_scales(self) -> None:
        units = self.plan.heads * self.plan.blocks * self.plan.units
        for (p, scales), i in product(enumerate(self.scales), range(self.items)):
            unit = T.let("scaled_unit", T.min(self.unit[i], self.plan.hidden - 1))
            for row in range(len(self.graph.product_phases[p].products)):
                T.buffer_store(scales, self.arguments[f"scales_{p}"][row * units + unit], [i, row])

    def _prepare(self, t: Expr) -> None:
        if self.beside is not None:
            self.beside.wait(t)

    def _step(self, t: Expr) -> None:
        plan, graph = self.plan, self.graph
        envs = [self._before(i) for i in range(plan.items)]
        p = e = 0  # products and exchanges of statistics so far
        for number, phase in enumerate(graph.phases):
            following = graph.phases[number + 1] if number + 1 < len(graph.phases) else None
            sums: list[dict[Var, Expr]] = [{} for _ in envs]
            if phase.statistics and self.sums is not None:
                lives = [self._live(i, t) for i in range(plan.items)]
                counts = [T.let("counts", T.And(own, unit < plan.hidden))  # of the layer's units; in padding rows, too
                          for own, unit in zip(self.owner, self.unit, strict=True)]
                sums, e = self.sums.exchange(e, t, envs, counts, self.unit, lives), e + 1
            if phase.products:
                T.note("gate warps: wait for the partial sums of all MMA warps, add them up")
                use = T.let("use", t * len(plan.phases) + p)
                side = T.let("side", use % 2)
                named_barrier_sync(side + FULL, plan.threads)
                sums, p = [sums[i] | self._sums(i, p, side) for i in range(plan.items)], p + 1
            T.note("gate warps, epilogue: the cell's scalars; the new state goes to the other CTAs at once")
            for i in range(plan.items):
                envs[i] = emit(phase.assigns if following else self.urgent.first, envs[i] | sums[i], self.math)
                if following is not None and following.products:
                    self._announce(i, p, t, envs[i])
            ended = [] if following is not None else [self._finish(i, envs[i], t) for i in range(plan.items)]
            if plan.held and (following is None or following.products):
                named_barrier_sync(SENT, plan.threads)
            if phase.products and self.sums is None:
                self.carrier.wipe(p - 1, t, self._places(p - 1))
            if following is None:
                self._after(t, ended)

    def _after(self, t: Expr, ended: list[Ended]) -> None:
        """The rest of a step, which nobody waits for. The release of exchange.py comes first, before the next write. It
        waits for what came before it, so y is stored and inputs are fetched after it: memory is further than L2."""
        T.note("gate warps: what nobody waits for: y, last states, inputs two steps ahead")
        if self.sums is not None:
            for p in range(len(self.plan.phases)):
                self.carrier.wipe(p, t, self._places(p))
            self.sums.wipe(t)
            self.carrier.acquired(t)
        self.carrier.ended(t)
        for i in range(self.plan.items):
            self._store(i, t, ended[i])
        self._advance()
        self._fetch(T.let("after_next", t + 2))

    def _sums(self, i: int, p: int, side: Expr) -> dict[Var, Expr]:
        """The products of phase p: partial sums of all warps, added in a tree."""
        plan, phase, products = self.plan, self.plan.phases[p], self.graph.product_phases[p].products
        stride, e, unit = plan.stride(phase), phase.interleave, self.local[i]
        base = T.let("base", side * plan.sum_floats + self.column[i] * stride
                     + unit // (8 // e) * 8 + unit % (8 // e) * e)
        rows: list[list[Expr]] = [[] for _ in range(phase.gates)]
        for w, outer in product(range(plan.warps), range(phase.gates // e)):
            place = base + w * plan.columns * stride + outer * plan.units * e
            for row, value in zip(rows[outer * e:], partial_sums(self.shared, place, e), strict=False):
                row.append(value)
        # rows beyond the products pad them
        found = {row.var: T.tree("sum", parts, operator.add) for row, parts in zip(products, rows, strict=False)}
        if plan.scaled:
            return {var: T.let("product", value * self.scales[p][i, n]) for n, (var, value) in enumerate(found.items())}
        return found

    def _announce(self, i: int, p: int, step: Expr, env: dict[Var, Expr]) -> None:
        """Sends this thread's operands of phase p; units beyond H are zero."""
        plan, carrier = self.plan, self.carrier
        slot = T.let("slot", carrier.slot(p, step))
        for o, operand in enumerate(self.graph.product_phases[p].operands):
            value = T.let(f"{operand.name}_sent", T.Select(self.unit[i] < plan.hidden, env[operand], T.float32(0)))
            place, mine = self._place(i, plan.phases[p], o)
            carrier.write(p, step, slot, place, self._shared(value), mine)

    def _place(self, i: int, phase: PhasePlan, operand: int) -> tuple[Expr, Expr]:
        """The word of an operand of item i, and whether this thread sends it: not of units beyond what is exchanged."""
        unit = self.unit[i] if self.plan.heads == 1 else self.unit[i] - self.head_first
        mine = T.And(self.owner[i], self.unit[i] < (self.plan.hidden if phase.units == self.plan.own else phase.units))
        if (per := per_word(self.plan.dtype)) > 1:  # the thread of a word's first unit sends it
            mine = T.And(mine, self.local[i] % per == 0)
        return word_of(self.plan, phase, operand, unit, self.column[i]), mine

    def _places(self, p: int) -> list[tuple[Expr, Expr]]:
        phase = self.plan.phases[p]
        return [self._place(i, phase, o) for i in range(self.plan.items) for o in range(phase.operands)]


def persistent_kernel(task: Task, plan: PersistentPlan, hoisted: Hoisted, kept: Stored, early: bool) -> PrimFunc:
    """``persistent(T, B, [x, input_weights, ready,] hoisted, vectors, <state>_in, <state>_out,
    recurrent_<p>, [scales_<p>,] [exchange_<p>,] y)``; of an adjoint's recurrence ``outputs`` in place of y;
    ``persistent_keeping`` stores what is ``kept``, too. ``early``: launched as :func:`begins_early` says."""
    phases = range(len(plan.phases))
    own = {f"recurrent_{i}": "uint8" if plan.scaled else plan.dtype for i in phases}
    own |= {f"scales_{i}": "float32" for i in phases if plan.scaled}
    if not plan.cluster:
        own |= dict.fromkeys((*(f"exchange_{i}" for i in phases), *(f"sums_{e}" for e in range(len(plan.sums)))),
                             "uint32")
    with T.kernel(keeping("persistent", kept)) as made:
        before = partial(ProjectionWorkers.declare, task, hoisted) if plan.workers else dict
        kernel = SequenceKernel.declare(task, hoisted, plan.knobs.math, own, kept, early, before)
        weights, rings = ([kernel.arguments[f"{name}_{i}"] for i in phases if f"{name}_{i}" in own]
                          for name in ("recurrent", "exchange"))
        T.device_entry()
        recurrent = plan.groups * plan.blocks
        block, thread = T.block(recurrent + plan.workers), T.thread(plan.block_threads)
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        # in order: 2 sides of partial sums, weights, what is exchanged; of a worker: its stages
        shared = T.shared(block_shared(task, plan) // 4)
        beside = ProjectionWorkers(kernel, plan) if plan.workers else None
        def recurrence() -> None:
            T.note("a group of CTAs holds all recurrent weights for its batch rows; each CTA has some hidden units")
            group, member = T.let("group", block // plan.blocks), T.let("member", block % plan.blocks)
            place = T.let("place", group % plan.heads * plan.blocks + member) if plan.heads > 1 else member
            warp, lane = T.let("warp", thread // 32), T.let("lane", thread % 32)
            carrier: Carrier = Ring(plan, rings, group)
            if plan.cluster:
                carrier = Cluster(plan, kernel.steps, shared)
                carrier.begin(kernel, group, thread)
            with T.If(warp < plan.warps):
                with T.Then():
                    products(plan, kernel.steps, Position(place, warp, lane), weights, carrier, shared, early)
                with T.Else(), T.when(warp < plan.warps + plan.gate_warps):
                    Gates(kernel, plan, carrier, shared, group, member,
                          T.let("gate_thread", thread - plan.warps * 32), beside).run()
        if beside is None:
            recurrence()
        else:
            with T.If(block < recurrent):
                with T.Then():
                    recurrence()
                with T.Else(), T.when(thread < THREADS):
                    beside.work(T.let("worker", block - recurrent), thread, shared)
    return made()
