"""What a record says of the software that made it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from ecornn.device import Device
from ecornn.task import versions
from ecornn.tune.record import Clocks


class Environment(msgspec.Struct, frozen=True):
    """Versions of ecornn, TVM and tvm-ffi, on a GPU of ``driver`` and ``cuda`` (the compiler) too; and
    the clocks of the device."""

    versions: dict[str, str] = {}
    clocks: Clocks | None = None


def environment(device: Device) -> Environment:
    """Of this machine, to measure on ``device``."""
    if device.kind != "cuda":
        return Environment(versions(), Clocks(cpu_clock()))
    from ecornn.host_gpu import clocks, driver_version

    found = versions() | {"driver": driver_version() or "none", "cuda": cuda_compiler() or "none"}
    return Environment(found, Clocks(*clocks()))


def cpu_clock() -> int:
    """The first processor's highest clock, MHz; what it runs at now where the kernel does not say."""
    try:
        khz = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()
        return int(khz) // 1000
    except (OSError, ValueError):
        from ecornn.host_cpu import cpuinfo

        try:
            return round(float(cpuinfo().get("cpu MHz", 0)))
        except ValueError:
            return 0


def cuda_compiler() -> str | None:
    """Name and version of the CUDA compiler that builds use, such as ``nvcc 13.0``."""
    from ecornn.build import nvcc, nvrtc
    from ecornn.build.commands import ANSWER, run

    path = nvcc.find_nvcc()
    if path:
        said = run([path, "--version"], ANSWER)[1]
        release = re.search(r"release (\d+\.\d+)", said)
        return f"nvcc {release[1]}" if release else "nvcc"
    if nvrtc.available():
        from importlib.metadata import version

        return f"nvrtc {version('cuda-bindings')}"
    return None
