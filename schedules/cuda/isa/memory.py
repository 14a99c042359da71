"""Loads, stores, fences and prefetches (PTX: data movement; memory consistency model).

Vectors are aligned to their size. A ``relaxed`` access is one of several threads of the GPU to the same memory, and
sees what any of them wrote, at some time; ``acquire`` and ``release`` order what is around them, too."""

from __future__ import annotations

from collections.abc import Iterable

from ecornn.schedules.builder import Expr, T


def ld_global(into: Iterable[Expr], address: Expr, kind: str = "b32") -> None:
    """Loads one, two or four neighbouring values of global memory into elements of local buffers."""
    _load("global", into, address, kind)


def ld_shared(into: Iterable[Expr], address: Expr, kind: str = "b32") -> None:
    """Loads one, two or four neighbouring values of shared memory into elements of local buffers."""
    _load("shared", into, address, kind)


def ld_relaxed(into: Iterable[Expr], address: Expr) -> None:
    """Loads one, two or four words of global memory that other blocks write meanwhile, as they are by now."""
    _load("relaxed.gpu.global", into, address, "b32")


def ld_acquire(into: Expr, address: Expr) -> None:
    """Loads a counter (uint32): what any thread released by adding to it is seen by later accesses."""
    _load("acquire.gpu.global", [into], address, "u32")


def st_global(address: Expr, values: Iterable[Expr], kind: str = "b32") -> None:
    """Stores one, two or four neighbouring values to global memory."""
    _store("global", address, values, kind)


def st_shared(address: Expr, values: Iterable[Expr], kind: str = "b32") -> None:
    """Stores one, two or four neighbouring values to shared memory."""
    _store("shared", address, values, kind)


def st_relaxed(address: Expr, values: Iterable[Expr]) -> None:
    """Stores one, two or four words to global memory that other blocks read meanwhile; 16 bytes arrive as one."""
    _store("relaxed.gpu.global", address, values, "b32")


def red_release(address: Expr) -> None:
    """Adds one to a counter (uint32) of global memory, behind all that this thread wrote or has seen."""
    T.evaluate(T.ptx["red.release.gpu.global.add.u32"](address, T.uint32(1)))


def fence_gpu() -> None:
    """Orders what this thread did before and after it, for all threads of the GPU: acquire and release."""
    T.evaluate(T.ptx["fence.acq_rel.gpu"]())


def fence_async_shared() -> None:
    """Orders a thread's accesses to shared memory and those of copy engines and wgmma, which go another way. sm_90."""
    T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())


def fence_async_global() -> None:
    """Orders accesses of this thread to global memory and those of copy engines. sm_90."""
    T.evaluate(T.ptx["fence.proxy.async.global"]())


def prefetch_l1(address: Expr) -> None:
    """Asks for a line of global memory in L1, and does not wait."""
    T.evaluate(T.ptx["prefetch.global.L1"](address))


def l2_policy(into: Expr, priority: str) -> None:
    """Makes a cache policy (uint64) for :func:`~.copies.bulk_copy`; ``priority``: ``evict_first`` or ``evict_last``."""
    T.evaluate(T.ptx[f"createpolicy.fractional.L2::{priority}.b64"](into))


def shared_address(pointer: Expr) -> Expr:
    """The address (uint32) of a pointer into shared memory, in that memory's own window."""
    return T.cuda.cvta_generic_to_shared(pointer)


def _load(where: str, into: Iterable[Expr], address: Expr, kind: str) -> None:
    into = [*into]
    T.evaluate(T.ptx[f"ld.{where}.{_vector(len(into))}{kind}"](*into, address))


def _store(where: str, address: Expr, values: Iterable[Expr], kind: str) -> None:
    values = [*values]
    T.evaluate(T.ptx[f"st.{where}.{_vector(len(values))}{kind}"](address, *values))


def _vector(count: int) -> str:
    return f"v{count}." if count > 1 else ""
