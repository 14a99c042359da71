"""Steps in PyTorch, and what such are made of: subclasses, functions with a backward of their own, statements."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0.1).to(v.dtype)

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return g / (1 + v.abs()) ** 2


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return v * v * v

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return 3 * v * v * g


class Doubled(nn.Linear):
    def forward(self, v):
        return 2 * super().forward(v) - 0.1


class NormedLSTM(nn.LSTMCell):
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
    def forward(self, x, hx):
        return 0.5 * hx + 0.5 * super().forward(x, hx)


class LeakyRNN(nn.RNNCell):
    def forward(self, input, hx):
        return torch.lerp(hx, super().forward(input, hx), 0.3)


def assigned(g: Any, H: int) -> Any:
    g = g.clone()
    g[:, H:] = g[:, H:] * 0.5
    return g


def written(both: Any, q: Any, H: int) -> Any:
    both[:, :H].mul_(2).add_(q)
    return both[:, :H] * 0.5


def silent(p: Any) -> Any:
    with torch.no_grad():
        return p * 2


def hooked(p: Any) -> Any:
    p = p * 1.0
    if p.requires_grad:
        p.register_hook(lambda g: g * 0.5)
    return p


def counted(m: Any, p: Any) -> Any:
    m.calls = getattr(m, "calls", 0) + 1
    return p * m.calls


def trained(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


# -- whole steps ----------------------------------------------------------------------------------
class MGU(nn.Module):
    def __init__(self, I: int, H: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = I, H
        self.x, self.f, self.n = nn.Linear(I, 2 * H), nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)

    def forward(self, x, h):
        fx, nx = self.x(x).chunk(2, dim=-1)
        f = torch.sigmoid(fx + self.f(h))
        return torch.lerp(h, torch.tanh(nx + self.n(f * h)), f)


class Norms(nn.Module):
    """LayerNorm over all gates and over one, slices, split, parameters of its own, a tuple of states, y before them."""

    def __init__(self, I: int, H: int) -> None:
        super().__init__()
        self.hidden_size, self.size = H, H
        self.lin, self.rec = nn.Linear(I, 4 * H, bias=False), nn.Linear(H, 4 * H)
        self.norm, self.cell_norm = nn.LayerNorm(4 * H), nn.LayerNorm(H, eps=1e-3)
        self.decay = nn.Parameter(torch.rand(H))
        self.out = nn.Parameter(torch.randn(H, H) / H ** 0.5)

    def forward(self, x, state):
        h, c = state
        gates = self.norm(self.lin(x) + self.rec(h))
        i, f = torch.split(gates[:, :2 * self.size], self.size, 1)
        g, o = gates[:, 2 * self.size:3 * self.size], gates[..., 3 * self.size:]
        c = f.sigmoid() * c * torch.exp(-F.softplus(self.decay)) + F.silu(i) * g.tanh()
        h = torch.sigmoid(o) * torch.tanh(self.cell_norm(c))
        return F.relu(h @ self.out), (h, c)


class Joint(nn.Module):
    def __init__(self, I: int, H: int) -> None:
        super().__init__()
        self.gates = nn.Sequential(nn.Linear(I + H, 2 * H), nn.Identity(), nn.Hardtanh(-0.9, 0.8))
        self.inner = nn.GRUCell(I, H)

    def forward(self, x, h, c):
        a, b = self.gates(torch.cat([x, h], dim=1)).chunk(2, 1)
        kept = torch.where((a > 0.1) & (b < 0.5), a ** 2, b.clamp(min=-0.5) / 2 - 1.5 * torch.abs(c))
        c = torch.minimum(kept, 1 - c) * 0.5
        return self.inner(x, c), c


class Bottleneck(nn.Module):
    """Products through three values, of low rank, normalized between, side by side with a state; a transposed one."""

    def __init__(self, I: int, H: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = I, H
        self.down, self.up = nn.Linear(I + H, 3), nn.Linear(3 + H, 2 * H, bias=False)
        self.norm, self.scale = nn.LayerNorm(3), nn.Parameter(torch.rand(3))
        self.out = nn.Parameter(torch.randn(3, H) / 3 ** 0.5)

    def forward(self, x, h):
        low = torch.tanh(self.down(torch.cat([x, h], 1))) * torch.exp(self.scale)
        new, gate = self.up(torch.cat([self.norm(low), h], -1)).chunk(2, 1)
        return torch.lerp(h, torch.tanh(new + low @ self.out), torch.sigmoid(gate))
