"""Targets as users name them, ``cpu``, ``cuda``, an architecture, a GPU's or a CPU's name, and what these mean."""

from __future__ import annotations

import re

from ecornn import host_cpu, host_gpu
from ecornn.chips import ARCHITECTURES, PRODUCTS, Product
from ecornn.device import Device, architecture_of
from ecornn.errors import DeviceError

_LETTER = 90  # the first compute capability whose architecture has a form with the letter a; families (f) are later
_MAKER = re.compile(r"^(nvidia|geforce|tesla)-|-generation$")


def _device(product: Product) -> Device:
    limits = ARCHITECTURES[product.arch]
    return Device("cuda", product.arch, product.name, product.cores, limits.shared, limits.registers,
                  product.l2 << 20, product.memory)


# By the product's short name; and by its architecture the first product of each, which "--target sm_90a" means.
BY_NAME = {product.short: _device(product) for product in PRODUCTS}
KNOWN = {arch: next(device for device in BY_NAME.values() if device.arch == arch) for arch in ARCHITECTURES}
NAMES = ", ".join([*KNOWN, *BY_NAME])


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
    """The device for ``cpu``, ``cuda`` (the GPU at hand), an architecture such as ``sm_90a``, a product such as
    ``rtx-4090`` or ``RTX 4090``, or a CPU's LLVM name such as ``neoverse-v1``. An architecture means its most common
    large product. Raises :class:`DeviceError` where there is no GPU, or for a name that nothing has."""
    if isinstance(target, Device):
        return target
    if target == "cpu":
        return host_cpu.detect()
    if target == "cuda":
        if (gpu := host_gpu.detect()) is None:
            raise DeviceError("target", target, "a machine with a CUDA GPU and its driver; without one name the "
                              f"architecture or the product, one of {NAMES}, or 'cpu'")
        return gpu
    if gpu := _by_architecture(target) or BY_NAME.get(_short(target)):
        return gpu
    cpu = None if target.startswith("sm_") else host_cpu.named(target)
    if cpu is None:
        raise DeviceError("target", target, "'cpu', 'cuda', a GPU of compute capability 8.0 or newer, one of "
                          f"{NAMES}, or LLVM's name of a 64-bit CPU such as znver4, skylake-avx512 or neoverse-v1")
    return cpu


def _by_architecture(target: str) -> Device | None:
    """``sm_100``, and its forms ``sm_100a`` and ``sm_100f``, are the same to schedules."""
    if (match := re.fullmatch(r"sm_(\d{2,3})([af]?)", target)) is None:
        return None
    number, letter = int(match[1]), match[2]
    return KNOWN.get(architecture_of(number)) if not letter or number >= _LETTER + 10 * (letter == "f") else None


def _short(target: str) -> str:
    """A product's name as people write it, or its driver, as the table's short names are written."""
    words = re.sub(r"[\s_-]+", "-", target.strip().lower())
    while (fewer := _MAKER.sub("", words)) != words:
        words = fewer
    return next((product.short for product in PRODUCTS if product.name.lower() == target.strip().lower()), words)
