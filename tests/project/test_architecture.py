"""The promises of docs/ARCHITECTURE.md: a light import, layers, small files; assertions without effects; mutants.py."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import site_architecture
from mutants import MUTANTS, Mutant
from rooms import ROOT

PLACES = {"ecornn": ROOT / "ecornn", "ecornn.schedules": ROOT / "schedules", "ecornn.tuning_logs": ROOT / "tuning_logs"}

# Room -> the rooms it may import, besides itself. A room is a file or folder of ecornn/, or of schedules/.
BASE = {"boundary", "dtypes", "errors", "interrupts", "workload", "device", "program", "manifest"}
HOSTS = {"host_cpu", "host_gpu"}
TEMPLATE = {"analysis", "device", "dtypes", "program", "workload", "schedules.base", "schedules.builder",
            "schedules.timeline"}
KERNEL = TEMPLATE | {"schedules.hoisted", "schedules.cuda.isa", "schedules.cuda.pipeline",
                     "schedules.keeping", "schedules.rates", "schedules.scalars", "schedules.sequence_kernel"}
MAY_IMPORT: dict[str, set[str]] = {
    **{room: set() for room in ("errors", "checksum", "file_locks", "interrupts", "dtypes", "chips", "notebook", "svg",
                                "schedules.builder", "schedules.cuda")},
    "heartbeat": {"notebook"},
    "device": {"chips"},
    **{room: {"errors"} for room in ("boundary", "temporary", "quick_tvm", "tuning_logs", "analysis")},
    "worker": {"errors", "temporary"},
    "workload": {"dtypes", "errors"},
    "host_cpu": {"device", "errors"},
    "host_gpu": {"device", "errors"},
    "targets": {"chips", "device", "errors"} | HOSTS,
    "program": {"dtypes", "workload"},
    "manifest": {"device", "errors", "program", "workload"},
    # A cell's identity is a digest of what the analysis finds; what is analysed need be no Cell.
    "cells": {"analysis", "errors"},
    "layer_spec": {"cells", "errors", "workload"},
    # What outputs are checked against: layers of any step, te graphs as they were written, formulas.
    "interpreter": {"cells", "errors"},
    "numpy_reference": {"boundary", "cells", "errors", "interpreter", "workload"},
    "numpy_gradients": {"boundary", "errors", "numpy_reference"},
    "schedules.base": {"analysis", "device", "program", "workload"},
    "schedules.timeline": {"program", "workload", "schedules.builder"},
    "schedules.rates": {"chips", "device", "schedules.base"},
    "schedules.cuda.isa": {"schedules.builder"},
    "schedules.cuda.pipeline": {"schedules.builder", "schedules.cuda.isa"},
    "schedules.hoisted": {"program", "schedules.base", "schedules.builder", "schedules.cuda.isa", "schedules.rates"},
    "schedules.keeping": TEMPLATE - {"schedules.timeline"} | {"schedules.cuda.isa"},
    "schedules.chunks": {"program", "schedules.base", "schedules.builder", "schedules.keeping", "schedules.timeline"},
    "schedules.assemble": {"program", "workload", "schedules.base", "schedules.chunks", "schedules.gemm",
                           "schedules.hoisted", "schedules.keeping", "schedules.rates", "schedules.scalars",
                           "schedules.timeline"},
    "schedules.sequence_kernel": {"schedules.base", "schedules.builder", "schedules.hoisted", "schedules.keeping",
                                  "schedules.timeline"},
    "schedules.scalars": KERNEL - {"schedules.scalars"},
    "schedules.gemm": KERNEL,
    "schedules.step": KERNEL | {"schedules.assemble", "schedules.backward", "schedules.gemm"},
    "schedules.elementwise": KERNEL | {"schedules.assemble", "schedules.backward", "schedules.gemm"},
    "schedules.scan": KERNEL | {"schedules.elementwise", "schedules.gemm"},
    "schedules.backward": KERNEL | {"schedules.assemble", "schedules.gemm"},
    "schedules.persistent": KERNEL | {"schedules.assemble", "schedules.backward", "schedules.gemm"},
    "schedules.persistent_block": KERNEL | {"schedules.assemble", "schedules.gemm"},
    "schedules.persistent_wide": KERNEL | {"schedules.assemble", "schedules.backward", "schedules.gemm",
                                           "schedules.persistent"},
    "schedules.training": TEMPLATE | {"errors", "schedules.assemble", "schedules.backward", "schedules.chunks",
                                      "schedules.hoisted", "schedules.keeping"},
    "schedules.cpu": TEMPLATE | {"schedules.assemble", "schedules.keeping", "schedules.rates", "schedules.scalars"},
    "compose": {"program", "schedules.backward", "schedules.timeline", "workload"},
    "task": BASE | {"analysis", "cells", "compose", "schedules.backward", "schedules.base", "schedules.training"},
    "build": BASE | HOSTS | {"checksum", "chips", "file_locks", "temporary"},
    # A machine that only runs modules has no TVM: nothing of the compiler may be needed there.
    "runtime": BASE | HOSTS | {"checksum", "notebook", "temporary", "weight_files"},
    "weight_files": {"errors", "temporary"},
}
MAY_IMPORT["schedules"] = {room for room in MAY_IMPORT if room.startswith("schedules.")}
MAY_IMPORT["tune"] = BASE | HOSTS | {"analysis", "build", "cells", "file_locks", "interpreter", "layer_spec",
                                     "heartbeat", "notebook", "numpy_gradients", "numpy_reference", "runtime",
                                     "schedules", "schedules.backward", "schedules.base", "schedules.hoisted", "svg",
                                     "targets", "task",
                                     "temporary", "tuning_logs", "quick_tvm", "worker"}
MAY_IMPORT["overlap"] = BASE | {"analysis", "cells", "schedules.base", "schedules.rates", "task", "tune"}
MAY_IMPORT["compiler"] = BASE | {"build", "cells", "compose", "layer_spec", "overlap", "runtime", "schedules.base",
                                 "schedules.keeping", "targets", "task", "temporary", "tune", "quick_tvm"}
MAY_IMPORT["floor"] = {"device", "schedules.rates", "targets"}
MAY_IMPORT["explain"] = BASE | {"analysis", "compiler", "floor", "notebook", "schedules", "schedules.base", "task",
                              "tune"}
MAY_IMPORT["report"] = BASE | {"bench", "cells", "explain", "floor", "schedules", "schedules.base", "schedules.builder",
                              "schedules.rates", "svg", "task", "tune", "quick_tvm"}
# What stands beside ours, and what both are checked against, as the tuner checks: never from schedules.
MAY_IMPORT["bench"] = BASE | HOSTS | {"analysis", "cells", "compiler", "interpreter", "layer_spec", "numpy_gradients",
                                      "numpy_reference", "quick_tvm", "runtime", "targets", "tune", "worker"}
MAY_IMPORT["module_cache"] = {"boundary", "build", "compiler", "errors", "layer_spec", "manifest", "program",
                              "quick_tvm", "runtime", "tuning_logs"} | HOSTS
# A step that is written in PyTorch is held against its module by what interprets and differentiates te steps.
MAY_IMPORT["torch"] = {"analysis", "bench", "boundary", "build", "cells", "dtypes", "errors", "heartbeat",
                       "interpreter", "interrupts", "layer_spec", "module_cache", "notebook", "program", "runtime",
                       "temporary", "worker", "workload"}
MAY_IMPORT["jax"] = {"boundary", "build", "checksum", "errors", "host_cpu", "program", "runtime", "temporary",
                     "workload"}
MAY_IMPORT["onnx"] = {"boundary", "cells", "compiler", "device", "errors", "layer_spec", "runtime", "workload"}
MAY_IMPORT["onnxruntime"] = {"bench", "boundary", "build", "checksum", "compiler", "device", "errors", "layer_spec",
                             "onnx", "runtime", "temporary", "tune", "workload"}
MAY_IMPORT[""] = {"cells", "compiler", "errors", "numpy_gradients", "numpy_reference", "runtime", "tune"}
MAY_IMPORT["cli"] = {*MAY_IMPORT} - {"jax", "torch"}
MAY_IMPORT["lightning"] = {"errors", "torch"}
MAY_IMPORT["console"] = {"cli"}
MAY_IMPORT["__main__"] = {"console"}


def sources() -> dict[str, Path]:
    found = {}
    for package, folder in PLACES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = path
    return found


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def room(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[:3 if parts[1:2] == ["cuda"] else 2]) if layer(module) == "schedules" else layer(module)


def imports(nodes: Iterable[ast.AST], modules: Collection[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else str(node.module)


@cache
def imported() -> dict[str, set[str]]:
    """What each module imports, at any depth; for type checkers, too."""
    modules = sources()
    return {name: {*imports(ast.walk(ast.parse(path.read_text())), modules)} for name, path in modules.items()}


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


def refuse_circles(of: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(of).prepare()
    except graphlib.CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_imports_go_down_the_layers():
    modules = imported()
    assert len(modules) > 20, "the layout changed; this test finds nothing"
    assert {*map(room, modules)} <= MAY_IMPORT.keys(), "rooms of which MAY_IMPORT says nothing"
    wrong = [f"{name} imports {target}" for name, targets in modules.items() for target in targets
             if target.split(".")[0] == "ecornn" and room(target) not in MAY_IMPORT[room(name)] | {room(name)}]
    assert not wrong, "\n".join(wrong)


def test_what_outputs_are_checked_against_is_apart_from_what_makes_kernels():
    modules = imported()
    for name in ("ecornn.tune.oracle", "ecornn.interpreter", "ecornn.numpy_reference",
                 "ecornn.bench.step_loop", "ecornn.bench.expected"):
        for target in modules[name]:
            assert layer(target) not in ("analysis", "schedules", "task", "build", "compiler"), f"{name}: {target}"


def test_no_circle_of_imports():
    """Neither of files nor of rooms. Imports inside functions count, and those for type checkers."""
    modules = imported()
    refuse_circles(MAY_IMPORT)
    refuse_circles({name: targets & modules.keys() - {name} for name, targets in modules.items()})


def test_a_circle_of_imports_is_named():
    with pytest.raises(pytest.fail.Exception, match=r"b <- c <- b|c <- b <- c"):
        refuse_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})


def test_tvm_and_torch_are_imported_inside_functions_only():
    """But for ecornn.torch and its callback for Lightning, which are made of torch's classes: for who has it."""
    wrong = [f"{name} imports {target}" for name, path in sources().items() if layer(name) not in ("torch", "lightning")
             for target in imports(at_import(ast.parse(path.read_text())), ())
             if target.split(".")[0] in ("tvm", "torch")]
    assert not wrong, "\n".join(wrong)


def test_import_is_light():
    """The processor's time inside a new interpreter, best of 5: other work on the machine must not fail it."""
    code = "import sys, time; start = time.process_time(); import ecornn; print(time.process_time() - start)"
    assert min(float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT).stdout)
               for _ in range(5)) < 0.3


def test_files_are_small():
    sizes = {path: path.stat().st_size for folder in ("ecornn", "schedules", "tuning_logs", "tests",
                                                       "examples", "benchmarks")
             for path in (ROOT / folder).rglob("*.py")}
    big = {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > 25_000}
    assert not big, f"files above 25 kB hold more than one idea: {big}"


def test_the_architecture_lists_every_file():
    """Run docs/site/site_architecture.py --write where this fails."""
    assert not site_architecture.differences(site_architecture.PAGE.read_text(encoding="utf-8"))


def test_the_architecture_says_what_files_are_and_is_short():
    text = site_architecture.PAGE.read_text(encoding="utf-8")
    empty = [line for line in text.splitlines() if re.search(r"\|\s*\|$", line)]
    assert not empty, f"files that say nothing of themselves: {empty}"
    assert len(site_architecture.prose(text).encode()) <= 20_000


def test_what_a_file_says_of_itself():
    first = site_architecture.first_sentence
    assert first("A thing,\nand ``more`` | less: a :class:`~ecornn.errors.Error`. Another one.\n\nMore.") == (
        "A thing, and `more` \\| less: a `Error`")
    assert site_architecture.said(ROOT / "ecornn/build/c_tables.h").startswith("What c_tables.py says")
    assert site_architecture.said(ROOT / "ecornn/include/ecornn_checksum.h").startswith("The digest at the end")
    page = f"before\n{site_architecture.BEGIN}{site_architecture.END}after\n"
    assert any("`program.py`" in line for line in site_architecture.differences(page))
    assert site_architecture.prose(page) == "before\nafter\n"
    assert not site_architecture.differences(site_architecture.written(page))


def test_ptx_and_intrinsics_are_written_in_isa_alone():
    words = "T.ptx", "T.cuda.", "func_call", "asm(", "asm volatile", "__device__"
    door = ROOT / "schedules/cuda/isa"
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "schedules").rglob("*.py")}
    found = {path: [word for word in words if word in text] for path, text in texts.items()}
    assert not [*filter(None, (found[p] for p in texts if not p.is_relative_to(door)))]
    assert {word for p in texts if p.is_relative_to(door) for word in found[p]} == {*words}


def test_docstrings_say_what_a_thing_is():
    """None begins with a word that leaves the reader to find the noun."""
    words, wrong = ("Of", "What", "Whether", "Where", "As", "Those"), []
    rooms = ("schedules", *(f"ecornn/{room}" for room in ("analysis", "build", "cells", "cli", "jax", "onnx",
                                                          "onnxruntime", "report", "torch", "tune")))
    for path in (*(path for room in rooms for path in (ROOT / room).rglob("*.py")), *(ROOT / "ecornn").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = (ast.get_docstring(node) or "").split(maxsplit=1)[:1]
                if first and first[0].rstrip(",.:;") in words:
                    wrong.append(f"{path.relative_to(ROOT)} line {getattr(node, 'lineno', 1)}: {first[0]} ...")
    assert not wrong, "\n".join(wrong)


# Of the functions of builtins.
PURE = {"abs", "all", "any", "bool", "float", "frozenset", "getattr", "hasattr", "int", "isinstance", "issubclass",
        "len", "list", "max", "min", "range", "set", "sorted", "str", "sum", "tuple", "type"}


def effects(source: str) -> Iterator[str]:
    """Assertions, with line and expression, that call what is not known to have no effect."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                called = isinstance(part, ast.Call) and not (isinstance(part.func, ast.Name) and part.func.id in PURE)
                if called or isinstance(part, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
                    yield f"{node.lineno}: {ast.unparse(part)}"


def test_no_assertion_has_an_effect():
    """Under ``python -O`` there are none: nothing that runs may be lost with them."""
    places = "ecornn", "schedules", "benchmarks", "examples"
    files = [path for place in places for path in (ROOT / place).rglob("*.py")]
    assert len(files) > 250
    found = [f"{path.relative_to(ROOT)}:{what}" for path in files for what in effects(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("statement", "count"), [
    ("assert isinstance(a, int) and len(a.rows) == 2 and sorted(b) == [*range(3)], f()", 0),
    *((statement, 1) for statement in (
        "assert known.setdefault(name, b) == b", "assert rows.pop() == 1", "assert (n := 3)", "assert next(rows) == 0",
        "assert len(read(file)) == 2", "assert all(seen.add(x) is None for x in rows)",
        "async def f(): assert await g"))])
def test_those_with_one_are_found(statement: str, count: int):
    assert len([*effects(statement)]) == count


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_line_of_a_fault_stands_once(mutant: Mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1 and mutant.old != mutant.new
