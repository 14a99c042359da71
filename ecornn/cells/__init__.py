"""The built-in cells, by name."""

from __future__ import annotations

from ecornn.cells.base import Cell, pointwise, product
from ecornn.cells.gru import GRU, GRUResetBefore
from ecornn.cells.lstm import LSTM
from ecornn.cells.vanilla import VanillaReLU, VanillaTanh
from ecornn.errors import ArgumentError

BUILTIN: dict[str, Cell] = {
    cell.name: cell for cell in (LSTM(), GRU(), GRUResetBefore(), VanillaTanh(), VanillaReLU())
}


def get(cell: str | Cell) -> Cell:
    """The cell of that name; a Cell object is returned as it is."""
    if isinstance(cell, Cell):
        return cell
    if cell not in BUILTIN:
        raise ArgumentError("cell", cell, f"one of {', '.join(BUILTIN)}, or an ecornn.Cell")
    return BUILTIN[cell]


__all__ = ["BUILTIN", "Cell", "get", "pointwise", "product"]
