"""A multiplying warpgroup: its part of K times its rows of weights, chunk by chunk as state arrives."""

from __future__ import annotations

from collections.abc import Callable

from ecornn.schedules.builder import Expr, T, TirBuffer, ceil_div
from ecornn.schedules.cuda import isa
from ecornn.schedules.cuda.pipeline import Use
from ecornn.schedules.persistent_wide.copies import Memory, chunk_at
from ecornn.schedules.persistent_wide.exchange import BlockRole, hand_over, handed_tag, handed_word, multiplier
from ecornn.schedules.persistent_wide.plan import DEPTH, TEAM, WidePlan

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
            for k in range(STEPS):
                for m in range(plan.own_tiles):
                    for i in range(4):  # words of operand A: rows l/4 and l/4 + 8 of its first eight values of K
                        octet = self._tile(m) * 8 + self.warp * 2 + i % 2
                        octet = T.min(octet, plan.octets - 1)  # padding: any weights
                        piece = (chunk * (DEPTH // 8) + 2 * k + i // 2) * plan.octets + octet
                        T.buffer_store(self.held, weights[T.cast(piece, "int64") * 32 + self.lane],
                                       [(p * STEPS + k) * plan.own_tiles + m, i])
        if plan.resident:
            memory.resident(self.ring).wait(Use(0, T.uint32(0)))

    @property
    def ring(self) -> Expr:
        """The ring of this team."""
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
            for k in range(STEPS):
                for m in range(plan.own_tiles):
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
        keep = T.uint32(1 if p or k else 0)
        if p < plan.kept:
            row = (p * STEPS + k) * plan.own_tiles + m
            isa.wgmma_registers(acc, [self.held[row, i] for i in range(4)], b, keep, plan.dtype)
        else:  # two pieces of eight values of K; a tile is eight octets of 128 bytes
            number, within = plan.stream(p), m
            place = (self.memory.weights(self.ring, p) if number is None
                     else self.memory.slot(self.ring, number % plan.slots))
            if plan.rings == 1:  # rows beyond the last tile are multiplied as others, and not stored
                first = self._tile(0) if plan.tiles % plan.sharers == 0 else T.min(self._tile(m), plan.tiles - 1)
                place, within = place + first * 256, m if plan.tiles % plan.sharers == 0 else 0
            a = isa.descriptor(self._address(place), plan.octets * 128, 128, swizzled=False)
            isa.wgmma(acc, a + T.uint64((2 * k * plan.octets + within * 8) * 8), b, keep, plan.dtype)

    def _address(self, word: Expr) -> Expr:
        return self.base + T.cast(word * 4, "uint32")

    def _release(self, p: int) -> None:
        """This warp has multiplied the chunk at position p: its stage may be written again, and its slot."""
        with T.when(self.lane == 0):
            self.memory.state(self.ring).release(p % self.plan.stages)
            if (number := self.plan.stream(p)) is not None:
                self.memory.streamed(self.ring).release(number % self.plan.slots)

    def store(self, handed: TirBuffer | None) -> None:
        """Leaves the partial sums in shared memory, and hands over those that other blocks finish: a column of
        weight rows for each batch row."""
        plan = self.plan
        if plan.rings == 1:
            self._store_rows(handed)
            return
        base = T.let("base", self.memory.sums(self.team) + self.lane % 4 * 2 * plan.stride + self.warp * 16
                     + self.lane // 4)
        for m in range(plan.tiles):
            with T.when(m * 4 + self.warp < ceil_div(plan.octets, 2)):
                for n in range(plan.columns // 8):
                    for i in range(4):
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
        for m in range(plan.own_tiles):
            for half in range(2):
                row = isa.opaque("row", self._tile(m) * 64 + warp * 16 + half * 8 + lane // 4)
                (finisher, own), there, whose = self._finisher(row), None, 1
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
        for (whose, there, _), every in zip(self.rows, values, strict=True):
            if there is not None:
                with T.when(whose < 0):
                    for (c, first), (_, second) in zip(every[::2], every[1::2], strict=True):
                        hand_over(handed, there + handed_word(plan, 0, 0, c, 0), [first, second], self.tag)
        for (whose, _, here), every in zip(self.rows, values, strict=True):
            with T.when(whose > 0):
                for c, value in every:
                    T.buffer_store(self.memory.words, value, [here + c * plan.stride])

    def _finisher(self, row: Expr) -> tuple[Expr, Expr]:
        """The block of the set that finishes the unit of a row, and which of its own rows of sums this is: numbers."""
        plan = self.plan
        units, finished = (T.uint32(n * plan.interleave) for n in (plan.units, plan.finished))
        outer, within = (v(T.cast(row, "uint32"), units) for v in (T.floordiv, T.floormod))
        return (isa.opaque("finisher", T.cast(T.floordiv(within, finished), "int32")),
                isa.opaque("own", T.cast(outer * finished + T.floormod(within, finished), "int32")))
