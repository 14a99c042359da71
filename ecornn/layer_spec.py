"""The properties of a layer that a user may give, in one place: every way in makes a :class:`LayerSpec`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from msgspec import structs

from ecornn.cells import Cell
from ecornn.cells.naming import load_cell
from ecornn.errors import ArgumentError
from ecornn.workload import BATCH, SEQ, Stack, Workload


@dataclass(frozen=True)
class LayerSpec:
    """A recurrent layer or stack at one size; properties as of :func:`ecornn.compile`. Making it checks it: the cell is
    loaded, a user's own analysed. Raises :class:`~ecornn.errors.ArgumentError` and its subclasses, which name the
    argument, and :class:`~ecornn.errors.CellError` for a cell that cannot be loaded or analysed."""

    cell: str | Cell
    hidden: int
    input: int | None = None
    batch: int = BATCH
    seq: int = SEQ
    dtype: str = "float32"
    weights: str | None = None
    precision: str | None = None
    layers: int = 1
    bidirectional: bool = False
    lengths: bool = False
    resets: bool = False
    reverse: bool = False
    sequences: bool = False
    training: bool = False
    keep: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.cell, type) and issubclass(self.cell, Cell):
            raise ArgumentError("cell", self.cell, f"an instance of the class, such as {self.cell.__name__}()")
        if not isinstance(self.cell, (str, Cell)):
            raise ArgumentError("cell", self.cell, "a cell's name, FILE.py:NAME or a Cell")
        if not isinstance(self.training, bool):
            raise ArgumentError("training", self.training, "True or False")
        if self.keep is not None and not self.training:
            raise ArgumentError("keep", self.keep, "None without training=True")
        self.stack, self.workload  # noqa: B018  (made here, so that what they refuse is said at once)

    @cached_property
    def loaded(self) -> Cell:
        return load_cell(self.cell) if isinstance(self.cell, str) else self.cell

    @cached_property
    def workload(self) -> Workload:
        """One sequence of it; in a stack, of the first layer."""
        input = self.hidden if self.input is None else self.input
        whole = Workload(self.loaded.identity(), self.hidden, input, self.batch, self.seq, self.dtype,
                         None if self.weights == self.dtype else self.weights,
                         None if self.precision == "exact" else self.precision)
        if self.layers != 1 and len(outputs := self.loaded.output_names()) > 1:
            raise ArgumentError("layers", self.layers, f"1: cell {self.loaded.name!r} has several outputs "
                                f"({', '.join(outputs)}"
                                "), and only one can be the input of the next layer")
        if not self.loaded.inputs:
            return whole
        if self.layers != 1:
            raise ArgumentError("layers", self.layers, f"1: cell {self.loaded.name!r} has inputs beside x, which only "
                                "one layer can have")
        return structs.replace(whole, input=self.loaded.row_width(input, self.hidden))

    @cached_property
    def stack(self) -> Stack:
        """The sequences that it is put together from. Where ``keep`` was left open the device decides."""
        return Stack(self.layers, self.bidirectional, self.lengths, self.resets, self.reverse, self.sequences,
                     (self.keep or "states") if self.training else None)


def usual_dtype(kind: str, precision: str | None) -> str:
    """The data type that a user leaves open, on ``cuda`` or ``llvm``; a precision is of float32."""
    return "float32" if kind == "llvm" or precision else "bfloat16"
