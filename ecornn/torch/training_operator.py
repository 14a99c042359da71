"""``torch.ops.ecornn.recurrent_forward`` and ``recurrent_backward``: a layer with gradients, as PyTorch's autograd,
tracers and transforms know it.

What the backward pass reads is saved as tensors: PyTorch sees weights that were changed in between, a graph that is
used twice, and what hooks do with saved tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ecornn.errors import DerivativeError
from ecornn.torch import training
from ecornn.torch.engine import engine_for
from ecornn.torch.kind import kind_of
from ecornn.torch.operator import each_call, flops, output_shapes

Tensors = list[torch.Tensor]


@torch.library.custom_op("ecornn::recurrent_forward", mutates_args=())
def recurrent_forward(x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None,
                      weights: list[torch.Tensor], kind: str) -> list[torch.Tensor]:
    """As ``recurrent``, and last what ``recurrent_backward`` reads besides these, bytes (N,)."""
    return training.forward(engine_for(kind_of(kind), weights), weights, x, state, lengths)


@torch.library.custom_op("ecornn::recurrent_backward", mutates_args=())
def recurrent_backward(x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None,
                       weights: list[torch.Tensor], kind: str, y: torch.Tensor, kept: torch.Tensor,
                       gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of x, ``state`` and ``weights``, from those of y and the last states."""
    engine = engine_for(kind_of(kind), weights)
    return training.backward(engine, weights, x, state, lengths, y, kept, gradients)


@recurrent_forward.register_fake
def _(x: torch.Tensor, state: Tensors, lengths: torch.Tensor | None, weights: Tensors, kind: str) -> Tensors:
    found = kind_of(kind)
    kept = x.new_empty(training.kept_bytes(found, x, lengths), dtype=torch.uint8)
    return [*map(x.new_empty, output_shapes(found, x)), kept]


@recurrent_backward.register_fake
def _(x: torch.Tensor, state: Tensors, lengths: torch.Tensor | None, weights: Tensors, kind: str, y: torch.Tensor,
      kept: torch.Tensor, gradients: Tensors) -> Tensors:
    return [of.new_empty(of.shape) for of in (x, *state, *weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    x, state, lengths, weights, ctx.kind = inputs
    ctx.states = len(state)
    ctx.save_for_backward(x, output[0], output[-1], lengths, *state, *weights)


def _backward(ctx: Any, gradients: Tensors) -> tuple[Any, ...]:
    x, y, kept, lengths, *rest = ctx.saved_tensors
    state, weights = rest[:ctx.states], rest[ctx.states:]
    found = recurrent_backward(x, state, lengths, weights, ctx.kind, y, kept, [*gradients[:-1]])
    needs = ctx.needs_input_grad

    def asked(values: Tensors, needed: Any) -> list[torch.Tensor | None]:
        return [value if need else None for value, need in zip(values, needed, strict=True)]

    before, after = found[1:1 + len(state)], found[1 + len(state):]
    return found[0] if needs[0] else None, asked(before, needs[1] or ()), None, asked(after, needs[3]), None


def refuse_again(*_: Any) -> None:
    """In place of gradients of gradients."""
    raise DerivativeError("compiled layers have no gradients of gradients: where these are asked for, call "
                          "ecornn.torch.restore(model) first, which makes its layers torch.nn's again; on a GPU also "
                          "torch.backends.cudnn.flags(enabled=False)")


recurrent_forward.register_autograd(_backward, setup_context=_save)
recurrent_backward.register_autograd(refuse_again)


@recurrent_forward.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> tuple[Tensors, list[int]]:
    return each_call(recurrent_forward, info, in_dims, args)


@recurrent_backward.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> tuple[Tensors, list[int]]:
    return each_call(recurrent_backward, info, in_dims, args)


register_flop_formula(torch.ops.ecornn.recurrent_forward, get_raw=True)(flops)


@register_flop_formula(torch.ops.ecornn.recurrent_backward, get_raw=True)
def _(*args: Any, **kwargs: Any) -> int:
    """As PyTorch counts them: of the gradients of both factors of each product."""
    return 2 * flops(*args, **kwargs)
