"""What the tests of PyTorch's own intents share: a layer of ours and torch.nn's in float64 on the same weights, calls
and gradients of both. Sizes are those of ``test_torch_layers.py``: the files share what is compiled for them."""

from __future__ import annotations

from typing import Any

import torch
from test_torch_layers import B, H, I, T, agree, double, error, flat
from test_torch_layers import pair as evaluated_pair

NAMES = ("LSTM", "GRU", "RNN")
FORWARD, BACKWARD = 1e-5, 2e-5  # relative, of float32 against float64
__all__ = ["BACKWARD", "FORWARD", "NAMES", "B", "H", "I", "T", "agree", "alike", "close", "double", "error", "flat",
           "gradients", "pair", "primed", "states"]


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """torch.nn's layer in float64 and ours, in training mode."""
    return tuple(layer.train() for layer in evaluated_pair(name, **options))


def primed(layer: Any, trains: bool = False) -> Any:
    """The layer, called once for T and B: calls of fewer rows and other lengths use what was compiled for these."""
    shape = (B, T, I) if layer.batch_first else (T, B, I)
    with torch.set_grad_enabled(trains):
        layer(torch.zeros(shape))
    return layer


def states(name: str, parts: int, batch: int = B, width: int = H) -> Any:
    """First states (parts, batch, H), or without the axis for none; ``width`` is h's."""
    made = [torch.randn(*((parts, batch) if batch else (parts,)), w) for w in (width, H)[:1 + (name == "LSTM")]]
    return tuple(made) if len(made) > 1 else made[0]


def close(found: Any, wanted: Any, limit: float = FORWARD) -> None:
    """Every tensor of a result, by relative error."""
    agree([t.detach() for t in flat(found)], [t.detach().double() for t in flat(wanted)], limit)


def gradients(layer: Any, x: Any, hx: Any = None, directions: Any = None) -> tuple[Any, list[torch.Tensor]]:
    """What a layer gives, and the gradients, of a sum of that weighted by ``directions``, of x, states and weights."""
    kind = next(layer.parameters()).dtype
    leaves = [t.detach().to(kind).requires_grad_() for t in (x, *(() if hx is None else flat(hx)))]
    given = None if hx is None else tuple(leaves[1:]) if isinstance(hx, tuple) else leaves[1]
    found = layer(leaves[0], given)
    parts = flat(found)
    if directions is None:
        directions = [torch.linspace(-1, 2, t.numel()).view(t.shape) for t in parts]
    loss = sum((t * d.to(kind)).sum() for t, d in zip(parts, directions, strict=True))
    return found, list(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))


def alike(theirs: Any, ours: Any, x: Any, hx: Any = None) -> None:
    """Values and all gradients of ours are torch.nn's."""
    wanted, exact = gradients(theirs, x, hx)
    found, made = gradients(ours, x, hx)
    close(found, wanted)
    close(made, exact, BACKWARD)
