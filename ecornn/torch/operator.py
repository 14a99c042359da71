"""``torch.ops.ecornn.recurrent``: a layer as an operator that PyTorch's tracers, modes and transforms know.

It takes the weights, so that a graph computes with those that it is given, and says what they are weights of by a text,
so that another process understands a graph that was saved.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ecornn.torch.engine import engine_for
from ecornn.torch.kind import kind_of


@torch.library.custom_op("ecornn::recurrent", mutates_args=())
def recurrent(x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None, weights: list[torch.Tensor],
              kind: str) -> list[torch.Tensor]:
    """y (T, B, D*H) and the states (L*D, B, H) of a layer on x (T, B, I), from ``state``, or from zeros if that is
    empty. ``weights`` are in the order of torch's ``_flat_weights``, ``kind`` as :func:`ecornn.torch.kind.text_of` has
    it; ``lengths`` (B,): each row's steps, all of T without."""
    return engine_for(kind_of(kind), weights).run(weights, x, state, lengths)


@recurrent.register_fake
def _(x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None, weights: list[torch.Tensor],
      kind: str) -> list[torch.Tensor]:
    found = kind_of(kind)
    rows = found.layers * found.directions
    return [x.new_empty((*x.shape[:2], found.directions * found.width)),
            *(x.new_empty((rows, x.shape[1], width)) for width in found.widths)]


@recurrent.register_vmap
def _(info: Any, in_dims: Any, x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None,
      weights: list[torch.Tensor], kind: str) -> tuple[list[torch.Tensor], list[int]]:
    """More rows of one call; a call for each of several weights."""
    count, (x_dim, state_dims, lengths_dim, weight_dims, _) = info.batch_size, in_dims

    def rows(tensor: torch.Tensor, dim: int | None, at: int) -> torch.Tensor:
        apart = tensor.unsqueeze(at) if dim is None else tensor.movedim(dim, at)
        return apart.expand(*apart.shape[:at], count, *apart.shape[at + 1:]).flatten(at, at + 1)

    def one(tensor: torch.Tensor, dim: int | None, number: int) -> torch.Tensor:
        return tensor if dim is None else tensor.select(dim, number)

    def each(tensors: list[torch.Tensor], dims: Any, number: int) -> list[torch.Tensor]:
        return [one(t, dim, number) for t, dim in zip(tensors, dims or [None] * len(tensors), strict=True)]

    if all(dim is None for dim in weight_dims or ()):
        found = recurrent(rows(x, x_dim, 1), [rows(s, d, 1) for s, d in zip(state, state_dims or (), strict=True)],
                          None if lengths is None else rows(lengths, lengths_dim, 0), weights, kind)
        return [t.unflatten(1, (count, -1)) for t in found], [1] * len(found)
    calls = [recurrent(one(x, x_dim, n), each(state, state_dims, n),
                       None if lengths is None else one(lengths, lengths_dim, n), each(weights, weight_dims, n), kind)
             for n in range(count)]
    made = [torch.stack(parts) for parts in zip(*calls, strict=True)]
    return made, [0] * len(made)


@register_flop_formula(torch.ops.ecornn.recurrent)
def flops(x: Any, state: Any, lengths: Any, weights: Any, kind: str, *_: Any, **__: Any) -> int:
    """Of the products, from shapes: each matrix with each row at each step."""
    return sum(2 * prod(x[:2]) * prod(shape) for shape in weights if len(shape) == 2)
