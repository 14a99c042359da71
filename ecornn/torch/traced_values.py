"""The values of a traced step: gates, as te tensors, and the axes that PyTorch has them on.

Sizes of the module are in units of its H here, so that the step can be written for any H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ecornn.errors import CellError

# The width of a row: "H", "I", a number of values less than H; 1: one value, whatever H is.
Width = str | int

# Axes of a value: the batch, one of a single place, gates, the units of a gate, and gates with their units behind one
# another, as a Linear of several gates makes them.
BATCH, ONE, GATES, UNITS, COLUMNS = "B", "1", "G", "U", "C"


@dataclass(frozen=True)
class Sizes:
    """The numbers B, I and H."""

    batch: int
    input: int
    hidden: int

    def width(self, width: Width) -> int:
        """The number of values of a width."""
        return {"H": self.hidden, "I": self.input}[width] if isinstance(width, str) else width

    @staticmethod
    def in_words(width: Width) -> str:
        """A width, for messages."""
        return f"{width} values" if isinstance(width, str) else f"{width} value{'s' * (width > 1)}, less than H"

    def parts(self, size: int) -> tuple[int, Width] | None:
        """The number of gates in ``size`` values, and the width of each; None if they are no gates."""
        if size == 1:
            return 1, 1
        if size % self.hidden == 0:
            return size // self.hidden, "H"
        return (1, size) if size < self.hidden else None

    def common(self, widths: set[Width]) -> Width | None:
        """The one width of rows of these widths, H also for x beside what has H values; None if they differ."""
        if len(widths) > 1:
            return "H" if {self.width(width) for width in widths} == {self.hidden} else None
        return next(iter(widths), 1)


@dataclass(frozen=True)
class Gate:
    """A row of ``width`` values for each batch row: all of a te tensor (B, W) or (B,), or gate ``index`` of one (B, G,
    W). A ``vector`` is a row of a parameter (G, W), the same in all batch rows. One value a row may have a place for
    each unit, all the same."""

    tensor: Any
    index: int = 0
    width: Width = "H"
    vector: bool = False

    def at(self, b: Any, j: Any, beyond: Any = 0) -> Any:
        """The scalar of batch row ``b`` and unit ``j``, so many gates ``beyond`` this one."""
        index = self.index + beyond
        if self.vector:
            return self.tensor[index, j]
        rank = len(self.tensor.shape)
        return self.tensor[b] if rank == 1 else self.tensor[b, j] if rank == 2 else self.tensor[b, index, j]


@dataclass(frozen=True)
class Value:
    """Gates on axes; ``axes`` has BATCH once, unless all gates are vectors."""

    axes: tuple[str, ...]
    gates: tuple[Gate, ...]

    @classmethod
    def of_tensor(cls, axes: Sequence[str], tensor: Any, count: int, width: Width) -> Value:
        """The value of a te tensor (B, W) or (B, G, W)."""
        return cls((*axes,), tuple(Gate(tensor, n, width) for n in range(count)))

    @classmethod
    def canonical(cls, axes: Sequence[str], gates: Sequence[Gate]) -> Value:
        """The value with ONE for axes of a single place, and UNITS for COLUMNS of a single gate."""
        one, narrow = len(gates) == 1, all(gate.width == 1 for gate in gates)
        own = {COLUMNS: UNITS if one else GATES if narrow else COLUMNS, UNITS: UNITS, GATES: ONE if one else GATES}
        own |= {axis: ONE for axis in ((UNITS, COLUMNS) if one else (UNITS,)) if narrow}
        return cls(tuple(own.get(axis, axis) for axis in axes), tuple(gates))

    @classmethod
    def joined(cls, values: Sequence[Value], axis: int) -> Value:
        """The values side by side along an axis. Raises :class:`CellError` if that is no row of gates."""
        axes = {v.axes[:axis] + v.axes[axis + 1:] for v in values}
        kinds = {v.axes[axis] for v in values}
        gates = [gate for v in values for gate in v.gates]
        single = all(len(v.gates) == 1 for v in values)
        if len(axes) > 1 or (not (kinds <= {UNITS, COLUMNS, ONE} and kinds != {ONE}) and not (
                kinds == {GATES}) and not (kinds == {ONE} and single)):
            raise CellError(f"side by side along axis {axis}: {', '.join(map(str, values))}")
        kind = GATES if kinds == {GATES} or kinds == {ONE} else COLUMNS
        return cls.canonical((*values[0].axes[:axis], kind, *values[0].axes[axis + 1:]), gates)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape that PyTorch's tensor has."""
        widths = [sizes.width(gate.width) for gate in self.gates]
        own = {BATCH: sizes.batch, ONE: 1, GATES: len(widths), UNITS: widths[0], COLUMNS: sum(widths)}
        return tuple(own[axis] for axis in self.axes)

    def __str__(self) -> str:
        """The value in words, for messages."""
        count, widths = len(self.gates), {gate.width for gate in self.gates}
        if len(widths) > 1:
            return f"a row of {' and '.join(Sizes.in_words(g.width) for g in self.gates)} side by side"
        what = "a vector" if self.gates[0].vector else "a row"
        return f"{what} of {f'{count} times ' * (count > 1)}{Sizes.in_words(next(iter(widths)))}"

    def width(self, sizes: Sizes) -> Width:
        """The width of each gate. Raises :class:`CellError` if they differ."""
        width = sizes.common({gate.width for gate in self.gates})
        if width is None:
            raise CellError(f"{self}, of which all must have one width")
        return width

    @property
    def block(self) -> bool:
        """True if these are gates of one tensor, one behind the other."""
        first = self.gates[0]
        whole = first.vector or len(first.tensor.shape) == 3
        return whole and all(g.tensor.same_as(first.tensor) and g.index == first.index + n and g.width == first.width
                             for n, g in enumerate(self.gates))

    def stacked(self) -> Any | None:
        """The te tensor (B, H) or (B, G, H) whose gates are exactly those of a value; None if there is none."""
        tensor = self.gates[0].tensor
        if self.gates[0].vector or len(tensor.shape) == 1:
            return None
        if len(tensor.shape) == 2:
            return tensor if len(self.gates) == 1 else None
        same = self.block and self.gates[0].index == 0 and int(tensor.shape[1]) == len(self.gates)
        return tensor if same else None

    def _atoms(self, sizes: Sizes) -> list[str]:
        """The axes of more than one place, GATES and UNITS in place of COLUMNS of one width."""
        alike = len({sizes.width(gate.width) for gate in self.gates}) == 1
        parts = [(GATES, UNITS) if axis == COLUMNS and alike else (axis,) for axis in self.axes if axis != ONE]
        return [axis for part in parts for axis in part]

    def viewed(self, shape: Sequence[int], sizes: Sizes) -> Value:
        """The same values in the same order on other axes, as PyTorch's view with this shape."""
        left, axes = self._atoms(sizes), []
        extent = {BATCH: sizes.batch, GATES: len(self.gates), UNITS: sizes.width(self.gates[0].width)}
        for n, size in enumerate(shape):
            if left and left[0] == COLUMNS and size == sum(sizes.width(g.width) for g in self.gates):
                axes.append(left.pop(0))
            elif left[:2] == [GATES, UNITS] and size == extent[GATES] * extent[UNITS] and size != extent[GATES]:
                axes.append(COLUMNS)
                del left[:2]
            elif left and size == extent.get(left[0]):
                axes.append(left.pop(0))
            elif size == 1:
                axes.append(ONE)
            else:
                raise CellError(f"{self} as {tuple(shape)}: axis {n} is not the batch, all units, or gates, one behind "
                                "the other")
        if left:
            raise CellError(f"{self} as {tuple(shape)}")
        return Value(tuple(axes), self.gates)

    def cut(self, axis: int, first: int, last: int, step: int, sizes: Sizes) -> Value:
        """Places ``first`` to ``last`` of an axis. Raises :class:`CellError` if they are not whole gates."""
        kind, extent = self.axes[axis], self.shape(sizes)[axis]
        first, last, step = slice(first, last, step).indices(extent)
        if (first, last, step) == (0, extent, 1):
            return self
        if kind == GATES and self.gates[first:last:step]:
            return Value.canonical(self.axes, self.gates[first:last:step])
        if kind == BATCH:
            raise CellError("along the batch, whose rows are apart in a cell")
        borders = [*accumulate((sizes.width(gate.width) for gate in self.gates), initial=0)]
        if kind == COLUMNS and step == 1 and first in borders and last in borders and first < last:
            return Value.canonical(self.axes, self.gates[borders.index(first):borders.index(last)])
        raise CellError(f"places {first} to {last}{f' by {step}' if step != 1 else ''} of an axis of {extent} of "
                        f"{self}; expected multiples of H")

    def taken(self, axis: int, index: int, sizes: Sizes) -> Value:
        """One place of an axis, which is gone then. Raises :class:`CellError` for one unit."""
        index %= self.shape(sizes)[axis]
        one = self.cut(axis, index, index + 1, 1, sizes)
        if one.axes[axis] not in (ONE, GATES):
            raise CellError(f"place {index} of an axis of {self.shape(sizes)[axis]} of {self}: a unit cannot "
                            "be read by itself")
        return Value(one.axes[:axis] + one.axes[axis + 1:], one.gates)
