"""The public face, and modules where there is no compiler: what is imported, and when."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import runtime_sample as sample

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


PACKAGES = ("numpy", "apache-tvm-ffi", "msgspec", "typing-extensions")

RUN = """
import importlib.util, pathlib, shutil, sys
import numpy as np
import ecornn
for name in ("tvm", "torch", "ml_dtypes", "xgboost", "click"):
    assert importlib.util.find_spec(name) is None, f"{name} is here: this tests nothing"
for tool in ("nvcc", "g++", "c++", "cc"):
    assert shutil.which(tool) is None, f"{tool} is here: this tests nothing"
assert pathlib.Path(ecornn.__file__).is_relative_to(sys.argv[1])
data = np.load(sys.argv[3])
layer = ecornn.load(sys.argv[2]).bind({n[2:]: data[n] for n in data.files if n.startswith("w:")})
first, state = layer(data["x"][:3])
second, _ = layer(data["x"][3:], state)
np.save(sys.argv[4], np.concatenate([first, second]))
"""


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ecornn and those packages alone."""
    folder = tmp_path_factory.mktemp("packages")
    for package in PACKAGES:
        files = importlib.metadata.files(package)
        assert files, package
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(Path(str(files[0].locate())).parents[len(files[0].parts) - 1] / top)
    (folder / "ecornn").symlink_to(Path(ecornn.__file__).parent)
    return folder


MISSING = """
import sys
import ecornn
try:
    ecornn.compile("lstm", hidden=8, target="cpu")
except ecornn.errors.MissingPackageError as error:
    assert isinstance(error, ImportError) and "apache-tvm is not installed" in str(error)
    print("said")
"""


def test_what_is_missing_is_said(lonely: Path, tmp_path: Path):
    """Not a traceback, of commands and of compile(), where the runtime alone is installed."""
    there = {"env": {"PATH": "", "PYTHONPATH": str(lonely), "HOME": os.environ["HOME"]}, "cwd": tmp_path,
             "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-S", "-c", MISSING], **there)
    assert done.stdout == "said\n", done.stderr
    done = subprocess.run([sys.executable, "-S", "-m", "ecornn", "doctor"], **there)
    assert done.returncode == 2 and done.stderr.startswith("error: click is not installed: "), done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


def run_there(lonely: Path, module: Path, weights: dict[str, np.ndarray], x: np.ndarray, tmp_path: Path) -> np.ndarray:
    """y of a new interpreter that sees that folder and the standard library, and no program."""
    np.savez(tmp_path / "data.npz", x=x, **{f"w:{n}": v for n, v in weights.items()})
    (tmp_path / "bin").mkdir()
    done = subprocess.run(
        [sys.executable, "-S", "-c", RUN, str(lonely), str(module),
         str(tmp_path / "data.npz"), str(tmp_path / "y.npy")], capture_output=True, text=True,
        cwd=tmp_path, env={"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(lonely), "HOME": os.environ["HOME"]})
    assert done.returncode == 0, done.stderr
    return np.load(tmp_path / "y.npy")


def test_a_module_by_hand(lonely: Path, tmp_path: Path):
    weights, x = sample.weights(), sample.inputs(8)
    y = run_there(lonely, sample.build(sample.manifest()), weights, x, tmp_path)
    # values of about 1, and a state that is rounded to float32 after every step
    np.testing.assert_allclose(y, sample.expected(x, weights)[0], rtol=2.0**-23, atol=2.0**-23)


@pytest.mark.slow
def test_a_compiled_module(lonely: Path, tmp_path: Path):
    from ecornn.numpy_reference import random_weights

    module = ecornn.compile("lstm", hidden=40, input=24, batch=3, seq=8, dtype="float32", target="cpu",
                            out=tmp_path / "lstm.so")
    weights = random_weights("lstm", 24, 40)
    x = np.random.default_rng(2).standard_normal((8, 3, 24)).astype(np.float32)
    y = run_there(lonely, module.path, weights, x, tmp_path)
    wanted, _ = ecornn.reference("lstm", x, weights)
    assert np.linalg.norm(y - wanted) <= 1e-5 * np.linalg.norm(wanted)
