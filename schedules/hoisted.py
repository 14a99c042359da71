"""How the hoisted values of a sequence lie in memory, between the projection and the recurrence that reads them.

In float32, (T*B, Q, H). In the layer's 16-bit type the values of a unit lie together, for loads and stores of 4 and 8
bytes: a row of T*B is a plane of four values a unit for every four of the Q, and of two and of one for what
is left (:attr:`Hoisted.planes`); units are padded to ``SECTOR``, so that every plane is of whole sectors.

Rounding them costs accuracy: of a float16 LSTM's error of 2.1e-4, which is mostly rounding of h, it makes 2.6e-4, of
bfloat16 1.7e-3 to 2.1e-3, where cuDNN, which rounds them too, has 2.6e-4 to 2.9e-4 and 2.3e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ecornn.program import Buffer, Extent
from ecornn.schedules.base import Config, Knob, Task
from ecornn.schedules.tensor_core import pack_pair, unpack_half

SECTOR = 16  # 16-bit values of 32 bytes
WIDEST = 4  # values of a unit in a plane, at most
WORTH = 0.01  # of a step: what the default must expect to gain from 16 bits
BYTES = 2400.0  # of hoisted values that are written in a nanosecond, and delay products meanwhile


@dataclass(frozen=True)
class Hoisted:
    """The layout of ``outputs`` values of ``hidden`` units in each row of T*B."""

    dtype: str
    outputs: int
    hidden: int

    @property
    def packed(self) -> bool:
        """Whether values are of 16 bits."""
        return self.dtype != "float32"

    @property
    def units(self) -> int:
        """Units of a row, padded."""
        return -(-self.hidden // SECTOR) * SECTOR if self.packed else self.hidden

    @property
    def row(self) -> int:
        """Values of a row."""
        return self.outputs * self.units

    @property
    def planes(self) -> tuple[int, ...]:
        """Values of a unit in each plane, of 16 bits."""
        rest = self.outputs % WIDEST
        return (WIDEST,) * (self.outputs // WIDEST) + tuple(n for n in (2, 1) if rest & n)

    @property
    def words(self) -> int:
        """Registers for the values of a unit."""
        return sum(-(-n // 2) for n in self.planes) if self.packed else self.outputs

    @property
    def span(self) -> int:
        """Neighbouring units of a projecting thread, 2 or 4, that make a quad's stores whole sectors."""
        return 2 if self.packed and self.outputs % WIDEST == 0 else 4

    def buffer(self, batch: int) -> Buffer:
        """The workspace."""
        return Buffer("hoisted", "workspace", self.dtype, Extent(0, batch * self.row))

    def registers(self, T: Any, *shape: int) -> Any:
        """An array of ``shape`` for what :meth:`load` gives for as many units."""
        return T.alloc_buffer((*shape, max(1, self.words)), "uint32" if self.packed else "float32", scope="local")

    def load(self, T: Any, buffer: Any, row: Any, unit: Any) -> list[Any]:
        """Loads the values of a unit of ``row`` (int64), as they are in memory."""
        first = T.Bind(row * self.row + unit) if not self.packed else T.Bind(row * self.row)
        if not self.packed:
            return [buffer[first + q * self.hidden] for q in range(self.outputs)]
        into, done = self.registers(T), 0
        for base, n in self._bases():
            some = range(done, done + -(-n // 2))
            kind = {1: "u16", 2: "b32", 4: "v2.b32"}[n]
            T.evaluate(T.ptx[f"ld.global.{kind}"](*(into[k] for k in some), buffer.ptr_to([first + base + unit * n])))
            done = some.stop
        return [into[k] for k in range(done)]

    def values(self, T: Any, loaded: Sequence[Any]) -> list[Any]:
        """What was loaded, in float32."""
        if not self.packed:
            return list(loaded)
        found: list[Any] = []
        words = iter(loaded)
        for n in self.planes:
            for q in range(n):
                word = word if q % 2 else next(words)
                found.append(unpack_half(word, q % 2 == 1, self.dtype))
        return found

    def store(self, T: Any, buffer: Any, row: Any, unit: Any, values: Sequence[Sequence[Any]]) -> None:
        """Stores ``values[e][q]`` of the neighbouring units from ``unit`` on, which their number divides; 16 bits.

        Units up to ``units`` may be written.
        """
        first, q = T.Bind(row * self.row), 0
        for base, n in self._bases():
            flat = [v for own in values for v in own[q:q + n]]
            words = [pack_pair(*flat[i:i + 2], self.dtype, finite=True) for i in range(0, len(flat), 2)]
            for i in range(0, len(words), 4):
                some = words[i:i + 4]
                kind = f"v{len(some)}.b32" if len(some) > 1 else "b32"
                T.evaluate(T.ptx[f"st.global.{kind}"](buffer.ptr_to([first + base + unit * n + i * 2]), *some))
            q += n

    def _bases(self) -> list[tuple[int, int]]:
        """Where in a row each plane begins, and its values of a unit."""
        found, base = [], 0
        for n in self.planes:
            found.append((base, n))
            base += n * self.units
        return found


def hoisted_of(task: Task, config: Config) -> Hoisted:
    """What a configuration with :func:`hoisted_knob` says."""
    w = task.workload
    dtype = w.dtype if config["hoisted"] == "same" else "float32"
    return Hoisted(dtype, len(task.graph.hoisted_outputs), w.hidden)


def in_float32(task: Task) -> Hoisted:
    """The layout of schedules without the knob."""
    return hoisted_of(task, {"hoisted": "float32"})


def hoisted_knob(task: Task) -> Knob:
    """The knob of schedules that have the choice."""
    choice = task.workload.dtype != "float32" and task.graph.hoisted_outputs
    return Knob("hoisted", ("float32", "same") if choice else ("float32",),
                "type of the hoisted input products between kernels; same: the layer's 16 bits, half the bytes, "
                "rounded as cuDNN does", before="float32")


def saved(task: Task) -> float:
    """Nanoseconds of a step that 16 bits are expected to save."""
    w = task.workload
    return w.batch * len(task.graph.hoisted_outputs) * w.hidden * 2 / BYTES if w.dtype != "float32" else 0.0


def gained(task: Task, config: Config) -> float:
    """What of it a configuration gains."""
    return saved(task) if config["hoisted"] == "same" else 0.0


def preferred(task: Task, expected: float) -> str:
    """The default of the knob for a step that takes ``expected`` nanoseconds with float32."""
    return "same" if saved(task) > WORTH * expected else "float32"
