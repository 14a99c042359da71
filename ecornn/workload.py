"""What is compiled: one recurrent layer at one size."""

from __future__ import annotations

import msgspec

from ecornn.errors import ArgumentError, DTypeError

DTYPES = ("float32", "float16", "bfloat16")
WEIGHTS = ("float32", "float16", "bfloat16", "int8")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer: cell, sizes and data type.

    Attributes
    ----------
    cell : name of a registered cell, or ``name@digest`` of a user's cell
    hidden, input, batch : H, I and the largest B the module must serve, each >= 1
    seq : the T to tune for; compiled modules serve any T >= 1
    dtype : ``float32``, ``float16`` or ``bfloat16``; of x, y, the states and, unless ``weights`` says
        otherwise, the weights
    weights : None, or what matrices of weights are rounded to: ``bfloat16``, or ``int8`` by the largest
        magnitude of each row, with products of integers (CPU)
    """

    cell: str
    hidden: int
    input: int
    batch: int = 1
    seq: int = 100
    dtype: str = "float32"
    weights: str | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "input", "batch", "seq"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
                raise ArgumentError(name, value, "an integer from 1 to 1048576")
        if self.dtype not in DTYPES:
            raise DTypeError("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.weights is not None and (self.weights not in WEIGHTS or self.weights == self.dtype):
            raise DTypeError("weights", self.weights, f"None or one of {', '.join(WEIGHTS)}, other than dtype")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return (f"{self.cell} T={self.seq} B={self.batch} I={self.input} "
                f"H={self.hidden} {self.dtype}" + (f", {self.weights} weights" if self.weights else ""))


def rounded(weights: str | None, dtype: str) -> str | None:
    """The field ``weights`` of a workload, from a user's wish: None where it names the layer's own type."""
    return None if weights == dtype else weights
