"""Forward that keeps what backward reads: states after each step, beside y, which has the output state, and with
``keep="gates"`` other values of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from msgspec import structs

from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.kept import kept
from ecornn.program import Buffer, Extent
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.outputs import together

MOST = 1 << 30  # bytes of gates that are kept where nobody says what is
Value = TypeVar("Value")


VALUES = "values_kept"


@dataclass(frozen=True)
class Spot:
    """The place of a kept value: a row of ``buffer`` has ``count`` times H values, and this value has the H of its
    ``number``."""

    buffer: str
    number: int = 0
    count: int = 1

    def at(self, row: Expr, unit: Expr, hidden: int) -> Expr:
        """The place of a unit in a row, int64."""
        first = row * (self.count * hidden) + unit
        return first + self.number * hidden if self.number else first


@dataclass(frozen=True)
class Stored:
    """The values that kernels of a GPU store of each step besides y: states, by name, and values of the step. The first
    ``together`` of the values lie in rows of ``values_kept`` (T, B, V, H), where backward's recurrence may write as
    many outputs over them."""

    states: tuple[str, ...] = ()
    values: tuple[Var, ...] = ()
    together: int = 0

    def __bool__(self) -> bool:
        return bool(self.states or self.values)

    def buffers(self, batch: int, hidden: int, dtype: str) -> list[Buffer]:
        """The buffers of these: :func:`kept_buffers` and :func:`value_buffers`, but one buffer for values that lie
        ``together``."""
        row = batch * self.together * hidden
        values = structs.replace(Buffer.of(VALUES, dtype, "0"), name=VALUES, extent=Extent(0, row))
        return [*kept_buffers(self.states, batch, hidden, dtype), *[values] * bool(self.together),
                *value_buffers(len(self.values), batch, hidden, dtype)[self.together:]]

    def arguments(self, dtype: str) -> dict[str, TirBuffer]:
        """The parameters of a kernel that stores them."""
        names = dict.fromkeys((*(f"{s}_kept" for s in self.states),
                               *(self.spot(n).buffer for n in range(len(self.values)))))
        return {name: T.pointer(name, dtype) for name in names}

    def found(self, after: Mapping[str, Value], env: Mapping[Var, Value]) -> dict[Spot, Value]:
        """The values to store by their spot, from the states after a step and the step's values."""
        return {**{Spot(f"{s}_kept"): after[s] for s in self.states},
                **{self.spot(n): env[v] for n, v in enumerate(self.values)}}

    def spot(self, number: int) -> Spot:
        """The spot of the value of this number."""
        return spot(number, self.together)


NOTHING = Stored()


def spot(number: int, several: int) -> Spot:
    """The spot of the value of this number, if the first ``several`` values lie together."""
    return Spot(VALUES, number, several) if number < several else Spot(f"value{number}_kept")


def stored(task: Task) -> Stored:
    """The values that the kernels of ``forward`` store, of a task that trains."""
    keep, graph = task.traversal.keep, task.graph
    assert keep is not None
    made = adjoint(graph, task.workload.hidden, starts_anew=task.traversal.resets)
    found = kept(made, keep, by_steps=True)
    return Stored(tuple(name for name in found.states if name != graph.output), found.values,
                  together(task, made, len(found.values)))


def usual_keep(task: Task, count: int) -> str:
    """The default of ``keep`` for a layer of ``count`` sequences, of which one is the task, which trains: ``gates``,
    which makes backward faster, unless they take more than ``MOST`` bytes at the expected T."""
    work = task.workload
    made = adjoint(task.graph, work.hidden, starts_anew=task.traversal.resets)
    size = count * kept(made, "gates").units * work.itemsize * work.seq * work.batch * work.hidden
    return "gates" if size <= MOST else "states"


def kept_buffers(states: Iterable[str], batch: int, hidden: int, dtype: str) -> list[Buffer]:
    """The buffers of kept states, ``<state>_kept`` (T, B, H) of the layer's type: at a step's place in x's time, zero
    where a row takes no part."""
    return [structs.replace(Buffer.of("state_kept", dtype, name), extent=Extent(0, batch * hidden)) for name in states]


def value_buffers(count: int, batch: int, hidden: int, dtype: str) -> list[Buffer]:
    """The buffers of kept values other than states, ``value<number>_kept``, in the same way."""
    extent = Extent(0, batch * hidden)
    return [structs.replace(Buffer.of("value_kept", dtype, str(n)), name=f"value{n}_kept", extent=extent)
            for n in range(count)]


def keeping(kernel: str, kept: Stored) -> str:
    """The name of a kernel; one that stores kept values has a name of its own."""
    return f"{kernel}_keeping" if kept else kernel
