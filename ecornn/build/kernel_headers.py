"""CUDA source for nvcc with the few declarations that kernels use, in place of TVM's first lines and CUDA's headers,
which take longer to read than most kernels take to compile. (NVRTC has these headers ready, and gains nothing.)"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

# nvcc reads cuda_runtime.h before every source, unless it seems to have been read.
DEFINES = ("-D__CUDA_RUNTIME_H__", "-D__CUDA_RUNTIME_API_H__")
_TVM_ENDS = "#define ushort unsigned short\n#endif\n"  # the lines that TVM puts first
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(if|include)", re.MULTILINE)


def short(source: str) -> str | None:
    """``source`` with :func:`text` for what TVM puts first, to be compiled with ``DEFINES``; None where that may mean
    something else.

    A type or function that :func:`text` lacks is for the compiler to find. A condition is not: an undefined name
    would choose the other branch.
    """
    _, end, kernels = source.partition(_TVM_ENDS)
    return text() + kernels if end and not _DIRECTIVE.search(kernels) else None


@cache
def text() -> str:
    """The declarations."""
    return resources.files("ecornn.build").joinpath("kernel_headers.h").read_text()
