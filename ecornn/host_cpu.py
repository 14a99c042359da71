"""The CPU at hand, as a :class:`~ecornn.device.Device`."""

from __future__ import annotations

import os
from pathlib import Path

from ecornn.device import Device
from ecornn.errors import DeviceError

# LLVM attributes that schedules ask for, by the kernel's name of the flag
FLAGS = {"avx": "avx", "avx2": "avx2", "fma": "fma", "avx512f": "avx512f", "avx512vl": "avx512vl",
         "avx512bw": "avx512bw", "avx512dq": "avx512dq", "asimd": "neon", "sve": "sve"}
# what a CPU without a better name gets, widest first: the flags it must have
LEVELS = (("x86-64-v4", ("avx512f", "avx512vl", "avx512bw", "avx512dq")), ("x86-64-v3", ("avx2", "fma")),
          ("x86-64", ()))


def detect() -> Device:
    """The CPU that this process may run on; ``cores`` counts physical ones of its affinity mask.

    Raises :class:`DeviceError` where the processor is not x86-64 or arm64.
    """
    info = cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    features = tuple(sorted({FLAGS[f] for f in flags if f in FLAGS}))
    allowed = sorted(os.sched_getaffinity(0))
    name = info.get("model name") or info.get("CPU part") or "unknown CPU"
    return Device("llvm", llvm_name(features), name, physical_cores(allowed), l2=l2_bytes(allowed[0]),
                  memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), features=features)


def cpuinfo() -> dict[str, str]:
    """The first processor's fields of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def llvm_name(features: tuple[str, ...]) -> str:
    """LLVM's name of this CPU; a level of x86-64 where the name promises what a hypervisor hides."""
    machine = os.uname().machine
    if machine not in ("x86_64", "aarch64"):
        raise DeviceError("target", "cpu", f"an x86-64 or arm64 processor, not {machine}")
    from tvm.target import Target, codegen

    name = str(codegen.llvm_get_system_cpu())
    if machine == "aarch64":
        return name
    if name not in ("", "generic"):
        promised = set(codegen.llvm_get_cpu_features(Target({"kind": "llvm", "mcpu": name})))
        if promised & set(FLAGS.values()) <= set(features):
            return name
    return next(level for level, needed in LEVELS if set(needed) <= set(features))


def physical_cores(allowed: list[int]) -> int:
    """Cores behind these logical processors, hyper-threads counted once."""
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def l2_bytes(cpu: int) -> int:
    """Bytes of the L2 cache that a processor uses; 0 where the kernel does not say."""
    for cache in sorted(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        try:
            if (cache / "level").read_text().strip() == "2":
                size = (cache / "size").read_text().strip()
                return int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0)
        except (OSError, ValueError):
            return 0
    return 0
