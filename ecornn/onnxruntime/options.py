"""Sessions of ONNX Runtime that know the operators of a rewritten model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ecornn.boundary import public
from ecornn.errors import ArgumentError, ModuleError
from ecornn.onnxruntime.library import NAME

THREADS = "ecornn.threads"  # the entry of session options that operators.cc reads
_MOST = 1024


def folder_of(model: str | os.PathLike[str]) -> Path:
    """Where the library and the modules of a rewritten model are."""
    return Path(model).with_suffix(".modules")


@public
def session_options(model: str | os.PathLike[str], options: Any = None, *, threads: int | None = None) -> Any:
    """Options for a session of a model that :func:`ecornn.onnxruntime.rewrite` wrote.

    Parameters
    ----------
    model : the model's file, which has its folder beside it
    options : ``onnxruntime.SessionOptions`` for this model alone, to which the library is added; default: new ones
    threads : CPU threads of a compiled node; default: ``options.intra_op_num_threads``, and where that is 0 the
        physical cores that this process may use

    Raises
    ------
    ArgumentError : ONNX Runtime is not installed; ``threads`` is not 1 to 1024
    ModuleError : the folder has no library
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ArgumentError("model", str(model), "onnxruntime installed: pip install onnxruntime") from error
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST):
        raise ArgumentError("threads", threads, f"an integer from 1 to {_MOST}, or None")
    library = folder_of(model) / NAME
    if not library.is_file():
        raise ModuleError(f"there is no {library}: ecornn onnx-rewrite writes it beside {Path(model).name}")
    options = onnxruntime.SessionOptions() if options is None else options
    threads = threads or options.intra_op_num_threads
    if threads:
        options.add_session_config_entry(THREADS, str(min(threads, _MOST)))
    options.register_custom_ops_library(str(library.resolve()))
    return options
