"""Packed weights of a module, in NumPy: c_pack.h and pack_weights.cu are held against it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.program import WHOLE, Packing

Array = NDArray[Any]
EXPONENTS = -126, 127  # of float32's normal numbers
BITS = {"int16": 16, "int21": 21}
PIECE = 1 << 15  # elements that are rounded at a time


def pack(packing: Packing, parameters: Mapping[str, Array]) -> Array:
    """The packed buffer of ``packing`` of ``parameters`` by the cell's name, (G, H, K) or (G, H): ``split[order]``.

    Of bfloat16 uint16 with its bits, of int8 uint8 in offset binary; of int16, int21 uint32 with words and lanes last.
    """
    padded = _stack(packing, parameters)
    if packing.dtype == "scale":
        return scales(padded)
    if packing.dtype in ("int16_scale", "int21_scale"):
        return fixed_scales(padded, packing.dtype.removesuffix("_scale"))
    if packing.dtype in BITS:
        return fixed_words(padded, packing.dtype, packing.split, packing.order)
    if packing.dtype == "balance":
        return powers(padded.astype(np.float32, copy=False))
    if packing.dtype in ("balanced", "pairs"):
        padded = balanced(padded)
    if packing.dtype == "pairs":
        return pairs(padded.reshape(packing.split))
    if packing.dtype == "int8":
        padded = integers(padded)
    # Rounded first, so that fewer bytes are moved.
    return np.ascontiguousarray(cast(padded, packing.dtype).reshape(packing.split).transpose(packing.order))


def _stack(packing: Packing, parameters: Mapping[str, Array]) -> Array:
    """The sources on a new first axis, with zeros up to ``pad``: gates in te shape, rows of a matrix, or zeros."""
    gates = [None if not name else parameters[name].reshape(-1, parameters[name].shape[-1]) if gate == WHOLE else
             parameters[name][gate] for name, gate in packing.sources]
    padded = np.zeros(packing.pad, np.result_type(np.float32, *(g.dtype for g in gates if g is not None)))
    for index, gate in enumerate(gates):
        if gate is not None:
            padded[index][tuple(slice(0, size) for size in gate.shape)] = gate
    return padded


def cast(values: Array, dtype: str) -> Array:
    if dtype == "int8":
        return values
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    if dtype == "tf32":
        return tf32(values)
    with np.errstate(over="ignore"):
        return values.astype("float32" if dtype == "balanced" else dtype, copy=False)


def tf32(values: Array) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(values, np.float32)
    rounded = (single.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isnan(single), single, rounded)


def scales(values: Array) -> NDArray[np.float32]:
    """What one step of an 8-bit integer stands for, in each row; 0 for a row of zeros, NaN where one is in it."""
    return (np.abs(values).max(-1) / 127).astype(np.float32)


def integers(values: Array) -> NDArray[np.uint8]:
    """Rows as multiples of their scales, -127 to 127, with 128 added."""
    scale = scales(values)[..., None]
    with np.errstate(invalid="ignore"):
        whole = np.rint(values / np.where(scale > 0, scale, 1))
    return (np.nan_to_num(whole, posinf=127, neginf=-127).clip(-127, 127) + 128).astype(np.uint8)


def powers(values: Array) -> NDArray[np.float32]:
    """The power of two at or below the mean magnitude of each row's normal numbers; 1 where that is 0 or not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.abs(values).sum(-1, dtype=np.float64) / np.maximum(np.count_nonzero(values, -1), 1)
    usable = (mean > 0) & np.isfinite(mean)
    return np.exp2(np.clip(np.floor(np.log2(np.where(usable, mean, 1))), *EXPONENTS)).astype(np.float32)


def balanced(values: Array) -> NDArray[np.float32]:
    single = values.astype(np.float32, copy=False)
    return single / powers(single)[..., None]


def pairs(values: Array) -> NDArray[np.float32]:
    """Minus the sum of products of sections 0 and 1, (..., sections, k), every other one subtracted."""
    products = values[..., 0, :].astype(np.float64) * values[..., 1, :]
    return (products[..., 1::2].sum(-1) - products[..., ::2].sum(-1)).astype(np.float32)


def bfloat16_bits(values: Array) -> NDArray[np.uint16]:
    """The bits of ``values`` as bfloat16: rounded to float32 first, as PyTorch does; NaN stays NaN."""
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(values, np.float32)
    flat, out = single.reshape(-1), np.empty(single.size, np.uint16)
    for first in range(0, flat.size, PIECE):  # a piece at a time, which stays in the cache
        piece = flat[first:first + PIECE]
        bits = piece.view(np.uint32)
        # Half of the last kept place, less one where that place is even; a carry rightly enters the exponent.
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += bits
        rounded += np.uint32(0x7FFF)
        rounded >>= np.uint32(16)
        nan = np.isnan(piece)
        if nan.any():
            rounded[nan] = np.uint32(0x7FC0)
        out[first:first + PIECE] = rounded
    return out.reshape(single.shape)


def fixed_scales(values: Array, kind: str) -> NDArray[np.float32]:
    """What the lowest bit of a word stands for, (..., K) -> (...): 0 for a row of zeros, NaN where one is in it."""
    bits = BITS[kind]
    return (np.abs(values).max(-1) / ((2 ** (bits - 1) - 1) * 2.0 ** (32 - bits))).astype(np.float32)


def fixed_words(values: Array, kind: str, split: tuple[int, ...], order: tuple[int, ...]) -> NDArray[np.uint32]:
    """Packed rows (G, H, K); the result ends in (word, lane). What is not finite becomes 0, not so its scale."""
    scale = fixed_scales(values, kind)[..., None].astype(np.float64)
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
    unit, most = 2 ** (32 - bits), 2 ** (bits - 1)
    return (np.rint(values / unit).clip(-most, most - 1).astype(np.int64) * unit).astype(np.uint32)
