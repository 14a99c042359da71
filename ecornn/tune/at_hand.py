"""Which device is measured on: what was asked for, held against what is there."""

from __future__ import annotations

from msgspec import structs

from ecornn.device import Device
from ecornn.errors import DeviceError
from ecornn.targets import resolve

GENERAL = {"llvm": "cpu", "cuda": "cuda"}  # kind -> the target that means whatever device of it is there


def present(target: str | Device | None) -> Device:
    """The device of this machine that ``target`` means, as :func:`matched`; default: the GPU if there is one.

    Raises :class:`~ecornn.errors.DeviceError` where it is not in this machine.
    """
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

    Raises :class:`~ecornn.errors.DeviceError` where ``target`` means another device, or what this one does not have.
    """
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
    """A target as an error shows it."""
    return target if isinstance(target, str) else f"{target.name} ({target.arch}, {target.cores} cores)"
