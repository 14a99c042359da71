"""How tests compare what layers in PyTorch give: tensors, tuples of them, packed sequences."""

from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

FORWARD, BACKWARD = 1e-5, 2e-5  # relative, of float32 against float64


def flat(result: Any) -> list[Any]:
    if isinstance(result, PackedSequence):
        return [result.data]
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in flat(part)]


def double(value: Any) -> Any:
    if isinstance(value, tuple) and not isinstance(value, PackedSequence):
        return tuple(double(v) for v in value)
    return None if value is None else value.double()


def error(found: Any, wanted: Any) -> float:
    value = float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return value if np.isfinite(value) else float("inf")


def agree(ours: Any, theirs: Any, limit: float = 1e-6) -> None:
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        one, other = one.detach(), other.detach()
        assert one.shape == other.shape and error(one, other) < limit


def close(found: Any, wanted: Any, limit: float = FORWARD) -> None:
    agree(found, [t.double() for t in flat(wanted)], limit)


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(flat(found), flat(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
