"""How the hoisted values of a sequence lie in memory, between the projection and the recurrence that reads them.

In float32, (T*B, Q, H). In the layer's 16-bit type the values of a unit lie together, for loads and stores of 4 and 8
bytes: a row of T*B is a plane of four values a unit for every four of the Q, and of two and of one for what
is left (:attr:`Hoisted.planes`); units are padded to ``SECTOR``, so that every plane is of whole sectors.

Rounding them costs accuracy: of a float16 LSTM's error of 2.1e-4, which is mostly rounding of h, it makes 2.6e-4, of
bfloat16 1.7e-3 to 2.1e-3, where cuDNN, which rounds them too, has 2.6e-4 to 2.9e-4 and 2.3e-3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.program import WORKSPACE, Buffer, Extent
from ecornn.schedules.base import Task, knob
from ecornn.schedules.builder import Expr, T, TirBuffer, ceil_div
from ecornn.schedules.cuda.isa import ld_global, st_global
from ecornn.schedules.cuda.isa.tensor_core import pack, unpack_half
from ecornn.schedules.rates import gpu_rates

SECTOR = 16  # 16-bit values of 32 bytes
WIDEST = 4  # values of a unit in a plane, at most
WORTH = 0.01  # of a step: what the default must expect to gain from 16 bits
WORTH_NORMALIZED = 0.02


@dataclass(frozen=True)
class Piece:
    """The part of some neighbouring units' values that one instruction loads, stores or copies."""

    base: int  # base, apart: in values; the first unit's are at ``base`` + ``apart`` * unit of a row
    apart: int
    words: int  # of 32 bits, at most four
    register: int  # the first of those that it is loaded into, among those of all pieces

    def of(self, registers: TirBuffer, *index: Expr) -> list[Expr]:
        """Its registers, of those of all pieces, which lie on the last axis."""
        places = [(*index, self.register + k) for k in range(self.words)]
        return [registers[place] for place in places]


@dataclass(frozen=True)
class Hoisted:
    """The layout of ``outputs`` values of ``hidden`` units in each row of T*B."""

    dtype: str
    outputs: int
    hidden: int

    @property
    def packed(self) -> bool:
        return self.dtype != "float32"  # true if values have 16 bits

    @property
    def units(self) -> int:
        return ceil_div(self.hidden, SECTOR) * SECTOR if self.packed else self.hidden  # units of a row, padded

    @property
    def row(self) -> int:
        return self.outputs * self.units  # values of a row

    @property
    def planes(self) -> tuple[int, ...]:
        if not self.packed:
            return (1,) * self.outputs
        return (WIDEST,) * (self.outputs // WIDEST) + tuple(n for n in (2, 1) if self.outputs % WIDEST & n)

    @property
    def span(self) -> int:
        """Neighbouring units of a projecting thread, 2 or 4, that make a quad's stores whole sectors."""
        return 2 if self.packed and self.outputs % WIDEST == 0 else 4

    def pieces(self, units: int = 1) -> tuple[Piece, ...]:
        """The pieces of ``units`` (1, 2 or 4) neighbouring units, the first of which is a multiple of ``units``."""
        found, base, first = [], 0, 0
        for n in self.planes:
            words = ceil_div(n * units, 2) if self.packed else units
            found += [Piece(base + i * 2, n, min(4, words - i), first + i) for i in range(0, words, 4)]
            base, first = base + n * self.units, first + words
        return tuple(found)

    def words(self, units: int = 1) -> int:
        return sum(p.words for p in self.pieces(units))  # registers for the values of so many units

    def registers(self, *shape: int, units: int = 1, name: str = "inputs") -> TirBuffer:
        """An array of ``shape``, and on its last axis :meth:`words`, for what is loaded of so many units."""
        return T.local(name, (*shape, max(1, self.words(units))), "uint32" if self.packed else "float32")

    def buffer(self, batch: int) -> Buffer:
        return Buffer("hoisted", WORKSPACE, self.dtype, Extent(0, batch * self.row))

    def laid(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values (T*B, Q, H) of the host as they lie in memory, (T*B, row), of their own type; NaN where none lies."""
        memory, first, q = np.full((len(values), self.row), np.nan, values.dtype), 0, 0
        for count in self.planes:
            for n in range(count):
                memory[:, first + n:first + count * self.hidden:count] = values[:, q + n]
            first, q = first + count * self.units, q + count
        return memory

    def load(self, buffer: TirBuffer, row: Expr, unit: Expr) -> list[Expr]:
        """Loads the values of a unit of ``row`` (int64), as they are in memory."""
        if not self.packed:
            first = T.let("first", row * self.row + unit)
            return [buffer[first + p.base] for p in self.pieces()]
        first, into = T.let("first", row * self.row), self.registers()
        for p in self.pieces():
            ld_global(p.of(into), buffer.ptr_to([first + p.base + unit * p.apart]), "u16" if p.apart == 1 else "b32")
        return [into[k] for k in range(self.words())]

    def order(self, units: int = 1) -> list[list[tuple[int, bool]]]:
        """The register of each output of each unit, and whether it is in the upper half of it."""
        found: list[list[tuple[int, bool]]] = [[] for _ in range(units)]
        first, per = 0, 2 if self.packed else 1
        for n in self.planes:
            for e in range(units):
                found[e] += [(first + i // per, i % per == 1) for i in range(e * n, (e + 1) * n)]
            first += ceil_div(n * units, per)
        return found

    def values(self, loaded: Sequence[Expr], units: int = 1) -> list[list[Expr]]:
        return [[unpack_half(loaded[k], upper, self.dtype) if self.packed else loaded[k] for k, upper in own]
                for own in self.order(units)]

    def store(self, buffer: TirBuffer, row: Expr, unit: Expr, values: Sequence[Sequence[Expr]],
              finite: bool = True) -> None:
        """Stores ``values[e][q]`` of 2 or 4 units from ``unit`` on, a multiple of as many; of 16 bits, with ``finite``
        the largest float16 in place of infinity. Units between ``hidden`` and ``units`` may be written."""
        first, units = T.let("first", row * self.row), len(values)
        halves = {place: value for own, those in zip(self.order(units), values, strict=True)
                  for place, value in zip(own, those, strict=True)}
        words = pack([halves[k, upper] for k in range(self.words(units)) for upper in (False, True)], self.dtype,
                     finite=finite)
        for p in self.pieces(units):
            st_global(buffer.ptr_to([first + p.base + unit * p.apart]), words[p.register:p.register + p.words])


def hoisted_of(task: Task, kind: str = "float32") -> Hoisted:
    """The layout for a value of :func:`hoisted_knob`; in float32 for schedules without that knob."""
    w = task.workload
    return Hoisted(w.dtype if kind == "same" else "float32", len(task.graph.hoisted_outputs), w.hidden)


def hoisted_knob() -> Any:
    """Declares the knob ``hoisted`` of schedules that have the choice."""
    return knob("data type of the hoisted input products between kernels; same: the layer's 16 bits, half the "
                "bytes, rounded as in cuDNN", before="float32")


def hoisted_choices(task: Task) -> tuple[str, ...]:
    return ("float32", "same") if task.workload.dtype != "float32" and task.graph.hoisted_outputs else ("float32",)


def saved(task: Task) -> float:
    """Nanoseconds of a step that 16 bits are expected to save; none in a vanilla layer, which may lose as much. Of 18
    layers on an H100 steps were a nanosecond shorter for each 670 to 6400 bytes."""
    w, outputs = task.workload, len(task.graph.hoisted_outputs)
    if w.dtype == "float32" or (outputs == 1 and task.graph.phases):
        return 0.0
    return w.batch * outputs * w.hidden * 2 / gpu_rates(task.device).memory_beside


def gained(task: Task, kind: str) -> float:
    """Nanoseconds of a step that the value ``kind`` of the knob ``hoisted`` is expected to save."""
    return saved(task) if kind == "same" else 0.0


def unhidden(task: Task, step: float, hides: float) -> float:
    """Nanoseconds that memory takes in a step beyond the part ``hides`` of a recurrence's ``step``: for x, y, and
    hoisted values in float32, written and read, of all rows. Nothing where rows are few."""
    w = task.workload
    values = w.batch * (w.hidden * len(task.graph.hoisted_outputs) * 8 + (task.own_input + w.hidden) * w.itemsize)
    return max(0.0, values / gpu_rates(task.device).memory_beside - hides * step)


def preferred(task: Task, expected: float, once: bool = False) -> str:
    """The default of the knob for a step that takes ``expected`` nanoseconds with float32. What is normalized has
    larger errors: of a float16 LSTM's 4.2e-4, if rounded ``once``, 5.1e-4, else 6.2e-4."""
    normalized = WORTH_NORMALIZED if once else float("inf")
    worth = normalized if task.graph.hoisted_statistics else WORTH
    return "same" if saved(task) > worth * expected else "float32"
