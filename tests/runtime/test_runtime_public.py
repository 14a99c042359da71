"""The public face: every name is there, and nothing is imported before it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import ecornn


def test_every_public_name_is_there():
    assert set(ecornn.__all__) <= set(dir(ecornn))
    for name in ecornn.__all__:
        assert getattr(ecornn, name) is not None
    for name in ("compile", "load", "reference", "pointwise", "product"):
        assert callable(getattr(ecornn, name))
    assert ecornn.__version__ == version("ecornn")
    assert ecornn.errors.ShapeError.__module__ == "ecornn.errors"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'ecornn' has no attribute 'nothing'"):
        _ = ecornn.nothing


@pytest.mark.parametrize(("use", "heavy"), [
    ("ecornn", {"numpy", "msgspec", "tvm", "tvm_ffi"}), ("ecornn.errors", {"numpy", "tvm", "tvm_ffi"}),
    ("ecornn.load", {"tvm", "tvm_ffi"}), ("ecornn.reference", {"tvm", "tvm_ffi", "msgspec"}),
    ("ecornn.compile", {"tvm", "tvm_ffi"})])
def test_what_a_name_imports(use: str, heavy: set[str]):
    code = f"import sys, ecornn; {use}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=Path(ecornn.__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    assert not heavy & set(done.stdout.split())
