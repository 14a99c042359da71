"""The CPU at hand, as a :class:`~ecornn.device.Device`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from ecornn.device import Device
from ecornn.errors import DeviceError

# Instruction sets that LLVM uses of its own accord, by the kernel's name of the flag. Code is built for those
# that a device names and for no other of them, and a module is refused where one is missing.
FLAGS = {flag: flag.replace("_", "") for flag in (
    "ssse3", "sse4a", "popcnt", "movbe", "bmi2", "adx", "f16c", "fma", "fma4", "xop", "tbm", "gfni", "avx", "avx2",
    "avx_vnni", "avx_vnni_int8", "avx_ifma", "avx512f", "avx512cd", "avx512vl", "avx512bw", "avx512dq", "avx512ifma",
    "avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bitalg", "avx512_vpopcntdq", "avx512_bf16", "avx512_fp16",
    "sve", "sve2", "bf16", "i8mm")} | {
    "amx_tile": "amx-tile", "amx_bf16": "amx-bf16",
    "pni": "sse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "lahf_lm": "sahf", "abm": "lzcnt", "bmi1": "bmi",
    "asimd": "neon", "asimddp": "dotprod", "asimdhp": "fullfp16", "asimdfhm": "fp16fml", "asimdrdm": "rdm",
    "fcma": "complxnum", "jscvt": "jsconv", "lrcpc": "rcpc", "atomics": "lse", "crc32": "crc"}
TILES = FLAGS["amx_tile"]
TRIPLES = ("x86_64-linux-gnu", "aarch64-linux-gnu")
# what a CPU without a better name gets, widest first: the flags it must have
LEVELS = (("x86-64-v4", ("avx512f", "avx512vl", "avx512bw", "avx512dq")), ("x86-64-v3", ("avx2", "fma")),
          ("x86-64", ()))


def detect() -> Device:
    """The CPU that this process may run on; ``cores`` counts physical ones of its affinity mask. Raises
    :class:`DeviceError` where the processor is not x86-64 or arm64."""
    info = cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    features = tuple(sorted({FLAGS[f] for f in flags if f in FLAGS}))
    allowed = sorted(os.sched_getaffinity(0))
    name = info.get("model name") or info.get("CPU part") or "unknown CPU"
    return Device("llvm", llvm_name(features), name, physical_cores(allowed), l2=l2_bytes(allowed[0]),
                  memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), features=features)


def permit_tiles() -> bool:
    """Asks Linux for the tile registers of AMX, which this process and those that it forks may use from then on (its
    Documentation/arch/x86/xstate.rst). False where it refuses."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return not ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)


def named(name: str) -> Device | None:
    """A CPU that need not be at hand, by LLVM's name such as ``neoverse-v1``; None where LLVM has no such name of
    one with 64 bits. What LLVM does not know of it, cores and caches, is that of a small server."""
    return next((Device("llvm", name, name, cores=4, l2=1 << 20, features=tuple(sorted(promised(name, triple))))
                 for triple in TRIPLES if known(name, triple)), None)


def known(name: str, triple: str) -> bool:
    """Tells whether LLVM compiles for a CPU of this name: for one of 32 bits it would end the process."""
    from tvm.target import codegen

    return bool(codegen.llvm_is_valid_cpu(name, triple)) and ("x86_64" not in triple or "64bit" in used(name, triple))


def promised(name: str, triple: str) -> set[str]:
    return used(name, triple) & set(FLAGS.values())


def used(name: str, triple: str, attributes: Sequence[str] = ()) -> set[str]:
    """The instruction sets that LLVM uses for a CPU that it knows, with ``+`` and ``-`` of some features in order."""
    from tvm.target import Target, codegen

    target = Target({"kind": "llvm", "mcpu": name, "mtriple": triple, "mattr": [*attributes]})
    return set(map(str, codegen.llvm_get_cpu_features(target)))


def machine_of(device: Device) -> str:
    return "aarch64" if "neon" in device.features else "x86_64"


def cpuinfo() -> dict[str, str]:
    """The first processor's fields of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def llvm_name(features: tuple[str, ...]) -> str:
    """LLVM's name of this CPU; a level of x86-64 where LLVM has none."""
    machine = os.uname().machine
    if machine not in ("x86_64", "aarch64"):
        raise DeviceError("target", "cpu", f"an x86-64 or arm64 processor, not {machine}")
    from tvm.target import codegen

    name = str(codegen.llvm_get_system_cpu())
    if machine == "aarch64" or (name not in ("", "generic", "x86-64") and known(name, TRIPLES[0])):
        return name
    return next(level for level, needed in LEVELS if set(needed) <= set(features))


def physical_cores(allowed: list[int]) -> int:
    """Cores behind these logical processors, hyper-threads counted once."""
    cores = set()
    for cpu in allowed:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
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
