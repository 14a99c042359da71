"""CUDA source -> cubin or PTX, by nvcc where there is one, otherwise by NVRTC.

``ECORNN_CUDA_COMPILER=nvcc`` or ``nvrtc`` forces one of the two. Neither is ever given ``--use_fast_math``: a schedule
that wants a fast approximation says so in its code.

Source is changed so that nvcc compiles it faster. Few declarations stand in place of TVM's first lines and CUDA's
headers, which take longer to read than most kernels to compile. And large local arrays become variables: they end up in
registers anyway, but finding that out costs nvcc the size of an array times its uses, or their square. Of some kernels
ptxas then makes other code, so source that compiles fast is left as it is."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence

import msgspec

from ecornn import temporary
from ecornn.build import cache, nvrtc
from ecornn.build.commands import ANSWER, WORK, first_lines, run
from ecornn.build.generated import texts
from ecornn.chips import ARCHITECTURES
from ecornn.errors import ArgumentError, BuildError

Resources = dict[str, dict[str, int]]
FIELDS = ("registers", "stack", "spill_stores", "spill_loads", "shared")
ENVIRONMENT = "ECORNN_CUDA_COMPILER"
FLAGS = ("-O3", "-std=c++17", "-w", "-Xptxas=-v")  # of nvcc
INSTALL = ("install the CUDA toolkit so that nvcc is on the PATH or below $CUDA_HOME, "
           "or NVRTC, in a checkout of ecornn, with: pip install '.[cuda]'")
# How nvcc's front end begins an error: `kernels.cu(3): error: ...`, or the preprocessor's `fatal error: ...`.
_NOT_UNDERSTOOD = re.compile(r"\(\d+\): (?:catastrophic )?error|:\d+: fatal error:")


def compile_cubin(source: str, arch: str) -> tuple[bytes, Resources]:
    """Machine code for ``arch`` (such as ``sm_90a``) of CUDA C++ ``source``, from the cache if possible: the cubin, and
    by kernel ``registers`` (a thread), ``stack``, ``spill_stores``, ``spill_loads`` (bytes a thread), ``shared``
    (static, bytes a block). For a GPU that is newer than the compiler: PTX, and no resources. Raises
    :class:`BuildError` with the compiler's first lines, or with what to install."""
    entry = cache.entry("cubin", (source, arch, identity()),
                        lambda: msgspec.msgpack.encode(_compile(source, arch, "cubin")))
    code, log = msgspec.msgpack.decode(entry, type=tuple[bytes, str])
    return code, parse_resources(log)


def ptx(source: str, arch: str) -> str:
    """PTX for ``arch`` of CUDA C++ ``source``; errors as :func:`compile_cubin`."""
    return _compile(source, arch, "ptx")[0].rstrip(b"\0").decode()


def find_nvcc() -> str | None:
    """Path of nvcc: on the PATH, below ``$CUDA_HOME`` or ``$CUDA_PATH``, or in /usr/local/cuda."""
    below = (root / "bin" / "nvcc" for root in nvrtc.toolkits())
    return shutil.which("nvcc") or next((str(path) for path in below if path.is_file()), None)


def identity() -> str:
    """All that machine code depends on besides source and architecture: the compiler, its flags, and headers."""
    if nvcc := chosen_nvcc():
        return " ".join((_said(nvcc), *FLAGS, *DEFINES, headers()))
    return nvrtc.identity()


@functools.cache
def _said(nvcc: str) -> str:
    return run([nvcc, "--version"], ANSWER)[1]


def parse_resources(log: str) -> Resources:
    """The resources of each entry function, as ``ptxas -v`` reports them in ``log``."""
    resources: Resources = {}
    entry: dict[str, int] = {}
    function: dict[str, int] = {}
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            entry = resources.setdefault(match[1], dict.fromkeys(FIELDS, 0))
        elif match := re.search(r"Function properties for (\S+)", line):
            # Functions that were not inlined are listed as well, and count for no kernel.
            function = resources.get(match[1], {})
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, "
                                r"(\d+) bytes spill loads", line):
            function.update(zip(FIELDS[1:4], map(int, match.groups()), strict=True))
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            entry.update(registers=int(match[1]), shared=int(shared[1]) if shared else 0)
    return resources


def chosen_nvcc() -> str | None:
    """Path of the nvcc that compiles; None: NVRTC does. :class:`BuildError` where there is neither."""
    choice = os.environ.get(ENVIRONMENT, "")
    if choice not in ("", "nvcc", "nvrtc"):
        raise ArgumentError(ENVIRONMENT, choice, "'nvcc', 'nvrtc' or nothing")
    nvcc = find_nvcc() if choice != "nvrtc" else None
    if choice == "nvcc" and not nvcc:
        raise BuildError(f"{ENVIRONMENT}=nvcc, but nvcc was not found; {INSTALL}")
    if not nvcc and not nvrtc.available():
        raise BuildError(f"no CUDA compiler was found; {INSTALL}")
    return nvcc


def _compile(source: str, arch: str, kind: str) -> tuple[bytes, str]:
    """The compiler's output (``kind`` is ``cubin`` or ``ptx``) and its log. In place of a cubin for an architecture
    that neither chips.py nor the compiler knows, PTX for the newest one before it: the GPU's driver compiles that as
    it loads it, and there is no report of resources."""
    try:
        return _compiled(source, arch, kind)
    except nvrtc.UnknownArchitectureError:
        if arch in ARCHITECTURES or kind == "ptx":
            raise
        older = [name.rstrip("a") for name in ARCHITECTURES if int(name[3:].rstrip("a")) < int(arch[3:].rstrip("af"))]
        for name in reversed(older):
            with contextlib.suppress(nvrtc.UnknownArchitectureError):
                text, log = _compiled(source, name, "ptx")
                return text.rstrip(b"\0") + b"\0", log
        raise


def _compiled(source: str, arch: str, kind: str) -> tuple[bytes, str]:
    nvcc = chosen_nvcc()
    if not nvcc:
        return nvrtc.compile(source, arch, kind)
    if (shorter := short(source)) is not None:
        try:
            return _nvcc(nvcc, shorter, arch, kind, DEFINES)
        except BuildError as error:
            # Source that is not understood needs CUDA's headers, or is wrong and fails with them too. They mend
            # nothing that fails later: ptxas finds too much shared memory, or the compiler is killed.
            if not _NOT_UNDERSTOOD.search(str(error)):
                raise
    return _nvcc(nvcc, source, arch, kind)


def _nvcc(nvcc: str, source: str, arch: str, kind: str, defines: Sequence[str] = ()) -> tuple[bytes, str]:
    virtual = f"compute_{arch.removeprefix('sm_')}"
    with temporary.folder() as folder:
        source_file, output = folder / "kernels.cu", folder / f"kernels.{kind}"
        source_file.write_text(source)
        status, log = run([nvcc, f"-gencode=arch={virtual},code={arch if kind == 'cubin' else virtual}", *FLAGS,
                           *defines, f"-{kind}", str(source_file), "-o", str(output)], WORK, folder)
        if "Unsupported gpu architecture" in log:
            raise nvrtc.unknown("nvcc", arch)
        if status != 0:
            raise BuildError(f"nvcc failed for {arch} with status {status}:\n{first_lines(log)}{temporary.limited()}")
        return output.read_bytes(), log


# nvcc reads cuda_runtime.h before every source, unless it seems to have been read.
DEFINES = ("-D__CUDA_RUNTIME_H__", "-D__CUDA_RUNTIME_API_H__")
_TVM_ENDS = "#define ushort unsigned short\n#endif\n"  # the lines that TVM puts first
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(if|include)", re.MULTILINE)

COSTLY = 500_000  # sizes times uses, of all arrays of a source: a second of nvcc's time
EACH = 100_000  # of an array that counts
MANY = 4_500  # uses of one array: more than a second of it, too
_ARRAY = r"\w*_ptr(?:_\d+)?"
_DECLARED = re.compile(rf"^( *)alignas\(64\) (\w+) ({_ARRAY})\[(\d+)\];$", re.MULTILINE)
_USED = re.compile(rf"\b({_ARRAY})\[(\d+)\]")
_ELSE = re.compile(rf"&\(*({_ARRAY})\b|\b({_ARRAY})\b(?!\[\d+\])")  # an address, or another index than a constant


def short(source: str) -> str | None:
    """``source`` with :func:`headers` in place of TVM's first lines, for ``DEFINES``; None where that may mean
    something else: an undefined name in a condition chooses the other branch, any other the compiler finds."""
    _, end, kernels = source.partition(_TVM_ENDS)
    return headers() + kernels if end and not _DIRECTIVE.search(kernels) else None


@functools.cache
def headers() -> str:
    """The declarations that kernels use, from kernel_headers.h."""
    return texts("kernel_headers.h")["kernel_headers.h"]


def as_variables(source: str) -> str:
    """``source`` with a variable for each element of the arrays that would cost nvcc most, if these cost much."""
    uses = Counter(match[1] for match in _USED.finditer(source))
    work = {match[3]: int(match[4]) * uses[match[3]] for match in _DECLARED.finditer(source)}
    least = EACH if sum(work.values()) >= COSTLY else COSTLY
    chosen = {name for name, of in work.items() if of >= least or uses[name] >= MANY}
    if not chosen:
        return source
    chosen -= {name for match in _ELSE.finditer(source) for name in match.groups()}

    def declare(match: re.Match[str]) -> str:
        indent, kind, name, size = match.groups()
        return f"{indent}{kind} {', '.join(f'{name}_e{i}' for i in range(int(size)))};" if name in chosen else match[0]

    source = _DECLARED.sub(declare, source)
    return _USED.sub(lambda match: f"{match[1]}_e{match[2]}" if match[1] in chosen else match[0], source)
