"""Whether this machine can run a module: asked before anything of it runs."""

from __future__ import annotations

from ecornn.device import Device
from ecornn.errors import DeviceError, ModuleError
from ecornn.host_cpu import FLAGS, cpuinfo

_KERNEL_NAME = {feature: flag for flag, feature in FLAGS.items()}


def check_host(built_for: Device, index: int) -> None:
    """Raises where this machine, or GPU ``index`` of it, cannot run code for ``built_for``.

    :class:`ModuleError` for a CPU that lacks instructions or a GPU of another architecture;
    :class:`DeviceError` where there is no such GPU.
    """
    if built_for.kind == "cuda":
        _check_gpu(built_for, index)
    else:
        _check_cpu(built_for, index)


def _check_gpu(built_for: Device, index: int) -> None:
    from ecornn.host_gpu import detect

    found = detect(index)
    if found is None:
        raise DeviceError("device", index, "the number of a CUDA GPU that this process can use: the "
                          f"module was compiled for {built_for.arch}")
    if found.arch != built_for.arch:
        raise ModuleError(f"the module was compiled for {built_for.arch} ({built_for.name}), but GPU {index} "
                          f"is a {found.name}, {found.arch}: compile with target={found.arch!r}")


def _check_cpu(built_for: Device, index: int) -> None:
    if index != 0:
        raise DeviceError("device", index, "0 for a module that was compiled for a CPU")
    info = cpuinfo()
    flags = (info.get("flags") or info.get("Features") or "").split()
    if not flags:
        return  # this kernel does not tell
    present = {_plain(flag) for flag in flags}
    missing = [f for f in built_for.features if _plain(_KERNEL_NAME.get(f, f)) not in present]
    if missing:
        raise ModuleError(f"the module was compiled for {built_for.arch} ({built_for.name}) and uses "
                          f"{', '.join(missing)}, which this CPU lacks: compile it here with target='cpu'")


def _plain(name: str) -> str:
    """LLVM writes avx512vnni and sse4.1 where the kernel writes avx512_vnni and sse4_1."""
    return name.replace("_", "").replace("-", "").replace(".", "").lower()
