"""Copies from global to shared memory that a thread does not wait for (PTX: asynchronous copy)."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T

_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def cp_async(to: Expr, source: Expr, size: int, present: Expr | None = None, *, l1: bool | None = None) -> None:
    """Copies 4, 8 or 16 bytes, of which ``present`` are read and the others are zeros. ``l1``: whether the line stays
    in L1 as well, which it must where fewer than 16 are copied, and does not otherwise."""
    through = size < 16 if l1 is None else l1
    filled = () if present is None else (present,)
    T.evaluate(T.ptx[f"cp.async.{'ca' if through else 'cg'}.shared.global"](to, source, size, *filled))


def cp_async_commit() -> None:
    """Makes a group of the thread's copies since the last one."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def cp_async_wait(pending: int) -> None:
    """Waits until at most so many of the thread's last groups are under way."""
    T.evaluate(T.ptx["cp.async.wait_group"](pending))


def cp_async_wait_all() -> None:
    """Waits for all copies of the thread: none may leave before its copies have landed."""
    T.evaluate(T.ptx["cp.async.wait_all"]())


def cp_async_mbarrier_arrive(barrier: Expr) -> None:
    """Arrives at an mbarrier once the thread's copies so far have landed: one of the arrivals that it was made for."""
    T.evaluate(T.ptx["cp.async.mbarrier.arrive.noinc.shared::cta.b64"](barrier))


def bulk_copy(to: Expr, source: Expr, size: Expr, barrier: Expr, *, policy: Expr | None = None,
              ranks: Expr | None = None) -> None:
    """Copies ``size`` bytes (uint32, a multiple of 16), which the mbarrier counts. One thread asks for all of them.
    sm_90. ``policy``: of L2, of :func:`~.memory.l2_policy`. ``ranks``: a bit (uint16) for each block of the cluster to
    which they are copied, to the same place and barrier of each."""
    if policy is not None:
        T.evaluate(T.ptx[f"{_BULK}.L2::cache_hint"](to, source, size, barrier, policy))
    elif ranks is not None:
        T.evaluate(T.ptx[f"{_BULK}.multicast::cluster"](to, source, size, barrier, ranks))
    else:
        T.evaluate(T.ptx[_BULK](to, source, size, barrier))
