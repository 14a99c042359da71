"""Importing TVM without PyTorch, for processes of our own that exchange no tensors."""

from __future__ import annotations

import sys


def import_tvm() -> None:
    """Imports TVM. Where PyTorch is installed TVM imports it too, which takes longer than all the rest
    (2 seconds of 3); it does without where there is none, and so it seems meanwhile."""
    if "tvm" in sys.modules or "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` an ImportError
    try:
        import tvm  # noqa: F401
    finally:
        del sys.modules["torch"]
