"""The wheel of this checkout, and environments that have it and other packages."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from rooms import ROOT

# Folders of the checkout, and their places in the wheel.
PLACES = {"ecornn": "ecornn", "schedules": "ecornn/schedules", "tuning_logs": "ecornn/tuning_logs"}
BESIDE = ("benchmarks", "docs", "examples", "tests")  # in the archive alone


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    assert "`packages` configuration" not in result.stderr  # setuptools' forty lines for each folder not named there
    return result.stdout


def build(source: Path, out: Path) -> Path:
    """Builds the wheel, and the archive beside it, of a copy of the checkout in ``source``."""
    for path in [*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("M*"), *ROOT.glob("*.yml"), ROOT / "LICENSE",
                 ROOT / "setup.py", ROOT / "CITATION.cff",
                 *(p for place in (*PLACES, *BESIDE) for p in (ROOT / place).rglob("*"))]:
        if path.is_file() and "__pycache__" not in path.parts:
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def environment(folder: Path, python: str = sys.executable) -> Path:
    """A new environment's folder of packages, which is empty."""
    run(python, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))


def install(wheel: Path, folder: Path) -> None:
    run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps",
        "--no-index", "--ignore-installed", wheel, cwd=folder)


def copy(names: Iterable[str], site: Path) -> None:
    """Copies this environment's packages, and what they require, as pip would install them from an index."""
    left, copied = [*names], set[str]()
    while left:
        if (name := left.pop()) in copied:
            continue
        copied.add(name)
        found = importlib.metadata.distribution(name)
        for file in found.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found.locate_file(file), site / file)
        needs = map(Requirement, found.requires or ())
        left += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
