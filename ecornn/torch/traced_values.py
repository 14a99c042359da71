"""The values of a traced step: gates, as te tensors, and the axes that PyTorch has them on.

Sizes of the module are in units of its H here, so that the step can be written for any H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ecornn.cells import pointwise
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

    def parts(self, size: int) -> tuple[int, Width] | None:
        """The number of gates in ``size`` values, and the width of each; None if they are no gates."""
        if size == 1:
            return 1, 1
        if size % self.hidden == 0:
            return size // self.hidden, "H"
        return (1, size) if size < self.hidden else None


@dataclass(frozen=True)
class Gate:
    """A row of ``width`` values for each batch row: all of a te tensor (B, W) or (B,), or gate ``index`` of one (B, G,
    W). A ``vector`` is a row of a parameter (G, W), the same in all batch rows. One value a row may have a place for
    each unit, all the same."""

    tensor: Any
    index: int = 0
    width: Width = "H"
    vector: bool = False

    def at(self, b: Any, j: Any, gate: Any = None) -> Any:
        """The scalar of batch row ``b`` and unit ``j``; ``gate`` in place of ``index``."""
        index = self.index if gate is None else gate
        if self.vector:
            return self.tensor[index, j]
        rank = len(self.tensor.shape)
        return self.tensor[b] if rank == 1 else self.tensor[b, j] if rank == 2 else self.tensor[b, index, j]


@dataclass(frozen=True)
class Value:
    """Gates on axes; ``axes`` has BATCH once, unless all gates are vectors."""

    axes: tuple[str, ...]
    gates: tuple[Gate, ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape that PyTorch's tensor has."""
        widths = [sizes.width(gate.width) for gate in self.gates]
        own = {BATCH: sizes.batch, ONE: 1, GATES: len(widths), UNITS: widths[0], COLUMNS: sum(widths)}
        return tuple(own[axis] for axis in self.axes)


def width_of(value: Value, sizes: Sizes) -> Width:
    """The width of each gate. Raises :class:`CellError` if they differ."""
    widths = {gate.width for gate in value.gates}
    if len(widths) == 1:
        return next(iter(widths))
    if {sizes.width(width) for width in widths} == {sizes.hidden}:
        return "H"  # x beside what has H values
    raise CellError(f"{described(value)}, of which all must have one width")


def block(gates: Sequence[Gate]) -> bool:
    """Tells whether these are gates of one tensor, one behind the other."""
    first = gates[0]
    whole = first.vector or len(first.tensor.shape) == 3
    return whole and all(g.tensor.same_as(first.tensor) and g.index == first.index + n and g.width == first.width
                         for n, g in enumerate(gates))


def of_tensor(tensor: Any, count: int, width: Width) -> tuple[Gate, ...]:
    """The gates of a te tensor (B, W) or (B, G, W)."""
    return tuple(Gate(tensor, n, width) for n in range(count))


def common(widths: Iterable[Width], sizes: Sizes) -> Width:
    """The width of a result of operands with these widths. Raises :class:`CellError` if there is none."""
    wide = {width for width in widths if width != 1}
    if len(wide) > 1 and {sizes.width(width) for width in wide} == {sizes.hidden}:
        return "H"
    if len(wide) > 1:
        raise CellError(f"arithmetic on rows of {' and '.join(sorted(map(_wide, wide)))}: one width is needed")
    return next(iter(wide), 1)


def combined(function: Callable[..., Any], operands: Sequence[Any], axes: tuple[str, ...], sizes: Sizes, like: Any,
             name: str, width: Width = 1) -> Value:
    """The value of ``function``, which takes scalars, at every gate and unit.

    ``operands``: values, each of one gate or of all, and anything else that the function takes; ``like``: a state, for
    the sizes; ``width``: the result's if operands have one value a row. Raises :class:`CellError` if numbers of gates
    or widths differ.
    """
    values = [o for o in operands if isinstance(o, Value)]
    count = max(len(v.gates) for v in values)
    several = [v for v in values if len(v.gates) > 1]
    if any(len(v.gates) != count for v in several):
        raise CellError(f"arithmetic on {' and '.join(described(v) for v in several)}: one number of gates is needed")

    def computed(gates: Sequence[Gate | None], per_gate: bool) -> Any:
        own = common((width, *(g.width for g in gates if g is not None)), sizes)

        def value(b: Any, j: Any, n: Any = None) -> Any:
            return function(*(o if g is None else g.at(b, j, None if n is None or len(o.gates) == 1 else g.index + n)
                              for o, g in zip(operands, gates, strict=True)))

        return _compute(value, own, all(g is None or (not g.vector and len(g.tensor.shape) == 1) for g in gates),
                        count if per_gate else 0, sizes, like, name), own

    def picked(n: int) -> list[Gate | None]:
        return [o.gates[n if len(o.gates) > 1 else 0] if isinstance(o, Value) else None for o in operands]

    if count > 1 and all(block(v.gates) for v in several) and len({g.width for v in several for g in v.gates}) == 1 \
            and several[0].gates[0].width != 1:
        tensor, own = computed(picked(0), True)
        return Value(axes, of_tensor(tensor, count, own))
    return Value(axes, tuple(Gate(tensor, 0, own) for tensor, own in (
        computed(picked(n), False) for n in range(count))))


def _compute(value: Callable[..., Any], width: Width, scalar: bool, count: int, sizes: Sizes, like: Any,
             name: str) -> Any:
    """The te tensor of a scalar expression: (B, W), with a ``count`` (B, G, W), or (B,) for one value a row."""
    from tvm import te

    batch, hidden = like.shape
    if width == 1 and scalar:
        return te.compute((batch,), lambda b: value(b, None), name=name)
    if not count and width in (1, "H"):
        return pointwise(lambda b, j: value(b, j), like, name)
    across = hidden if width in (1, "H") else sizes.width(width)
    if not count:
        return te.compute((batch, across), lambda b, j: value(b, j), name=name)
    return te.compute((batch, count, across), lambda b, g, j: value(b, j, g), name=name)


def whole(gate: Gate, name: str, like: Any, sizes: Sizes) -> Any:
    """The te tensor (B, W) of a gate."""
    if not gate.vector and len(gate.tensor.shape) == 2:
        return gate.tensor
    return _compute(lambda b, j: gate.at(b, j), gate.width, False, 0, sizes, like, name)


def stacked(value: Value) -> Any | None:
    """The te tensor (B, H) or (B, G, H) whose gates are exactly those of a value; None if there is none."""
    tensor = value.gates[0].tensor
    if value.gates[0].vector or len(tensor.shape) == 1:
        return None
    if len(tensor.shape) == 2:
        return tensor if len(value.gates) == 1 else None
    same = block(value.gates) and value.gates[0].index == 0 and int(tensor.shape[1]) == len(value.gates)
    return tensor if same else None


# -- axes ---------------------------------------------------------------------------------------
def canonical(axes: Sequence[str], gates: Sequence[Gate]) -> Value:
    """The value with ONE for axes of a single place, and UNITS for COLUMNS of a single gate."""
    one, narrow = len(gates) == 1, all(gate.width == 1 for gate in gates)
    own = {COLUMNS: UNITS if one else GATES if narrow else COLUMNS, UNITS: UNITS, GATES: ONE if one else GATES}
    own |= {axis: ONE for axis in ((UNITS, COLUMNS) if one else (UNITS,)) if narrow}
    return Value(tuple(own.get(axis, axis) for axis in axes), tuple(gates))


def atoms(value: Value, sizes: Sizes) -> list[str]:
    """The axes of more than one place, GATES and UNITS in place of COLUMNS of one width."""
    alike = len({sizes.width(gate.width) for gate in value.gates}) == 1
    parts = [(GATES, UNITS) if axis == COLUMNS and alike else (axis,) for axis in value.axes if axis != ONE]
    return [axis for part in parts for axis in part]


def viewed(value: Value, shape: Sequence[int], sizes: Sizes) -> Value:
    """The same values in the same order on other axes, as PyTorch's view with this shape."""
    left, axes = atoms(value, sizes), []
    extent = dict(zip([BATCH, GATES, UNITS], (sizes.batch, len(value.gates), sizes.width(value.gates[0].width)),
                      strict=True))
    for n, size in enumerate(shape):
        if left and left[0] == COLUMNS and size == sum(sizes.width(g.width) for g in value.gates):
            axes.append(left.pop(0))
        elif left[:2] == [GATES, UNITS] and size == extent[GATES] * extent[UNITS] and size != extent[GATES]:
            axes.append(COLUMNS)
            del left[:2]
        elif left and size == extent.get(left[0]):
            axes.append(left.pop(0))
        elif size == 1:
            axes.append(ONE)
        else:
            raise CellError(f"{described(value)} as {tuple(shape)}: axis {n} is not the batch, all units, or "
                            "gates, one behind the other")
    if left:
        raise CellError(f"{described(value)} as {tuple(shape)}")
    return replace(value, axes=tuple(axes))


def cut(value: Value, axis: int, first: int, last: int, step: int, sizes: Sizes) -> Value:
    """Places ``first`` to ``last`` of an axis. Raises :class:`CellError` if they are not whole gates."""
    kind, extent = value.axes[axis], value.shape(sizes)[axis]
    first, last, step = slice(first, last, step).indices(extent)
    if (first, last, step) == (0, extent, 1):
        return value
    if kind == GATES and value.gates[first:last:step]:
        return canonical(value.axes, value.gates[first:last:step])
    if kind == BATCH:
        raise CellError("along the batch, whose rows are apart in a cell")
    borders = [0]
    for gate in value.gates:
        borders.append(borders[-1] + sizes.width(gate.width))
    if kind == COLUMNS and step == 1 and first in borders and last in borders and first < last:
        return canonical(value.axes, value.gates[borders.index(first):borders.index(last)])
    raise CellError(f"places {first} to {last}{f' by {step}' if step != 1 else ''} of an axis of {extent} of "
                    f"{described(value)}; expected multiples of H")


def joined(values: Sequence[Value], axis: int) -> Value:
    """The values side by side along an axis. Raises :class:`CellError` if that is no row of gates."""
    axes = {v.axes[:axis] + v.axes[axis + 1:] for v in values}
    kinds = {v.axes[axis] for v in values}
    gates = [gate for v in values for gate in v.gates]
    single = all(len(v.gates) == 1 for v in values)
    if len(axes) > 1 or (not (kinds <= {UNITS, COLUMNS, ONE} and kinds != {ONE}) and not (
            kinds == {GATES}) and not (kinds == {ONE} and single)):
        raise CellError(f"side by side along axis {axis}: {', '.join(described(v) for v in values)}")
    kind = GATES if kinds == {GATES} or kinds == {ONE} else COLUMNS
    return canonical((*values[0].axes[:axis], kind, *values[0].axes[axis + 1:]), gates)


def taken(value: Value, axis: int, index: int, sizes: Sizes) -> Value:
    """One place of an axis, which is gone then. Raises :class:`CellError` for one unit."""
    index %= value.shape(sizes)[axis]
    one = cut(value, axis, index, index + 1, 1, sizes)
    if one.axes[axis] not in (ONE, GATES):
        raise CellError(f"place {index} of an axis of {value.shape(sizes)[axis]} of {described(value)}: a unit cannot "
                        "be read by itself")
    return Value(one.axes[:axis] + one.axes[axis + 1:], one.gates)


# -- words --------------------------------------------------------------------------------------
def _wide(width: Width) -> str:
    return f"{width} values" if isinstance(width, str) else f"{width} value{'s' * (width > 1)}, less than H"


def described(value: Any) -> str:
    """The value in words, for messages."""
    if not isinstance(value, Value):
        return repr(value)
    count, widths = len(value.gates), {gate.width for gate in value.gates}
    if len(widths) > 1:
        return f"a row of {' and '.join(_wide(g.width) for g in value.gates)} side by side"
    width = next(iter(widths))
    what = "a vector" if value.gates[0].vector else "a row"
    return f"{what} of {f'{count} times ' * (count > 1)}{_wide(width)}"
