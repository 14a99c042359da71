"""8-bit integers as operands of 16-bit products: a word of four becomes two words of two, exactly.

The integers are in offset binary, q + 128. A byte u below a constant one is a number of 16 bits that is linear in u,

    float16   0x64u = 1024 + u        so that one subtraction makes q of it
    bfloat16  0x43u = 128 + u         where u < 128
                      256 + 2 (u - 128)   beyond, where the byte's upper bit is one of the exponent

and with t = 0x43u - 256, which is q or 2 q, q = t - max(t, 0) / 2. Both need one permutation of bytes for two integers,
which has half the rate of other instructions, and besides one or three of what the permutation leaves idle.

The compiler must not compute these ahead of the loop over steps, in which integers that stay in registers would then
take twice as many: the permutation is volatile.
"""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa.functions import call

UNPACKED = {"float16": 2, "bfloat16": 4}  # instructions for a word of two
_LOWER, _UPPER = 0x4140, 0x4342  # which bytes of the word, and of the constant, make the lower and upper two

def unpacked(word: Expr, upper: bool, dtype: str) -> Expr:
    """The lower or upper two of a word's four integers, as a word of that 16-bit type."""
    which = T.uint32(_UPPER if upper else _LOWER)
    if dtype == "float16":
        name, body = "f16", """
            unsigned above, r;
            asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(above) : "r"(word), "r"(0x64646464u), "r"(bytes));
            asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(above), "r"(0x64806480u));
            return r;"""
    else:
        name, body = "bf16", """
            unsigned above, t, positive, r;
            asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(above) : "r"(word), "r"(0x43434343u), "r"(bytes));
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(t) : "r"(above), "r"(0x3F803F80u), "r"(0xC380C380u));
            asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(positive) : "r"(above), "r"(0x3F803F80u), "r"(0xC380C380u));
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(positive), "r"(0xBF00BF00u), "r"(t));
            return r;"""
    return T.let("integers", call(f"unsigned ecornn_integers_{name}(unsigned word, unsigned bytes)", body, word, which))
