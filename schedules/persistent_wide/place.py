"""Which block of the wide persistent kernel this is, and which units it finishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ecornn.schedules.persistent_wide.plan import TEAM, Plan


@dataclass(frozen=True)
class Place:
    """Its ``group``, the set in the group (``member``) and the ``part`` of K in the set: expressions, int32."""

    T: Any
    plan: Plan
    group: Any
    member: Any
    part: Any  # 0 where blocks do not share K

    @classmethod
    def of(cls, T: Any, plan: Plan, block: Any) -> Place:
        """Of the block with this number."""
        group, within = T.Bind(block // plan.blocks), T.Bind(block % plan.blocks)
        if plan.parts == 1:
            return cls(T, plan, group, within, 0)
        return cls(T, plan, group, named(T, within // plan.parts), named(T, within % plan.parts))

    def anew(self) -> Place:
        """The same, worked out again: no register keeps it, or what follows from it."""
        return Place.of(self.T, self.plan, _special(self.T, "ctaid"))

    @property
    def first(self) -> Any:
        """The first unit that it finishes."""
        first = self.member * self.plan.units
        return first if self.plan.parts == 1 else first + self.part * self.plan.finished

    @property
    def count(self) -> Any:
        """Units that it finishes, none or less if it has none; None: all finish as many."""
        plan = self.plan
        if plan.finished * plan.parts == plan.units:
            return None
        return self.T.min(plan.units - self.part * plan.finished, plan.finished)


def named(T: Any, value: Any) -> Any:
    """An int32 value as a variable of the generated code. What TVM sees through it puts into every index that uses it,
    with 64 bits there, and registers are few."""
    return T.Bind(T.cuda.func_call("ecornn_named", value, source_code=_NAMED, return_type="int32"))


def pinned(T: Any, value: Any) -> Any:
    """The same, computed here and not later."""
    return T.Bind(T.cuda.func_call("ecornn_pinned", value, source_code=_PINNED, return_type="int32"))


def multiplier(T: Any) -> Any:
    """The number of this thread among those that multiply, read anew: no register keeps it, or what follows from it."""
    return T.Bind(T.bitwise_and(_special(T, "tid") - TEAM, 511))


def _special(T: Any, name: str) -> Any:
    """What a special register holds, which is read here."""
    return T.Bind(T.cuda.func_call(f"ecornn_{name}", source_code=_SPECIAL.format(name=name), return_type="int32"))


_NAMED = """
__device__ __forceinline__ int ecornn_named(int value) {
  return value;
}"""

_PINNED = """
__device__ __forceinline__ int ecornn_pinned(int value) {
  asm volatile("" : "+r"(value));
  return value;
}"""

_SPECIAL = """
__device__ __forceinline__ int ecornn_{name}() {{
  int value;
  asm volatile("mov.u32 %0, %%{name}.x;" : "=r"(value));
  return value;
}}"""
