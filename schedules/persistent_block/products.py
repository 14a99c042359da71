"""The products of a step, of a block's state in shared memory: by multiply-adds of float32, or on tensor cores.

Either way a thread ends with the sums of the (unit, batch row) pairs that it computes the gates of, so that nothing but
the new state goes through shared memory, and one barrier of the block is all that a phase waits for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.cuda.isa.memory import ld_global, ld_shared, st_shared
from ecornn.schedules.persistent_block.plan import BlockPlan, Part


class Products(ABC):
    """Emits them for a thread.

    Attributes
    ----------
    place : of each item the unit of its head, the batch row of the block, and whether it is this thread's alone
    head : which one of the block's a thread has units of
    """

    head: Expr = 0

    def __init__(self, task: Task, plan: BlockPlan, shared: TirBuffer, sources: list[TirBuffer], thread: Expr,
                 rank: Expr, share: Expr) -> None:
        """``shared``: the block's memory, float32; ``sources``: the packed weights of each part; ``rank``: the block's
        in its cluster; ``share``: which blocks it is of, or clusters, that have the heads of the same rows."""
        self.task, self.plan, self.shared, self.thread, self.rank = task, plan, shared, thread, rank
        self.share_of_heads = share
        self.words = shared.view("uint32")
        self.sources, self.weights = sources, list[TirBuffer]()
        self.place: list[tuple[Expr, Expr, Expr]] = []
        self._locate()

    @abstractmethod
    def _locate(self) -> None:
        """Works out which pairs the thread has, ``place`` and ``head``."""

    @abstractmethod
    def store(self, first: Expr, unit: Expr, column: Expr, value: Expr) -> None:
        """Stores a value of an operand whose buffer begins at word ``first``; ``unit`` counts those before it there."""

    def stored(self) -> None:  # noqa: B027  who has nothing to say leaves it as it is
        """Is called behind a thread's last :meth:`store`, before the barrier."""

    @abstractmethod
    def multiply(self, phase: int, side: Expr, meanwhile: Callable[[], None] = lambda: None) -> list[dict[Var, Expr]]:
        """The products of a phase, of each item; ``side``: which buffer of the operands. ``meanwhile`` emits what is
        done while the state is on its way from shared memory."""

    def begin(self) -> None:
        """Weights, into registers and shared memory."""
        plan, place = self.plan, self.plan.weights_place
        self.places = []
        for part, source in zip(plan.parts, self.sources, strict=True):
            each = len(part.products) * plan.units  # of 16 bytes of a thread in a piece
            kept = self._registers(max(1, part.kept * each))
            self.weights.append(kept)
            self.places.append(place)
            for n in range(part.pieces * each):
                address = source.ptr_to([T.cast(self._weight(part, n), "int64") * (16 // self._itemsize)])
                if n < part.kept * each:
                    ld_global([kept[n, i] for i in range(4)], address)
                    continue
                loaded = T.local("loaded", (4,), "uint32")
                ld_global([loaded[i] for i in range(4)], address)
                at = self.words.ptr_to([place + (n - part.kept * each) * plan.threads * 4 + self.thread * 4])
                st_shared(at, [loaded[i] for i in range(4)])
            place += plan.shared_words(part)

    @property
    def head_first(self) -> Expr:
        """The units in an operand before those of the thread's head."""
        return self.head * self.plan.head_stride if self.plan.held > 1 else 0

    def first(self, phase: int, operand: int, side: Expr) -> Expr:
        """First word of an operand's buffer."""
        plan = self.plan
        return plan.operand_place(phase, operand) + side * (plan.operands[phase] * plan.operand_words)

    def piece(self, number: int, piece: int) -> list[list[Expr]]:
        """Four words for each (product, unit) of FMA or (unit, product) of mma of a part's piece."""
        plan, part = self.plan, self.plan.parts[number]
        each = len(part.products) * plan.units
        if piece < part.kept:
            return [[self.weights[number][piece * each + n, i] for i in range(4)] for n in range(each)]
        loaded = self._registers(each)
        for n in range(each):
            at = self.places[number] + ((piece - part.kept) * each + n) * plan.threads * 4 + self.thread * 4
            ld_shared([loaded[n, i] for i in range(4)], self.words.ptr_to([at]))
        return [[loaded[n, i] for i in range(4)] for n in range(each)]

    def _registers(self, count: int) -> TirBuffer:
        return T.local("weights", (count, 4), "uint32")

    @property
    @abstractmethod
    def _itemsize(self) -> int:
        """Bytes of a packed weight."""

    @abstractmethod
    def _weight(self, part: Part, n: int) -> Expr:
        """The number, among all 16 bytes of the packed weights of a part, of this thread's n-th."""
