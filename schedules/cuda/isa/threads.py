"""Threads of a block: barriers, shuffles, votes, special registers (PTX: bar, shfl, vote; CUDA C: warp functions)."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa import functions

_SHUFFLED = """
__device__ __forceinline__ float {name}(float value{parameter}) {{
  return {before}__shfl_xor_sync(0xffffffffu, value, {lanes}){after};
}}"""
_MEET = """
__device__ __forceinline__ void ecornn_meet() {
  __syncwarp(__activemask());
}"""
_BALLOT = """
__device__ __forceinline__ unsigned ecornn_ballot(int value) {
  return __ballot_sync(0xffffffffu, value);
}"""
_UNIFORM = """
__device__ __forceinline__ int ecornn_uniform(int value) {
  return __shfl_sync(0xffffffffu, value, 0, 32);
}"""
_PAUSE = """
__device__ __forceinline__ void ecornn_pause(unsigned cycles) {
  unsigned start, now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(start));
  do { asm volatile("mov.u32 %0, %%clock;" : "=r"(now)); } while (now - start < cycles);
}"""
_SPECIAL = """
__device__ __forceinline__ int ecornn_{name}() {{
  int value;
  asm volatile("mov.u32 %0, %%{name}.x;" : "=r"(value));
  return value;
}}"""


def sync_block() -> None:
    """Waits for all threads of the block, and sees what they wrote (``__syncthreads``)."""
    T.evaluate(T.cuda.cta_sync())


def sync_warp() -> None:
    """Waits for all threads of the warp, and sees what they wrote (``__syncwarp``)."""
    T.evaluate(T.cuda.warp_sync())


def sync_active() -> None:
    """Waits for those threads of the warp that come here together, and sees what they wrote."""
    functions.run("ecornn_meet", _MEET)


def named_barrier_sync(name: Expr | int, threads: int) -> None:
    """Waits until so many threads have come to that one of the block's 16 barriers, and sees what they wrote. 0 is
    :func:`sync_block`'s."""
    T.evaluate(T.ptx["bar.sync"](_uint32(name), T.uint32(threads)))


def named_barrier_arrive(name: Expr | int, threads: int) -> None:
    """Comes to a barrier, as one of so many threads, and does not wait."""
    T.evaluate(T.ptx["bar.arrive"](_uint32(name), T.uint32(threads)))


def shuffle_xor(value: Expr, lanes: int) -> Expr:
    """The float32 value of the lane whose number differs by the bits of ``lanes``."""
    return _shuffled("exchanged", value, T.int32(lanes))


def neighbour(value: Expr) -> Expr:
    """The float32 value of the lane beside: 0 and 1, 2 and 3, and so on."""
    return _shuffled("neighbour", value)


def sum_xor(value: Expr, lanes: int) -> Expr:
    """``value`` and that of :func:`shuffle_xor`, added."""
    return _shuffled("across", value, T.int32(lanes), "value + ")


def largest_xor(value: Expr, lanes: int) -> Expr:
    """The larger of both."""
    return _shuffled("largest_across", value, T.int32(lanes), "fmaxf(value, ", ")")


def uniform(name: str, value: Expr) -> Expr:
    """An int32 value that all threads of a warp have, as a variable of which the compiler can see that."""
    return T.let(name, functions.call("ecornn_uniform", _UNIFORM, value, returns="int32"))


def ballot(value: Expr) -> Expr:
    """A word (uint32) with a bit for each lane: whether its ``value`` (int32) is not 0."""
    return functions.call("ecornn_ballot", _BALLOT, value, returns="uint32")


def special_register(name: str) -> Expr:
    """``tid`` or ``ctaid`` along x (int32), as a variable of that name that is read at this place and not before."""
    return T.let(name, functions.call(f"ecornn_{name}", _SPECIAL.format(name=name), returns="int32"))


def pause(cycles: int) -> None:
    """Lets at least so many cycles of the clock pass."""
    functions.run("ecornn_pause", _PAUSE, T.uint32(cycles))


def _uint32(value: Expr | int) -> Expr:
    return T.uint32(value) if isinstance(value, int) else T.cast(value, "uint32")


def _shuffled(name: str, value: Expr, lanes: Expr | None = None, before: str = "", after: str = "") -> Expr:
    own = () if lanes is None else (lanes,)
    source = _SHUFFLED.format(name=f"ecornn_{name}", parameter=", int lanes" if own else "", before=before, after=after,
                              lanes="lanes" if own else "1")
    return functions.call(f"ecornn_{name}", source, value, *own, returns="float32")
