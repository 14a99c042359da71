"""Packed sequences with gradients, on a GPU laid in columns as those without are: ``packed.py`` says when and where.

Gradients take the same way back: what is gathered from packed rows to columns, and from columns to packed rows, has a
gather for its gradient, too, since each packed row has one place. Places of no sequence have some row's values, which
the module does not read.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ecornn.errors import ScheduleError
from ecornn.runtime.columns import Columns
from ecornn.torch import training
from ecornn.torch.engine import Engine, engine_of, weights_of
from ecornn.torch.kind import text_of
from ecornn.torch.layer_by_layer import layers_of, wanted
from ecornn.torch.packed import laid, width_of
from ecornn.torch.training_operator import refuse_again


def run(module: Any, packed: PackedSequence, state: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Packed y and the states (L*D, S, H) from ``state`` or zeros, rows in packed order; None where columns gain
    nothing, or no schedule serves them."""
    sizes, engine, data = packed.batch_sizes.numpy().tobytes(), engine_of(module), packed.data
    weights, width, together = weights_of(module), _width(data, sizes), 0
    if width is None or (data.dtype, width, "training") in engine.refused:
        return None
    parts = [(engine, weights, state)]
    if wanted(module, weights):
        parts = [(engine.part(number, text_of(module, number)), [*its], first)
                 for number, (its, first) in enumerate(layers_of(module, weights, state))]
    try:  # x is not laid before it is known which columns may share a sequence
        like = data[:1].detach().expand(len(packed.batch_sizes), width, -1)
        for part, its, _ in parts:
            with torch.no_grad(), part.training(its, like, "sequences", again=True) as layer:
                together = gcd(together, layer.together)
    except ScheduleError:  # weights that do not fit on the chip
        engine.refused.add((data.dtype, width, "training"))
        return None
    found = laid(sizes, width, together)
    assert found.columns is not None
    there, back, _ = found.index_on(data)
    y, after = _Gather.apply(data, there, back).view(*found.shape, -1), []
    for part, its, first in parts:
        y, *states = _Layer.apply(part, found.columns, len(first), y, *first, *its)
        after.append(states)
    last = after[0] if len(parts) == 1 else [torch.cat(states) for states in zip(*after, strict=True)]
    return [_Gather.apply(y.flatten(0, 1), back, there), *last]


def _width(data: torch.Tensor, sizes: bytes) -> int | None:
    """Columns to lay them in, if any."""
    return width_of(sizes) if data.is_cuda else None


class _Gather(torch.autograd.Function):
    """Rows of ``data`` by ``index``, of which ``inverse`` is the inverse, but for what nobody reads."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return data.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        index, inverse = ctx.saved_tensors
        return _Gather.apply(gradients[0], inverse, index), None, None


class _Layer(torch.autograd.Function):
    """y (T, C, D*H) and the states after it, by number of the sequence, of x in ``columns``; ``tensors``: as many
    first states as ``count`` says, and the weights."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, columns: Columns, count: int, x: torch.Tensor,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, *after, kept = training.forward(engine, tensors[count:], x, tensors[:count], columns)
        ctx.engine, ctx.columns, ctx.count = engine, columns, count
        ctx.save_for_backward(x, y, kept, *tensors)
        return y, *after

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = _Backward.apply(ctx.engine, ctx.columns, ctx.count, len(gradients), *gradients, *ctx.saved_tensors)
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *(g if need else None for g, need in zip(found, needed, strict=True))


class _Backward(torch.autograd.Function):
    """Its gradients, which have none."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, columns: Columns, count: int, outputs: int,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients, (x, y, kept, *rest) = tensors[:outputs], tensors[outputs:]
        return tuple(training.backward(engine, rest[count:], x, rest[:count], columns, y, kept, gradients))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        refuse_again()
