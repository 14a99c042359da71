"""What ptxas makes of kernels for Hopper: what it says is read, as of wgmma that it serializes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from ecornn.build.nvcc import find_nvcc, parse_resources

NVCC = find_nvcc()
needs_ptxas = pytest.mark.skipif(NVCC is None, reason="nvcc is optional, and this reads what its ptxas says")


def resources_without_spills(source: str, kernel: str = "") -> dict[str, dict[str, int]]:
    """The resources of that kernel of CUDA source, or of all, which do not spill; nor is wgmma serialized, or
    setmaxnreg ignored, both of which cost most of the speed."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        given.write_text(source)
        command = [str(NVCC), "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-cubin", "-Xptxas=-v",
                   "-diag-suppress=177", str(given), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert made.read_bytes()[:4] == b"\x7fELF"
    log = done.stdout + done.stderr
    assert not re.findall(r"C75\d\d|wgmma|setmaxnreg", log), log
    found = {name: used for name, used in parse_resources(log).items() if kernel in ("", name)}
    assert found and all(used["spill_stores"] == used["stack"] == 0 for used in found.values()), found
    return found
