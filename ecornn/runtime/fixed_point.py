"""Weights as multiples of a step for each row, 16 or 21 bits of one, as schedules/cpu/product.py reads them.

    step = max_k |w[k]| / (2**(bits - 1) - 1),  q[k] = round(w[k] / step)

Products are made with words of 32 bits whose upper bits are q, so the packed scale is step * 2**(bits - 32). The lower
bits of such a word belong to other weights. They are part of what is multiplied, and known: q[k] is rounded such that
both together are nearest to w[k].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BITS = {"int16": 16, "int21": 21}


def scales(values: Array, kind: str) -> NDArray[np.float32]:
    """What the lowest bit of a word stands for, (..., K) -> (...): 0 for a row of zeros, NaN where one is in it."""
    bits = BITS[kind]
    return (np.abs(values).max(-1) / ((2 ** (bits - 1) - 1) * 2.0 ** (32 - bits))).astype(np.float32)


def words(values: Array, kind: str, split: tuple[int, ...], order: tuple[int, ...]) -> NDArray[np.uint32]:
    """Packed rows (G, H, K). ``split`` in its ``order`` ends in (lane, k of a group); the result ends in (word, lane).
    What is not finite becomes 0, and its row's scale is not finite."""
    scale = scales(values, kind)[..., None].astype(np.float64)
    with np.errstate(invalid="ignore"):
        wanted = np.nan_to_num(values / np.where(scale > 0, scale, 1), posinf=0, neginf=0)
    groups = np.moveaxis(wanted.reshape(split).transpose(order), -1, 0)
    return np.stack(sixteen(*groups) if kind == "int16" else twenty_one(*groups), -2)


def sixteen(first: Array, second: Array) -> list[NDArray[np.uint32]]:
    """One word of two: the first is shifted up before it is used, the second is not."""
    lower = upper_bits(first, 16) >> np.uint32(16)
    return [upper_bits(second - lower, 16) | lower]


def twenty_one(first: Array, second: Array, third: Array) -> list[NDArray[np.uint32]]:
    """Two words of three: the third, of 22 bits, is put together from the lower 11 of both."""
    split = upper_bits(third, 22)
    lower = split >> np.uint32(21), split >> np.uint32(10) & np.uint32(0x7FF)
    return [upper_bits(value - below, 21) | below for value, below in zip((first, second), lower, strict=True)]


def upper_bits(values: Array, bits: int) -> NDArray[np.uint32]:
    """``values`` rounded to int32 whose lower bits are zero."""
    unit, most = 2 ** (32 - bits), 2 ** (bits - 1)
    return (np.rint(values / unit).clip(-most, most - 1).astype(np.int64) * unit).astype(np.uint32)
