"""Loads module files and runs them; needs NumPy, msgspec and apache-tvm-ffi, and no compiler."""

from __future__ import annotations

from ecornn.runtime.columns import Columns
from ecornn.runtime.layer import Layer
from ecornn.runtime.loader import Module, load

__all__ = ["Columns", "Layer", "Module", "load"]
