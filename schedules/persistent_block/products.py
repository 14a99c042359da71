"""The products of a step, of a block's state in shared memory: by multiply-adds of float32, or on tensor cores.

Either way a thread ends with the sums of the (unit, batch row) pairs that it computes the gates of, so that nothing but
the new state goes through shared memory, and one barrier of the block is all that a phase waits for."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import product
from typing import TypeAlias

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda import isa
from ecornn.schedules.cuda.isa.tensor_core import PAIR, multiply_pair, per_word, zeros
from ecornn.schedules.persistent_block.plan import BlockPlan, Part
from ecornn.schedules.scalars.row_sums import across_lanes

Meanwhile: TypeAlias = Callable[[], None]


class Products(ABC):
    head: Expr = 0  # which one of the block's the thread has units of

    def __init__(self, task: Task, plan: BlockPlan, shared: TirBuffer, sources: list[TirBuffer], thread: Expr,
                 rank: Expr, share: Expr) -> None:
        """``shared``: the block's memory, float32; ``sources``: the packed weights of each part; ``rank``: the block's
        in its cluster; ``share``: its number, or the cluster's, among those that have the heads of the same rows."""
        self.task, self.plan, self.thread, self.rank, self.share_of_heads = task, plan, thread, rank, share
        self.shared, self.words, self.sources = shared, shared.view("uint32"), sources
        self.weights = list[TirBuffer]()
        # of each item the unit of its head, the batch row of the block, and whether it is this thread's alone
        self.place = list[tuple[Expr, Expr, Expr]]()
        self._locate()

    @abstractmethod
    def _locate(self) -> None:
        """Finds the thread's pairs: ``place``, ``head``."""

    @abstractmethod
    def store(self, first: Expr, unit: Expr, column: Expr, value: Expr) -> None:
        """Stores a value of an operand whose buffer begins at word ``first``; ``unit`` counts those before it there."""

    def stored(self) -> None:  # noqa: B027
        """Is called behind a thread's last :meth:`store`, before the barrier."""

    @abstractmethod
    def multiply(self, phase: int, side: Expr, meanwhile: Meanwhile = lambda: None) -> list[dict[Var, Expr]]:
        """The products of a phase, of each item; ``side``: the number of the operands' buffer. ``meanwhile`` emits what
        is done while the state is on its way from shared memory."""

    def begin(self) -> None:
        """Weights, into registers and shared memory."""
        plan, place, self.places = self.plan, self.plan.weights_place, list[int]()
        values = 4 * per_word(plan.dtype) if plan.mma else 4  # of 16 bytes
        for part, source in zip(plan.parts, self.sources, strict=True):
            each = len(part.products) * plan.units  # of 16 bytes of a thread in a piece
            kept = T.local("weights", (max(1, part.kept * each), 4), "uint32")
            self.weights.append(kept)
            self.places.append(place)
            for n in range(part.pieces * each):
                address = source.ptr_to([T.cast(self._weight(part, n), "int64") * values])
                if n < part.kept * each:
                    isa.ld_global([kept[n, i] for i in range(4)], address)
                    continue
                buffer = T.local("loaded", (4,), "uint32")
                loaded = [buffer[i] for i in range(4)]
                isa.ld_global(loaded, address)
                at = place + (n - part.kept * each) * plan.threads * 4 + self.thread * 4
                isa.st_shared(self.words.ptr_to([at]), loaded)
            place += plan.shared_words(part)

    @property
    def head_first(self) -> Expr:  # the units in an operand before those of the thread's head
        padded = self.plan.depth_of_k * (PAIR * per_word(self.plan.dtype) if self.plan.mma else 1)
        return self.head * padded if self.plan.held > 1 else 0

    def first(self, phase: int, operand: int, side: Expr) -> Expr:
        """First word of an operand's buffer; the second one follows that of all operands of its phase."""
        plan = self.plan
        place = (sum(plan.operands[:phase]) * plan.buffers + operand) * plan.operand_words
        return place + side * (plan.operands[phase] * plan.operand_words)

    def piece(self, number: int, piece: int) -> list[list[Expr]]:
        """Four words for each (product, unit) of FMA or (unit, product) of mma of a part's piece."""
        plan, part = self.plan, self.plan.parts[number]
        each = len(part.products) * plan.units
        if piece < part.kept:
            return [[self.weights[number][piece * each + n, i] for i in range(4)] for n in range(each)]
        loaded = T.local("weights", (each, 4), "uint32")
        for n in range(each):
            at = self.places[number] + ((piece - part.kept) * each + n) * plan.threads * 4 + self.thread * 4
            isa.ld_shared([loaded[n, i] for i in range(4)], self.words.ptr_to([at]))
        return [[loaded[n, i] for i in range(4)] for n in range(each)]

    def _parts(self, phase: int, side: Expr, meanwhile: Meanwhile) -> Iterator[tuple[int, Part, Expr, Meanwhile]]:
        """A phase's parts, by number, with the first word of the operand, and what is done while state is loaded."""
        numbers = [number for number, part in enumerate(self.plan.parts) if part.phase == phase]
        for number in numbers:
            part = self.plan.parts[number]
            yield (number, part, self.first(phase, part.operand, side),
                   meanwhile if number == numbers[0] else lambda: None)

    @abstractmethod
    def _weight(self, part: Part, n: int) -> Expr:
        """The number, among all 16 bytes of the packed weights of a part, of this thread's n-th."""


class MultiplyAdds(Products):
    """Products by multiply-adds in float32, whatever the layer's type. ``lanes`` neighbouring threads share K: of every
    ``4 lanes`` values a thread has four, which it loads at once without bank conflicts. Each has all products of its
    units, so that a loaded value is multiplied ``products x units`` times, a weight ``rows`` times. Lanes then add up:
    while pairs can be halved, a lane gives one half away and gets the other lane's sums of its own half; what cannot be
    halved all add alike, and the first one stores. A pair's number is ``row * units + unit``."""

    def _locate(self) -> None:
        plan, thread = self.plan, self.thread
        self.lane, self.group = T.let("k_lane", thread % plan.lanes), T.let("k_group", thread // plan.lanes)
        first: Expr = 0
        left, lanes, group = plan.units * plan.rows, plan.lanes, self.group
        owner = group < plan.held * plan.groups
        if plan.held > 1:  # threads beyond the last head's read what is that one's
            self.head = T.let("head", T.min(self.group // plan.groups, plan.held - 1))
            group = T.let("head_group", self.group - self.head * plan.groups)
        while lanes > 1:
            lanes //= 2
            if left % 2 == 0:
                left //= 2
                first = first + self.lane // lanes % 2 * left
            else:
                owner = T.And(owner, self.lane // lanes % 2 == 0)
        first, owner = T.let("first_pair", first), T.let("owner", owner)
        self.place = [(group * plan.units + pair % plan.units, pair // plan.units, owner)
                      for pair in (first + i for i in range(plan.items))]

    def store(self, first: Expr, unit: Expr, column: Expr, value: Expr) -> None:
        T.buffer_store(self.shared, value, [first + column * (self.plan.held * self.plan.depth_of_k) + unit])

    def multiply(self, phase: int, side: Expr, meanwhile: Meanwhile = lambda: None) -> list[dict[Var, Expr]]:
        plan, products = self.plan, self.task.graph.product_phases[phase].products
        count, chains, rows = len(products), plan.chains(phase), plan.rows
        sums = T.local("sums", (count, plan.units, chains, rows), "float32")  # (product, unit, chain, row)
        for place in product(range(count), range(plan.units), range(chains)):
            with T.unroll("r", rows) as r:
                T.buffer_store(sums, T.float32(0), [*place, r])
        for number, part, first, beside in self._parts(phase, side, meanwhile):
            self._part(number, part, T.let("operand", first + self.lane * 4 + self.head_first), sums, beside)
        # pairs in the order of their numbers, each with all products
        pairs = [[reduce(operator.add, [sums[p, u, c, r] for c in range(chains)]) for p in range(count)]
                 for r in range(rows) for u in range(plan.units)]
        if chains > 1:
            pairs = [[T.let("sum", value) for value in own] for own in pairs]
        lanes = plan.lanes
        while lanes > 1:
            lanes //= 2
            pairs = self._added(pairs, lanes)
        return [{p.var: value for p, value in zip(products, own, strict=True)} for own in pairs]

    def _part(self, number: int, part: Part, first: Expr, sums: TirBuffer, meanwhile: Meanwhile) -> None:
        plan, ahead, chains = self.plan, self.plan.ahead(part), self.plan.chains(part.phase)
        state = T.local("state", (ahead, plan.rows, 4), "float32")
        def load(piece: int) -> None:
            with T.unroll("r", plan.rows) as r:
                at = self.shared.ptr_to([first + r * (plan.held * plan.depth_of_k) + piece * 4 * plan.lanes])
                isa.ld_shared([state[piece % ahead, r, i] for i in range(4)], at, "f32")
        for piece in range(ahead):
            load(piece)
        meanwhile()
        for piece in range(part.pieces):
            for i, (n, word) in product(range(4), enumerate(self.piece(number, piece))):
                with T.unroll("r", plan.rows) as r:
                    into = [part.products[n // plan.units], n % plan.units, i % chains, r]
                    weight = T.reinterpret("float32", word[i])
                    T.buffer_store(sums, sums[tuple(into)] + weight * state[piece % ahead, r, i], into)
            if piece + ahead < part.pieces:
                load(piece + ahead)

    def _added(self, pairs: list[list[Expr]], lanes: int) -> list[list[Expr]]:
        """With the sums of another lane that is so far away, of all pairs or of one half of them."""
        flat, count = [value for own in pairs for value in own], len(pairs[0])
        if len(pairs) % 2:
            flat = across_lanes(flat, lanes)
        else:
            upper, half = T.let("upper", self.lane // lanes % 2 != 0), len(flat) // 2
            halves = [*zip(flat[:half], flat[half:], strict=True)]
            given = [T.let("given", T.Select(upper, a, b)) for a, b in halves]
            mine = [T.let("mine", T.Select(upper, b, a)) for a, b in halves]
            theirs = [T.let("theirs", isa.shuffle_xor(value, lanes)) for value in given]
            flat = [T.let("sum", a + b) for a, b in zip(mine, theirs, strict=True)]
        return [flat[k:k + count] for k in range(0, len(flat), count)]

    def _weight(self, part: Part, n: int) -> Expr:
        plan = self.plan
        if plan.heads == 1:
            return n * plan.threads + self.thread
        groups, each = plan.held * plan.groups, part.pieces * len(part.products) * plan.units
        group = T.min(self.group, groups - 1)  # threads without units have any weights
        return ((self.share_of_heads * each + n) * groups + group) * plan.lanes + self.lane


class TensorProducts(Products):
    """Products on tensor cores: a warp has all products of some units, as rows of operand A, so that no sums travel.
    Eight units of one product are eight rows of A, two of these an m16 tile; the columns of B are the batch rows. Lane
    l then has, of unit ``l / 4`` of each eight, the sums of columns ``2 (l % 4)`` and the next one. Up to four rows are
    repeated in the columns, so that all lanes of a quad have sums, and share the units of a warp: lane q has row ``q %
    period``, and of every ``spread`` eights one. A row of state lies in shared memory in pairs of k-tiles: 16 bytes of
    a lane are words of both tiles. Warpgroup products read the state themselves, in matrices of 8 columns by 16 bytes
    of K; repeated rows are then stored as often as they repeat."""

    def _locate(self) -> None:
        plan, thread = self.plan, self.thread
        self.values = self.shared if plan.dtype == "float32" else self.shared.view(plan.dtype)
        self.warp, self.tile_lane = T.let("warp", thread // 32), T.let("lane", thread % 32)
        if plan.cluster > 1:  # among the warps of all blocks
            self.warp = T.let("cluster_warp", self.rank * (plan.threads // 32) + self.warp)
        column, quad, warp = self.tile_lane // 4, T.let("quad", self.tile_lane % 4), self.warp
        # of each n8 tile, the row whose state a lane loads
        rows = [column // 2 % plan.row_period] if plan.row_period else [n * 8 + column for n in range(plan.tiles)]
        self.loads = [T.let("load_row", T.min(row, plan.rows - 1)) for row in rows]
        self.items: list[tuple[int, int, int]] = []  # of each item: eight units (or the first of some), tile, column
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
        for u, n, e in product(range(plan.units), range(plan.tiles), range(2)):
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
        each = PAIR * per_word(self.plan.dtype)
        return (unit // each * self.plan.rows + column) * each + unit % each

    def multiply(self, phase: int, side: Expr, meanwhile: Meanwhile = lambda: None) -> list[dict[Var, Expr]]:
        found: list[dict[Var, Expr]] = [{} for _ in self.items]
        for number, part, first, beside in self._parts(phase, side, meanwhile):
            acc = self._part(number, part, first, beside)
            for own, item in zip(found, self.items, strict=True):
                own |= self._sums(acc, part, item)
        return found

    def _part(self, number: int, part: Part, first: Expr, meanwhile: Meanwhile) -> TirBuffer:
        """The sums of a part, as fragments C."""
        plan, octets, ahead = self.plan, len(part.products) * self.plan.units, self.plan.ahead(part)
        # (chain, m16 tile of weight rows, n8 tile of batch rows, 4 of fragment C)
        acc = zeros("acc", plan.chains(part.phase), ceil_div(octets, 2), plan.tiles, 4)
        if plan.held > 1:
            first = T.let("head_first", first + self.head * (plan.depth_of_k * plan.rows * PAIR))
        # (pair, n8 tile, 2 words of fragment B of each k-tile)
        state = T.local("state", (ahead, plan.tiles, 4), "uint32")
        def load(pair: int) -> None:
            for n, row in enumerate(self.loads):
                at = self.words.ptr_to([first + (pair * plan.rows + row) * PAIR + self.tile_lane % 4 * 4])
                isa.ld_shared([state[pair % ahead, n, i] for i in range(4)], at)
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
        plan, products = self.plan, self.task.graph.product_phases[part.phase].products
        (unit, tile, column), found = item, {}
        units = range(unit, min(unit + plan.spread, plan.units) if plan.row_period else unit + 1)
        for g, p in enumerate(part.products):
            value = None
            for u in units:
                octet = u * len(part.products) + g
                one = reduce(operator.add, [acc[c, octet // 2, tile, octet % 2 * 2 + column]
                                            for c in range(plan.chains(part.phase))])
                value = one if value is None else T.Select(self.share == u - unit, one, value)
            found[products[p].var] = T.let("sum", value)
        return found

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
        isa.fence_async_shared()

    def _part(self, number: int, part: Part, first: Expr, meanwhile: Meanwhile) -> TirBuffer:
        plan, octets, zero = self.plan, len(part.products) * self.plan.units, T.uint32(0)
        tiles, apart = ceil_div(octets, 2), plan.tiles * 128  # bytes between matrices of the same columns
        acc = T.local("acc", (1, tiles, plan.tiles, 4), "float32")
        if plan.held > 1:
            first = first + self.head * (plan.depth_of_k * PAIR * plan.tiles * 8)
        address = isa.shared_address(self.words.ptr_to([first]))
        state = T.let("state", isa.descriptor(address, apart, 128, swizzled=False))
        isa.wgmma_fence()
        for pair in range(part.pieces):
            weights = self.piece(number, pair)
            for tile, m in product(range(2), range(tiles)):
                step = pair * 2 + tile
                rows = [weights[v][tile * 2 + half] if v < octets else zero
                        for half in range(2) for v in (2 * m, 2 * m + 1)]
                sums = [acc[0, m, n, i] for n in range(plan.tiles) for i in range(4)]
                isa.wgmma(sums, rows, state + T.uint64(step * 2 * apart // 16), T.uint32(1 if step else 0), plan.dtype)
        isa.wgmma_commit()
        meanwhile()
        isa.wgmma_wait([acc[0, m, n, i] for m in range(tiles) for n in range(plan.tiles) for i in range(4)])
        return acc


KINDS: dict[str, type[Products]] = {"fma": MultiplyAdds, "mma": TensorProducts, "wgmma": WarpgroupProducts}
