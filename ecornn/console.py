"""The commands' entry points, where what they need may be missing: an installation may be of the runtime alone."""

from __future__ import annotations

import sys
from functools import partial

PACKAGES = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}  # module: what brings it
HINT = ("this installation can only run module files. To compile and tune, install ecornn with its requirements: "
        "pip install its wheel file or checkout, without --no-deps")


def _run(*command: str) -> None:
    try:
        import ecornn.cli

        ecornn.cli.main([*command, *sys.argv[1:]], prog_name="ecornn")
    except ModuleNotFoundError as error:  # one of ecornn's own that is not there is a fault
        root = (error.name or "").partition(".")[0]
        if root in ("", "ecornn"):
            raise
        print(f"error: {PACKAGES.get(root, root)} is not installed: {HINT}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before a command begins, which has its own way to end
        raise SystemExit(130) from None


main, tune, compile = partial(_run), partial(_run, "tune"), partial(_run, "compile")  # ecornn, ecornn-tune, ...
