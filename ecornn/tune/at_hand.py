"""The device that is measured on: the one asked for, held against what is there; what records say of its machine."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import structs

from ecornn.device import Device
from ecornn.errors import DeviceError
from ecornn.targets import resolve
from ecornn.task import versions
from ecornn.tune.record import Clocks

GENERAL = {"llvm": "cpu", "cuda": "cuda"}  # kind -> the target that means whatever device of it is there


def present(target: str | Device | None) -> Device:
    """The device of this machine that ``target`` means, as :func:`matched`; default: the GPU if there is one.

    Raises :class:`~ecornn.errors.DeviceError` where it is not in this machine."""
    from ecornn import host_gpu
    from ecornn.tune.choose import default_target

    wanted = default_target() if target is None else target
    general = wanted if wanted in GENERAL.values() else GENERAL[resolve(wanted).kind]
    here = resolve("cpu") if general == "cpu" else host_gpu.detect()
    if here is None:
        raise DeviceError("target", told(wanted), "'cpu', for there is no CUDA GPU with its driver: tuning measures, "
                          "so the device must be in this machine, or behind a tracker")
    return matched(wanted, here)


def matched(target: str | Device, here: Device) -> Device:
    """``here``, the device that measures, where ``target`` means it: as it is and not as the largest product of its
    architecture; with fewer multiprocessors where ``target`` is a device that has fewer: a share of a GPU, as sequences
    that run at the same time have. Code for a CPU may use fewer of its features; all of its cores measure.

    Raises :class:`~ecornn.errors.DeviceError` where ``target`` means another device, or what this one does not have."""
    general = GENERAL[here.kind]
    if target == general:
        return here
    if target in GENERAL.values() or resolve(target).arch != here.arch:
        raise DeviceError("target", told(target), f"{general!r} or {here.arch!r} ({here.name}): tuning measures, so "
                          "the device must be in this machine, or behind a tracker")
    if isinstance(target, str):
        return here
    if here.kind == "llvm" and target.cores != here.cores:
        raise DeviceError("target.cores", target.cores, f"{here.cores}, all cores of {here.name} that the process may "
                          "use, for all of them measure; `taskset` lets it use fewer")
    if missing := sorted(set(target.features) - set(here.features)):
        raise DeviceError("target.features", ", ".join(missing), f"features that {here.name} has")
    return structs.replace(here, cores=min(here.cores, target.cores), features=target.features)


def told(target: str | Device) -> str:
    """The name of a target in an error."""
    return target if isinstance(target, str) else f"{target.name} ({target.arch}, {target.cores} cores)"


class Environment(msgspec.Struct, frozen=True):
    """Versions of ecornn, TVM and tvm-ffi, on a GPU of ``driver`` and ``cuda`` (the compiler) too; and
    the clocks of the device."""

    versions: dict[str, str] = {}
    clocks: Clocks | None = None


def environment(device: Device) -> Environment:
    """The environment of this machine, to measure on ``device``."""
    if device.kind != "cuda":
        return Environment(versions(), Clocks(cpu_clock()))
    from ecornn.host_gpu import clocks, driver_version

    software = versions() | {"driver": driver_version() or "none", "cuda": cuda_compiler() or "none"}
    return Environment(software, Clocks(*clocks()))


def cpu_clock() -> int:
    """The first processor's highest clock, in MHz; where the kernel does not say, its present one; 0 where unknown."""
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
