"""The operator library: compiled by the host's C++ compiler when a model is first rewritten."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from ecornn import temporary
from ecornn.build import cache
from ecornn.build.link import find_compiler, identity, run_tool

NAME = "libecornn_onnxruntime.so"
SOURCE = "operators.cc"
FLAGS = ("-shared", "-fPIC", "-O2", "-std=c++17", "-pthread", "-fvisibility=hidden", "-w")
# modules need libtvm_ffi, which lies beside them; the library must bring it though it has no use for it
LINKED = ("-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-ltvm_ffi", "-Wl,--as-needed", "-ldl", "-Wl,-z,noexecstack")


def write(folder: Path) -> Path:
    """Puts the library and what it needs into a folder; returns its path.

    Raises :class:`~ecornn.errors.BuildError` without a C++ compiler.
    """
    from tvm_ffi import libinfo

    content = cache.entry("onnxruntime", (identity(), *FLAGS, *LINKED, *_texts()), _compiled)
    runtime = Path(libinfo.find_libtvm_ffi())
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as name:
        made = Path(name, NAME)
        made.write_bytes(content)
        made.chmod(0o755)
        shutil.copyfile(runtime, Path(name, runtime.name))
        for path in (Path(name, runtime.name), made):  # a process that has an older one loaded keeps it
            path.replace(folder / path.name)
    return folder / NAME


def _texts() -> Iterator[str]:
    for place in ("onnxruntime", "include"):
        for path in sorted(resources.files("ecornn").joinpath(place).iterdir(), key=lambda p: p.name):
            if path.name.endswith((".cc", ".h", ".hpp")):
                yield path.read_text()


def _compiled() -> bytes:
    from tvm_ffi import libinfo

    package = resources.files("ecornn")
    folders = [package / "include", libinfo.find_dlpack_include_path()]
    runtime = Path(libinfo.find_libtvm_ffi())
    with temporary.folder() as folder:
        run_tool([*find_compiler(), *FLAGS, *(f"-I{f}" for f in folders), str(package / "onnxruntime" / SOURCE),
                  f"-L{runtime.parent}", *LINKED, "-o", NAME], folder)
        return (folder / NAME).read_bytes()
