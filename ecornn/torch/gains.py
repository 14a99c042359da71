"""The gains that were measured of layers like a given one, which the report of :func:`ecornn.torch.replace` states.

``gains.json`` has a row for each measured layer: place, cell, data type, pass, hidden size, and how many times as fast
the compiled layer is as PyTorch's, or cuDNN's. ``benchmarks/gains.py`` writes it from ``benchmarks/results``."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec
import torch

NEAR = 1.6  # layers are alike up to this ratio of their hidden sizes
PASSES = "inference", "training"


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A measured layer; ``place``: ``cuda`` or ``cpu``, ``cell``: torch.nn's name of its kind."""

    place: str
    cell: str
    dtype: str
    which: str  # of PASSES
    hidden: int
    ratio: float


@cache
def rows() -> tuple[Row, ...]:
    return msgspec.json.decode((resources.files("ecornn.torch") / "gains.json").read_bytes(), type=tuple[Row, ...])


def expected(module: torch.nn.Module) -> str:
    """Says in words how many times as fast layers like this one are; empty where none was measured."""
    weight: Any = getattr(module, "weight_hh_l0", None) if isinstance(module, torch.nn.RNNBase) else module.weight_hh
    cell: Any = module.mode if isinstance(module, torch.nn.RNNBase) else type(module).TORCH.__name__
    hidden, dtype = int(module.hidden_size), str(weight.dtype).removeprefix("torch.")
    parts = []
    for which in PASSES:
        ratios = sorted(row.ratio for row in rows() if (row.place, row.cell, row.dtype, row.which) == (
            weight.device.type, cell, dtype, which) and 1 / NEAR <= row.hidden / hidden <= NEAR)
        if ratios:
            span = f"{ratios[0]:.1f}" if len(ratios) == 1 else f"{ratios[0]:.1f} to {ratios[-1]:.1f}"
            parts.append(f"{span}x in {which} ({len(ratios)})")
    return f"measured layers like it gain {', '.join(parts)}" if parts else ""
