"""The GPUs that ecornn knows by name, in one table: limits of each architecture, and each product's size and speed.

Limits are those of the CUDA C++ Programming Guide (compute capabilities, technical specifications) and of the tuning
guides of each architecture. Products' figures are the vendor's, from the document that the row names. A row is
``measured`` where ``schedules/rates.py`` has rates that were measured on it; all others are from documents alone. A GPU
at hand that no row names is taken as its driver describes it."""

from __future__ import annotations

from typing import NamedTuple


class Architecture(NamedTuple):
    """Limits of one compute capability, in bytes, 32-bit registers, threads and blocks."""

    shared: int  # of a block at most
    shared_of_multiprocessor: int
    threads: int  # of a multiprocessor
    cluster: int  # blocks of a cluster; 1: has none
    cuda: str  # the first toolkit that compiles for it
    registers: int = 65536  # of a multiprocessor, and of a block


# Clusters of more than 8 blocks are not portable: guides say that H100 and B200 have them.
ARCHITECTURES = {
    "sm_80": Architecture(163 << 10, 164 << 10, 2048, 1, "11.0"),
    "sm_86": Architecture(99 << 10, 100 << 10, 1536, 1, "11.1"),
    "sm_87": Architecture(163 << 10, 164 << 10, 1536, 1, "11.4"),
    "sm_89": Architecture(99 << 10, 100 << 10, 1536, 1, "11.8"),
    "sm_90a": Architecture(227 << 10, 228 << 10, 2048, 16, "12.0"),
    "sm_100a": Architecture(227 << 10, 228 << 10, 2048, 16, "12.8"),
    "sm_103a": Architecture(227 << 10, 228 << 10, 2048, 8, "12.9"),
    "sm_110a": Architecture(227 << 10, 228 << 10, 1536, 8, "13.0"),
    "sm_120": Architecture(99 << 10, 100 << 10, 1536, 8, "12.8"),
    "sm_121": Architecture(99 << 10, 100 << 10, 1536, 8, "12.9"),
}


class Product(NamedTuple):
    """One product: GB are 10^9 bytes, and MiB and GiB powers of two."""

    short: str  # as ``--target`` takes it, in small letters and with hyphens
    name: str  # as the driver says it
    arch: str
    cores: int  # multiprocessors
    l2: int  # MiB
    memory: int  # bytes
    bandwidth: float  # GB/s of memory
    clock: int  # MHz, boost
    tensor: float  # 10^12 16-bit multiplications and additions a second, without sparsity, summed in float32
    source: str
    measured: bool = False


def _gib(count: int) -> int:
    return count << 30


_ADA, _BLACKWELL = "Ada GPU architecture white paper", "RTX Blackwell GPU architecture white paper"
_GA102 = "GA102 GPU architecture white paper"

# The first product of an architecture is the one that its plain name means.
PRODUCTS = (
    Product("a100", "NVIDIA A100", "sm_80", 108, 40, _gib(80), 2039, 1410, 312, "A100 data sheet, 80 GB SXM"),
    Product("a100-80gb", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 40, _gib(80), 2039, 1410, 312, "A100 data sheet"),
    Product("a100-40gb", "NVIDIA A100-SXM4-40GB", "sm_80", 108, 40, _gib(40), 1555, 1410, 312, "A100 data sheet"),
    Product("a30", "NVIDIA A30", "sm_80", 56, 24, _gib(24), 933, 1440, 165, "A30 data sheet"),
    Product("a10", "NVIDIA A10", "sm_86", 72, 6, _gib(24), 600, 1695, 125, "A10 data sheet"),
    Product("a40", "NVIDIA A40", "sm_86", 84, 6, _gib(48), 696, 1740, 149.7, "A40 data sheet"),
    Product("rtx-3090", "NVIDIA GeForce RTX 3090", "sm_86", 82, 6, _gib(24), 936, 1695, 71, _GA102),
    Product("rtx-3080", "NVIDIA GeForce RTX 3080", "sm_86", 68, 5, _gib(10), 760, 1710, 59.5, _GA102),
    Product("jetson-orin", "Orin", "sm_87", 16, 4, _gib(64), 204.8, 1300, 42.6,
            "Jetson AGX Orin technical brief, 64 GB; tensor: half of its dense int8 rate"),
    Product("l40s", "NVIDIA L40S", "sm_89", 142, 96, _gib(48), 864, 2520, 362, "L40S data sheet"),
    Product("l4", "NVIDIA L4", "sm_89", 58, 48, _gib(24), 300, 2040, 121, "L4 data sheet"),
    Product("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", "sm_89", 142, 96, _gib(48), 960, 2505, 364.2, _ADA),
    Product("rtx-4090", "NVIDIA GeForce RTX 4090", "sm_89", 128, 72, _gib(24), 1008, 2520, 165.2, _ADA),
    Product("rtx-4080", "NVIDIA GeForce RTX 4080", "sm_89", 76, 64, _gib(16), 716.8, 2505, 97.5, _ADA),
    Product("rtx-4070", "NVIDIA GeForce RTX 4070", "sm_89", 46, 36, _gib(12), 504.2, 2475, 58.3, _ADA),
    Product("h100", "NVIDIA H100 80GB HBM3", "sm_90a", 132, 50, 85_017_493_504,  # as its driver says, so that modules
            3352, 1980, 989.4, "H100 data sheet, SXM", measured=True),  # built elsewhere are those built there
    Product("h100-pcie", "NVIDIA H100 PCIe", "sm_90a", 114, 50, _gib(80), 2039, 1755, 756, "H100 data sheet"),
    Product("h200", "NVIDIA H200", "sm_90a", 132, 50, _gib(141), 4800, 1980, 989.4, "H200 data sheet"),
    Product("gh200", "NVIDIA GH200 480GB", "sm_90a", 132, 50, _gib(96), 4000, 1980, 989.4, "GH200 data sheet, 96 GB"),
    Product("b200", "NVIDIA B200", "sm_100a", 148, 126, _gib(180), 8000, 1965, 2250,
            "HGX data sheet; Blackwell tuning guide"),
    Product("b300", "NVIDIA B300 SXM6 AC", "sm_103a", 148, 126, _gib(270), 8000, 1965, 2250,
            "HGX data sheet; multiprocessors, clock and L2 are taken to be a B200's"),
    Product("jetson-thor", "NVIDIA Thor", "sm_110a", 20, 32, _gib(128), 273, 1575, 258,
            "Jetson Thor data sheet, T5000; tensor: an eighth of its sparse FP4 rate"),
    Product("rtx-5090", "NVIDIA GeForce RTX 5090", "sm_120", 170, 96, _gib(32), 1792, 2407, 209.5, _BLACKWELL),
    Product("rtx-5080", "NVIDIA GeForce RTX 5080", "sm_120", 84, 64, _gib(16), 960, 2617, 112.6, _BLACKWELL),
    Product("rtx-5070-ti", "NVIDIA GeForce RTX 5070 Ti", "sm_120", 70, 48, _gib(16), 896, 2452, 87.9, _BLACKWELL),
    Product("rtx-5070", "NVIDIA GeForce RTX 5070", "sm_120", 48, 48, _gib(12), 672, 2512, 61.7, _BLACKWELL),
    Product("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120", 188, 128, _gib(96), 1792,
            2617, 503.8, "RTX PRO Blackwell GPU architecture white paper"),
    Product("gb10", "NVIDIA GB10", "sm_121", 48, 24, _gib(128), 273, 2418, 125,
            "DGX Spark data sheet; tensor: an eighth of its sparse FP4 rate"),
)
