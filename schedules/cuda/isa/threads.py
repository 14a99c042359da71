"""Threads of a block: barriers, shuffles, votes, special registers (PTX: bar, shfl, vote; CUDA C: warp functions)."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa.functions import call, run


def sync_block() -> None:
    """Waits for all threads of the block, and sees what they wrote (``__syncthreads``)."""
    T.evaluate(T.cuda.cta_sync())


def sync_warp() -> None:
    """Waits for all threads of the warp, and sees what they wrote (``__syncwarp``)."""
    T.evaluate(T.cuda.warp_sync())


def sync_active() -> None:
    """Waits for those threads of the warp that come here together, and sees what they wrote."""
    run("void ecornn_meet()", "__syncwarp(__activemask());")


def named_barrier_sync(name: Expr | int, threads: int) -> None:
    """Waits for so many threads at one of the block's 16 barriers, 0 is :func:`sync_block`'s; sees what they wrote."""
    T.evaluate(T.ptx["bar.sync"](_uint32(name), T.uint32(threads)))


def named_barrier_arrive(name: Expr | int, threads: int) -> None:
    """Comes to a barrier, as one of so many threads, and does not wait."""
    T.evaluate(T.ptx["bar.arrive"](_uint32(name), T.uint32(threads)))


def shuffle_xor(value: Expr, lanes: int) -> Expr:
    """The float32 value of the lane whose number differs by the bits of ``lanes``."""
    return _shuffled("exchanged", value, lanes)


def neighbour(value: Expr) -> Expr:
    """The float32 value of the lane beside: 0 and 1, 2 and 3, and so on."""
    return call("float ecornn_neighbour(float value)", "return __shfl_xor_sync(0xffffffffu, value, 1);", value)


def sum_xor(value: Expr, lanes: int) -> Expr:
    """``value`` and that of :func:`shuffle_xor`, added."""
    return _shuffled("across", value, lanes, "value + {}")


def largest_xor(value: Expr, lanes: int) -> Expr:
    """The larger of both."""
    return _shuffled("largest_across", value, lanes, "fmaxf(value, {})")


def uniform(name: str, value: Expr) -> Expr:
    """An int32 value that all threads of a warp have, as a variable of which the compiler can see that."""
    return T.let(name, call("int ecornn_uniform(int value)", "return __shfl_sync(0xffffffffu, value, 0, 32);", value))


def ballot(value: Expr) -> Expr:
    """A word (uint32) with a bit for each lane: whether its ``value`` (int32) is not 0."""
    return call("unsigned ecornn_ballot(int value)", "return __ballot_sync(0xffffffffu, value);", value)


def special_register(name: str) -> Expr:
    """``tid`` or ``ctaid`` along x (int32), as a variable of that name that is read at this place and not before."""
    return T.let(name, call(f"int ecornn_{name}()", f"""
        int value;
        asm volatile("mov.u32 %0, %%{name}.x;" : "=r"(value));
        return value;"""))


def pause(cycles: int) -> None:
    """Lets at least so many cycles of the clock pass."""
    run("void ecornn_pause(unsigned cycles)", """
        unsigned start, now;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(start));
        do { asm volatile("mov.u32 %0, %%clock;" : "=r"(now)); } while (now - start < cycles);""", T.uint32(cycles))


def _uint32(value: Expr | int) -> Expr:
    return T.uint32(value) if isinstance(value, int) else T.cast(value, "uint32")


def _shuffled(name: str, value: Expr, lanes: int, expression: str = "{}") -> Expr:
    """The value of ``expression``, in which {} stands for that of another lane."""
    body = f"return {expression.format('__shfl_xor_sync(0xffffffffu, value, lanes)')};"
    return call(f"float ecornn_{name}(float value, int lanes)", body, value, T.int32(lanes))
