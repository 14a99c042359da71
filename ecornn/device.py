"""The device that code is compiled for: one GPU model or one CPU, by its capabilities."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

# Fields that are decoded, from a record or a manifest, have these limits.
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class Capabilities(msgspec.Struct, frozen=True):
    """The features of a GPU that kernels may use."""

    tensor_cores: bool = False  # mma of 16-bit types and TF32, and asynchronous copies
    fp8: bool = False  # mma of 8-bit floating-point types
    bulk_copies: bool = False  # copies that an mbarrier counts, and `st.async`
    early_launches: bool = False  # programmatic dependent launch
    cluster: int = 1  # blocks of one at most; more than 8 are not portable, but every GPU that has 16 here has them
    warpgroups: bool = False  # products of warpgroups, and their registers


# From a compute capability on; and those of one architecture alone, whose names end in a letter.
_HOPPER = Capabilities(tensor_cores=True, fp8=True, bulk_copies=True, early_launches=True, cluster=16)
_FROM = {0: Capabilities(), 80: Capabilities(tensor_cores=True), 89: Capabilities(tensor_cores=True, fp8=True),
         90: _HOPPER}
_ALONE = {"sm_90a": msgspec.structs.replace(_HOPPER, warpgroups=True)}


def architecture_of(capability: int) -> str:
    """The name of a compute capability's architecture, such as ``sm_80`` for 80; with its letter where it has
    instructions that no later one has, as Hopper's ``sm_90a``."""
    return next((name for name in _ALONE if name[3:-1] == str(capability)), f"sm_{capability}")


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
        number = int(self.arch[3:].rstrip("af")) if self.kind == "cuda" else 0
        return _ALONE.get(self.arch) or _FROM[max(first for first in _FROM if first <= number)]

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
