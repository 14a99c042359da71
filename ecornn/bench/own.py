"""Sides of ours beside ours: the same layer, or another cell, compiled otherwise than a user's command would."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from ecornn.bench.case import Case
from ecornn.errors import ScheduleError

if TYPE_CHECKING:
    from ecornn.compiler import LayerPlan

ALIKE = "the same as is compiled anyway"
OF_CASE = ("cell", "weights", "precision", "keep")


class Own(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """How a side is compiled; what is left open is the layer's.

    Attributes
    ----------
    cell, weights, precision, keep, overlap, schedule : as of :func:`ecornn.compile`
    config : knobs that are set to something else than what is chosen
    untuned : as if there were no records; such a side is left out where records choose the same
    like : another cell, whose schedule and knobs at this size are taken
    module : a module's file, which is not compiled; the side is left out where there is none
    within : ``MODULE:NAME`` of a function of no arguments that makes a context, in which the module is built
    """

    cell: str | None = None
    weights: str | None = None
    precision: str | None = None
    keep: str | None = None
    schedule: str | None = None
    config: dict[str, Any] = {}
    overlap: str = "auto"
    untuned: bool = False
    like: str | None = None
    module: str | None = None
    within: str | None = None

    def case(self, case: Case) -> Case:
        """The layer of this side."""
        changed = {name: value for name in OF_CASE if (value := getattr(self, name)) is not None}
        return structs.replace(case, module=self.module, **changed)

    def planned(self, case: Case) -> LayerPlan:
        """The plan of what is built for a case. Raises what :func:`ecornn.compiler.plan_layer` raises, and
        :class:`~ecornn.errors.ScheduleError` where it is the same as without records."""
        from ecornn.compiler import plan_layer
        from ecornn.tune.choose import serving_or_raise

        own = self.case(case)

        def plan(case: Case, schedule: str | None, config: Mapping[str, Any] | None) -> LayerPlan:
            return plan_layer(case.layer(), target=case.target, schedule=schedule, config=config, overlap=self.overlap)

        whole = plan(own if self.like is None else structs.replace(own, cell=self.like), self.schedule, None)
        found = whole.found
        if self.untuned:
            first = serving_or_raise(whole.task)[0]
            config = first.default(whole.task)
            if (first.name, config) == (found.schedule.name, dict(found.config)):
                raise ScheduleError(ALIKE)
            return plan(own, first.name, config)
        if self.like is None and not self.config:
            return whole
        return plan(own, found.schedule.name, {**found.config, **self.config})

    def build(self, case: Case, out: Path) -> Path:
        """The module's file, built unless it is there."""
        if self.module is not None:
            return Path(self.module)
        if not out.exists():
            from ecornn.compiler import build

            with self.context():
                build(self.planned(case), out)
        return out

    def context(self) -> AbstractContextManager[Any]:
        """The context that the module is built in."""
        if self.within is None:
            return nullcontext()
        where, _, name = self.within.partition(":")
        made: AbstractContextManager[Any] = getattr(importlib.import_module(where), name)()
        return made


Owns = Mapping[str, Own]
