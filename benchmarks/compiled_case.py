"""One module of ours that a comparison asks for: a cell at one size, by the schedule and the knobs that it names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ecornn.cells import Cell
from ecornn.errors import ScheduleError

if TYPE_CHECKING:
    from ecornn.compiler import LayerPlan
    from ecornn.device import Device

ALIKE = "the same as with records"
Knobs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Made:
    """What to compile.

    Attributes
    ----------
    cell : a cell's name, or a Cell whose repr says all of it
    schedule : by name; None for what is expected to be fastest
    config : all knobs; empty for the best record or the heuristic
    changed : knobs that are then set to something else
    untuned : True: as if there were no records; it is not made where that is what records say (``ALIKE``)
    like : another cell, whose schedule and knobs at this size are taken instead
    multiplied : False: without recurrent products (unmultiplied.py)
    weights : what they are rounded to, as of ``compile``
    """

    cell: str | Cell
    T: int
    B: int
    I: int
    H: int
    dtype: str
    schedule: str | None = None
    config: Knobs = ()
    changed: Knobs = ()
    precision: str | None = None
    untuned: bool = False
    like: str | None = None
    multiplied: bool = True
    weights: str | None = None

    @property
    def file(self) -> str:
        """The name of the module's file."""
        return f"{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}.so"

    def plan(self, device: Device) -> LayerPlan:
        """What is built for a device; raises :class:`~ecornn.errors.EcornnError` where that cannot be."""
        found = self._plan(device)
        if self.multiplied:
            return found
        from unmultiplied import Unmultiplied

        return Unmultiplied.of(found)

    def _plan(self, device: Device) -> LayerPlan:
        from ecornn.compiler import plan

        asked: dict[str, Any] = {
            "hidden": self.H, "input": self.I, "batch": self.B, "seq": self.T, "dtype": self.dtype,
            "precision": self.precision, "weights": self.weights, "target": device}
        found = plan(self.like or self.cell, schedule=self.schedule, config=dict(self.config), **asked)
        if self.untuned:
            from ecornn.tune.choose import serving_or_raise

            first = serving_or_raise(found.task)[0]
            config = first.default(found.task)
            if (first.name, config) == (found.found.schedule.name, dict(found.found.config)):
                raise ScheduleError(ALIKE)
            return plan(self.cell, schedule=first.name, config=config, **asked)
        if not (self.like or self.changed):
            return found
        return plan(self.cell, schedule=found.found.schedule.name,
                    config={**found.found.config, **dict(self.changed)}, **asked)


def knobs(config: Any) -> Knobs:
    """A configuration as `Made` has it."""
    return tuple(sorted(dict(config).items()))
