"""A module in a process whose CUDA driver only takes notes (fake_driver.c), and those notes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PARAMETERS = "total_kernel:ppppi;step_kernel:pppppi;last_kernel:pppi;"  # of cuda_sample.py
# What every child process does first; the loader must not need TVM's compiler.
LOAD = "import sys, tvm_ffi; m = tvm_ffi.load_module(sys.argv[1]); assert 'tvm' not in sys.modules\n"
LOGGED = re.compile(r"^(cu[A-Z]\w+)(?: (.*))?$", re.MULTILINE)


def child(code: str, module: Path, driver: Path | None = None, *arguments: object, **environment: str) -> Any:
    """Runs ``LOAD`` and ``code`` in a new process; ``calls`` of the answer are the driver's notes."""
    env = {**os.environ, "FAKE_PARAMETERS": PARAMETERS, **environment}
    if driver:
        env["LD_LIBRARY_PATH"] = f"{driver}{os.pathsep}{env['LD_LIBRARY_PATH']}" if (
            "LD_LIBRARY_PATH" in env) else str(driver)
    done = subprocess.run([sys.executable, "-c", LOAD + code, str(module), *map(str, arguments)], env=env, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    done.calls = [" ".join(filter(None, match.groups())) for match in LOGGED.finditer(done.stderr)]
    return done


def raised(code: str) -> str:
    """Code that prints type and message of what ``code`` raises."""
    return f"try:\n    {code.strip()}\nexcept Exception as e:\n    print(type(e).__name__, e)\n"
