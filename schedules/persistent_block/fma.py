"""Products by multiply-adds in float32, whatever the layer's type.

``lanes`` neighbouring threads share K: of every ``4 lanes`` values a thread has four, which it loads at once; no two
lanes load from the same bank. Each has all products of its units, so that a value that is loaded is multiplied
``products x units`` times, and a weight ``rows`` times. Lanes then add their sums up: as long as the pairs of units and
rows can be halved, a lane gives one half away and gets the other lane's sums of its own half; what cannot be halved all
lanes add alike, and the first one of these stores.
"""

from __future__ import annotations

from collections.abc import Callable

from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.cuda.isa.memory import ld_shared
from ecornn.schedules.cuda.isa.threads import shuffle_xor
from ecornn.schedules.persistent_block.plan import Part
from ecornn.schedules.persistent_block.products import Products
from ecornn.schedules.scalars.row_sums import across_lanes


class MultiplyAdds(Products):
    """Emits them. A pair's number is ``row * units + unit``."""

    def _locate(self) -> None:
        plan, thread = self.plan, self.thread
        self.lane, self.group = T.let("k_lane", thread % plan.lanes), T.let("k_group", thread // plan.lanes)
        first: Expr = 0
        left, lanes, owner = plan.units * plan.rows, plan.lanes, self.group < plan.held * plan.groups
        group = self.group
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
        for i in range(plan.items):
            pair = first + i
            self.place.append((group * plan.units + pair % plan.units, pair // plan.units, owner))

    def store(self, first: Expr, unit: Expr, column: Expr, value: Expr) -> None:
        T.buffer_store(self.shared, value, [first + column * (self.plan.held * self.plan.depth_of_k) + unit])

    def multiply(self, phase: int, side: Expr, meanwhile: Callable[[], None] = lambda: None) -> list[dict[Var, Expr]]:
        plan, products = self.plan, self.task.graph.product_phases[phase].products
        chains, rows = plan.chains(phase), plan.rows
        first = next(number for number, part in enumerate(plan.parts) if part.phase == phase)
        # (product, unit, chain, row)
        sums = T.local("sums", (len(products), plan.units, chains, rows), "float32")
        for p in range(len(products)):
            for u in range(plan.units):
                for c in range(chains):
                    with T.unroll("r", rows) as r:
                        T.buffer_store(sums, T.float32(0), [p, u, c, r])
        for number, part in enumerate(plan.parts):
            if part.phase == phase:
                operand = T.let("operand", self.first(phase, part.operand, side) + self.lane * 4 + self.head_first)
                self._part(number, part, operand, sums, chains, meanwhile if number == first else lambda: None)
        # pairs in the order of their numbers, each with all products
        pairs = [[self._total(sums, p, u, r, chains) for p in range(len(products))]
                 for r in range(rows) for u in range(plan.units)]
        lanes = plan.lanes
        while lanes > 1:
            lanes //= 2
            pairs = self._added(pairs, lanes)
        return [{product.var: value for product, value in zip(products, own, strict=True)} for own in pairs]

    def _part(self, number: int, part: Part, first: Expr, sums: TirBuffer, chains: int,
              meanwhile: Callable[[], None]) -> None:
        plan = self.plan
        ahead = plan.ahead(part)
        state = T.local("state", (ahead, plan.rows, 4), "float32")

        def load(piece: int) -> None:
            with T.unroll("r", plan.rows) as r:
                at = self.shared.ptr_to([first + r * (plan.held * plan.depth_of_k) + piece * 4 * plan.lanes])
                ld_shared([state[piece % ahead, r, i] for i in range(4)], at, "f32")

        for piece in range(ahead):
            load(piece)
        meanwhile()
        for piece in range(part.pieces):
            weights = self.piece(number, piece)
            for i in range(4):
                for n, word in enumerate(weights):
                    p, u = part.products[n // plan.units], n % plan.units
                    with T.unroll("r", plan.rows) as r:
                        into = [p, u, i % chains, r]
                        weight = T.reinterpret("float32", word[i])
                        T.buffer_store(sums, sums[tuple(into)] + weight * state[piece % ahead, r, i], into)
            if piece + ahead < part.pieces:
                load(piece + ahead)

    @staticmethod
    def _total(sums: TirBuffer, p: int, u: int, r: int, chains: int) -> Expr:
        value = sums[p, u, 0, r]
        for c in range(1, chains):
            value = value + sums[p, u, c, r]
        return T.let("sum", value) if chains > 1 else value

    def _added(self, pairs: list[list[Expr]], lanes: int) -> list[list[Expr]]:
        """With the sums of another lane that is so far away, of all pairs or of one half of them."""
        count = len(pairs[0])
        if len(pairs) % 2:
            flat = across_lanes([value for own in pairs for value in own], lanes)
            return [flat[k:k + count] for k in range(0, len(flat), count)]
        upper, half = T.let("upper", self.lane // lanes % 2 != 0), len(pairs) // 2
        low, high = ([value for own in part for value in own] for part in (pairs[:half], pairs[half:]))
        given = [T.let("given", T.Select(upper, a, b)) for a, b in zip(low, high, strict=True)]
        mine = [T.let("mine", T.Select(upper, b, a)) for a, b in zip(low, high, strict=True)]
        flat = [T.let("sum", own + theirs) for own, theirs in zip(mine, exchanged(given, lanes), strict=True)]
        return [flat[k:k + count] for k in range(0, len(flat), count)]

    @property
    def _itemsize(self) -> int:
        return 4

    def _weight(self, part: Part, n: int) -> Expr:
        plan = self.plan
        if plan.heads == 1:
            return n * plan.threads + self.thread
        groups, each = plan.held * plan.groups, part.pieces * len(part.products) * plan.units
        group = T.min(self.group, groups - 1)  # threads without units have any weights
        return ((self.share_of_heads * each + n) * groups + group) * plan.lanes + self.lane


def exchanged(values: list[Expr], lanes: int) -> list[Expr]:
    """The values of the lane that is so far away."""
    return [T.let("theirs", shuffle_xor(value, lanes)) for value in values]
