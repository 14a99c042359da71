"""The built-in cells, by name."""

from __future__ import annotations

from ecornn.cells.base import Cell, derive, largest, mean, normalized, pointwise, product, softmax
from ecornn.cells.builtin import GRU, LSTM, SLSTM, GRUResetBefore, IndRNN, VanillaReLU, VanillaTanh
from ecornn.cells.options import Optioned, parse
from ecornn.cells.surrogates import custom_gradient, spike
from ecornn.errors import ArgumentError

BUILTIN: dict[str, Optioned] = {
    cell.name: cell for cell in (LSTM(), GRU(), GRUResetBefore(), VanillaTanh(), VanillaReLU(), IndRNN(), SLSTM())}


def get(cell: str | Cell) -> Cell:
    """The cell of that name, with its options if it has some; a Cell object is returned as it is."""
    if isinstance(cell, Cell):
        return cell
    name, options = parse(cell)
    if name not in BUILTIN:
        raise ArgumentError("cell", cell, f"one of {', '.join(BUILTIN)}, or an ecornn.Cell")
    return type(BUILTIN[name])(**options) if options else BUILTIN[name]


__all__ = ["BUILTIN", "Cell", "custom_gradient", "derive", "get", "largest", "mean", "normalized", "pointwise",
           "product", "softmax", "spike"]
