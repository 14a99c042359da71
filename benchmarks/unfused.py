"""Layers as frameworks run them without a fused operator: products and pointwise kernels one by one, in PyTorch.

With ``per_gate`` a product for each gate and operand; else all gates of an operand in one product, which is what
MXNet's cells do (`LSTMCell`, `GRUCell`, `RNNCell`: two fully connected layers a step, slices, activations, elementwise
operations). Slices are views here, which cost nothing, and y is written by the last operation of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import linear

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def unfused(cell: str, x: torch.Tensor, p: Mapping[str, torch.Tensor], y: torch.Tensor, *, per_gate: bool) -> None:
    """x (T, B, I) to y (T, B, H), initial state zero; weights by PyTorch's names."""
    count, hidden = GATES[cell], y.shape[2]
    h, c = (torch.zeros(x.shape[1], hidden, device=x.device, dtype=x.dtype) for _ in range(2))
    parts = {name: w.chunk(count) for name, w in p.items()}

    def products(operand: torch.Tensor, kind: str) -> tuple[torch.Tensor, ...]:
        weight, bias = f"weight_{kind}_l0", f"bias_{kind}_l0"
        if per_gate:
            return tuple(linear(operand, w, b) for w, b in zip(parts[weight], parts[bias], strict=True))
        return linear(operand, p[weight], p[bias]).chunk(count, 1)

    for step, out in zip(x, y, strict=True):
        given, kept = products(step, "ih"), products(h, "hh")
        if cell == "lstm":
            i, f, n, o = (a + b for a, b in zip(given, kept, strict=True))
            c = f.sigmoid() * c + i.sigmoid() * n.tanh()
            h = torch.mul(o.sigmoid(), c.tanh(), out=out)
        elif cell == "gru":
            reset, update = ((a + b).sigmoid() for a, b in zip(given[:2], kept[:2], strict=True))
            new = (given[2] + reset * kept[2]).tanh()
            h = torch.add((1 - update) * new, update * h, out=out)
        else:
            total = given[0] + kept[0]
            h = torch.tanh(total, out=out) if cell == "rnn_tanh" else torch.clamp(total, min=0, out=out)
