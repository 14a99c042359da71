"""Importing TVM without PyTorch, for processes of our own that exchange no tensors."""

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
    """Imports TVM without PyTorch, which it would import if installed (2 seconds of 3): it seems missing meanwhile."""
    require_tvm()
    if "tvm" in sys.modules or "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` an ImportError
    try:
        import tvm  # noqa: F401
    finally:
        del sys.modules["torch"]
