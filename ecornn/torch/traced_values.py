"""The values of a traced step: gates, as te tensors, on PyTorch's axes; and the weights that it reads of its module.

Sizes are in units of the module's H, so that the step fits any H. PyTorch computes tensors of weights alone, as a
weight norm, a mask or ``exp(decay)``, once for weights and not in each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node

from ecornn.errors import CellError
from ecornn.torch.traced_graph import Graph, Learned, Sizes, Width, carried_out, operator_name

Shape = tuple[int, ...]

# Axes of a value: the batch, one of a single place, gates, the units of a gate, and gates with their units behind one
# another, as a Linear of several gates makes them.
BATCH, ONE, GATES, UNITS, COLUMNS = "B", "1", "G", "U", "C"


@dataclass(frozen=True)
class Gate:
    """A row of ``width`` values for each batch row: a te tensor (B, W) or (B,), or gate ``index`` of (B, G, W); a
    ``vector`` of a parameter (G, W) is the same in all. One value a row may have a place for each unit."""

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
        single = all(len(v.gates) == 1 for v in values)
        fits = single if kinds == {ONE} else kinds == {GATES} or kinds <= {UNITS, COLUMNS, ONE}
        if len(axes) > 1 or not fits:
            raise CellError(f"a concatenation along axis {axis} of {', '.join(map(str, values))}; expected whole gates")
        kind = GATES if kinds == {GATES} or kinds == {ONE} else COLUMNS
        return cls.canonical((*values[0].axes[:axis], kind, *values[0].axes[axis + 1:]),
                             [gate for v in values for gate in v.gates])

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
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
            raise CellError(f"{self}; expected gates of one width")
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
                raise CellError(f"a view of {self} as {tuple(shape)}; expected axis {n} to be the batch, all units, "
                                "or consecutive gates")
        if left:
            raise CellError(f"a view of {self} as {tuple(shape)}; expected a shape with all of its axes")
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
            raise CellError("a part of the batch; a cell computes each row of the batch separately")
        borders = [*accumulate((sizes.width(gate.width) for gate in self.gates), initial=0)]
        if kind == COLUMNS and step == 1 and first in borders and last in borders and first < last:
            return Value.canonical(self.axes, self.gates[borders.index(first):borders.index(last)])
        raise CellError(f"indices {first} to {last}{f' with step {step}' if step != 1 else ''} of an axis of {extent} "
                        f"of {self}; expected multiples of H")

    def taken(self, axis: int, index: int, sizes: Sizes) -> Value:
        """One place of an axis, which is gone then. Raises :class:`CellError` for one unit."""
        index %= self.shape(sizes)[axis]
        one = self.cut(axis, index, index + 1, 1, sizes)
        if one.axes[axis] not in (ONE, GATES):
            raise CellError(f"index {index} of an axis of {self.shape(sizes)[axis]} of {self}; a cell cannot read "
                            "a single unit")
        return Value(one.axes[:axis] + one.axes[axis + 1:], one.gates)


# -- the weights that a step reads --------------------------------------------------------------
@dataclass(frozen=True)
class Matrix:
    """A matrix of a product: the tensor of ``node``, (K, N), or its part ``index``; ``stored``: (N, K). N rows are
    gates of H, less, or 1 for all units; the K columns are of ``widths``, this at ``place``."""

    node: Node
    index: int | None
    stored: bool
    gates: int
    rows: Width
    place: int
    widths: tuple[Width, ...]

    def shape(self, input: int, hidden: int) -> Shape:
        """The parameter's shape in te: (G, H, K), or (1, N, K) if it is narrow."""
        sizes = Sizes(0, input, hidden)
        rows = hidden if self.rows in ("H", 1) else sizes.width(self.rows)
        return self.gates, rows, sizes.width(self.widths[self.place])

    def of(self, value: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """The parameter in te shape from the node's value, a view if it can be; (1, 1, K) if all units have one."""
        value = value if self.index is None else value[self.index]
        value = value if self.stored else value.t()
        if len(self.widths) > 1:
            value = value.split([sizes.width(width) for width in self.widths], dim=1)[self.place]
        if self.rows == 1:
            return value[None]
        return value.reshape(self.shape(sizes.input, sizes.hidden))


@dataclass(frozen=True)
class Vector:
    """Weights as an operand: the tensor of ``node`` on the ``axes`` of the others, with gates of ``width``."""

    node: Node
    axes: tuple[str, ...]
    gates: int
    width: Width

    def shape(self, input: int, hidden: int) -> Shape:
        return self.gates, input if self.width == "I" else hidden

    def of(self, value: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """The parameter from the node's value, with zeros behind a narrow one; (G, 1) if all units have the same."""
        width = sizes.width(self.width)
        extent = {BATCH: 1, ONE: 1, GATES: self.gates, UNITS: width, COLUMNS: self.gates * width}
        axes = self.axes[len(self.axes) - value.dim():] if value.dim() <= len(self.axes) else self.axes
        if BATCH in axes and value.shape[axes.index(BATCH)] > 1:  # all rows are alike
            value = value.narrow(axes.index(BATCH), 0, 1)
        value = value.expand([extent[axis] for axis in self.axes])
        order = sorted(range(len(self.axes)), key=lambda n: self.axes[n] in (GATES, UNITS, COLUMNS))
        units = [n for n in order if self.axes[n] == UNITS]
        value = value.permute([n for n in order if n not in units] + units).reshape(self.gates, width)
        full = self.shape(sizes.input, sizes.hidden)[1]
        return value if width in (1, full) else torch.nn.functional.pad(value, (0, full - width))


Use = Matrix | Vector


@dataclass(frozen=True)
class Source:
    """A parameter of the cell that is a tensor of the module as it is stored, or some columns of it."""

    learned: Learned
    use: Use


class Weights:
    """The parameters of a cell, the module's or derived, computed of ``originals`` by the ``needed`` nodes."""

    def __init__(self, graph: Graph, uses: Sequence[Use]) -> None:
        self.graph, self.sizes = graph, graph.sizes
        self.names: dict[Use, str] = {}  # of the parameter that the step reads
        self.direct: dict[str, Source] = {}  # parameter -> the tensor of the module that it is
        self.derived: dict[str, Use] = {}  # parameter -> the use of weights that PyTorch computes for it
        ways: dict[Node, set[Any]] = {}
        for use in uses:
            for node, way in self._origins(use):
                ways.setdefault(node, set()).add(way)
        for use in uses:
            source = self._as_stored(use)
            if source is not None and len(ways[source.use.node]) == 1:
                name = _identifier(source.learned.name)
                if isinstance(use, Matrix) and len(use.widths) > 1:
                    name += f"_{use.place}"
                if self.direct.setdefault(name, source) != source:
                    raise CellError(f"{source.learned.name} and {self.direct[name].learned.name} would both be the "
                                    f"parameter {name!r}")
            else:
                name = f"{_identifier(use.node.name)}_{len(self.derived)}"
                self.derived[name] = use
            self.names[use] = name
        self.needed = graph.below(use.node for use in self.derived.values())
        read = [graph.learned[node] for node in self.needed if node in graph.learned]
        self.originals = {_identifier(learned.name): learned for learned in read if learned.kind != "constant"}
        parts = *self.direct, *self.derived, *self.originals
        if len(parts) > len(set(parts)):
            raise CellError(f"two weights of the step would both be the parameter {max(parts, key=parts.count)!r}")

    def _as_stored(self, use: Use) -> Source | None:
        """The tensor of the module that a use reads, if it reads it as stored."""
        node, flipped = use.node, False
        while operator_name(node) in ("permute", "alias") and node not in self.graph.learned:
            if operator_name(node) == "permute":
                if len(node.args[1]) != 2:
                    return None
                flipped ^= list(node.args[1]) != [0, 1]
            node = node.args[0]
        learned = self.graph.learned.get(node)
        if learned is None or learned.kind == "constant" or not learned.value.is_floating_point():
            return None
        if isinstance(use, Matrix):
            if use.stored == flipped or use.index is not None or use.rows == 1:
                return None
            return Source(learned, replace(use, node=node, stored=True))
        if (flipped or use.axes[-1:] not in ((UNITS,), (COLUMNS,)) or use.width == 1
                or learned.value.shape != (use.gates * self.sizes.width(use.width),)):
            return None
        return Source(learned, replace(use, node=node, axes=use.axes[-1:]))

    def _origins(self, use: Use) -> Iterator[tuple[Node, Any]]:
        """The weights that a use depends on, each with the way it is read: one parameter serves all uses in one way."""
        stored = self._as_stored(use)
        way = stored.use if stored else use
        if stored and isinstance(stored.use, Matrix):
            way = replace(stored.use, place=0)  # its columns are parameters of their own
        for node in self.graph.below([use.node]):
            if node in self.graph.learned:
                yield node, way

    def computed(self, values: Mapping[str, torch.Tensor], like: torch.Tensor) -> dict[str, torch.Tensor]:
        """The derived parameters in te shape, of the ``originals``' values; of the type of ``like``, where it is."""
        def known(learned: Learned) -> torch.Tensor:
            value = learned.value if learned.kind == "constant" else values[_identifier(learned.name)]
            return value.to(like.device, like.dtype if learned.value.is_floating_point() else learned.value.dtype)

        values_of = carried_out(self.needed, {node: known(self.graph.learned[node]) for node in self.needed
                                              if node in self.graph.learned}, like)
        return {name: use.of(values_of[use.node], self.sizes).to(like.dtype) for name, use in self.derived.items()}


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
