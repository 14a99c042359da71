"""Importing TVM without PyTorch and ml_dtypes, for processes of our own that exchange no tensors."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ecornn.errors import MissingPackageError


def require_tvm() -> None:
    """Raises :class:`MissingPackageError` without TVM, as where the runtime alone is installed."""
    if "tvm" not in sys.modules and find_spec("tvm") is None:
        raise MissingPackageError("apache-tvm is not installed, so that this installation can only run module files. "
                                  "To compile and tune, install ecornn with its requirements")


def import_tvm() -> None:
    """Imports TVM without what it would import if installed and compiling has no use for: PyTorch (2 seconds of 3) and
    ml_dtypes (half of the CPU time that is left). Both seem missing meanwhile, and can be imported later."""
    require_tvm()
    if "tvm" in sys.modules or "torch" in sys.modules:
        return
    hidden = [name for name in ("torch", "ml_dtypes") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes `import torch` an ImportError
    try:
        import tvm  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
