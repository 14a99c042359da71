"""The operator library for ONNX Runtime, which the host's C++ compiler makes, and sessions that know its operators."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ecornn.boundary import public
from ecornn.build.link import libinfo, package_library
from ecornn.errors import ArgumentError, ModuleError

NAME = "libecornn_onnxruntime.so"
SOURCE = "onnxruntime/operators.cc"
# modules need libtvm_ffi, which lies beside them; the library must bring it though it has no use for it
LINKED = ("-pthread", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-ltvm_ffi", "-Wl,--as-needed", "-ldl",
          "-Wl,-z,noexecstack")
THREADS = "ecornn.threads"  # the entry of session options that operators.cc reads
# ONNX Runtime's threads go on spinning after a node of theirs, on the cores that the next compiled one needs
SPINNING = "session.intra_op.allow_spinning"
_MOST = 1024


def write(folder: Path) -> Path:
    """Puts the library and libtvm_ffi, which it needs, into a folder; returns the library's path. Raises
    :class:`~ecornn.errors.BuildError` without a C++ compiler."""
    runtime, content = Path(libinfo().find_libtvm_ffi()), package_library(SOURCE, LINKED)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as name:
        library = Path(name, NAME)
        library.write_bytes(content)
        library.chmod(0o755)
        shutil.copyfile(runtime, Path(name, runtime.name))
        for path in (Path(name, runtime.name), library):  # a process that has an older one loaded keeps it
            path.replace(folder / path.name)
    return folder / NAME


def folder_of(model: str | os.PathLike[str]) -> Path:
    """The folder with the library and the modules of a rewritten model."""
    return Path(model).with_suffix(".modules")


@public
def session_options(model: str | os.PathLike[str], options: Any = None, *, threads: int | None = None) -> Any:
    """Options for a session of a model that :func:`ecornn.onnxruntime.rewrite` wrote.

    Parameters
    ----------
    model : the model's file, which has its folder beside it
    options : ``onnxruntime.SessionOptions`` for this model alone, to which the library is added; default: new ones.
        Those that say nothing of ``session.intra_op.allow_spinning`` get ``0`` where the model has compiled nodes: else
        threads of ONNX Runtime and those of compiled nodes compete for cores
    threads : CPU threads of a compiled node; default: ``options.intra_op_num_threads``, and where that is 0 the
        physical cores that this process may use

    Raises
    ------
    ArgumentError : ONNX Runtime is not installed; ``threads`` is not 1 to 1024
    ModuleError : the folder has no library"""
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise ArgumentError("model", str(model), "onnxruntime, which is not installed: pip install "
                            "onnxruntime") from error
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST):
        raise ArgumentError("threads", threads, f"an integer from 1 to {_MOST}, or None")
    library = folder_of(model) / NAME
    if not library.is_file():
        raise ModuleError(f"{library} does not exist; `ecornn onnx-rewrite` writes it beside {Path(model).name}")
    return with_library(library, options, threads)


def with_library(library: Path, options: Any = None, threads: int | None = None) -> Any:
    """Does what :func:`session_options` does, with a library that is there."""
    import onnxruntime

    options = onnxruntime.SessionOptions() if options is None else options
    threads = threads or options.intra_op_num_threads
    if threads:
        options.add_session_config_entry(THREADS, str(min(threads, _MOST)))
    try:
        said = options.get_session_config_entry(SPINNING)
    except RuntimeError:  # they have none
        said = ""
    if not said and any(file.suffix == ".so" and not file.name.startswith("lib") for file in library.parent.iterdir()):
        options.add_session_config_entry(SPINNING, "0")
    options.register_custom_ops_library(str(library.resolve()))
    return options
