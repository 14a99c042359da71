"""The role of a block of the wide persistent kernel, and the units that it finishes."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa.registers import opaque
from ecornn.schedules.cuda.isa.threads import special_register
from ecornn.schedules.persistent_wide.plan import TEAM, WidePlan


@dataclass(frozen=True)
class BlockRole:
    """A block's ``group``, its set in the group (``member``) and its ``part`` of K in the set: expressions, int32."""

    plan: WidePlan
    group: Expr
    member: Expr
    part: Expr  # 0 where blocks do not share K

    @classmethod
    def of(cls, plan: WidePlan, block: Expr) -> BlockRole:
        """The role of the block with this number."""
        group, within = T.let("group", block // plan.blocks), T.let("within", block % plan.blocks)
        if plan.parts == 1:
            return cls(plan, group, within, 0)
        return cls(plan, group, opaque("member", within // plan.parts),
                   opaque("part", within % plan.parts))

    def anew(self) -> BlockRole:
        """The same role, worked out again: no register keeps it, or what follows from it."""
        return BlockRole.of(self.plan, special_register("ctaid"))

    @property
    def first(self) -> Expr:
        """The first unit that it finishes."""
        first = self.member * self.plan.units
        return first if self.plan.parts == 1 else first + self.part * self.plan.finished

    @property
    def count(self) -> Expr | None:
        """Units that it finishes, none or less if it has none; None: all finish as many."""
        plan = self.plan
        if plan.finished * plan.parts == plan.units:
            return None
        return T.min(plan.units - self.part * plan.finished, plan.finished)


def multiplier() -> Expr:
    """The number of this thread among those that multiply, read anew: no register keeps it, or what follows from it."""
    return T.let("multiplier", T.bitwise_and(special_register("tid") - TEAM, 511))
