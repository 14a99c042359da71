"""The commands' entry points, where what they need may be missing: an installation may be of the runtime alone."""

from __future__ import annotations

import sys
from functools import partial

PACKAGES = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}  # module: what brings it
HINT = ("this installation runs module files and no more. To compile and tune, install ecornn with what it requires: "
        "pip install of its wheel file or checkout, without --no-deps")


def _run(name: str) -> None:
    try:
        import ecornn.cli

        getattr(ecornn.cli, name)(prog_name="ecornn" if name == "main" else f"ecornn-{name}")
    except ModuleNotFoundError as error:  # one of ecornn's own that is not there is a fault
        root = (error.name or "").partition(".")[0]
        if root in ("", "ecornn"):
            raise
        print(f"error: {PACKAGES.get(root, root)} is not installed: {HINT}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before a command begins, which has its own way to end
        raise SystemExit(130) from None


main, tune, compile = (partial(_run, name) for name in ("main", "tune", "compile"))  # ecornn, ecornn-tune, ...
