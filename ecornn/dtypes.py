"""The data types that a layer may have, a row each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataType:
    """One data type of x, y, states and weights."""

    code: int  # DLPack's DLDataTypeCode
    bits: int
    devices: tuple[str, ...]  # the kinds that serve it
    tolerance: float  # the relative error ||y - reference|| / ||reference|| that an output may have
    gradients: float | None = None  # the same of the recurrence of an adjoint; None: no such recurrence is tuned


# Tolerances. float32: a few roundings of a long sum. float16 and bfloat16 (unit roundoff 5e-4 and 4e-3): about twice
# the error of cuDNN on an LSTM of these types, 2.9e-4 and 2.3e-3. Of an adjoint's recurrence: twice what the roundings
# of its factors, operands and outputs make of an LSTM's or a GRU's, 4.6e-4 and 3.9e-3 in 8 steps; gradients are
# differences of sums.
_FLOAT, _BFLOAT = 2, 4
TABLE = {"float32": DataType(_FLOAT, 32, ("cuda", "llvm"), 1e-5, 2e-5),
         "float16": DataType(_FLOAT, 16, ("cuda", "llvm"), 6e-4, 1e-3),
         "bfloat16": DataType(_BFLOAT, 16, ("cuda", "llvm"), 5e-3, 8e-3),
         "float64": DataType(_FLOAT, 64, ("llvm",), 1e-13)}
DTYPES = tuple(TABLE)
SERVED = {kind: tuple(name for name, row in TABLE.items() if kind in row.devices) for kind in ("cuda", "llvm")}
ITEMSIZE = {name: row.bits // 8 for name, row in TABLE.items()} | {"int8": 1}
DLPACK = {name: (row.code, row.bits) for name, row in TABLE.items()}
