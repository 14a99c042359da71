"""What random steps of PyTorch are made of: subclasses, functions with a backward of their own, statements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Spike(torch.autograd.Function):
    """A step function whose gradient is another function's."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0.1).to(v.dtype)

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return g / (1 + v.abs()) ** 2


class Clipped(torch.autograd.Function):
    """The same value; its gradient is clipped."""

    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


class Cubed(torch.autograd.Function):
    """With the gradient that it has."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return v * v * v

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return 3 * v * v * g


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, v):
        return 2 * super().forward(v) - 0.1


class NormedLSTM(nn.LSTMCell):
    """A subclass of PyTorch's cell with a forward of its own."""

    def __init__(self, I, H):
        super().__init__(I, H)
        self.norm = nn.LayerNorm(4 * H)
        self.out = nn.LayerNorm(H)

    def forward(self, x, hx):
        h, c = hx
        gates = self.norm(F.linear(x, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh))
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + i.sigmoid() * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(self.out(c)), c


class SlowGRU(nn.GRUCell):
    """The same of a GRU: half of the old state stays."""

    def forward(self, x, hx):
        return 0.5 * hx + 0.5 * super().forward(x, hx)


class LeakyRNN(nn.RNNCell):
    """Of a vanilla cell."""

    def forward(self, input, hx):
        return torch.lerp(hx, super().forward(input, hx), 0.3)


def assigned(g: Any, H: int) -> Any:
    """Gates of which all but the first are assigned to."""
    g = g.clone()
    g[:, H:] = g[:, H:] * 0.5
    return g


def written(both: Any, q: Any, H: int) -> Any:
    """Gates of which the first is written to."""
    both[:, :H].mul_(2).add_(q)
    return both[:, :H] * 0.5


def silent(p: Any) -> Any:
    """Without gradients."""
    with torch.no_grad():
        return p * 2


def hooked(p: Any) -> Any:
    """With a hook that halves its gradient."""
    p = p * 1.0
    if p.requires_grad:
        p.register_hook(lambda g: g * 0.5)
    return p


def counted(m: Any, p: Any) -> Any:
    """Times the number of calls."""
    m.calls = getattr(m, "calls", 0) + 1
    return p * m.calls


def trained(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    """As after some training."""
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.weight.normal_()
        norm.bias.normal_()
    return norm
