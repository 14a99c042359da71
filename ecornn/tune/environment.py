"""What a record says of the software that made it."""

from __future__ import annotations

import re
import subprocess

from ecornn.device import Device
from ecornn.task import versions


def environment(device: Device) -> dict[str, str]:
    """Versions of ecornn, TVM and tvm-ffi; on a GPU ``driver`` and ``cuda`` (the compiler) too."""
    found = versions()
    if device.kind == "cuda":
        from ecornn.host_gpu import driver_version

        found |= {"driver": driver_version() or "none", "cuda": cuda_compiler() or "none"}
    return found


def cuda_compiler() -> str | None:
    """Name and version of the CUDA compiler that builds use, such as ``nvcc 13.0``."""
    from ecornn.build import nvcc, nvrtc

    path = nvcc.find_nvcc()
    if path:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        release = re.search(r"release (\d+\.\d+)", said)
        return f"nvcc {release[1]}" if release else "nvcc"
    if nvrtc.available():
        from importlib.metadata import version

        return f"nvrtc {version('cuda-bindings')}"
    return None
