"""Targets as users name them, ``cpu``, ``cuda``, an architecture or a CPU, and the devices that these mean."""

from __future__ import annotations

import re

from ecornn import host_cpu, host_gpu
from ecornn.device import Device, architecture_of
from ecornn.errors import DeviceError

# The largest common product of each architecture: what "--target sm_90a" means with no GPU here.
KNOWN = {
    "sm_80": Device("cuda", "sm_80", "NVIDIA A100", 108, 163 << 10, 65536, 40 << 20, 80 << 30),
    "sm_86": Device("cuda", "sm_86", "NVIDIA A10", 72, 99 << 10, 65536, 6 << 20, 24 << 30),
    "sm_89": Device("cuda", "sm_89", "NVIDIA L40S", 142, 99 << 10, 65536, 96 << 20, 48 << 30),
    "sm_90a": Device("cuda", "sm_90a", "NVIDIA H100 80GB HBM3", 132, 227 << 10, 65536, 50 << 20,
                     85_017_493_504),  # as its driver says, so that modules built elsewhere are those built there
}


def default_target() -> str:
    """``cuda`` where there is a GPU that schedules serve, else ``cpu``."""
    try:
        return "cuda" if host_gpu.detect() is not None else "cpu"
    except DeviceError:
        return "cpu"


def kind_of(target: str) -> str:
    """The kind of device that a target means, ``cuda`` or ``llvm``, without a look at the machine."""
    return "cuda" if target == "cuda" or target.startswith("sm_") else "llvm"


def resolve(target: str | Device) -> Device:
    """The device for ``cpu``, ``cuda`` (the GPU at hand), an architecture such as ``sm_90a``, or a CPU's LLVM name such
    as ``neoverse-v1``. Raises :class:`DeviceError` where there is no GPU, or for an architecture no schedule serves."""
    if isinstance(target, Device):
        return target
    if target == "cpu":
        return host_cpu.detect()
    if target == "cuda":
        if (gpu := host_gpu.detect()) is None:
            raise DeviceError("target", target, "a machine with a CUDA GPU and its driver; without one name the "
                              f"architecture, one of {', '.join(KNOWN)}, or 'cpu'")
        return gpu
    name = architecture_of(int(target[3:])) if re.fullmatch(r"sm_\d{2,3}", target) else target
    if name in KNOWN:
        return KNOWN[name]
    cpu = None if name.startswith("sm_") else host_cpu.named(name)
    if cpu is None:
        raise DeviceError("target", target, f"'cpu', 'cuda', one of {', '.join(KNOWN)}, or LLVM's name of a "
                          "64-bit CPU such as znver4, skylake-avx512 or neoverse-v1")
    return cpu
