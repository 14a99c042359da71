"""The warps that copy: a lane brings one chunk of state in as soon as it is complete, step after step.

Warp r fills ring r, or all four of them the only one, each some of its stages: while a warp waits for a counter, it
cannot fill a stage that another lane waits for. Lane p has the chunk that is multiplied at position p, or at the p-th
position whose chunk goes through the warp's stages. The chunks begin with another one in every set of blocks, so that
not all read the same part of L2 at once."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda import isa
from ecornn.schedules.cuda.pipeline import BARRIER_WORDS, Pipeline, Use, parity_of
from ecornn.schedules.persistent_wide.exchange import BlockRole, writers
from ecornn.schedules.persistent_wide.plan import DEPTH, LANES, SLOTS, WidePlan
from ecornn.schedules.sequence_kernel import SequenceKernel


class Memory:
    """The layout of shared memory; ``ring`` is an expression (int32), or 0."""

    def __init__(self, plan: WidePlan, words: TirBuffer) -> None:
        self.plan, self.words = plan, words

    def stage(self, ring: Expr, stage: Expr) -> Expr:
        """Index of the first word of a stage."""
        return (ring * self.plan.stages + stage) * (self.plan.stage_bytes // 4)

    def weights(self, ring: Expr, position: Expr) -> Expr:
        """Index of the first word of the weights of the chunk at a position from ``kept`` on, if they stay."""
        within = ring * self.plan.resident + position - self.plan.kept
        if self.plan.streamed:
            within = within - self.plan.streamed_before(position)
        return self.plan.first_weight // 4 + within * (self.plan.weight_bytes // 4)

    def slot(self, ring: Expr, slot: Expr) -> Expr:
        """Index of the first word of a slot for streamed weights."""
        return self.plan.first_slot // 4 + (ring * self.plan.slots + slot) * (self.plan.weight_bytes // 4)

    def sums(self, ring: Expr) -> Expr:
        """Index of the first word of partial sums."""
        return self.plan.first_sum // 4 + ring * (self.plan.columns * self.plan.stride)

    def state(self, ring: Expr) -> Pipeline:
        """The stages of state."""
        return self._pipeline(ring, 0, self.plan.stages)

    def resident(self, ring: Expr) -> Pipeline:
        """All weights that stay in shared memory, as one stage that is filled once."""
        return Pipeline(self.words, self._barrier(ring, 2 * self.plan.stages))

    def streamed(self, ring: Expr) -> Pipeline:
        """The slots for streamed weights."""
        return self._pipeline(ring, 2 * self.plan.stages + 1, self.plan.slots)

    def _pipeline(self, ring: Expr, first: int, stages: int) -> Pipeline:
        """The one whose barriers begin with the ring's ``first``: those of full stages, then those of empty ones."""
        return Pipeline(self.words, self._barrier(ring, first), stages, self._barrier(ring, first + stages))

    def _barrier(self, ring: Expr, number: int) -> Expr:
        """Index of the first word of one of the ring's barriers."""
        return self.plan.first_barrier // 4 + (ring * self.plan.barriers + number) * BARRIER_WORDS


def chunk_at(plan: WidePlan, role: BlockRole, ring: Expr, position: Expr) -> Expr:
    """The chunk that is multiplied at a position of a ring."""
    return (role.part if plan.parts > 1 else ring) * plan.chunks + (position + role.member) % plan.chunks


def copy(kernel: SequenceKernel, plan: WidePlan, memory: Memory, role: BlockRole, warp: Expr, lane: Expr) -> None:
    """A copying warp's whole life."""
    C, S, each = plan.chunks, plan.stages, plan.copier_stages
    weights, exchange, counters = (kernel.arguments[name] for name in ("recurrent", "exchange", "counters"))
    if plan.copiers == 1:
        ring, keep, chunk = warp, T.let, T.let("chunk", chunk_at(plan, role, warp, lane))
        _weights(plan, memory, role, ring, lane, chunk, weights)
        stage, turn = T.let("stage", lane % S), T.let("turn", lane // S)
        mine, every = lane < C, (1 << C) - 1
    else:
        ring, keep = 0, isa.opaque
        with T.when(warp == 0):
            _weights(plan, memory, role, ring, lane, T.let("chunk", chunk_at(plan, role, ring, lane)), weights)
        stage, turn = keep("stage", warp + lane % each * plan.copiers), keep("turn", lane // each)
        position = keep("position", turn * S + stage)
        mine, every = T.And(stage < S, position < C), (1 << 32) - 1  # a lane without a chunk never waits
        chunk = keep("chunk", chunk_at(plan, role, ring, position))
    state = memory.state(ring)
    uses = T.let("uses", state.uses(stage, C))  # of the stage, in a step
    counter = counters.ptr_to([keep("counter", role.counter(chunk))])
    needed = keep("needed", writers(plan, chunk))
    count, waiting, issued = (T.local(name, (1,), "uint32") for name in ("count", "waiting", "issued"))
    T.note("producer: bulk copies of the state's chunks into free stages, as soon as all CTAs have counted them")
    T.buffer_store(count, T.uint32(0), [0])
    with T.serial("t", 0, kernel.steps) as t:
        T.buffer_store(waiting, T.cast(mine, "uint32"), [0])
        T.buffer_store(issued, T.uint32(0), [0])
        use = Use(stage, T.let("parity", parity_of(t * uses + turn)))
        source = keep("source", role.slot(t % SLOTS) + chunk * (plan.columns * DEPTH // 2))
        with T.While(issued[0] != T.uint32(every)):
            with T.when(waiting[0] != T.uint32(0)):
                with T.when(T.cast(count[0], "int32") < t * needed):
                    isa.ld_acquire(count[0], counter)
                # a parity says nothing about the use after next: the one before must have been issued
                before = T.bitwise_and(issued[0] >> T.cast(T.max(lane - each, 0), "uint32"), T.uint32(1))
                follows = T.Or(turn == 0, before != T.uint32(0))
                with T.when(T.And(follows, T.cast(count[0], "int32") >= t * needed)), T.when(state.may_acquire(use)):
                    # The copies of several lanes issue as one instruction, which a race checker takes for the
                    # first lane's: that one must have seen what the others have waited for.
                    isa.sync_active()
                    state.expect(stage, plan.stage_bytes)
                    isa.fence_async_global()
                    isa.bulk_copy(memory.words.ptr_to([memory.stage(ring, stage)]), exchange.ptr_to([source]),
                                  T.uint32(plan.stage_bytes), state.full_barrier(stage))
                    T.buffer_store(waiting, T.uint32(0), [0])
            done = waiting[0] == T.uint32(0)
            done = T.cast(T.And(done, mine) if plan.copiers == 1 else done, "int32")
            T.buffer_store(issued, isa.ballot(done), [0])


def _weights(plan: WidePlan, memory: Memory, role: BlockRole, ring: Expr, lane: Expr, chunk: Expr,
             weights: TirBuffer) -> None:
    """Weights that are kept in shared memory."""
    T.note("producer, prologue: weights that stay in shared memory")
    if not plan.resident:
        return
    for first in range(0, plan.chunks, LANES):
        position = lane + first if first else lane
        mine = T.And(position >= plan.kept, position < plan.chunks)
        if plan.streamed:
            mine = T.And(mine, plan.streamed_before(position + 1) == plan.streamed_before(position))
        with T.when(mine):
            chunk = chunk_at(plan, role, ring, position) if first else chunk
            piece = T.cast(role.member * plan.packed_chunks + chunk, "int64")
            memory.resident(ring).copy(0, memory.words.ptr_to([memory.weights(ring, position)]),
                                       weights.ptr_to([piece * (plan.weight_bytes // 4)]), plan.weight_bytes)
    isa.sync_warp()


def stream(steps: Expr, plan: WidePlan, memory: Memory, role: BlockRole, ring: Expr, weights: TirBuffer) -> None:
    """Weights that do not fit on the chip: a warp for each ring brings them in every step, a bulk copy for each chunk.

    Whose weights come next is known ahead, whatever the state is. So they go through slots of their own, apart from
    stages of state: while a step waits for state, the weights of its first streamed chunks arrive. A slot is written
    again when each warp that multiplies has arrived at its ``used``, behind its products (wgmma) of what the slot had;
    nobody writes weights while the kernel runs, and nothing else orders these copies. Which slot a chunk has does not
    depend on the step; how often a slot has been filled says which parity to wait for.

    Weights beyond what L2 holds would drive each other out of it: read in the same order in every step, none would be
    there when it is read again. So the first ones of a step are asked to stay, and the others to go first.

    Emits one thread's whole life: all streamed chunks of a ring, step after step."""
    T.note("weight producer: bulk copies of the weights that do not fit, into slots that have been multiplied")
    count, among, slots = plan.streamed, plan.chunks - plan.kept, memory.streamed(ring)
    policies = T.local("policies", (2,), "uint64")
    if plan.lasting < count:
        isa.l2_policy(policies[0], "evict_last")
        isa.l2_policy(policies[1], "evict_first")
    turn = T.local("turn", (1,), "int32")  # a loop that is not unrolled: a thread that copies has few registers
    with T.serial("t", 0, steps) as t:
        T.buffer_store(turn, T.int32(0), [0])
        with T.While(turn[0] < count):
            number = isa.opaque("number", turn[0])
            slot, position = isa.opaque("slot", number % plan.slots), plan.kept + (number * among + among - 1) // count
            piece = role.member * plan.packed_chunks + chunk_at(plan, role, ring, isa.opaque("position", position))
            source = weights.ptr_to([T.cast(isa.opaque("piece", piece), "int64") * (plan.weight_bytes // 4)])
            slots.acquire(slots.use(t, number, count)._replace(stage=slot))
            policy = T.Select(number < plan.lasting, policies[0], policies[1]) if plan.lasting < count else None
            slots.copy(slot, memory.words.ptr_to([memory.slot(ring, slot)]), source, plan.weight_bytes, policy)
            T.buffer_store(turn, number + 1, [0])
