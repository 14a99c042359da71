"""Products on tensor cores: a warp has all products of some units, as rows of operand A, so that no sums travel.

Eight units of one product are eight rows of A, two of these an m16 tile; the columns of B are the batch rows. Lane l
then has, of unit ``l / 4`` of each eight, the sums of columns ``2 (l % 4)`` and the next one. Where there are at most
four rows the columns repeat them, so that all lanes of a quad have sums, and share the units of a warp: lane q has row
``q % period``, and of every ``spread`` eights one.

A row of state lies in shared memory in pairs of k-tiles, in the order of its units: 16 bytes of a lane are words of
both tiles, as persistent/exchange.py has it. Warpgroup products read the state from shared memory themselves, in
matrices of 8 columns by 16 bytes of K; repeated rows are then stored as often as they repeat.
"""

from __future__ import annotations

from collections.abc import Callable

from ecornn.schedules.builder import Expr, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda.fragments import multiply_pair, zeros
from ecornn.schedules.cuda.isa.memory import fence_async_shared, ld_shared, shared_address
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.cuda.isa.wgmma import descriptor, wgmma_commit, wgmma_fence, wgmma_registers, wgmma_wait
from ecornn.schedules.persistent_block.plan import PAIR, Part
from ecornn.schedules.persistent_block.products import Products


class TensorProducts(Products):
    """Emits products on tensor cores."""

    def _locate(self) -> None:
        plan, thread = self.plan, self.thread
        self.values = self.shared if plan.dtype == "float32" else self.shared.view(plan.dtype)
        self.warp, self.tile_lane = T.let("warp", thread // 32), T.let("lane", thread % 32)
        if plan.cluster > 1:  # among the warps of all blocks
            self.warp = T.let("cluster_warp", self.rank * (plan.threads // 32) + self.warp)
        column, quad = self.tile_lane // 4, T.let("quad", self.tile_lane % 4)
        # of each n8 tile, the row whose state a lane loads
        rows = [column // 2 % plan.row_period] if plan.row_period else [n * 8 + column for n in range(plan.tiles)]
        self.loads = [T.let("load_row", T.min(row, plan.rows - 1)) for row in rows]
        self.items: list[tuple[int, int, int]] = []  # of each item: eight units (or the first of some), tile, column
        warp = self.warp
        if plan.held > 1:
            self.head = T.let("head", self.warp // plan.warps)
            warp = T.let("head_warp", self.warp % plan.warps)
        self.busy: Expr | None = None
        self.source_warp, source = self.warp, warp
        if plan.heads > 1:
            if plan.warps > plan.groups:  # warps without units have any weights
                self.busy, source = T.let("busy", warp < plan.groups), T.min(warp, plan.groups - 1)
            head = self.share_of_heads * plan.held + self.head
            self.source_warp = T.let("source_warp", head * (plan.cluster * plan.groups) + source)
        first = T.let("first_unit", warp * (8 * plan.units) + column)
        if plan.row_period:
            row, self.share = T.let("quad_row", quad % plan.row_period), T.let("share", quad // plan.row_period)
            for i in range(0, plan.units, plan.spread):
                self.items.append((i, 0, 0))
                own = T.And(row < plan.rows, self.share + i < plan.units)
                self.place.append((first + (i + self.share) * 8, row, self._of_units(own)))
            return
        for u in range(plan.units):
            for n in range(plan.tiles):
                for e in range(2):
                    self.items.append((u, n, e))
                    row = n * 8 + quad * 2 + e
                    self.place.append((first + u * 8, row, self._of_units(row < plan.rows)))

    def _of_units(self, own: Expr) -> Expr:
        """``own``, and true only in warps that have units."""
        return own if self.busy is None else T.And(own, self.busy)

    def store(self, first: Expr, unit: Expr, column: Expr, value: Expr) -> None:
        at = first * per_word(self.plan.dtype) + self.place_of(unit, column)
        T.buffer_store(self.values, T.cast(value, self.plan.dtype), [at])

    def place_of(self, unit: Expr, column: Expr) -> Expr:
        """The place of a value in its operand."""
        each = PAIR * per_word(self.plan.dtype)
        return (unit // each * self.plan.rows + column) * each + unit % each

    def multiply(self, phase: int, side: Expr, meanwhile: Callable[[], None] = lambda: None) -> list[dict[Var, Expr]]:
        found: list[dict[Var, Expr]] = [{} for _ in self.items]
        first = next(number for number, part in enumerate(self.plan.parts) if part.phase == phase)
        for number, part in enumerate(self.plan.parts):
            if part.phase == phase:
                acc = self._part(number, part, self.first(phase, part.operand, side), self.plan.chains(phase),
                                 meanwhile if number == first else lambda: None)
                for own, item in zip(found, self.items, strict=True):
                    own |= self._sums(acc, part, item)
        return found

    def _part(self, number: int, part: Part, first: Expr, chains: int, meanwhile: Callable[[], None]) -> TirBuffer:
        """The sums of a part, as fragments C."""
        plan = self.plan
        octets, ahead = len(part.products) * plan.units, plan.ahead(part)
        # (chain, m16 tile of weight rows, n8 tile of batch rows, 4 of fragment C)
        acc = zeros("acc", chains, ceil_div(octets, 2), plan.tiles, 4)
        if plan.held > 1:
            first = T.let("head_first", first + self.head * (plan.depth_of_k * plan.rows * PAIR))
        # (pair, n8 tile, 2 words of fragment B of each k-tile)
        state = T.local("state", (ahead, plan.tiles, 4), "uint32")

        def load(pair: int) -> None:
            for n, row in enumerate(self.loads):
                at = self.words.ptr_to([first + (pair * plan.rows + row) * PAIR + self.tile_lane % 4 * 4])
                ld_shared([state[pair % ahead, n, i] for i in range(4)], at)

        for pair in range(ahead):
            load(pair)
        meanwhile()
        for pair in range(part.pieces):
            rows = [octet.__getitem__ for octet in self.piece(number, pair)]
            columns = [[state[pair % ahead, n, i] for i in range(4)] for n in range(plan.tiles)]
            multiply_pair(acc, pair, rows, columns, plan.arithmetic)
            if pair + ahead < part.pieces:
                load(pair + ahead)
        return acc

    def _sums(self, acc: TirBuffer, part: Part, item: tuple[int, int, int]) -> dict[Var, Expr]:
        """An item's sums of a part."""
        plan, products = self.plan, self.task.graph.product_phases[part.phase].products
        (unit, tile, column), found = item, {}
        for g, p in enumerate(part.products):
            units = range(unit, min(unit + plan.spread, plan.units)) if plan.row_period else [unit]
            value = None
            for u in units:
                octet = u * len(part.products) + g
                parts = [acc[c, octet // 2, tile, octet % 2 * 2 + column] for c in range(plan.chains(part.phase))]
                one = parts[0] if len(parts) == 1 else parts[0] + parts[1]
                value = one if value is None else T.Select(self.share == u - unit, one, value)
            found[products[p].var] = T.let("sum", value)
        return found

    @property
    def _itemsize(self) -> int:
        return 4 // per_word(self.plan.dtype)

    def _weight(self, part: Part, n: int) -> Expr:
        each = len(part.products) * self.plan.units
        return (self.source_warp * (part.pieces * each) + n) * 32 + self.tile_lane


class WarpgroupProducts(TensorProducts):
    """Emits products by warpgroups: of an m64 tile each warp has the same sixteen rows as of an mma's m16 tile."""

    def store(self, first: Expr, unit: Expr, column: Expr, value: Expr) -> None:
        plan, value = self.plan, T.let("rounded", T.cast(value, self.plan.dtype))
        for copy in range(plan.spread if plan.row_period else 1):
            at = (column + copy * plan.row_period) * 2 if plan.row_period else column
            matrix = unit // 8 * plan.tiles + (0 if plan.row_period else at // 8)
            T.buffer_store(self.values, value, [first * 2 + (matrix * 8 + at % 8) * 8 + unit % 8])

    def stored(self) -> None:
        fence_async_shared()

    def _part(self, number: int, part: Part, first: Expr, chains: int, meanwhile: Callable[[], None]) -> TirBuffer:
        plan = self.plan
        octets, apart = len(part.products) * plan.units, plan.tiles * 128  # bytes between matrices of the same columns
        tiles, zero = ceil_div(octets, 2), T.uint32(0)
        acc = T.local("acc", (1, tiles, plan.tiles, 4), "float32")
        if plan.held > 1:
            first = first + self.head * (plan.depth_of_k * PAIR * plan.tiles * 8)
        address = shared_address(self.words.ptr_to([first]))
        state = T.let("state", descriptor(address, apart, 128, swizzled=False))
        wgmma_fence()
        for pair in range(part.pieces):
            weights = self.piece(number, pair)
            for tile in range(2):
                step = pair * 2 + tile
                for m in range(tiles):
                    rows = [weights[v][tile * 2 + half] if v < octets else zero
                            for half in range(2) for v in (2 * m, 2 * m + 1)]
                    wgmma_registers([acc[0, m, n, i] for n in range(plan.tiles) for i in range(4)], rows,
                                    state + T.uint64(step * 2 * apart // 16), T.uint32(1 if step else 0), plan.dtype)
        wgmma_commit()
        meanwhile()
        wgmma_wait([acc[0, m, n, i] for m in range(tiles) for n in range(plan.tiles) for i in range(4)])
        return acc
