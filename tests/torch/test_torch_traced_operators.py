"""Operators of steps that are written in PyTorch: each as a cell computes it, against PyTorch's in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ecornn
import ecornn.torch
from ecornn.torch import traced_step
from ecornn.torch.traced_graph import operator_name
from ecornn.torch.traced_operators import POINTWISE

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {  # of x and h, both in (0.05, 0.95)
    "add": lambda x, h: torch.add(x, h, alpha=2), "sub": lambda x, h: torch.subtract(1 - h, x, alpha=3),
    "mul": lambda x, h: 3.0 * h.multiply(x), "div": lambda x, h: torch.div(h, x) + 1 / (x + h),
    "div, rounded": lambda x, h: torch.div(9 * h, x, rounding_mode="floor") + (9 * h - 9 * x) // 1,
    "div, truncated": lambda x, h: torch.divide(9 * h - 9 * x, 2, rounding_mode="trunc") + h, "neg": lambda x, h: -h,
    "pow": lambda x, h: (x - h) ** 3 + h ** 0.5 + x ** -2 + h ** 1.7 + 2 ** h + x ** h,
    "square": lambda x, h: h.square(),
    "reciprocal": lambda x, h: torch.reciprocal(h), "lerp": lambda x, h: torch.lerp(x, h, 0.3) + torch.lerp(x, h, x),
    "maximum": lambda x, h: torch.maximum(x, h), "minimum": lambda x, h: torch.minimum(x, h),
    "where": lambda x, h: torch.where(x < h, x, 2.0) + h.where(x > 0.5, x), "lt": lambda x, h: h * (x < 0.5),
    "le": lambda x, h: torch.where(x <= h, 1.0, h), "gt": lambda x, h: (x > h).float() * h,
    "ge": lambda x, h: torch.where(x >= h, 1.0, h), "eq": lambda x, h: torch.where(h.floor() == 0, x, h),
    "ne": lambda x, h: torch.where((x - h).sign() != 1, x, h), "and": lambda x, h: torch.where(
        (x > 0.3) & (h > 0.3) | torch.logical_and(x > 0.8, h < 0.1), x, h),
    "or": lambda x, h: torch.where((x > 0.7) | (h > 0.7) | torch.logical_or(x < 0.1, h < 0.1), x, h),
    "not": lambda x, h: torch.where(~(x > 0.7), x, h) + h.masked_fill((h > 0.4).logical_not(), 0.2),
    "xor": lambda x, h: torch.where((x > 0.5) ^ (h > 0.5), x, h) * torch.logical_xor(x > 0.3, h > 0.2).to(h.dtype),
    **{n: (lambda x, h, n=n: getattr(torch, n)(h - 0.5)) for n in (
        "sigmoid", "tanh", "exp", "abs", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "atanh",
        "erf", "erfc", "expm1", "floor", "ceil", "relu", "sign")},
    **{n: (lambda x, h, n=n: getattr(torch, n)(9 * h - 4)) for n in ("trunc", "round", "frac", "sinc")},
    **{n: (lambda x, h, n=n: getattr(torch, n)(h)) for n in (
        "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "logit")},
    "acosh": lambda x, h: torch.acosh(1 + h), "silu": lambda x, h: F.silu(h),
    "logsigmoid": lambda x, h: F.logsigmoid(8 * x - 4) + h, "softsign": lambda x, h: F.softsign(x - h),
    "hardsigmoid": lambda x, h: F.hardsigmoid(9 * x - 4 - h), "hardswish": lambda x, h: F.hardswish(9 * x - 4 - h),
    "clamp": lambda x, h: (x - h).clamp(-0.2, 0.1) + torch.clip(h, min=0.4) + h.clamp_max(
        0.3) + h.clamp(x, 0 * x + 0.9),
    "softplus": lambda x, h: F.softplus(40 * x - 20 * h, beta=2) + F.softplus(9 * h, threshold=1),
    "mish": lambda x, h: F.mish(9 * x - 4 * h), "elu": lambda x, h: F.elu(x - h, alpha=0.7) + F.celu(x - h, 0.6),
    "selu": lambda x, h: F.selu(x - h), "leakyrelu": lambda x, h: F.leaky_relu(x - h, 0.2),
    "hardtanh": lambda x, h: F.hardtanh(3 * x - 3 * h) + F.relu6(9 * x - h),
    "gelu": lambda x, h: F.gelu(4 * x - 3 * h) + F.gelu(4 * x - 3 * h, approximate="tanh"),
    "shrink": lambda x, h: F.softshrink(x - h, 0.1) + F.hardshrink(x - h, 0.1) + F.tanhshrink(h),
    "threshold": lambda x, h: F.threshold(h, 0.4, 0.1),
    "remainder": lambda x, h: torch.remainder(x - h, 0.3) + (x - h) % x, "fmod": lambda x, h: torch.fmod(x - h, 0.3),
    "atan2": lambda x, h: torch.atan2(x - h, h), "hypot": lambda x, h: torch.hypot(x, h),
    "addcmul": lambda x, h: torch.addcmul(x, h, h, value=0.5) + torch.addcdiv(h, x, h, value=-2),
    "same": lambda x, h: (h * x).contiguous().clone() + torch.zeros_like(h) + h.new_ones(h.shape),
    "softmax": lambda x, h: h.softmax(-1) + F.log_softmax(h - x, dim=1) + F.softmin(h, dim=1),
    "logsumexp": lambda x, h: h - h.logsumexp(-1, keepdim=True), "sum": lambda x, h: h * h.sum(1, keepdim=True),
    "mean": lambda x, h: h - h.mean(-1, keepdim=True), "amax": lambda x, h: h / h.amax(1, True) + h.amin(1)[:, None],
    "var": lambda x, h: h * h.var(1, keepdim=True) + h * h.var(1, unbiased=False, keepdim=True),
    "std": lambda x, h: h / h.std(-1, keepdim=True), "norm": lambda x, h: F.normalize(h) + h / h.norm(1, -1, True),
    "layer_norm": lambda x, h: F.layer_norm(h, (16,)) + F.rms_norm(h - x, (16,), eps=1e-5),
    "group_norm": lambda x, h: F.group_norm(h, 4), "glu": lambda x, h: F.glu(torch.cat([h, x - h], axis=1)),
    "einsum": lambda x, h: torch.einsum("bi,bi->b", h, h - x)[:, None] * h,
    "stack": lambda x, h: torch.stack([h, x, h * x], 1).amax(1),
    "gates": lambda x, h: (torch.stack([h, x - h], 0).softmax(0) * torch.stack([x, h])).sum(0),
    "views": lambda x, h: torch.cat([h, h * x], -1).view(-1, 2, 16).transpose(0, 1)[1].unsqueeze(1).squeeze(1),
    "expand": lambda x, h: h * h.mean(1, keepdim=True).expand(-1, 16) + h.sum(1, True).expand_as(h),
}


def cell_of_operators(names: Sequence[str]) -> ecornn.Cell:
    """Of a step that has a state for each."""
    def step(x, *states):
        return tuple(OPERATORS[name](x, h) for name, h in zip(names, states, strict=True))

    return ecornn.torch.cell(step, input_size=16, hidden_size=16, states=[f"h{n}" for n in range(len(names))])


def test_operators_are_pytorchs(monkeypatch: pytest.MonkeyPatch):
    tried: set[str] = set()
    monkeypatch.setattr(traced_step, "operator_name", lambda n: tried.add(operator_name(n)) or operator_name(n))
    generator, every = torch.Generator().manual_seed(3), list(OPERATORS)
    for first in range(0, len(every), 12):
        names = every[first:first + 12]
        x, *states = (0.05 + 0.9 * torch.rand(1, 4, 16, generator=generator, dtype=torch.float64)
                      for _ in range(1 + len(names)))
        cell = cell_of_operators(names)
        weights = ecornn.derive(cell, {}, 16, 16)
        _, last = ecornn.reference(cell, x.numpy(), weights, [h[0].numpy() for h in states])
        # numbers of a step are float32: a part in 1.7e7 of values near 1, also where terms cancel
        for name, found, h in zip(names, last, states, strict=True):
            np.testing.assert_allclose(found, OPERATORS[name](x[0], h[0]), rtol=1e-6, atol=1e-7, err_msg=name)
    assert POINTWISE.keys() <= tried | {"rsub", "sgn"}  # spellings of other versions of PyTorch
