"""Cells of tests/published as a loop over steps in PyTorch: their NumPy formulas, carried out on PyTorch's tensors.

What these have one gate after the other (`published.base.affine`) is one product of x and one of h for all gates here,
as a user of PyTorch writes it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._numpy as torch_numpy

from ecornn.interpreter import output_numbers
from ecornn.tune.oracle import weights_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from published import CELLS, FAMILIES, base, heads
from published.base import Published

__all__ = ["CELLS", "Published", "drawn", "heads", "in_torch", "loop"]


def affine(x: Any, h: Any, p: Mapping[str, Any]) -> list[Any]:
    """W_g x + R_g h + b_g of every g, of one product of x and one of h."""
    W, R = (p[name].reshape(-1, p[name].shape[2]) for name in ("W", "R"))
    found, hidden = x @ W.T + h @ R.T + p["b"].reshape(-1), p["b"].shape[1]
    return [found[:, n:n + hidden] for n in range(0, found.shape[1], hidden)]


@contextlib.contextmanager
def in_torch() -> Iterator[None]:
    """Within it formulas have PyTorch's operations in place of NumPy's."""
    with contextlib.ExitStack() as stack:
        for module in (base, *FAMILIES):
            for name, value in (("np", torch_numpy), ("affine", affine)):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, value))
        yield


def loop(cell: Published, x: torch.Tensor, states: Sequence[torch.Tensor],
         parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """y (T, B, H) of x (T, B, I), states (B, H) and parameters in te shape, all of one type and on one device."""
    p = {name: torch_numpy.ndarray(value) for name, value in parameters.items()}
    now, (output,), y = [torch_numpy.ndarray(s) for s in states], output_numbers(cell), []
    with in_torch():
        for row in x:
            made = cell.numpy(torch_numpy.ndarray(row), dict(zip(cell.states, now, strict=True)), p)
            made = [torch_numpy.ndarray(v.tensor.to(x.dtype)) for v in made]
            now = made[:len(now)]
            y.append(made[output].tensor)
    return torch.stack(y)


def drawn(cell: Published, batch: int, input: int, hidden: int, kind: torch.dtype,
          device: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """First states (B, H), and parameters in te shape as the cell's ``sample`` draws them."""
    import numpy as np

    rng = np.random.default_rng(0)
    parameters = {name: torch.from_numpy(value).to(device, kind)
                  for name, value in weights_of(cell, input, hidden, rng).items()}
    states = [rng.uniform(0 if name in cell.nonnegative else -1, 1, (batch, hidden)) for name in cell.states]
    return [torch.from_numpy(s).to(device, kind) for s in states], parameters
