"""Programs in C and C++, compiled, and run on folders of arrays."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from rooms import ROOT

import ecornn
from ecornn.cli import main
from ecornn.runtime.loader import Module

HERE = Path(__file__).parent
STRICT = ("-Wall", "-Wextra", "-Werror")


def documented(language: str, holds: str = "") -> str:
    text = (ROOT / "docs" / "C.md").read_text()
    return next(code for code in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if holds in code)


def flags(*asked: str) -> list[str]:
    result = CliRunner().invoke(main, ["config", *asked])
    assert result.exit_code == 0, result.output
    return shlex.split(result.output)


def compiled(source: Path, out: Path, *more: str, last: Sequence[str | Path] = (), alone: bool = False) -> Path:
    c = source.suffix == ".c"
    compiler = shutil.which("cc" if c else "c++")
    assert compiler, "these tests need a C and a C++ compiler"
    standard = ["-std=c11", "-D_GNU_SOURCE"] if c else ["-std=c++17", "-pthread"]
    ours = flags("--cflags", *(() if alone else ("--libs",)))
    subprocess.run([compiler, *standard, *STRICT, "-O1", *more, source, *ours, *last, "-lm", "-o", out], check=True)
    return out


def run(program: Path | str, *arguments: Any) -> str:
    said, errors = run_both(program, *arguments)
    assert not errors, errors
    return said


def run_both(program: Path | str, *arguments: Any, **environment: str) -> tuple[str, str]:
    result = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True,
                            env=os.environ | {"ECORNN_OPENMP": "off"} | environment)
    assert result.returncode == 0, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout, result.stderr


def weights_of(module: Module, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {p.name: rng.uniform(-0.5, 0.5, p.shape).astype(np.float32) for p in module.manifest.parameters}


def write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        array.tofile(folder / name)


def read(folder: Path, name: str, *shape: int) -> np.ndarray:
    return np.fromfile(folder / name, np.float32).reshape(shape)


FORWARD, BACKWARD = 1e-5, 2e-5  # relative errors of float32 against float64


def close(found: np.ndarray, wanted: np.ndarray, limit: float = FORWARD) -> None:
    assert found.shape == wanted.shape and np.linalg.norm(found - wanted) < limit * np.linalg.norm(wanted)


def drawn(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def arrays_of(module: Module, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return weights_of(module) | drawn(**shapes)


def training_arrays(module: Module) -> dict[str, np.ndarray]:
    w = module.manifest.workload
    return arrays_of(module, x=(w.seq, w.batch, w.input), dy=(w.seq, w.batch, w.hidden),
                     **dict.fromkeys(("h_in", "c_in", "dh", "dc"), (w.batch, w.hidden)))


def gradients_of(arrays: Mapping[str, np.ndarray], module: Module) -> tuple[Any, Any, Any]:
    weights = {p.name: arrays[p.name] for p in module.manifest.parameters}
    before, after = ([arrays[name] for name in names] for names in (("h_in", "c_in"), ("dh", "dc")))
    return ecornn.reference_gradients("lstm", arrays["x"], weights, before, dy=arrays["dy"], dstate=after)


def check_gradients(folder: Path, arrays: Mapping[str, np.ndarray], module: Module) -> None:
    dx, dweights, dstate = gradients_of(arrays, module)
    wanted = {"dx": dx, **dict(zip(("dh_in", "dc_in"), dstate, strict=True)),
              **{f"gradient_{name}": value for name, value in dweights.items()}}
    for name, value in wanted.items():
        close(read(folder, name, *value.shape), value, BACKWARD)
