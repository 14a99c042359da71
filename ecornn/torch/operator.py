"""``torch.ops.ecornn.recurrent``: a layer as an operator that PyTorch's tracers, modes and transforms know.

It takes the weights, so that a graph computes with those that it is given, and says what they are weights of by a text,
so that another process understands a graph that was saved.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from ecornn.torch.engine import engine_for
from ecornn.torch.kind import Kind, kind_of


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
    return [*map(x.new_empty, output_shapes(kind_of(kind), x))]


def output_shapes(kind: Kind, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Of y and the states."""
    rows, y = kind.layers * kind.directions, kind.directions * kind.outputs * kind.width
    return [(*x.shape[:2], y), *((rows, x.shape[1], width) for width in kind.widths)]


@recurrent.register_vmap
def _(info: Any, in_dims: Any, x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None,
      weights: list[torch.Tensor], kind: str) -> tuple[list[torch.Tensor], list[int]]:
    """More rows of one call; a call for each of several weights."""
    count, (x_dim, state_dims, lengths_dim, weight_dims, _) = info.batch_size, in_dims
    if any(dim is not None for dim in weight_dims or ()):
        return each_call(recurrent, info, in_dims, (x, state, lengths, weights, kind))

    def rows(tensor: torch.Tensor, dim: int | None, at: int) -> torch.Tensor:
        apart = tensor.unsqueeze(at) if dim is None else tensor.movedim(dim, at)
        return apart.expand(*apart.shape[:at], count, *apart.shape[at + 1:]).flatten(at, at + 1)

    found = recurrent(rows(x, x_dim, 1), [rows(s, d, 1) for s, d in zip(state, state_dims or (), strict=True)],
                      None if lengths is None else rows(lengths, lengths_dim, 0), weights, kind)
    return [t.unflatten(1, (count, -1)) for t in found], [1] * len(found)


def each_call(operator: Any, info: Any, in_dims: Any, args: Any) -> tuple[list[torch.Tensor], list[int]]:
    """A batching rule: a call for each."""
    def one(value: Any, dim: Any, number: int) -> Any:
        if isinstance(value, list):
            return [one(v, d, number) for v, d in zip(value, dim or [None] * len(value), strict=True)]
        return value if dim is None else value.select(dim, number)

    calls = [operator(*(one(v, d, n) for v, d in zip(args, in_dims, strict=True))) for n in range(info.batch_size)]
    made = [torch.stack(parts) for parts in zip(*calls, strict=True)]
    return made, [0] * len(made)


@register_flop_formula(torch.ops.ecornn.recurrent, get_raw=True)
def flops(x: torch.Tensor, state: Any, lengths: torch.Tensor | None, weights: list[torch.Tensor], *_: Any,
          **__: Any) -> int:
    """Of the products: each matrix with each row at each step, of all of T where lengths have no values."""
    steps = prod(x.shape[:2]) if lengths is None or isinstance(lengths, FakeTensor) else int(lengths.sum())
    return sum(2 * steps * w.numel() for w in weights if w.dim() == 2)
