"""Naming a cell so that another process can load it: ``lstm``, ``file.py:Name``, ``module:Name``; or it is sent."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import inspect
import pickle
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from ecornn.cells import BUILTIN, Cell, get
from ecornn.errors import ArgumentError, CellError, MissingPackageError, ScheduleError

PICKLED = "pickle:"  # begins the spec of a cell that is sent whole
_here = threading.local()  # whether this thread imports a user's file

ALLOWED = (f"one of {', '.join(BUILTIN)}, one of these with options, such as 'lstm(peepholes)', or FILE.py:NAME "
           "or MODULE:NAME of an ecornn.Cell")


def load_cell(spec: str) -> Cell:
    """The cell that ``spec`` names. A file or module is imported, a class instantiated. Raises :class:`ArgumentError`
    where there is no such cell, :class:`CellError` where its file raises."""
    if spec.partition("(")[0] in BUILTIN:
        return get(spec)
    where, _, name = spec.rpartition(":")
    if not where:
        raise ArgumentError("cell", spec, ALLOWED)
    cell: Any = load_module(where, spec)
    for part in name.split("."):
        if not hasattr(cell, part):
            raise ArgumentError("cell", spec, f"a name that {where} defines; it does not define {part!r}")
        cell = getattr(cell, part)
    if inspect.isclass(cell) and issubclass(cell, Cell):
        try:
            cell = cell()
        except Exception as error:
            need = "the class must need no arguments: " if isinstance(error, TypeError) else f"{type(error).__name__}: "
            raise CellError(f"{spec}: {need}{error}") from error
    if not isinstance(cell, Cell):
        raise ArgumentError("cell", spec, "an ecornn.Cell, its class or an object of it")
    return cell


def load_module(where: str, spec: str) -> Any:
    before, _here.importing = importing(), True
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where).resolve()
        if not path.is_file():
            raise ArgumentError("cell", spec, f"an existing file; {path} does not exist")
        name = f"ecornn_cell_{path.stem}"
        loader = importlib.util.spec_from_file_location(name, path)
        assert loader is not None and loader.loader is not None
        module = importlib.util.module_from_spec(loader)
        sys.modules[name] = module
        loader.loader.exec_module(module)
        return module
    except (ArgumentError, ScheduleError):
        raise
    except (Exception, SystemExit) as error:
        raise CellError(f"cannot load the cell {spec!r}: {type(error).__name__}: {error}") from error
    finally:
        _here.importing = before


def importing() -> bool:
    """True while this thread imports a file or module with a cell: a script there must not tune."""
    return getattr(_here, "importing", False)


def spec_of(cell: Cell) -> str:
    """The text by which :func:`received` has an equal cell in another process: a name, or a pickle of a class of a
    notebook or a function, which has none there."""
    kind = type(cell)
    if kind is type(BUILTIN.get(cell.name)):
        return cell.identity()
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if "<locals>" in kind.__qualname__ or (kind.__module__ == "__main__" and not file.endswith(".py")):
        return pickled(cell)
    spec = f"{Path(file).resolve() if file.endswith('.py') else kind.__module__}:{kind.__qualname__}"
    if load_cell(spec).identity() != cell.identity():
        raise CellError(f"cell {cell.name!r}: {spec} makes another cell; its class must need no arguments, so that the "
                        "tuner's processes can make it")
    return spec


def pickled(cell: Cell) -> str:
    """A cell as text, class and all. Raises :class:`CellError` where it holds what cannot be pickled."""
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"cell {cell.name!r} is of a class that only this process has. To tune it, install "
                                  "cloudpickle, which the extra [tune] has, or define it in a file") from error
    try:
        return PICKLED + base64.b85encode(cloudpickle.dumps(cell)).decode()
    except Exception as error:  # of whatever the class refers to
        raise CellError(f"cell {cell.name!r} cannot be sent to the tuner's processes, {type(error).__name__}: {error}; "
                        "define its class at the top level of a file or module") from error


def received(spec: str) -> Cell:
    """The cell of a text of :func:`spec_of` that the process sent which started this one. Nothing else may come here:
    pickles run code, which :func:`load_cell` does not let a text contain."""
    return _unpickled(spec.removeprefix(PICKLED)) if spec.startswith(PICKLED) else load_cell(spec)


@lru_cache(maxsize=4)  # a worker gets the same cell with every trial, and tracing a step in PyTorch again takes long
def _unpickled(text: str) -> Cell:
    cell: Cell = pickle.loads(base64.b85decode(text))
    return cell
