"""XLA's way to a module: a library with FFI handlers, compiled against jaxlib's headers when it is first needed."""

from __future__ import annotations

import ctypes
import functools
from importlib import resources
from pathlib import Path

from ecornn import checksum, temporary
from ecornn.build.link import package_library
from ecornn.errors import ModuleError
from ecornn.runtime.library import spelling
from ecornn.runtime.loader import Module

TARGETS = {"cpu": "ecornn_jax_cpu", "CUDA": "ecornn_jax_cuda"}  # XLA's platform -> the library's function
TARGET = "ecornn"  # XLA's name of the handlers
ABI = 1
FLAGS = ("-shared", "-fPIC", "-O2", "-std=c++17", "-fvisibility=hidden", "-w")


@functools.cache
def library() -> ctypes.CDLL:
    """The handlers, known to XLA. Raises :class:`~ecornn.errors.BuildError` without a C++ compiler."""
    import jax
    from tvm_ffi import libinfo

    package = Path(str(resources.files("ecornn")))
    texts = [(package / name).read_text() for name in ("jax/handler.cc", "include/ecornn.h",
                                                       "include/ecornn_checksum.h")]
    content = package_library(
        "jax", package / "jax" / "handler.cc",
        (jax.ffi.include_dir(), libinfo.find_dlpack_include_path(), package / "include"), FLAGS, ("-ldl",),
        (jax.version.__version__, *FLAGS, *texts))
    with temporary.folder() as folder:
        path = folder / "handler.so"
        path.write_bytes(content)
        handlers = ctypes.CDLL(str(path))  # it stays when its file goes
    for platform, name in TARGETS.items():
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(handlers, name)), platform=platform)
    return handlers


def register(module: Module) -> str:
    """Makes a module known to the handlers; returns the digest of its file, by which programs of XLA call it.

    Raises :class:`~ecornn.errors.ModuleError` for a file from before modules had a C interface.
    """
    path = module.path
    if not path.is_file():
        raise ModuleError(f"the module's file {path} is gone")
    digest = checksum.said(path.read_bytes()).hex()
    functions = ctypes.CDLL(spelling(path.resolve()))  # never closed: programs of XLA may call it as long as they like
    function = getattr(functions, "ecornn_module_api", None)
    if function is None:
        raise ModuleError(f"{path} was compiled before modules had a C interface: compile it again")
    function.restype = ctypes.c_void_p
    table = function(ABI)
    if not table:
        raise ModuleError(f"{path} has another version of the C interface: compile it again")
    library().ecornn_jax_register(digest.encode(), ctypes.c_void_p(table))
    return digest
