"""One step of a layer on a CPU, past all that longer calls need: a cell is called between PyTorch's operations, and
takes about as long as one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ecornn.program import RUN
from ecornn.torch.bound import BoundLayer
from ecornn.torch.engine import Engine

ALIGNMENT = 16  # bytes, of what modules read
TENSORS = "x", "y", "state_in", "state_out"


def run(engine: Engine, weights: Sequence[torch.Tensor], x: torch.Tensor,
        state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The states after x (B, I), or (I,), from ``state``, or from zeros if that is empty; nobody asks for gradients,
    and the arguments are checked."""
    key, layers = (x.shape, torch.get_num_threads()), engine.inference
    step: Step | None = engine.steps.get(key)
    if step is None or not layers.take_this(step.one, weights):
        one = layers.take(weights, x, (1, rows_of(x)))
        if step is None or step.one is not one:
            step = engine.steps[key] = Step(one, x.shape)
    try:
        return step(x, state)
    finally:
        layers.give(step.one)


class Step:
    """A step of x of this shape by a layer that is bound to weights.

    Attributes
    ----------
    one : the layer
    """

    def __init__(self, one: BoundLayer, shape: torch.Size) -> None:
        self.one, layer, rows = one, one.layer, math.prod(shape[:-1])
        hidden, count = layer.manifest.workload.hidden, len(layer.manifest.states)
        self._call, self._count = layer.addressed(RUN, 1, rows, TENSORS), count
        self._shape, self._zeros = (*shape[:-1], hidden), [layer.zero_state(rows)[1]] * count

    def __call__(self, x: torch.Tensor, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The states after x."""
        rows = [*map(ready, (x, *state))]
        at = [row.data_ptr() for row in rows]
        after = [torch.empty(self._shape) for _ in range(self._count)]
        to = [row.data_ptr() for row in after]
        # y is where the output state is
        self._call((at[0], to[0], *(at[1:] or self._zeros), *to))
        return after


def rows_of(x: torch.Tensor) -> int:
    """B of x (B, I), or (I,)."""
    return x.shape[0] if x.dim() == 2 else 1


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that a module can read."""
    if tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT and not tensor.is_neg():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
