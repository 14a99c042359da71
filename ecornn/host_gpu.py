"""The GPU at hand, asked through the driver alone."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from ecornn.device import Device, architecture_of
from ecornn.errors import DeviceError

# CUdevice_attribute
_CORES, _L2, _MAJOR, _MINOR, _REGISTERS, _SHARED = 16, 38, 75, 76, 82, 97
_CLOCK, _MEMORY_CLOCK = 13, 36


def detect(index: int = 0) -> Device | None:
    """GPU number ``index`` of those that CUDA shows; None without a driver or without that GPU. Raises
    :class:`DeviceError` for a GPU older than compute capability 8.0, or where the driver fails."""
    driver, count, handle = _open("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0:
        return None
    _check(driver, "cuDeviceGetCount", ctypes.byref(count))
    if not 0 <= index < count.value:
        return None
    _check(driver, "cuDeviceGet", ctypes.byref(handle), index)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(driver, "cuDeviceGetAttribute", ctypes.byref(value), number, handle)
        return value.value

    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    _check(driver, "cuDeviceGetName", name, len(name), handle)
    _check(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    product = name.value.decode(errors="replace")
    return Device("cuda", architecture(attribute(_MAJOR), attribute(_MINOR), product), product,
                  attribute(_CORES), attribute(_SHARED), attribute(_REGISTERS), attribute(_L2), memory.value)


def clocks() -> tuple[int, int]:
    """Highest clocks of the first GPU's multiprocessors and of its memory, MHz; 0 where unknown."""
    driver, handle, khz = _open("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(handle), 0) != 0:
        return 0, 0
    mhz = []
    for number in (_CLOCK, _MEMORY_CLOCK):
        known = driver.cuDeviceGetAttribute(ctypes.byref(khz), number, handle) == 0
        mhz.append(khz.value // 1000 if known else 0)
    return mhz[0], mhz[1]


def architecture(major: int, minor: int, name: str) -> str:
    """A compute capability's architecture; raises :class:`DeviceError` for one that is too old."""
    if major < 8:
        raise DeviceError("device", name, f"compute capability 8.0 or newer, not {major}.{minor}")
    return architecture_of(10 * major + minor)


def driver_version() -> str | None:
    """The driver's version (``580.65.06``), or that of the CUDA it serves (``CUDA 13.0``); None without a driver."""
    if nvml := _open("libnvidia-ml.so.1"):
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0:
            told = nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0
            nvml.nvmlShutdown()
            if told:
                return text.value.decode()
    if (module := Path("/sys/module/nvidia/version")).is_file():
        return module.read_text().strip()
    driver, number = _open("libcuda.so.1"), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _open(library: str) -> Any:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def _check(driver: Any, function: str, *arguments: Any) -> None:
    """Calls the driver; its errors here mean a broken installation."""
    if (result := getattr(driver, function)(*arguments)) != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DeviceError("device", "cuda", f"a working driver, but {function} says {reason}")
