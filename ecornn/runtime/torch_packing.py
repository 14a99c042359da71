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
    if packing.dtype == "scale":
        return scales(padded)
    # Rounded first, so that fewer bytes are moved.
    kinds = {"tf32": tf32, "int8": integers}
    rounded = kinds[packing.dtype](padded) if packing.dtype in kinds else padded.to(getattr(torch, packing.dtype))
    return rounded.reshape(packing.split).permute(packing.order).contiguous()


def tf32(values: Any) -> Any:
    """As ``packing.tf32``."""
    import torch

    bits = values.view(torch.int32)
    return torch.where(values.isnan(), values, (bits + 0x1000 & ~0x1FFF).view(torch.float32))


def scales(values: Any) -> Any:
    """As ``packing.scales``."""
    # by a tensor: a number would be multiplied by its reciprocal on a GPU, which rounds another way
    return values.abs().amax(-1) / values.new_tensor(127)


def integers(values: Any) -> Any:
    """As ``packing.integers``."""
    import torch

    scale = scales(values)[..., None]
    whole = (values / torch.where(scale > 0, scale, 1)).round()
    return (whole.nan_to_num(posinf=127, neginf=-127).clamp(-127, 127) + 128).to(torch.uint8)
