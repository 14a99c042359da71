"""Registers: how many the threads of a warpgroup have, and values that compilers must not look into."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa.functions import call


def register_dealloc(count: int) -> None:
    """Gives back all but so many registers of each thread; all threads of a warpgroup do it (setmaxnreg). sm_90a."""
    T.evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](count))


def register_alloc(count: int) -> None:
    """Waits until so many registers a thread are there, and takes them; all threads of a warpgroup do it. sm_90a."""
    T.evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](count))


def opaque(name: str, value: Expr) -> Expr:
    """An int32 value as a variable that TVM does not look into. What TVM sees through it puts into every index that
    uses it, with 64 bits there, and registers are few."""
    return T.let(name, call("int ecornn_named(int value)", "return value;", value))


def pinned(name: str, value: Expr) -> Expr:
    """An int32 value as a variable as :func:`opaque` makes it, computed here and not later."""
    return T.let(name, call("int ecornn_pinned(int value)", """
        asm volatile("" : "+r"(value));
        return value;""", value))


def float_bits(value: Expr) -> Expr:
    """The bits (uint32) of a float32 value, also of a constant: TVM takes the address of what it reinterprets."""
    return call("unsigned ecornn_bits(float value)", "return *(unsigned*)&value;", value)
