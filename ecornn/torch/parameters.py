"""Weights, states and gradients of torch's layers as those of compiled ones, and back.

A compiled layer has biases, and in place of a projection one that keeps the size: zeros stand where torch has nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from ecornn.errors import ArgumentError
from ecornn.torch.kind import Kind


def parameters(kind: Kind, weights: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The weights of torch's layer as those of a compiled one, by name, with zeros for biases that torch's has not, and
    around a projection.

    Raises :class:`ArgumentError` for a weight without memory.
    """
    with_memory = [w.clone() if w._is_zerotensor() else w for w in weights]  # zeros of autograd's have none
    if kind.projection:  # torch would copy from nowhere
        for name, w in zip(kind.names, with_memory, strict=True):
            if not w.untyped_storage().size() and w.numel():
                raise ArgumentError(f"weights[{name!r}]", "a tensor without memory of its own", "a tensor with memory")
    compiled = {name: w.detach() for name, w in zip(kind.names, with_memory, strict=True)}
    if not kind.bias:
        for name in [n for n in compiled if n.startswith("weight_hh")]:
            zeros = compiled[name].new_zeros(len(compiled[name]))
            compiled |= {name.replace("weight_hh", f"bias_{which}"): zeros for which in ("ih", "hh")}
    if kind.projection:
        room = kind.hidden - kind.projection
        for name, value in compiled.items():
            if name.startswith("weight_hr"):
                compiled[name] = pad(value, (0, 0, 0, room))
            elif name.startswith("weight_hh"):
                compiled[name] = pad(value, (0, room))
            elif _reads_layer(name):
                parts = value.reshape(len(value), -1, kind.projection)  # one for each direction of the layer below
                compiled[name] = pad(parts, (0, room)).reshape(len(value), -1)
    return compiled


def weight_gradients(kind: Kind, compiled: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of torch's weights, from those of the weights that :func:`parameters` makes of them."""
    gradients, width = [], kind.width
    for name in kind.names:
        value = compiled[name]
        if kind.projection and name.startswith("weight_hr"):
            value = value[:width].clone()
        elif kind.projection and name.startswith("weight_hh"):
            value = value[:, :width].contiguous()
        elif kind.projection and _reads_layer(name):
            value = value.reshape(len(value), -1, kind.hidden)[..., :width].reshape(len(value), -1)
        gradients.append(value)
    return gradients


def _reads_layer(name: str) -> bool:
    """Tells whether a weight multiplies y of a layer below."""
    return name.startswith("weight_ih") and not name.endswith(("_l0", "_l0_reverse"))


def widened(kind: Kind, states: Sequence[Any]) -> list[Any]:
    """States, or gradients of them, padded from the projection's width to H."""
    if not states or not kind.projection or states[0] is None:
        return [*states]
    return [pad(states[0], (0, kind.hidden - kind.width)), *states[1:]]


def widened_rows(kind: Kind, y: torch.Tensor) -> torch.Tensor:
    """y (T, B, D*width) padded to (T, B, D*H)."""
    if not kind.projection:
        return y
    rows = y.reshape(*y.shape[:2], -1, kind.width)
    return pad(rows, (0, kind.hidden - kind.width)).reshape(*y.shape[:2], -1)


def narrowed(kind: Kind, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """States without the padding of :func:`widened`."""
    return [states[0][..., :kind.width].contiguous(), *states[1:]] if states and kind.projection else [*states]


def narrowed_rows(kind: Kind, y: torch.Tensor) -> torch.Tensor:
    """y without the padding of :func:`widened_rows`."""
    if not kind.projection:
        return y
    rows = y.reshape(*y.shape[:2], -1, kind.hidden)[..., :kind.width].contiguous()
    return rows.reshape(*y.shape[:2], -1)
