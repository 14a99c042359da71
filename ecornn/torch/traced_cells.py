"""PyTorch's own cells inside a traced step, or as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ecornn.errors import CellError
from ecornn.torch.traced_operators import POINTWISE
from ecornn.torch.traced_values import Matrix, combined, cut


def apply(walk: Any, module: Any, prefix: str, x: Any, states: Iterable[Any]) -> tuple[Any, ...]:
    """The new states of a ``torch.nn.LSTMCell``, ``GRUCell`` or ``RNNCell`` whose parameters are ``prefix``'s; ``walk``
    makes products and vectors."""
    h, *more = states
    sides = []
    for side, operand in (("ih", x), ("hh", h)):
        weight = Matrix(f"{prefix}weight_{side}", tuple(getattr(module, f"weight_{side}").shape))
        bias = walk.vector(f"{prefix}bias_{side}", weight.shape[0]) if module.bias else None
        sides.append(walk.linear(f"{side}", operand, weight, bias))
    gx, gh = sides

    def of(function: Any, *operands: Any) -> Any:
        return combined(function, operands, walk.like, "gate")

    def gates(n: int) -> tuple[Any, Any]:
        return cut(gx, n, 1), cut(gh, n, 1)

    sigmoid, tanh, relu = (POINTWISE[k] for k in ("sigmoid", "tanh", "relu"))
    if isinstance(module, torch.nn.LSTMCell):
        i, f, o = (of(lambda a, b: sigmoid(a + b), *gates(n)) for n in (0, 1, 3))
        g = of(lambda a, b: tanh(a + b), *gates(2))
        (c,) = more
        new = of(lambda f, c, i, g: f * c + i * g, f, c, i, g)
        return of(lambda o, c: o * tanh(c), o, new), new
    if isinstance(module, torch.nn.GRUCell):
        r, z = (of(lambda a, b: sigmoid(a + b), *gates(n)) for n in (0, 1))
        n = of(lambda a, r, b: tanh(a + r * b), cut(gx, 2, 1), r, cut(gh, 2, 1))
        return (of(lambda h, z, n: n + z * (h - n), h, z, n),)
    if isinstance(module, torch.nn.RNNCell):
        activation = relu if module.nonlinearity == "relu" else tanh
        return (of(lambda a, b: activation(a + b), gx, gh),)
    raise CellError(f"a {type(module).__name__}; there are LSTMCell, GRUCell and RNNCell")
