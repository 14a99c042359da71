"""Cells by a text: what they compute, and where another process finds them."""

from __future__ import annotations

import sys

from ecornn.cells import BUILTIN, Cell
from ecornn.cells.naming import load_cell
from ecornn.errors import ArgumentError

_here: dict[str, Cell] = {}  # by identity, those that this process has named


def name_of(cell: Cell) -> str:
    """``lstm(peepholes)`` of a built-in cell, or ``mgu@0f5ac8d1`` with ``=package.file:Class`` behind it where a module
    has its class. The cell is known by it here from now on."""
    identity = _here_as(cell)
    kind = type(cell)
    named = kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__ and kind.__module__ in sys.modules
    return f"{identity}={kind.__module__}:{kind.__qualname__}" if named and not _builtin(identity) else identity


def _here_as(cell: Cell) -> str:
    identity = cell.identity()
    _here.setdefault(identity, cell)
    return identity


def cell_of(name: str) -> Cell:
    """The cell that :func:`name_of` has named, perhaps in another process; :class:`ArgumentError` for no such one."""
    identity, _, where = name.partition("=") if not _builtin(name) else (name, "", "")
    if identity not in _here and (where or _builtin(identity)):
        cell = load_cell(where or identity)
        if cell.identity() != identity:
            raise ArgumentError("kind", name, f"the cell that {where} makes here, {cell.identity()}")
        _here[identity] = cell
    if identity not in _here:
        raise ArgumentError("kind", name, "a cell that this process has: make an ecornn.torch.Recurrent of it first")
    return _here[identity]


def _builtin(name: str) -> bool:
    return name.partition("(")[0] in BUILTIN
