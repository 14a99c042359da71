"""From a program to one shared library: code generation, compilers, generated host code, linker."""

from ecornn.build.generated import Generated
from ecornn.build.module import build_module

__all__ = ["Generated", "build_module"]
