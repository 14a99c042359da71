"""Temporary folders in which nothing can be written, or from which nothing can be loaded."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ecornn
from ecornn import temporary
from ecornn.build import commands, link
from ecornn.compiler import generate, plan
from ecornn.errors import BuildError, EcornnError, ModuleError
from ecornn.runtime.loader import from_bytes
from ecornn.tune.pool import Scratch

LIMITED = """
import resource, sys
import ecornn
from ecornn.errors import EcornnError
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
try:
    ecornn.compile("rnn_tanh", hidden=8, batch=1, target="cpu")
except EcornnError as error:
    print(type(error).__name__, error)
"""


def test_a_full_temporary_folder_is_an_error_that_can_be_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(BuildError, match="less than 16 MiB left"):
        generate(plan("rnn_tanh", hidden=8, target="cpu"))


@pytest.mark.parametrize("most", [5, 4096])
def test_a_limit_of_file_sizes_is_named(most: int):
    """LLVM, and the linker, would be ended by it."""
    found = subprocess.run([sys.executable, "-c", LIMITED, str(most)], capture_output=True, text=True,
                           env={**os.environ, "ECORNN_CACHE": "off"})
    assert found.returncode == 0 and found.stdout.startswith("BuildError "), found.stderr
    if most > 100:  # of fewer bytes Python has no temporary folder
        assert f"may have at most {most} bytes: raise that limit (ulimit -f)" in found.stdout


def test_a_tool_that_a_limit_of_file_sizes_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "write.sh").write_text("ulimit -f 1; head -c 1000000 /dev/zero > made")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))  # as of this process, which has another
    with pytest.raises(BuildError, match=r"^sh failed:(.|\n)*at most 1024 bytes: raise that limit"):
        link.run_tool(["sh", "write.sh"], tmp_path)


@pytest.mark.parametrize("call", [
    lambda: ecornn.compile("rnn_tanh", hidden=8, target="cpu"), lambda: from_bytes("a.so", b""), Scratch,
    lambda: commands.run(["true"], 5)], ids=["compile", "load", "tune", "command"])
def test_without_a_temporary_folder_tmpdir_is_named(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere", "/proc"])
    with pytest.raises(EcornnError, match=r"No usable temporary directory .* set TMPDIR to a folder where"):
        call()


def test_a_folder_that_is_mounted_noexec_is_named(monkeypatch: pytest.MonkeyPatch):
    """The dynamic loader says "failed to map segment from shared object"."""
    import tvm_ffi

    module = ecornn.compile("rnn_tanh", hidden=8, target="cpu")
    content = module.path.read_bytes()

    def refuse(path: str) -> None:
        raise RuntimeError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr("ecornn.runtime.library._modules", {})
    monkeypatch.setattr(tvm_ffi, "load_module", refuse)
    for flags, told in ((os.ST_NOEXEC, True), (0, False)):
        monkeypatch.setattr(os, "statvfs", lambda path, flags=flags: SimpleNamespace(f_flag=flags))
        with pytest.raises(ModuleError, match="failed to map segment") as error:
            from_bytes("layer.so", content)
        assert ("is mounted noexec: set TMPDIR to a folder from which" in str(error.value)) == told


def test_a_temporary_folder_goes_with_what_lives_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    class Owner:
        pass

    owner = temporary.lasting(lambda folder: (folder / "file").touch() or Owner())
    assert len([*tmp_path.glob("*/file")]) == 1
    del owner
    assert not [*tmp_path.iterdir()]
    with pytest.raises(BuildError, match="nothing"):
        temporary.lasting(lambda folder: (_ for _ in ()).throw(BuildError("nothing")))
    assert not [*tmp_path.iterdir()]
