"""The gate warps of the persistent kernel: partial sums to new state."""

from __future__ import annotations

import operator

from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.cuda.isa.cluster import wait_on_earlier
from ecornn.schedules.cuda.isa.threads import named_barrier_sync
from ecornn.schedules.persistent.exchange import Carrier, Cluster, word_of
from ecornn.schedules.persistent.plan import PersistentPlan, PhasePlan
from ecornn.schedules.persistent.projection_workers import ProjectionWorkers
from ecornn.schedules.persistent.sums import ClusterSums, RingSums, Sums
from ecornn.schedules.scalars.gate_threads import Ended, GateThreads, Share, partial_sums
from ecornn.schedules.scalars.pointwise import emit
from ecornn.schedules.sequence_kernel import SequenceKernel

FULL = 1  # named barriers of the two buffers of partial sums, FULL and FULL + 1
SENT = 4  # of a block's operands that are on their way; sums.py has 3


class Gates(GateThreads):
    """Emits the gate warps' code."""

    def __init__(self, kernel: SequenceKernel, plan: PersistentPlan, carrier: Carrier, shared: TirBuffer,
                 group: Expr, member: Expr, thread: Expr, beside: ProjectionWorkers | None) -> None:
        """``shared``: the block's memory, float32; ``member``: the block in its group; ``thread``: of gate threads."""
        share = Share(plan.lanes, plan.rows, plan.gate_warps * 32)
        rows, first = group, member * plan.units
        self.head_first: Expr = 0  # unit of the group
        if plan.heads > 1:
            self.head_first = T.let("head_first", group % plan.heads * plan.own)
            rows, first = T.let("rows_group", group // plan.heads), T.let("first", self.head_first + first)
        super().__init__(kernel, share, rows, first, thread,
                         None if plan.lanes == plan.units else plan.units)
        self.plan, self.carrier, self.shared, self.beside, self.early = plan, carrier, shared, beside, kernel.early
        if plan.lanes != plan.units:  # the others read the partial sums of a unit that there is
            self.local = [T.let("local", T.Select(mine, unit, 0))
                          for mine, unit in zip(self.owner, self.local, strict=True)]
        count = [len(phase.products) for phase in self.graph.product_phases]
        # of each item, those of the rows of each phase
        self.scales = [T.local("scales", (self.items, n), "float32") for n in count] if plan.scaled else []
        self.sums: Sums | None = None
        if plan.sums:
            statistics = [p.statistics for p in self.graph.phases if p.statistics]
            if isinstance(carrier, Cluster):
                self.sums = ClusterSums(plan, statistics, carrier, group, member, thread, self.steps)
            else:
                rings = [self.arguments[f"sums_{e}"] for e in range(len(plan.sums))]
                self.sums = RingSums(plan, statistics, rings, shared, group, member, thread)

    def run(self) -> None:
        """Emits the whole sequence."""
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
        plan = self.plan
        for p, scales in enumerate(self.scales):
            for i in range(plan.items):
                unit = T.let("scaled_unit", T.min(self.unit[i], plan.hidden - 1))
                for row in range(len(self.graph.product_phases[p].products)):
                    at = row * (plan.heads * plan.blocks * plan.units) + unit
                    T.buffer_store(scales, self.arguments[f"scales_{p}"][at], [i, row])

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
                sums, e = self.sums.exchange(e, t, envs, self._units(), self.unit, lives), e + 1
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

    def _units(self) -> list[Expr]:
        """For each item, whether it is one of the layer's units, padding rows included."""
        hidden = self.plan.hidden
        return [T.let("counts", T.And(own, unit < hidden)) for own, unit in zip(self.owner, self.unit, strict=True)]

    def _after(self, t: Expr, ended: list[Ended]) -> None:
        """The rest of a step, which nobody waits for.

        The release of exchange.py comes first, before the next write. It waits for what came before
        it, so y is stored and inputs are fetched after it, two steps ahead: memory is further away
        than L2.
        """
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
        plan, phase = self.plan, self.plan.phases[p]
        stride, e = plan.stride(phase), phase.interleave
        unit = self.local[i]
        base = T.let("base", side * plan.sum_floats + self.column[i] * stride
                     + unit // (8 // e) * 8 + unit % (8 // e) * e)
        rows: list[list[Expr]] = [[] for _ in self.graph.product_phases[p].products]
        for w in range(plan.warps):
            for outer in range(phase.gates // e):
                place = base + w * plan.columns * stride + outer * plan.units * e
                wide = partial_sums(self.shared, place, e)
                for inner in range(e):
                    if outer * e + inner < len(rows):
                        rows[outer * e + inner].append(wide[inner])
        found = {row.var: T.tree("sum", parts, operator.add)
                 for row, parts in zip(self.graph.product_phases[p].products, rows, strict=True)}
        if plan.scaled:
            return {var: T.let("product", value * self.scales[p][i, n]) for n, (var, value) in enumerate(found.items())}
        return found

    def _announce(self, i: int, p: int, step: Expr, env: dict[Var, Expr]) -> None:
        """Sends this thread's operands of phase p; units beyond H are zero."""
        plan, carrier = self.plan, self.carrier
        slot = T.let("slot", carrier.slot(p, step))
        for o, operand in enumerate(self.graph.product_phases[p].operands):
            value = T.let(f"{operand.name}_sent", T.Select(self.unit[i] < plan.hidden, env[operand], T.float32(0)))
            word = carrier.word(value, None if plan.dtype == "float32" else self._neighbour(value))
            carrier.write(p, step, slot, self._place(i, plan.phases[p], o), word, self._mine(i, plan.phases[p]))

    def _place(self, i: int, phase: PhasePlan, operand: int) -> Expr:
        unit = self.unit[i] if self.plan.heads == 1 else self.unit[i] - self.head_first
        return word_of(self.plan, phase, operand, unit, self.column[i])

    def _mine(self, i: int, phase: PhasePlan) -> Expr:
        """Tells whether this thread sends a word of item i: units beyond H, or beyond what is exchanged, have none."""
        units = self.plan.hidden if phase.units == self.plan.own else phase.units
        mine = T.And(self.owner[i], self.unit[i] < units)
        if self.plan.dtype != "float32":  # the thread of the even unit sends for both
            mine = T.And(mine, self.local[i] % 2 == 0)
        return mine

    def _places(self, p: int) -> list[tuple[Expr, Expr]]:
        """The words that this thread may send: (place, true if it does)."""
        phase = self.plan.phases[p]
        return [(self._place(i, phase, o), self._mine(i, phase))
                for i in range(self.plan.items) for o in range(phase.operands)]
