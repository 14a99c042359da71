"""The promises of docs/ARCHITECTURE.md: a light import, layers, small files."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLACES = {"ecornn": ROOT / "ecornn", "ecornn.schedules": ROOT / "schedules",
          "ecornn.tuning_logs": ROOT / "tuning_logs"}

# Layer -> the layers it may import. A layer is a file or folder of ecornn/, or schedules/.
BASE = {"errors", "workload", "device", "program", "manifest"}
CELLS = {"cells", "analysis", "errors"}
PLAN = BASE | CELLS | {"schedules"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "workload": {"errors"},
    "device": {"errors", "host_cpu", "host_gpu"},
    "host_cpu": {"device", "errors"},
    "host_gpu": {"device", "errors"},
    "program": {"workload"},
    "manifest": {"device", "errors", "program", "workload"},
    "cells": CELLS,
    "analysis": CELLS,
    "numpy_reference": {"errors"},
    "schedules": PLAN,
    "compose": {"program", "schedules", "workload"},
    "task": PLAN | {"compose", "task"},
    "overlap": PLAN | {"task", "tune"},
    "build": BASE | {"build", "host_cpu", "host_gpu"},
    # A machine that only runs modules has no TVM: nothing of the compiler may be needed there.
    "runtime": BASE | {"runtime", "host_cpu", "host_gpu", "weight_files"},
    "weight_files": {"errors"},
    "tuning_logs": set(),
}
EVERYTHING = {*MAY_IMPORT, "tune", "compiler"}
MAY_IMPORT |= {"torch": {"compiler", "errors", "runtime", "workload"}}
MAY_IMPORT |= {"onnx": {"cells", "compiler", "device", "errors", "runtime"}}
MAY_IMPORT |= {"tune": EVERYTHING, "compiler": EVERYTHING, "": EVERYTHING,
               "cli": EVERYTHING | {"cli", "onnx", ""}}


def sources() -> dict[str, Path]:
    """Module name -> file, of everything that is installed."""
    found = {}
    for package, folder in PLACES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = path
    return found


def layer(module: str) -> str:
    """``cells`` for ecornn.cells.lstm, the empty string for ecornn itself."""
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.Module, modules: dict[str, Path]) -> Iterator[str]:
    """The full names of the modules that a file imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else str(node.module)


def at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when a file is imported, those under TYPE_CHECKING left out."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        if isinstance(node, ast.stmt):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def test_imports_go_down_the_layers():
    modules, wrong = sources(), []
    assert len(modules) > 20, "the layout changed; this test finds nothing"
    for name, path in modules.items():
        own = layer(name)
        assert own in MAY_IMPORT, f"{path} belongs to no layer; say here what {own!r} may import"
        for target in imports(ast.parse(path.read_text()), modules):
            if target.split(".")[0] == "ecornn" and layer(target) not in MAY_IMPORT[own] | {own}:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_tvm_and_torch_are_imported_inside_functions_only():
    wrong = []
    for name, path in sources().items():
        if layer(name) == "torch":  # made of torch's classes, and imported by who has it
            continue
        for node in at_import(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else (
                [str(node.module)] if isinstance(node, ast.ImportFrom) else [])
            wrong += [f"{name} line {node.lineno} imports {n}" for n in names
                      if n.split(".")[0] in ("tvm", "torch")]
    assert not wrong, "\n".join(wrong)


def python(code: str) -> str:
    """What a new interpreter prints; tests must not see the modules that others imported."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                            cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light():
    """The time inside the interpreter, best of 5: other work on the machine must not fail it."""
    code = ("import sys, time; start = time.perf_counter(); import ecornn; "
            "print(time.perf_counter() - start); "
            "print(*{'tvm', 'tvm_ffi', 'numpy', 'torch', 'xgboost'} & set(sys.modules)); "
            "print(ecornn.__file__)")
    seconds, heavy, file = zip(*(python(code).splitlines() for _ in range(5)), strict=True)
    assert Path(file[0]).name == "__init__.py"
    assert min(map(float, seconds)) < 0.3
    assert set(heavy) == {""}


@pytest.mark.parametrize("module", ["ecornn.runtime", "ecornn.numpy_reference"])
def test_no_tvm_to_run_modules(module):
    assert python(f"import sys, {module}; print('tvm' in sys.modules)").strip() == "False"


def test_files_are_small():
    sizes = {path: path.stat().st_size for folder in ("ecornn", "schedules", "tuning_logs", "tests",
                                                       "examples", "benchmarks")
             for path in (ROOT / folder).rglob("*.py")}
    big = {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > 25_000}
    assert not big, f"files above 25 kB hold more than one idea: {big}"
    assert statistics.median(sizes.values()) < 6_000


def test_the_architecture_names_every_part():
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    parts = {path.name for path in (ROOT / "ecornn").iterdir()
             if path.suffix == ".py" or (path / "__init__.py").exists()} - {"__init__.py"}
    missing = sorted(part for part in parts if part not in text)
    assert not missing, f"docs/ARCHITECTURE.md says nothing of {missing}"
