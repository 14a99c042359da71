"""The device that code is compiled for: one GPU model or one CPU, by its capabilities."""

from __future__ import annotations

import functools
from typing import Annotated, Literal

import msgspec

from ecornn.chips import ARCHITECTURES

# Fields that are decoded, from a record or a manifest, have these limits.
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class Capabilities(msgspec.Struct, frozen=True):
    """The features of a GPU that kernels may use."""

    tensor_cores: bool = False  # mma of 16-bit types and TF32, and asynchronous copies
    fp8: bool = False  # mma of 8-bit floating-point types
    bulk_copies: bool = False  # copies that an mbarrier counts, and `st.async`
    early_launches: bool = False  # programmatic dependent launch
    cluster: int = 1  # blocks of one at most; more than 8 are not portable
    multicast: bool = False  # a bulk copy to all blocks of a cluster takes no longer than one to a single block
    warpgroups: bool = False  # products of warpgroups (wgmma), and their registers (setmaxnreg)


@functools.cache
def capabilities(arch: str) -> Capabilities:
    """The features of an architecture such as ``sm_90a``. All but the last two last from a compute capability on; one
    that no table has yet is taken to have what the ones before it have, and clusters of the portable size."""
    number = int(arch[3:].rstrip("af"))
    row = ARCHITECTURES.get(architecture_of(number))
    return Capabilities(
        tensor_cores=number >= 80, fp8=number >= 89, bulk_copies=number >= 90, early_launches=number >= 90,
        cluster=row.cluster if row else 8 if number >= 90 else 1,
        multicast=90 <= number < 120,  # PTX ISA: later ones carry it out, but maybe much more slowly
        warpgroups=arch == "sm_90a")  # sm_100a and later have other products of their own instead


def architecture_of(capability: int) -> str:
    """The name of a compute capability's architecture, such as ``sm_80`` for 80; with its letter where it has
    instructions that no later one has, as Hopper's ``sm_90a``."""
    return f"sm_{capability}a" if f"sm_{capability}a" in ARCHITECTURES else f"sm_{capability}"


NONE = Capabilities()


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A target and the capabilities that schedules plan with."""

    kind: Literal["cuda", "llvm"]
    arch: Text  # `sm_90a` and the like, or the CPU's LLVM name such as `znver4`
    name: Text  # the product's, for people and for ranking records
    cores: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]  # streaming multiprocessors, or physical CPU cores
    shared: Size = 0  # bytes of shared memory that one block can use (CUDA)
    registers: Size = 0  # 32-bit registers of one multiprocessor (CUDA)
    l2: Size = 0  # bytes of L2 cache (CUDA: of the chip; CPU: of one core)
    memory: Size = 0  # bytes of device memory; 0 where unknown
    features: Annotated[tuple[Text, ...], msgspec.Meta(max_length=256)] = ()  # LLVM attributes of the code (CPU)

    @property
    def can(self) -> Capabilities:
        """The features that kernels may use; none of a CPU."""
        return capabilities(self.arch) if self.kind == "cuda" else NONE

    @property
    def identity(self) -> Device:
        """This device without ``memory``, by which runs, records and servers tell devices apart. Memory differs by
        kilobytes from boot to boot and by megabytes between equal GPUs, and no schedule reads it; products that differ
        in it, and slices of a GPU (MIG), differ by name."""
        return msgspec.structs.replace(self, memory=0)

    def clusters(self, blocks: int) -> int:
        """Clusters of ``blocks`` blocks, each on a multiprocessor of its own, that run at once. Two need neighbours, a
        larger one a GPC. By cudaOccupancyMaxActiveClusters an H100 has seven of 16 multiprocessors or more and one of
        at least 8 (30 clusters of 4, 15 of 8, 7 of 12 and 16), others as many in proportion."""
        if not self.can.bulk_copies or not 1 <= blocks <= self.can.cluster:
            return 0
        return self.cores // blocks if blocks <= 2 else (7 * (16 // blocks) + 8 // blocks) * self.cores // 132
