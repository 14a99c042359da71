"""Packs weights that lie on the GPU there; what :mod:`ecornn.runtime.packing` does, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecornn.program import Packing
from ecornn.runtime.packing import consistent, fitting


def pack_tensors(packing: Packing, parameters: Mapping[str, Any]) -> Any:
    """As ``pack``, of tensors of one device to a tensor there, on its current stream."""
    import torch

    consistent(packing)
    gates = fitting(packing, parameters)
    like = next(iter(parameters.values()))
    padded = torch.zeros(packing.pad, dtype=torch.float32, device=like.device)
    for part, gate in zip(padded, gates, strict=False):
        if gate is not None:
            part[tuple(slice(0, size) for size in gate.shape)] = gate
    # Rounded first, so that fewer bytes are moved.
    rounded = tf32(padded) if packing.dtype == "tf32" else padded.to(getattr(torch, packing.dtype))
    return rounded.reshape(packing.split).permute(packing.order).contiguous()


def tf32(values: Any) -> Any:
    """As ``packing.tf32``."""
    import torch

    bits = values.view(torch.int32)
    return torch.where(values.isnan(), values, (bits + 0x1000 & ~0x1FFF).view(torch.float32))
