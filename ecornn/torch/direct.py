"""A layer with gradients past PyTorch's dispatcher, for autograd alone, if nobody else watches: the dispatcher takes
longer to call an operator than the layer takes to be launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ecornn.boundary import public
from ecornn.torch import training
from ecornn.torch.engine import Engine
from ecornn.torch.operator import output_shapes, recurrent_backward


def forward(engine: Engine, x: torch.Tensor, state: Sequence[torch.Tensor], lengths: torch.Tensor | None,
            weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """y and the states of ``recurrent_forward`` by this engine."""
    return [*RecurrentForward.apply(engine, len(state), lengths, x, *state, *weights)]


class RecurrentForward(torch.autograd.Function):
    """``recurrent_forward`` of a flat list of tensors, which saves for the backward pass what the operator saves."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, states: int, lengths: Any, x: torch.Tensor,
                *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state, weights = rest[:states], rest[states:]
        *outputs, kept = training.forward(engine, weights, x, state, lengths)
        ctx.engine, ctx.states = engine, states
        ctx.save_for_backward(x, outputs[0], kept, lengths, *rest)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @public
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        x, y, kept, lengths, *rest = ctx.saved_tensors
        state, weights, engine = rest[:ctx.states], rest[ctx.states:], ctx.engine
        needed = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():  # gradients of gradients may follow: the operator refuses them
            shapes = output_shapes(engine.kind, x)
            given = [x.new_zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=True)]
            computed = recurrent_backward(x, state, lengths, weights, engine.kind.text, y, kept, given)
        else:
            wanted = any(needed[1:1 + ctx.states])
            computed = each(
                lambda given: training.backward(engine, weights, x, state, lengths, y, kept, given, wanted), gradients)
        return None, None, None, *(value if need else None for value, need in zip(computed, needed, strict=True))


def is_batched(gradient: torch.Tensor | None) -> bool:
    """Tells whether a gradient is several as one."""
    return gradient is not None and bool(torch._C._functorch.is_legacy_batchedtensor(gradient))


def each(call: Callable[[Sequence[Any]], list[Any]], gradients: Sequence[Any]) -> list[Any]:
    """The results of ``call`` on gradients, one by one and stacked if autograd gives several as one
    (``is_grads_batched``)."""
    batched = [*map(is_batched, gradients)]
    if not any(batched):
        return call(gradients)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    rows = [torch._remove_batch_dim(g, level, 1, 0) if b else g for g, b in zip(gradients, batched, strict=True)]
    count = len(rows[batched.index(True)])
    results = [call([row[n] if b else row for row, b in zip(rows, batched, strict=True)]) for n in range(count)]
    return [None if one[0] is None else torch._add_batch_dim(torch.stack(one), 0, level)
            for one in zip(*results, strict=True)]
