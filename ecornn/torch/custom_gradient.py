"""``torch.ops.ecornn.custom_gradient``: a value with derivatives of its own, as ``ecornn.custom_gradient`` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.library.custom_op("ecornn::custom_gradient", mutates_args=())
def custom_gradient_operator(value: torch.Tensor, operands: Sequence[torch.Tensor],
                             derivatives: Sequence[torch.Tensor]) -> torch.Tensor:
    """``value``, whose derivative by each of ``operands`` is that of ``derivatives``; all of shapes that broadcast."""
    return value.clone()


@custom_gradient_operator.register_fake
def _(value: torch.Tensor, operands: Sequence[torch.Tensor], derivatives: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(value)


class _CustomGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, count: int, *both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*both)
        ctx.count = count
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        operands, derivatives = ctx.saved_tensors[:ctx.count], ctx.saved_tensors[ctx.count:]
        through = [(gradient * d).sum_to_size(o.shape) for o, d in zip(operands, derivatives, strict=True)]
        return None, None, *through, *[None] * ctx.count


def custom_gradient(value: torch.Tensor, operands: Sequence[torch.Tensor],
                    derivatives: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the operator does, in PyTorch's autograd; all of shapes that broadcast to that of ``value``."""
    result: torch.Tensor = _CustomGradient.apply(value, len(operands), *operands, *derivatives)
    return result
