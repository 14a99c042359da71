"""Derivatives of layers forward, and of their gradients, by layers of :class:`~ecornn.cells.tangent.Tangent` cells.

A tangent layer computes a layer's results, and their tangents: how they change if x, states and weights change in a
direction. The cotangents v of a backward pass, given as those of the tangents, give the gradients of <v, tangents>.
These are the gradients of <gradients, direction>, which a second backward pass asks for. They are also the change of
the gradients in that direction, since second derivatives are symmetric, but for those that a cell says itself. Both
are computed by the passes of layers, so that they have derivatives themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ecornn.cells import get
from ecornn.errors import CellError, DerivativeError, ScheduleError
from ecornn.torch.compiling import KEPT
from ecornn.torch.kind import Kind, keeping, kind_of, name_of

if TYPE_CHECKING:
    from ecornn.cells.tangent import Tangent

Tensors = Sequence[torch.Tensor]


class Passes(NamedTuple):
    """The passes of a layer, which have derivatives themselves: ``forward(kind, states, lengths, x, *state, *weights)``
    returns y, the last states and the kept bytes; ``backward(kind, states, lengths, x, y, kept, *gradients, *state,
    *weights)`` the gradients of x, ``state`` and ``weights``. ``states``: the number of first states, 0 for zeros."""

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]


class Point(NamedTuple):
    """All that a layer reads, or a direction in which that changes."""

    x: torch.Tensor  # (T, B, I)
    state: Tensors  # each (L*D, B, H); none: zeros
    weights: Tensors  # as torch's ``_flat_weights``

    @classmethod
    def of(cls, tensors: Tensors, states: int) -> Point:
        x, *rest = tensors
        return cls(x, rest[:states], rest[states:])


class _Ran(NamedTuple):
    """One tangent layer of a stack after its forward pass."""

    rows: torch.Tensor
    state: list[torch.Tensor]
    weights: list[torch.Tensor]
    results: Tensors


def tangents(text: str, passes: Passes, lengths: Any, at: Point, direction: Point) -> list[torch.Tensor]:
    """How y (T, B, D*H) and the last states of a layer of this kind change in a direction. Raises
    :class:`~ecornn.errors.DerivativeError` where no layer computes it."""
    return _Stack(text, passes, lengths, at, direction).tangents


def second(text: str, passes: Passes, lengths: Any, at: Point, direction: Point,
           cotangents: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The derivatives of <gradients, direction>, of the gradients of x, states and weights that belong to the
    ``cotangents`` of y and the last states: by the cotangents, which are :func:`tangents`, and by x, states and
    weights. Raises as it does."""
    stack = _Stack(text, passes, lengths, at, direction)
    return stack.tangents, stack.gradients([torch.zeros_like(c) for c in cotangents], cotangents)


def changed(text: str, passes: Passes, lengths: Any, at: Point, direction: Point, cotangents: Tensors,
            change: Tensors) -> list[torch.Tensor]:
    """The change of these gradients in a direction, in which the cotangents ``change``, too. Raises as the others, and
    for cells that say derivatives themselves, whose second ones need not be symmetric."""
    stack = _Stack(text, passes, lengths, at, direction)
    if any(cell.says_derivatives for cell, _ in stack.layers):
        raise DerivativeError(f"{_operator(stack.kind)}: forward derivatives of gradients are not computed for a cell "
                              "that says its own derivatives, as by ecornn.spike(): differentiate the gradients "
                              "backward, as torch.autograd.grad(..., create_graph=True) and torch.func.grad do")
    return stack.gradients(change, cotangents)


def _operator(kind: Kind) -> str:
    return f"torch.ops.ecornn.recurrent of cell {get(kind.cell).name!r}"


@contextmanager
def _refusing(kind: Kind) -> Iterator[None]:
    """Within it errors of cells and schedules are those of a derivative that no layer computes."""
    try:
        yield
    except (CellError, ScheduleError) as error:
        raise DerivativeError(
            f"{_operator(kind)}: no compiled layer computes these forward derivatives or gradients of gradients. In "
            "place of layers of torch.nn, call ecornn.torch.restore(model) first, and on a GPU set torch.backends."
            f"cudnn.flags(enabled=False); write other layers as a loop over steps in PyTorch. {error}") from error


@lru_cache(maxsize=256)
def _layers(kind: Kind) -> list[tuple[Tangent, Kind]]:
    """The tangent cell of each layer, and its kind."""
    from ecornn.cells.tangent import Tangent

    base, layers = get(kind.cell), []
    for layer in range(kind.layers):
        cell = Tangent(base, kind.directions * kind.hidden if layer else kind.input, kind.hidden)
        layers.append((cell, replace(kind, mode="cell", input=2 * cell.input, layers=1, bias=1, projection=0,
                                     name=name_of(cell))))
    return layers


class _Stack:
    def __init__(self, text: str, passes: Passes, lengths: Any, at: Point, direction: Point) -> None:
        self.kind, self.passes, self.lengths, self.base = kind_of(text), passes, lengths, get(kind_of(text).cell)
        kind = self.kind
        with _refusing(kind):
            self.layers = _layers(kind)
            weights, turned = (kind.completed(dict(zip(kind.names, p.weights, strict=True))) for p in (at, direction))
            states, moved = ([kind.widened(s) if n == 0 else s for n, s in enumerate(p.state)] for p in (at, direction))
            x, dx, self.ran, last = at.x, direction.x, list[_Ran](), []
            for layer, (cell, own) in enumerate(self.layers):
                rows = self._rows(cell, x, dx)
                own_rows = slice(layer * kind.directions, (layer + 1) * kind.directions)
                state = [s[own_rows] for s in (*states, *moved)]
                packed = self._packed(cell, layer, weights, turned)
                results = passes.forward(keeping(own.text, KEPT[x.device.type]), len(state), lengths, rows, *state,
                                         *packed)
                self.ran.append(_Ran(rows, state, packed, results))
                x, dx = results[0].unflatten(-1, (kind.directions, 2, -1)).unbind(-2)
                x, dx = x.flatten(-2), dx.flatten(-2)
                last.append(results[1 + len(kind.widths):-1])
        after = [torch.cat(parts) for parts in zip(*last, strict=True)]
        self.tangents = [kind.narrowed(dx), *(s if n else kind.narrowed(s) for n, s in enumerate(after))]

    def gradients(self, values: Tensors, tangents: Tensors) -> list[torch.Tensor]:
        """The gradients of x, states and weights, from those of the results and of their tangents."""
        kind, directions = self.kind, self.kind.directions
        (dy, *d_states), (dt, *t_states) = ([kind.widened(g) if n < 2 else g for n, g in enumerate(those)]
                                            for those in (values, tangents))
        weights: dict[str, torch.Tensor] = {}
        states: list[Tensors] = []
        for layer in range(kind.layers - 1, -1, -1):
            (cell, own), ran = self.layers[layer], self.ran[layer]
            own_rows = slice(layer * directions, (layer + 1) * directions)
            given = torch.stack([g.unflatten(-1, (directions, -1)) for g in (dy, dt)], -2).flatten(-3)
            with _refusing(kind):
                found = self.passes.backward(
                    keeping(own.text, KEPT[given.device.type]), len(ran.state), self.lengths, ran.rows, ran.results[0],
                    ran.results[-1], given, *(g[own_rows] for g in (*d_states, *t_states)), *ran.state, *ran.weights)
            rows, rest = found[0], found[1:]
            states.append(rest[:len(ran.state) // 2])
            weights |= self._unpacked(cell, layer, rest[len(ran.state):], ran.weights)
            dy, dt = self._of_rows(cell, rows)
        before = [torch.cat(parts) for parts in zip(*states[::-1], strict=True)]
        before = [s if n else kind.narrowed(s) for n, s in enumerate(before)]
        return [dy, *before, *kind.gradients(weights)]

    # -- rows of x, and weights -----------------------------------------------------------------
    def _rows(self, cell: Tangent, x: torch.Tensor, dx: torch.Tensor) -> torch.Tensor:
        parts = []
        for whole in (x, dx):
            own, inputs = whole[..., :cell.input], whole[..., cell.input:]
            parts += [own, [inputs, own] if cell.reads_x else [inputs]]
        x, values, dx, changes = parts
        return torch.cat([x, dx, *values, *changes], -1)

    def _of_rows(self, cell: Tangent, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of x and its change, from that of the rows that are made of them."""
        size = cell.input
        behind = (rows.shape[-1] - 2 * size) // 2
        found = []
        for n in (0, 1):
            own, rest = rows[..., n * size:(n + 1) * size], rows[..., 2 * size + n * behind:][..., :behind]
            if cell.reads_x:
                own, rest = own + rest[..., -size:], rest[..., :-size]
            found.append(torch.cat([own, rest], -1))
        return found[0], found[1]

    def _each(self, cell: Tangent, layer: int) -> list[tuple[str, str]]:
        """The parameters of a layer as they are passed: a name of the cell's, and the whole one behind the packing."""
        return [(name, self.base.parameter_name(name, layer, second)) for second in (False, True)[:self.kind.directions]
                for name in cell.own]

    def _packed(self, cell: Tangent, layer: int, weights: dict[str, torch.Tensor],
                turned: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        packed = []
        for name, whole in self._each(cell, layer):
            w, dw = weights[whole], turned[whole]
            if cell.x_name(name) in cell.shapes:
                gates, gate_rows, width = cell.own[name]
                w_x, dw_x = (t.reshape(gates, gate_rows, width) for t in (w, dw))
                packed.append(torch.cat([torch.cat([w_x, torch.zeros_like(w_x)], -1), torch.cat([dw_x, w_x], -1)])
                              .flatten(0, 1))
            if name in cell.shapes:
                packed += [w, dw]
        return packed

    def _unpacked(self, cell: Tangent, layer: int, gradients: Tensors, packed: Tensors) -> dict[str, torch.Tensor]:
        """The gradients of weights by name, from those of the weights that are made of them."""
        left, found = list(gradients), {}
        for name, whole in self._each(cell, layer):
            parts = []
            if cell.x_name(name) in cell.shapes:
                gates, gate_rows, width = cell.own[name]
                values, changes = left.pop(0).reshape(2, gates, gate_rows, 2 * width)
                flat = values[..., :width] + changes[..., width:]
                parts.append(flat.flatten(0, 1))
            if name in cell.shapes:
                parts.append(left.pop(0))
                left.pop(0)
            shape = cell.own[name]
            found[whole] = sum(parts[1:], parts[0]) if parts else packed[0].new_zeros(shape[0] * shape[1], *shape[2:])
        return found
