"""Loads module files and runs them; needs NumPy, msgspec and apache-tvm-ffi, and no compiler."""

from __future__ import annotations

from ecornn.runtime.columns import Columns
from ecornn.runtime.loader import Layer, Module, load

__all__ = ["Columns", "Layer", "Module", "load"]
