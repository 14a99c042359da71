"""The scalars of a pass over all rows: what a (row, unit) reads from memory, computes and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecornn.analysis.liveness import needed
from ecornn.analysis.step import Assign, Product, Vector
from ecornn.schedules.backward.memory import Place, Within
from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.gemm.job import Epilogue, Vectors, store_hoisted
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import emit
from ecornn.schedules.timeline import takes_part

Env = dict[Var, Expr]
Arguments = Mapping[str, TirBuffer]


@dataclass(frozen=True)
class Scalars:
    """Values of a row and unit, and where they go.

    Attributes
    ----------
    vectors : of the forward step; the buffer ``vectors`` has them in this order
    invariants : assignments that these determine
    assigns : the others, in order
    leaves : where a value lies that is made elsewhere
    stores : values, and where they go
    hoisted, layout : values that go to the buffer ``hoisted``
    mask : of :func:`~ecornn.schedules.timeline.rows_mask`: where a row takes no part in the step zeros are stored
    instead : of some values, the one that is stored there in place of zeros
    """

    vectors: tuple[Vector, ...]
    invariants: tuple[Assign, ...]
    assigns: tuple[Assign, ...]
    leaves: Mapping[Var, Place]
    stores: tuple[tuple[Var, Place], ...]
    hoisted: tuple[Var, ...] = ()
    layout: Hoisted | None = None
    mask: str | None = None
    instead: Mapping[Var, Var] = field(default_factory=dict)
    math: str = "exact"

    @property
    def wanted(self) -> set[Var]:
        """The variables that are stored."""
        return {*(v for v, _ in self.stores), *self.hoisted}

    @property
    def reads_vectors(self) -> bool:
        """True if parameter vectors are among what is needed."""
        read = self._needed(self.wanted)
        return any(v.var in read for v in self.vectors)

    def reads(self, known: Iterable[Var] = (), besides: Iterable[Var] = ()) -> dict[str, str]:
        """The buffers, with their types, that must be read for what is stored and what is wanted ``besides``, if
        ``known`` is known."""
        read = self._needed({*self.wanted, *besides}) - set(known)
        found = {p.columns.name: p.dtype for v, p in self.leaves.items() if v in read}
        return found | ({self.mask: "int32"} if self.mask else {})

    def writes(self) -> dict[str, str]:
        """Buffers that are written."""
        found = {p.columns.name: p.dtype for _, p in self.stores}
        return found | ({"hoisted": self.layout.dtype} if self.layout is not None and self.hoisted else {})

    def _needed(self, wanted: set[Var]) -> set[Var]:
        return needed(self.invariants, needed(self.assigns, wanted)[1])[1]

    def constants(self, vector: Vectors, wanted: set[Var] | None = None) -> Env:
        """The values that parameters determine, as far as ``wanted`` (default: what is stored) needs them."""
        read = self._needed(self.wanted if wanted is None else wanted)
        env = {v.var: T.let(v.var.name, vector(None if v.numbers else i))
               for i, v in enumerate(self.vectors) if v.var in read}
        return emit([a for a in self.invariants if a.var in read], env, self.math)

    def values(self, arguments: Arguments, row: Expr, unit: Expr, within: Within, known: Sequence[Env],
               wanted: set[Var] | None = None) -> list[Env]:
        """The values of neighbouring units, an environment each: ``known``, and what ``wanted`` needs besides."""
        assigns, read = needed(self.assigns, self.wanted if wanted is None else wanted)
        assigns = tuple(a for a in assigns if a.var not in known[0])
        envs = [dict(env) for env in known]
        for var, place in self.leaves.items():
            if var in read and var not in known[0]:
                for env, value in zip(envs, place.load(arguments, row, unit, within, len(known)), strict=True):
                    env[var] = value
        return [emit(assigns, env, self.math) for env in envs]

    def store(self, arguments: Arguments, row: Expr, unit: Expr, envs: Sequence[Env]) -> None:
        """Stores the result of :meth:`values`."""
        live = self._live(arguments, row)
        for var, place in self.stores:
            values = [env[var] for env in envs]
            if live is not None:
                others = [env[self.instead[var]] if var in self.instead else T.float32(0) for env in envs]
                values = [T.Select(live, value, other) for value, other in zip(values, others, strict=True)]
            place.store(arguments, row, unit, values)
        if self.hoisted:
            assert self.layout is not None
            store_hoisted(self.layout, arguments["hoisted"], row, unit, [[env[v] for v in self.hoisted]
                                                                         for env in envs], finite=False)

    def _live(self, arguments: Arguments, row: Expr) -> Expr | None:
        if self.mask is None:
            return None
        return T.let("live", takes_part(self.mask, arguments[self.mask], row, arguments["B"]))


class Pointwise(Epilogue):
    """Scalars computed on the products of a job."""

    def __init__(self, scalars: Scalars, products: Sequence[Product], span: int) -> None:
        self.scalars, self.products, self.span = scalars, products, span
        self.reads, self.writes = scalars.reads([p.var for p in products]), scalars.writes()

    def constants(self, vector: Vectors) -> Env:
        return self.scalars.constants(vector)

    def store(self, arguments: Arguments, row: Expr, unit: Expr, within: Callable[[Expr, int], Expr],
              constants: Sequence[Any], sums: Sequence[Sequence[Expr]]) -> None:
        known = [own | {p.var: value for p, value in zip(self.products, values, strict=True)}
                 for own, values in zip(constants, sums, strict=True)]
        self.scalars.store(arguments, row, unit, self.scalars.values(arguments, row, unit, within, known))
