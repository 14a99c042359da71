"""The warps of the wide kernel, beside gates: those that copy, and those that multiply.

A lane of a copying warp brings one chunk of state in as soon as it is complete, step after step. Warp r fills ring r,
or all four of them the only one, each some of its stages: while a warp waits for a counter, it cannot fill a stage that
another lane waits for. Lane p has the chunk that is multiplied at position p, or at the p-th position whose chunk goes
through the warp's stages. The chunks begin with another one in every set of blocks, so that not all read the same part
of L2 at once. A multiplying warpgroup multiplies its part of K by its rows of weights, as chunks arrive."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from ecornn.schedules.builder import Expr, T, TirBuffer, ceil_div
from ecornn.schedules.cuda import isa
from ecornn.schedules.cuda.pipeline import BARRIER_WORDS, Pipeline, Use, parity_of
from ecornn.schedules.persistent_wide.exchange import BlockRole, hand_over, handed_tag, handed_word, multiplier, writers
from ecornn.schedules.persistent_wide.plan import DEPTH, LANES, SLOTS, TEAM, WidePlan
from ecornn.schedules.sequence_kernel import SequenceKernel


class Memory:
    """The layout of shared memory: first words, and pipelines; ``ring`` is an expression (int32), or 0."""

    def __init__(self, plan: WidePlan, words: TirBuffer) -> None:
        self.plan, self.words = plan, words
        self.first_weight, self.first_slot, self.first_sum, self.first_barrier = (n // 4 for n in plan.places)

    def stage(self, ring: Expr, stage: Expr) -> Expr:
        return (ring * self.plan.stages + stage) * (self.plan.stage_bytes // 4)

    def weights(self, ring: Expr, position: Expr) -> Expr:  # of the chunk at a position from ``kept`` on, if they stay
        within = ring * self.plan.resident + position - self.plan.kept
        if self.plan.streamed:
            within = within - self.plan.streamed_before(position)
        return self.first_weight + within * (self.plan.weight_bytes // 4)

    def slot(self, ring: Expr, slot: Expr) -> Expr:  # for streamed weights
        return self.first_slot + (ring * self.plan.slots + slot) * (self.plan.weight_bytes // 4)

    def sums(self, ring: Expr) -> Expr:
        return self.first_sum + ring * (self.plan.columns * self.plan.stride)

    def state(self, ring: Expr) -> Pipeline:
        return self._pipeline(ring, 0, self.plan.stages)

    def resident(self, ring: Expr) -> Pipeline:  # all weights that stay in shared memory: a stage that is filled once
        return Pipeline(self.words, self._barrier(ring, 2 * self.plan.stages))

    def streamed(self, ring: Expr) -> Pipeline:  # the slots for streamed weights
        return self._pipeline(ring, 2 * self.plan.stages + 1, self.plan.slots)

    def _pipeline(self, ring: Expr, first: int, stages: int) -> Pipeline:  # barriers of full stages, then of empty ones
        return Pipeline(self.words, self._barrier(ring, first), stages, self._barrier(ring, first + stages))

    def _barrier(self, ring: Expr, number: int) -> Expr:
        return self.first_barrier + (ring * self.plan.barriers + number) * BARRIER_WORDS


def chunk_at(plan: WidePlan, role: BlockRole, ring: Expr, position: Expr) -> Expr:
    """The chunk that is multiplied at a position of a ring."""
    return (role.part if plan.parts > 1 else ring) * plan.chunks + (position + role.member) % plan.chunks


def copy(kernel: SequenceKernel, plan: WidePlan, memory: Memory, role: BlockRole, warp: Expr, lane: Expr) -> None:
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
    """Weights that do not fit on the chip: a thread for each ring brings them every step, by a bulk copy a chunk. Those
    that come next are known ahead, so they go through slots of their own: while a step waits for state, the weights of
    its first streamed chunks arrive. A slot is written again when each warp that multiplies has arrived at its
    ``empty``, behind its products (wgmma) of what the slot had; nobody writes weights while the kernel runs. Which slot
    a chunk has does not depend on the step; how often it has been filled says which parity to wait for. Weights beyond
    what L2 holds, read in the same order in every step, would drive each other out of it before they are read again. So
    the first ones of a step are asked to stay, and the others to go first."""
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


STEPS = DEPTH // 16  # products of a chunk and tile


class Products:
    """Emits the products of one warpgroup (``team``), whose threads are ``team_thread`` 0 to 127."""

    def __init__(self, plan: WidePlan, memory: Memory, role: BlockRole, team: Expr, team_thread: Expr,
                 weights: TirBuffer) -> None:
        self.plan, self.memory, self.role, self.home, self.team = plan, memory, role, team, team
        self.warp, self.lane = T.let("warp", team_thread // 32), T.let("lane", team_thread % 32)
        self.base = self.begin = T.let("base", isa.shared_address(memory.words.ptr_to([0])))
        # (m64 tile of weight rows, n8 tile of batch rows, 4 of fragment C)
        self.acc = T.local("acc", (plan.own_tiles, plan.columns // 8, 4), "float32")
        # (position of a chunk, step of K, m64 tile), 4 of fragment A
        self.held = T.local("held", (max(1, plan.kept * plan.own_tiles * STEPS), 4), "uint32")
        for p in range(plan.kept):
            chunk = T.let("chunk", role.member * plan.packed_chunks + chunk_at(plan, role, self.ring, p))
            # words of operand A: rows l/4 and l/4 + 8 of its first eight values of K
            for k, m, i in product(range(STEPS), range(plan.own_tiles), range(4)):
                octet = T.min(self._tile(m) * 8 + self.warp * 2 + i % 2, plan.octets - 1)  # padding: any weights
                piece = (chunk * (DEPTH // 8) + 2 * k + i // 2) * plan.octets + octet
                T.buffer_store(self.held, weights[T.cast(piece, "int64") * 32 + self.lane],
                               [(p * STEPS + k) * plan.own_tiles + m, i])
        if plan.resident:
            memory.resident(self.ring).wait(Use(0, T.uint32(0)))

    @property
    def ring(self) -> Expr:
        return self.team if self.plan.rings > 1 else 0

    def _tile(self, m: int) -> Expr:
        """This team's m-th tile of rows; beyond the last one of the block where teams have not as many."""
        return m if self.plan.rings > 1 else self.team * self.plan.own_tiles + m

    def run(self, t: Expr, meanwhile: Callable[[Expr], None]) -> None:
        """Emits all products of step t, left in ``acc``; ``meanwhile`` emits what is done while the last ones run."""
        plan = self.plan
        T.note("MMA warpgroups: wait for each chunk's mbarrier (full), wgmma, then hand the stage back (empty)")
        home = self.home if plan.rings > 1 else multiplier() // TEAM
        self.team = isa.uniform("team", home)  # anew: addresses computed before the loop would take too many registers
        if plan.streamed:  # of more chunks; the same
            self.base = T.cast(isa.pinned("base", T.cast(self.begin, "int32")), "uint32")
        every = [[self.acc[m, n, i] for n in range(plan.columns // 8) for i in range(4)] for m in range(plan.own_tiles)]
        for p in range(plan.chunks):
            chunks, slots = self.memory.state(self.ring), self.memory.streamed(self.ring)
            use = chunks.use(t, p, plan.chunks)
            chunks.wait(use)
            if (number := plan.stream(p)) is not None:
                slots.wait(slots.use(t, number, plan.streamed))
            isa.wgmma_fence()
            state = self._address(self.memory.stage(self.ring, use.stage))
            b = T.let("b", isa.descriptor(state, 16, 8 * DEPTH * 2, swizzled=True))
            for k, m in product(range(STEPS), range(plan.own_tiles)):
                self._multiply(every[m], p, k, m, b + T.uint64(2 * k))
            isa.wgmma_commit()
            if p:
                isa.wgmma_wait_pending(1)
                self._release(p - 1)
        if plan.rings == 1:
            self.rows = self._find_rows(t)
        meanwhile(t)
        isa.wgmma_wait([value for tile in every for value in tile])
        self._release(plan.chunks - 1)

    def _multiply(self, acc: list[Expr], p: int, k: int, m: int, b: Expr) -> None:
        """Step k of the products of the chunk at position p."""
        plan = self.plan
        if p < plan.kept:
            a = [self.held[(p * STEPS + k) * plan.own_tiles + m, i] for i in range(4)]
        else:  # two pieces of eight values of K; a tile is eight octets of 128 bytes
            number, within = plan.stream(p), m
            place = (self.memory.weights(self.ring, p) if number is None
                     else self.memory.slot(self.ring, number % plan.slots))
            if plan.rings == 1:  # rows beyond the last tile are multiplied as others, and not stored
                first = self._tile(0) if plan.tiles % plan.sharers == 0 else T.min(self._tile(m), plan.tiles - 1)
                place, within = place + first * 256, m if plan.tiles % plan.sharers == 0 else 0
            described = isa.descriptor(self._address(place), plan.octets * 128, 128, swizzled=False)
            a = [described + T.uint64((2 * k * plan.octets + within * 8) * 8)]
        isa.wgmma(acc, a, b, T.uint32(1 if p or k else 0), plan.dtype)

    def _address(self, word: Expr) -> Expr:
        return self.base + T.cast(word * 4, "uint32")

    def _release(self, p: int) -> None:
        """This warp has multiplied the chunk at position p: its stage may be written again, and its slot."""
        with T.when(self.lane == 0):
            self.memory.state(self.ring).release(p % self.plan.stages)
            if (number := self.plan.stream(p)) is not None:
                self.memory.streamed(self.ring).release(number % self.plan.slots)

    def store(self, handed: TirBuffer | None) -> None:
        """Leaves partial sums in shared memory, a column for each batch row, or hands them over."""
        plan = self.plan
        if plan.rings == 1:
            self._store_rows(handed)
            return
        base = T.let("base", self.memory.sums(self.team) + self.lane % 4 * 2 * plan.stride + self.warp * 16
                     + self.lane // 4)
        for m in range(plan.tiles):
            with T.when(m * 4 + self.warp < ceil_div(plan.octets, 2)):
                for n, i in product(range(plan.columns // 8), range(4)):
                    T.buffer_store(self.memory.words, self.acc[m, n, i],
                                   [base + (n * 8 + i % 2) * plan.stride + m * 64 + i // 2 * 8])

    def _find_rows(self, t: Expr) -> list[tuple[Expr, Expr, Expr]]:
        """For each tile's two rows of this thread: whether they are its block's own (1), another's (-1) or padding (0),
        and where sums of batch rows begin, in what is handed over and in shared memory."""
        plan, role, thread = self.plan, self.role, multiplier()
        warp, lane, found = T.let("warp", thread % TEAM // 32), T.let("lane", thread % 32), []
        column = T.let("column", lane % 4 * 2)
        slot = isa.opaque("slot", role.handed(t)) if plan.parts > 1 else None
        self.tag = handed_tag(t)
        units, finished = (T.uint32(n * plan.interleave) for n in (plan.units, plan.finished))  # rows of these
        for m, half in product(range(plan.own_tiles), range(2)):
            row = isa.opaque("row", self._tile(m) * 64 + warp * 16 + half * 8 + lane // 4)
            outer, within = (v(T.cast(row, "uint32"), units) for v in (T.floordiv, T.floormod))
            # the block of the set that finishes the row's unit, and which of its own rows of sums this is
            finisher = isa.opaque("finisher", T.cast(T.floordiv(within, finished), "int32"))
            own = isa.opaque("own", T.cast(outer * finished + T.floormod(within, finished), "int32"))
            there, whose = None, 1
            if slot is not None:
                other = T.truncmod(role.part + (plan.parts - 1) - finisher, plan.parts)
                there = isa.pinned("there", slot + handed_word(plan, finisher, other, column, own))
                whose = T.Select(finisher == role.part, 1, -1)
            here = isa.pinned("here", self.memory.sums(0) + column * plan.stride + own)
            found.append((isa.pinned("whose", T.Select(row < plan.gates * plan.units, whose, 0)), there, here))
        return found

    def _store_rows(self, handed: TirBuffer) -> None:
        """The same where each team has rows of its own; other blocks wait longer, so theirs go first."""
        plan = self.plan
        values = [[(n * 8 + i, self.acc[m, n, half * 2 + i]) for n in range(plan.columns // 8) for i in range(2)]
                  for m in range(plan.own_tiles) for half in range(2)]
        for (whose, there, _), every in zip(self.rows, values, strict=True) if plan.parts > 1 else ():
            with T.when(whose < 0):
                for (c, first), (_, second) in zip(every[::2], every[1::2], strict=True):
                    hand_over(handed, there + handed_word(plan, 0, 0, c, 0), [first, second], self.tag)
        for (whose, _, here), every in zip(self.rows, values, strict=True):
            with T.when(whose > 0):
                for c, value in every:
                    T.buffer_store(self.memory.words, value, [here + c * plan.stride])
