"""A layer with gradients for autograd alone, where nobody else watches: PyTorch's dispatcher takes longer to call an
operator than the layer takes to be launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ecornn.boundary import public
from ecornn.torch import training
from ecornn.torch.engine import Engine
from ecornn.torch.operator import recurrent_backward


def forward(engine: Engine, x: torch.Tensor, state: Sequence[torch.Tensor], lengths: torch.Tensor | None,
            weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As ``recurrent_forward`` by this engine, without what is kept."""
    return [*RecurrentForward.apply(engine, len(state), lengths, x, *state, *weights)]


class RecurrentForward(torch.autograd.Function):
    """``recurrent_forward`` of a flat list of tensors. What the backward pass reads is saved as tensors, as the
    operator saves it."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, states: int, lengths: Any, x: torch.Tensor,
                *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state, weights = rest[:states], rest[states:]
        *found, kept = training.forward(engine, weights, x, state, lengths)
        ctx.engine, ctx.states = engine, states
        ctx.save_for_backward(x, found[0], kept, lengths, *rest)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @public
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        x, y, kept, lengths, *rest = ctx.saved_tensors
        state, weights, engine = rest[:ctx.states], rest[ctx.states:], ctx.engine
        needed = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():  # which gradients of gradients may follow: the operator refuses them
            kind = engine.kind
            shapes = [y.shape, *((kind.layers * kind.directions, x.shape[1], width) for width in kind.widths)]
            given = [x.new_zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=True)]
            found = recurrent_backward(x, state, lengths, weights, kind.text, y, kept, given)
        else:
            wanted = any(needed[1:1 + ctx.states])
            found = each(lambda given: training.backward(engine, weights, x, state, lengths, y, kept, given, wanted),
                         gradients)
        return None, None, None, *(value if need else None for value, need in zip(found, needed, strict=True))


def is_batched(gradient: torch.Tensor | None) -> bool:
    """Whether it is several as one."""
    return gradient is not None and bool(torch._C._functorch.is_legacy_batchedtensor(gradient))


def each(call: Callable[[Sequence[Any]], list[Any]], gradients: Sequence[Any]) -> list[Any]:
    """``call`` of gradients; where autograd gives several as one (``is_grads_batched``), of each of these."""
    batched = [*map(is_batched, gradients)]
    if not any(batched):
        return call(gradients)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    rows = [torch._remove_batch_dim(g, level, 1, 0) if b else g for g, b in zip(gradients, batched, strict=True)]
    count = len(rows[batched.index(True)])
    found = [call([row[n] if b else row for row, b in zip(rows, batched, strict=True)]) for n in range(count)]
    return [None if some[0] is None else torch._add_batch_dim(torch.stack(some), 0, level)
            for some in zip(*found, strict=True)]
