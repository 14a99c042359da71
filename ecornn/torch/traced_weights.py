"""The weights that a traced step reads of its module: parameters as they are, and tensors computed of these alone.

PyTorch computes the latter once for weights and not in each step: a weight norm, a mask, ``exp(decay)``, a scalar for
all units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ecornn.errors import CellError
from ecornn.torch.traced_graph import CONSTANT, Graph, Learned, operator_name, reached, shape_of
from ecornn.torch.traced_values import BATCH, COLUMNS, GATES, ONE, UNITS, Sizes, Width

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a product: the tensor of ``node``, (K, N), or of several (M, K, N) that of ``index``; ``stored``: it
    is (N, K). N rows are gates of H, less than H, or 1, which all units have; its K columns are of ``widths``, of which
    this is the one at ``place``."""

    node: torch.fx.Node
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
        """The parameter in te shape from the node's value, a view if it can be; (1, 1, K) if all units have the
        same."""
        value = value if self.index is None else value[self.index]
        value = value if self.stored else value.t()
        if len(self.widths) > 1:
            value = value.split([sizes.width(width) for width in self.widths], dim=1)[self.place]
        if self.rows == 1:
            return value[None]
        return value.reshape(self.shape(sizes.input, sizes.hidden))


@dataclass(frozen=True)
class Vector:
    """Weights as an operand of arithmetic: the tensor of ``node`` on the ``axes`` of the other operands, with as many
    gates as ``gates``, of ``width``."""

    node: torch.fx.Node
    axes: tuple[str, ...]
    gates: int
    width: Width

    def shape(self, input: int, hidden: int) -> Shape:
        """The parameter's shape in te, (G, H)."""
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
    """The parameters of a cell, from the uses that its step makes of the module's weights.

    Attributes
    ----------
    names : use -> the name of the parameter that the step reads for it
    direct : parameter -> the tensor of the module that it is
    derived : parameter -> the use of weights that PyTorch computes for it
    originals : the module's tensors that the derived parameters are computed of, by name
    needed : the nodes that compute these, in order

    Raises :class:`CellError` if two parameters would have one name.
    """

    def __init__(self, graph: Graph, uses: Sequence[Use]) -> None:
        self.graph, self.sizes = graph, graph.sizes
        self.names: dict[Use, str] = {}
        self.direct: dict[str, Source] = {}
        self.derived: dict[str, Use] = {}
        ways: dict[torch.fx.Node, set[Any]] = {}
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
        self.needed = below(graph, (use.node for use in self.derived.values()))
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
        natural = not flipped and use.axes[-1:] in ((UNITS,), (COLUMNS,)) and use.width != 1
        if not natural or learned.value.shape != (use.gates * self.sizes.width(use.width),):
            return None
        return Source(learned, replace(use, node=node, axes=use.axes[-1:]))

    def _origins(self, use: Use) -> Iterator[tuple[torch.fx.Node, Any]]:
        """The weights that a use depends on, each with the way it is read. One parameter can serve all uses of a weight
        if there is one way."""
        stored = self._as_stored(use)
        way = stored.use if stored else use
        if stored and isinstance(stored.use, Matrix):
            way = replace(stored.use, place=0)  # its columns are parameters of their own
        for node in below(self.graph, [use.node]):
            if node in self.graph.learned:
                yield node, way

    def computed(self, values: Mapping[str, torch.Tensor], like: torch.Tensor) -> dict[str, torch.Tensor]:
        """The derived parameters in te shape, with their gradients, from the values of ``originals`` by name; on the
        device and of the type of ``like``."""
        def known(learned: Learned) -> torch.Tensor:
            value = learned.value if learned.kind == "constant" else values[_identifier(learned.name)]
            return value.to(like.device, like.dtype if learned.value.is_floating_point() else learned.value.dtype)

        values_of = carried_out(self.needed, {node: known(self.graph.learned[node]) for node in self.needed
                                              if node in self.graph.learned}, like)
        return {name: use.of(values_of[use.node], self.sizes).to(like.dtype) for name, use in self.derived.items()}


def below(graph: Graph, nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """The nodes and all nodes that they depend on, in the graph's order."""
    needed = reached(nodes, lambda node: [] if node.op == "placeholder" or operator_name(
        node) in CONSTANT else node.all_input_nodes)
    return [node for node in (*graph.learned, *graph.given, *graph.nodes) if node in needed]


def carried_out(nodes: Iterable[torch.fx.Node], known: Mapping[torch.fx.Node, torch.Tensor],
                like: torch.Tensor | None) -> dict[torch.fx.Node, Any]:
    """The values of nodes, in their order, by PyTorch; constants are on the device and of the type of ``like``."""
    values = dict(known)
    for node in nodes:
        if node in values:
            continue
        options = dict(node.kwargs)
        if like is not None and "device" in options:
            options["device"] = like.device
        if like is not None and options.get("dtype") in (torch.float32, torch.float16, torch.bfloat16):
            options["dtype"] = like.dtype
        args, options = torch.fx.node.map_arg((node.args, options), lambda n: values[n] if n in values else torch.zeros(
            shape_of(n), dtype=None if like is None else like.dtype))  # of which the shape alone counts
        values[node] = node.target(*args, **options)
    return values


def number(graph: Graph, node: torch.fx.Node) -> float | bool | int | None:
    """The one value that a constant has everywhere; None if it depends on a parameter or buffer, or has several values.

    Raises :class:`CellError` for values that PyTorch draws at random.
    """
    order = below(graph, [node])
    for one in order:
        if torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ()):
            raise CellError("a step that draws at random is no cell")
    learned = {n: graph.learned[n] for n in order if n in graph.learned}
    if any(weights.kind != "constant" for weights in learned.values()):
        return None
    value = carried_out(order, {n: weights.value for n, weights in learned.items()}, None)[node]
    first = value.reshape(-1)[0]
    return first.item() if bool((value == first).all()) else None


def alike_in_rows(graph: Graph, node: torch.fx.Node, axis: int) -> bool:
    """Tells whether a tensor computed of weights is the same along an axis for any weights."""
    order = below(graph, [node])
    generator = torch.Generator().manual_seed(0)
    given = {n: graph.learned[n].value.detach().cpu() for n in order if n in graph.learned}
    given = {n: v + torch.rand(v.shape, generator=generator) if v.is_floating_point() else v for n, v in given.items()}
    value = carried_out(order, given, None)[node]
    return bool((value == value.narrow(axis, 0, 1)).all())


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
