"""The same operators under transforms of torch.func, which know ``torch.autograd.Function`` but no formula that an
operator registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ecornn.torch.kind import kind_of
from ecornn.torch.training_operator import recurrent_backward, recurrent_forward, refuse_again


def forward(x: torch.Tensor, state: Sequence[torch.Tensor], lengths: torch.Tensor | None,
            weights: Sequence[torch.Tensor], kind: str) -> list[torch.Tensor]:
    """As ``recurrent_forward``."""
    if torch._C._functorch.maybe_current_level() is None:
        return recurrent_forward(x, [*state], lengths, [*weights], kind)
    return [*Forward.apply(kind, len(state), lengths, x, *state, *weights)]


class Forward(torch.autograd.Function):
    """``recurrent_forward`` of a flat list of tensors."""

    @staticmethod
    def forward(kind: str, states: int, lengths: Any, x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(recurrent_forward(x, [*rest[:states]], lengths, [*rest[states:]], kind))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.kind, ctx.states, lengths, x, *rest = inputs
        ctx.save_for_backward(lengths, x, output[0], output[-1], *rest)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        lengths, x, y, kept, *rest = ctx.saved_tensors
        return None, None, None, *Backward.apply(ctx.kind, ctx.states, lengths, x, y, kept, *gradients[:-1], *rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        return _each(Forward, info, in_dims, args)


class Backward(torch.autograd.Function):
    """``recurrent_backward`` of a flat list of tensors: gradients of y and each state, the first states, weights."""

    @staticmethod
    def forward(kind: str, states: int, lengths: Any, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor,
                *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = 1 + len(kind_of(kind).widths)
        gradients, rest = rest[:given], rest[given:]
        return tuple(recurrent_backward(x, [*rest[:states]], lengths, [*rest[states:]], kind, y, kept, [*gradients]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        refuse_again()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        return _each(Backward, info, in_dims, args)


def _each(function: Any, info: Any, in_dims: Any, args: Any) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """A batching rule: a call for each."""
    calls = [function.apply(*(a if d is None else a.select(d, n) for a, d in zip(args, in_dims, strict=True)))
             for n in range(info.batch_size)]
    made = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    return made, (0,) * len(made)
