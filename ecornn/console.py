"""The commands' entry points, where what they need may be missing: an installation may be of the runtime alone."""

from __future__ import annotations

import sys
from typing import NoReturn

PACKAGES = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi", "xgboost": "xgboost-cpu"}  # module: what brings it
HINT = ("this installation runs module files and no more. To compile and tune, install ecornn with what it requires: "
        "pip install of its wheel file or checkout, without --no-deps")


def main() -> None:
    """``ecornn``."""
    _run("main")


def tune() -> None:
    """``ecornn-tune``."""
    _run("tune")


def compile() -> None:
    """``ecornn-compile``."""
    _run("compile")


def _run(name: str) -> None:
    try:
        import ecornn.cli

        getattr(ecornn.cli, name)(prog_name="ecornn" if name == "main" else f"ecornn-{name}")
    except ModuleNotFoundError as error:
        _missing(error)
    except KeyboardInterrupt:  # before a command begins, which has its own way to end
        raise SystemExit(130) from None


def _missing(error: ModuleNotFoundError) -> NoReturn:
    """Says which package is missing, and exits with 2; a module of ecornn's own that is not there is a fault."""
    root = (error.name or "").partition(".")[0]
    if root in ("", "ecornn"):
        raise error
    print(f"error: {PACKAGES.get(root, root)} is not installed: {HINT}", file=sys.stderr)
    raise SystemExit(2) from None
