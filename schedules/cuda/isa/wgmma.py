"""Warpgroup products of Hopper's tensor cores (PTX: wgmma). sm_90a."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa.functions import run

_KIND = {"float16": "k16.f32.f16.f16", "bfloat16": "k16.f32.bf16.bf16", "tf32": "k8.f32.tf32.tf32"}


def wgmma(acc: list[Expr], a: Expr, b: Expr, keep: Expr, dtype: str, across: bool = False) -> None:
    """``acc = a b + (keep ? acc : 0)`` for 32 bytes of K; a: 64 rows, b: ``2 * len(acc)`` columns, by descriptors.
    ``across``: in memory K is the outer axis of both; of 16-bit types. Accumulators are those of ``mma`` for each n8
    tile (``tensor_core.py``), warp w has rows 16 w to 16 w + 15."""
    instruction = T.ptx[f"wgmma.mma_async.sync.aligned.m64n{2 * len(acc)}{_KIND[dtype]}"]
    layout = () if dtype == "tf32" else (int(across), int(across))  # TF32 cannot be transposed, so nothing says so
    T.evaluate(instruction(*acc, a, b, T.ptx.pred(keep), 1, 1, *layout))


def wgmma_registers(acc: list[Expr], a: list[Expr], b: Expr, keep: Expr, dtype: str) -> None:
    """:func:`wgmma` with ``a`` in registers: four words of each thread, warp w's rows as operand A of ``mma``."""
    instruction = T.ptx[f"wgmma.mma_async.sync.aligned.m64n{2 * len(acc)}{_KIND[dtype]}"]
    T.evaluate(instruction(*acc, *a, b, T.ptx.pred(keep), 1, 1, 0))


def descriptor(address: Expr, leading: int, stride: int, swizzled: bool) -> Expr:
    """wgmma's description of an operand at ``address`` in shared memory (uint64).

    ``stride`` bytes lie between groups of 8 rows, ``leading`` between the two 16-byte halves of a product's K (which
    the 128-byte swizzle implies: it is then ignored, and addresses are multiples of 1024). Addresses are in units of 16
    bytes: those of later values of K are larger by a constant. Of an operand that is read across, swizzled: ``stride``
    between groups of 8 values of K, ``leading`` between panels of 128 bytes."""
    fixed = (leading >> 4) << 16 | (stride >> 4) << 32 | (1 << 62 if swizzled else 0)
    return T.cast(address >> T.uint32(4), "uint64") + T.uint64(fixed)


def wgmma_fence() -> None:
    """Orders what this warpgroup did with registers and shared memory, and its products that follow."""
    T.evaluate(T.ptx["wgmma.fence.sync.aligned"]())


def wgmma_commit() -> None:
    """Makes a group of the products since the last one."""
    T.evaluate(T.ptx["wgmma.commit_group.sync.aligned"]())


def wgmma_wait_pending(count: int) -> None:
    """Waits until at most so many of the last groups are under way. Accumulators may not be read behind it."""
    T.evaluate(T.ptx["wgmma.wait_group.sync.aligned"](count))


def wgmma_wait(acc: list[Expr]) -> None:
    """Waits for all products; names the accumulators, so that none is read before."""
    count = len(acc)
    arguments = ", ".join(f"float& d{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d{i})' for i in range(count))
    run(f"void ecornn_wgmma_wait_{count}({arguments})", f"""
        asm volatile("wgmma.wait_group.sync.aligned 0;" : {operands} : : "memory");""", *acc)
