"""The schedules, by name; the compiler tries what they expect of themselves, and then this order."""

from __future__ import annotations

from functools import cache

from ecornn.schedules.base import Config, Knob, Schedule, Task, config_text


@cache
def all_schedules() -> dict[str, Schedule]:
    from ecornn.schedules.cpu import CPUSequence
    from ecornn.schedules.elementwise import Elementwise
    from ecornn.schedules.persistent import Persistent
    from ecornn.schedules.persistent_block import PersistentBlock
    from ecornn.schedules.persistent_wide import PersistentWide
    from ecornn.schedules.scan import Scan
    from ecornn.schedules.step.fused_step import FusedStep
    from ecornn.schedules.step.layout_transform import LayoutTransform
    from ecornn.schedules.step.whole_step import WholeStep

    return {s.name: s for s in (
        Persistent(), PersistentWide(), PersistentBlock(), Scan(), Elementwise(), LayoutTransform(), WholeStep(),
        FusedStep(), CPUSequence())}


def revisions() -> dict[str, int]:
    return {name: schedule.revision for name, schedule in all_schedules().items()}


def generation() -> int:
    """How much the schedules serve by now, as records state: what came after a record was no choice of its search."""
    return max(schedule.latest for schedule in all_schedules().values())


__all__ = ["Config", "Knob", "Schedule", "Task", "all_schedules", "config_text", "generation", "revisions"]
