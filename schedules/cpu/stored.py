"""How weights lie in memory, and how a register of weights is made from it.

A lane of a vector holds some weights that are neighbours in k, as words of 32 bits, or 64 in a float64 layer:

    float32   one weight; float64 alike
    bfloat16  a pair; each is the upper half of a float32
    int16     a pair of integers
    int21     three integers in two words: the upper 21 bits of each are one, the lower 11 of both are the third
    int8      four integers, for an instruction that multiplies them with four of the operand

int16 and int21 are multiples of a step, one for each unit, which the product is multiplied with in the end: the
largest magnitude of a unit's weights is 2**15 or 2**20 steps, less one. So a weight is off by half a step at most; the
operand stays float32. What makes int21 as fast as its bytes are few is that two of three weights are a word as it
lies there: what the lower 11 bits add to it was taken from it before it was rounded (ecornn/runtime/fixed_point.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecornn.schedules.builder import Expr
from ecornn.schedules.cpu.emit import Emitter

UPPER = 0xFFFF0000  # of a pair
THIRD = 0x001FFC00  # bits 10 to 20 of a third weight


@dataclass(frozen=True)
class Stored:
    """``group``: weights of a lane; ``words`` they take; ``element``: how code sees a word; ``scaled``: whether the
    product has to be multiplied with the units' steps; ``word``: its bytes."""

    group: int
    words: int
    element: str
    scaled: bool = False
    word: int = 4

    @property
    def bytes(self) -> float:
        """Bytes of one weight."""
        return self.word * self.words / self.group

    def size(self, k: int, columns: int) -> int:
        """Words of ``columns`` columns of ``k`` weights."""
        return -(-k // self.group) * self.words * columns


STORED = {
    "float64": Stored(1, 1, "float64", word=8),
    "float32": Stored(1, 1, "float32"),
    "bfloat16": Stored(2, 1, "uint32"),
    "int16": Stored(2, 1, "uint32", scaled=True),
    "int21": Stored(3, 2, "uint32", scaled=True),
    "int8": Stored(4, 1, "int32", scaled=True),
}


def widen(e: Emitter, words: Sequence[Expr], place: int, kind: str) -> Expr:
    """The weights number ``place`` of each lane, as float32; float64, float32 and int8 as they are."""
    if kind in ("float64", "float32", "int8"):
        return words[0]
    if kind == "bfloat16":
        bits = words[0] & e.splat(UPPER, "uint32") if place else words[0] << e.splat(16, "uint32")
        return e.let("weight", e.tirx.reinterpret(e.vector_type, bits))
    if kind == "int16":
        bits = words[0] if place else words[0] << e.splat(16, "uint32")
    elif place < 2:
        bits = words[place]
    else:
        bits = words[0] << e.splat(21, "uint32") | (words[1] << e.splat(10, "uint32") & e.splat(THIRD, "uint32"))
    return e.let("weight", e.cast("float32", e.tirx.reinterpret(e.lanes_of("int32"), bits)))
