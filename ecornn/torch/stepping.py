"""One step of a layer on a CPU, past all that longer calls need: a cell is called between PyTorch's operations, and
takes about as long as one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ecornn.program import RUN
from ecornn.runtime.memory import HostMemory
from ecornn.torch.engine import Engine
from ecornn.torch.snapshot import Snapshot

ALIGNMENT = 16  # bytes, of what modules read
TENSORS = "x", "y", "state_in", "state_out"


def run(engine: Engine, weights: Sequence[torch.Tensor], x: torch.Tensor,
        state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The states after x (B, I), or (I,), from ``state``, or from zeros if that is empty; nobody asks for gradients,
    and the arguments are checked."""
    key = x.shape, torch.get_num_threads()
    step = engine.steps.get(key)
    if step is None or not step.holds(weights):
        if step is not None:
            engine.steps.clear()  # they keep layers of weights that were
        step = engine.steps[key] = Step(engine, weights, x)
    return step(x, state)


class Step:
    """A step of so many rows as x has, by a layer that is bound to weights."""

    def __init__(self, engine: Engine, weights: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        self.holds = Snapshot(weights).holds
        batch = rows_of(x)
        layer = engine.layer(weights, x, batch, 1)
        self._call = layer.addressed(RUN, 1, batch, TENSORS)
        self._layer, self._count = layer, len(engine.kind.widths)
        self._shape = *x.shape[:-1], engine.kind.hidden
        self._zeros = zeros(4 * batch * engine.kind.hidden)

    def __call__(self, x: torch.Tensor, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The states after x."""
        rows = [*map(ready, (x, *state))]
        at = [row.data_ptr() for row in rows]
        after = [torch.empty(self._shape) for _ in range(self._count)]
        to = [row.data_ptr() for row in after]
        # y is where the output state is
        self._call((at[0], to[0], *(at[1:] or [self._zeros.pointer] * self._count), *to))
        return after


def rows_of(x: torch.Tensor) -> int:
    """B of x (B, I), or (I,)."""
    return x.shape[0] if x.dim() == 2 else 1


def zeros(nbytes: int) -> HostMemory:
    """So many of them."""
    made = HostMemory(nbytes)
    made.bytes[:] = 0
    return made


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that a module can read."""
    if tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT and not tensor.is_neg():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
