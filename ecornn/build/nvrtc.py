"""CUDA source -> cubin or PTX by NVRTC, from the wheels of the ``cuda`` extra."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from ecornn.build.commands import first_lines
from ecornn.build.generated import texts
from ecornn.chips import ARCHITECTURES
from ecornn.errors import BuildError

# TVM's source includes these of libcu++, which the extra's wheels lack, for little or nothing.
_IN_MEMORY = ("cuda/std/cstdint", "cuda/std/type_traits", "cuda/barrier")
_RUNTIME_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")


class UnknownArchitectureError(BuildError):
    """The compiler is older than the GPU."""


def unknown(compiler: str, arch: str) -> UnknownArchitectureError:
    newer = f"CUDA {ARCHITECTURES[arch].cuda} or newer" if arch in ARCHITECTURES else "a newer CUDA toolkit"
    return UnknownArchitectureError(f"{compiler} does not know {arch}: it needs {newer}")


def available() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        return False


def identity() -> str:
    """All that machine code depends on besides source and architecture."""
    names = ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", *_RUNTIME_WHEELS)
    versions = [f"{name} {version}" for name in names if (version := _version(name))]
    return "\n".join([*versions, str(include_folder()), *texts("nvrtc.py", "nvrtc_std.h").values()])


def _version(wheel: str) -> str | None:
    try:
        return metadata.version(wheel)
    except metadata.PackageNotFoundError:
        return None


def compile(source: str, arch: str, kind: str) -> tuple[bytes, str]:
    """The output (``kind`` is ``cubin`` or ``ptx``) and the log; :class:`BuildError` on failure."""
    from cuda.bindings import nvrtc

    folder = include_folder()
    cccl = (folder / "cccl" / "cuda" / "std" / "cstdint").is_file()
    names = [] if cccl else [name.encode() for name in _IN_MEMORY]
    headers = [text.encode() for text in texts("nvrtc_std.h").values()] * len(names)
    program = _check(nvrtc, "nvrtcCreateProgram", source.encode(), b"kernels.cu", len(names), headers, names)
    try:
        real, own = (arch, ["--ptxas-options=-v"]) if kind == "cubin" else (f"compute_{arch.removeprefix('sm_')}", [])
        options = [f"--gpu-architecture={real}", "-std=c++17", "-default-device", "--device-int128", "-w",
                   f"-I{folder}", f"-I{folder / 'cccl'}",
                   "-DINFINITY=__int_as_float(0x7f800000)", *own]  # TVM writes it, and NVRTC has no math.h
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _text(nvrtc, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            # Cooperative groups include more of libcu++ than TVM does itself.
            hint = "\npip install nvidia-cuda-cccl, or install nvcc" if b'source file "nv/' in log else ""
            if b"invalid value for --gpu-architecture" in log:
                raise unknown("NVRTC", arch)
            raise BuildError(f"NVRTC failed for {arch}: {result.name}\n{first_lines(log.decode())}{hint}")
        get = f"nvrtcGet{kind.upper()}"
        return _text(nvrtc, f"{get}Size", get, program), log.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def toolkits() -> Iterator[Path]:
    """The folders where a CUDA toolkit may be: ``$CUDA_HOME``, ``$CUDA_PATH`` and /usr/local/cuda."""
    roots = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return (Path(root) for root in roots if root)


def include_folder() -> Path:
    """The folder of ``cuda_fp16.h``: in the runtime's wheel, else below ``$CUDA_HOME``."""
    for wheel in filter(_version, _RUNTIME_WHEELS):
        for file in metadata.files(wheel) or []:
            if file.name == "cuda_fp16.h":
                return Path(str(file.locate())).parent
    for root in toolkits():
        if (root / "include" / "cuda_fp16.h").is_file():
            return root / "include"
    raise BuildError("NVRTC is installed but CUDA's headers are not: in a checkout of ecornn, pip install '.[cuda]'")


def _check(nvrtc: Any, function: str, *arguments: Any) -> Any:
    """The value of a call of NVRTC, which returns (status, value) or (status,)."""
    try:
        result, *values = getattr(nvrtc, function)(*arguments)
    except RuntimeError as error:  # the bindings are there, libnvrtc.so is not
        raise BuildError(f"NVRTC cannot be loaded: {error}; in a checkout of ecornn, pip install '.[cuda]'") from error
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildError(f"{function}: {result.name}")
    return values[0] if values else None


def _text(nvrtc: Any, size: str, get: str, program: Any) -> bytes:
    buffer = bytearray(_check(nvrtc, size, program))
    _check(nvrtc, get, program, buffer)
    return bytes(buffer)
