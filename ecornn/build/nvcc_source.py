"""CUDA source that nvcc compiles faster: short headers, and variables in place of large local arrays.

Headers: kernels use few declarations, which stand in place of TVM's first lines and CUDA's headers; these take longer
to read than most kernels take to compile. (NVRTC has them ready, and gains nothing.)

Arrays: TVM keeps accumulators and fragments in arrays, which end up in registers because every index is a constant.
Finding that out costs nvcc's optimiser the size of an array times the number of its uses, or the square of that number:
most of the time of a kernel with many products. Variables are registers from the start. Of some kernels ptxas then
makes code that differs in the order and choice of registers; so source that compiles fast is left as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib import resources

# nvcc reads cuda_runtime.h before every source, unless it seems to have been read.
DEFINES = ("-D__CUDA_RUNTIME_H__", "-D__CUDA_RUNTIME_API_H__")
_TVM_ENDS = "#define ushort unsigned short\n#endif\n"  # the lines that TVM puts first
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(if|include)", re.MULTILINE)

WORK = 500_000  # sizes times uses, of all arrays of a source: a second of nvcc's time
EACH = 100_000  # of an array that counts
MANY = 4_500  # uses of one array: more than a second of it, too
_ARRAY = r"\w*_ptr(?:_\d+)?"
_DECLARED = re.compile(rf"^( *)alignas\(64\) (\w+) ({_ARRAY})\[(\d+)\];$", re.MULTILINE)
_USED = re.compile(rf"\b({_ARRAY})\[(\d+)\]")
_ELSE = re.compile(rf"&\(*({_ARRAY})\b|\b({_ARRAY})\b(?!\[\d+\])")  # an address, or another index than a constant


def short(source: str) -> str | None:
    """``source`` with :func:`headers` in place of TVM's first lines, to be compiled with ``DEFINES``; None where that
    may mean something else.

    A type or function that :func:`headers` lacks is for the compiler to find. A condition is not: an undefined name
    would choose the other branch.
    """
    _, end, kernels = source.partition(_TVM_ENDS)
    return headers() + kernels if end and not _DIRECTIVE.search(kernels) else None


@cache
def headers() -> str:
    """The declarations that kernels use, from kernel_headers.h."""
    return resources.files("ecornn.build").joinpath("kernel_headers.h").read_text()


def as_variables(source: str) -> str:
    """``source`` with a variable for each element of the arrays that would cost nvcc most, if these cost much."""
    uses = Counter(match[1] for match in _USED.finditer(source))
    work = {match[3]: int(match[4]) * uses[match[3]] for match in _DECLARED.finditer(source)}
    least = EACH if sum(work.values()) >= WORK else WORK
    chosen = {name for name, of in work.items() if of >= least or uses[name] >= MANY}
    if not chosen:
        return source
    chosen -= {name for match in _ELSE.finditer(source) for name in match.groups()}

    def declare(match: re.Match[str]) -> str:
        indent, kind, name, size = match.groups()
        return f"{indent}{kind} {', '.join(f'{name}_e{i}' for i in range(int(size)))};" if name in chosen else match[0]

    source = _DECLARED.sub(declare, source)
    return _USED.sub(lambda match: f"{match[1]}_e{match[2]}" if match[1] in chosen else match[0], source)
