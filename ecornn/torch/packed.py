"""Packed sequences: padded by one gather, or on a GPU laid end to end in fewer columns than there are sequences.

A module for the whole batch steps through the longest row, and rows that have ended keep their places in every
product. Laid end to end the same steps take about as many columns as the rows have valid steps for each step of the
longest. Where that gains nothing each sequence is a row of x, and the module has their lengths. Either way x is one
gather of packed data, packed y one of y, and what these need is kept for the next call with the same lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import PackedSequence

from ecornn.errors import DTypeError, ScheduleError, ShapeError
from ecornn.runtime.columns import Columns, steps_of
from ecornn.runtime.loader import Layer
from ecornn.runtime.torch_arrays import TorchArrays
from ecornn.torch.engine import engine_of, weights_of

LEAST = 16  # columns; fewer do not make steps shorter
FIXED = 32  # a step of C columns takes about as long as C + 32 do: the way of the state between blocks


Ints = NDArray[np.int32]
Call = Callable[[torch.Tensor, dict[str, Any]], Sequence[torch.Tensor]]
_arrays = TorchArrays()


@dataclass(frozen=True, eq=False)
class Layout:
    """Where packed sequences (N rows) lie in x (T, C, I).

    Attributes
    ----------
    shape : T and C
    index : for each place of x the row of packed data, or 0 where there is none; for each of the N rows its place; and,
        without columns, the C lengths
    columns : what the module is told of sequences that lie end to end; None: each is a row of x
    """

    shape: tuple[int, int]
    index: Ints
    columns: Columns | None = None
    _copies: dict[Any, Any] = field(default_factory=dict, repr=False)

    def index_on(self, data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The three parts of ``index``, where ``data`` (N, I) is."""
        steps, width = self.shape
        # a graph would read copies that may be gone when it is replayed
        copy = _arrays.rows if data.is_cuda and not _arrays.keeps_workspace() else partial(_arrays.kept, self._copies)
        index, _ = copy(self.index, "int32", data, None)
        return index.split((steps * width, len(data), len(index) - steps * width - len(data)))

    def call(self, data: torch.Tensor, call: Call) -> list[torch.Tensor]:
        """What ``call`` makes of x and the module's masks, with y as packed as ``data`` (N, I) is."""
        steps, width = self.shape
        there, back, lengths = self.index_on(data)
        masks = {"lengths": lengths} if self.columns is None else {"sequences": self.columns}
        y, *after = call(data.index_select(0, there).view(steps, width, -1), masks)
        return [y.view(steps * width, -1).index_select(0, back), *after]


@lru_cache(maxsize=16)
def rows_of(batch_sizes: bytes) -> int:
    """How many rows of packed data int64 ``batch_sizes`` have. pack_padded_sequence() makes them as they must be; of
    others, which a user has made, kernels would read memory that is none of x's.

    Raises :class:`ShapeError`.
    """
    sizes = np.frombuffer(batch_sizes, np.int64)
    if not len(sizes) or sizes[-1] < 0 or (np.diff(sizes) > 0).any():
        raise ShapeError("input.batch_sizes", sizes.tolist(), "one for each step, none larger than the one before "
                         "and none below 0")
    return int(sizes.sum())


def checked(packed: PackedSequence) -> PackedSequence:
    """The sequence with no more rows of data than it says that there are.

    Raises :class:`ShapeError` and :class:`DTypeError` where its parts do not fit each other.
    """
    data, sizes, *orders = packed
    if sizes.dtype != torch.int64 or not sizes.is_cpu:
        raise DTypeError("input.batch_sizes", f"{sizes.dtype} on {sizes.device}", "torch.int64 on the host")
    rows = rows_of(sizes.numpy().tobytes())
    if rows > len(data):
        raise ShapeError("input.data.shape", tuple(data.shape), f"{rows} rows, which batch_sizes have")
    return packed if rows == len(data) else PackedSequence(data[:rows], sizes, *orders)


def sizes_of(batch_sizes: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """int64 ``batch_sizes`` as an array, and the lengths, the longest first."""
    sizes = np.frombuffer(batch_sizes, np.int64)
    return sizes, np.searchsorted(-sizes, -np.arange(sizes[0]), side="left")


@lru_cache(maxsize=16)  # the layers of a model have the same lengths, one after the other
def padded(batch_sizes: bytes) -> Layout:
    """Each sequence of int64 ``batch_sizes`` as a row of x. What x has beyond its length is not used: the first row of
    packed data will do."""
    sizes, lengths = sizes_of(batch_sizes)
    shape = len(sizes), len(lengths)
    return Layout(shape, _index(shape, np.flatnonzero(np.arange(shape[1]) < sizes[:, None]), lengths))


@lru_cache(maxsize=16)
def laid(batch_sizes: bytes, width: int, together: int) -> Layout:
    """The sequences of int64 ``batch_sizes`` in ``width`` columns, of which ``together`` neighbours may share one."""
    sizes, lengths = sizes_of(batch_sizes)
    columns = Columns.of(lengths, width, together)
    steps, numbers = np.nonzero(np.arange(columns.count) < sizes[:, None])  # of packed rows
    back = columns.places[columns.first[numbers] + steps]
    return Layout(columns.table.shape, _index(columns.table.shape, back), columns)


def _index(shape: tuple[int, ...], back: NDArray[Any], *more: NDArray[Any]) -> Ints:
    """As :class:`Layout` has it, from the places of packed rows."""
    there = np.zeros(shape[0] * shape[1], np.int32)
    there[back] = np.arange(len(back))
    return np.concatenate((there, back, *more), dtype=np.int32)


@lru_cache(maxsize=16)
def width_of(batch_sizes: bytes) -> int | None:
    """:func:`columns_for` their lengths."""
    return columns_for(sizes_of(batch_sizes)[1])


def columns_for(lengths: np.ndarray[Any, Any]) -> int | None:
    """How many columns to lay them in, a power of two, so that few modules are compiled and records are at hand; None
    where as many as there are sequences are best. All columns may share sequences, it is hoped."""
    longest, count, valid = int(lengths.max()), len(lengths), int(lengths.sum())
    least = max(LEAST, 1 << (valid // longest).bit_length() - 1)
    costs = {width: steps_of(lengths, width, width) * (width + FIXED) for width in (least, 2 * least) if width < count}
    best = min(costs, key=lambda width: costs[width], default=None)
    return best if best is not None and costs[best] < longest * (count + FIXED) else None


def run(module: Any, packed: PackedSequence, state: list[torch.Tensor]) -> list[torch.Tensor]:
    """Packed y and the states (L*D, S, H) from ``state`` or zeros, rows in packed order."""
    sizes, engine, data = packed.batch_sizes.numpy().tobytes(), engine_of(module), packed.data
    weights = weights_of(module)

    def run_in(width: int, masks: str, lay: Callable[[Layer], Layout]) -> list[torch.Tensor]:
        with engine.layer(weights, data, width, len(packed.batch_sizes), masks) as layer:
            return lay(layer).call(data, lambda x, masks: engine.called(layer, x, state, **masks))

    # layers of one direction may work at the same time instead, which columns do not allow
    if data.is_cuda and (module.num_layers == 1 or module.bidirectional):
        width = width_of(sizes)
        if width is not None and (data.dtype, width) not in engine.refused:
            try:
                return run_in(width, "sequences", lambda layer: laid(sizes, width, layer.together))
            except ScheduleError:  # weights that do not fit on the chip
                engine.refused.add((data.dtype, width))
    rows = padded(sizes)
    return run_in(rows.shape[1], "lengths", lambda layer: rows)


def call_layer(layer: Layer, packed: PackedSequence, state: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """A layer compiled with ``sequences=True`` on packed sequences: packed y, and the states."""
    found = laid(packed.batch_sizes.numpy().tobytes(), layer.manifest.workload.batch, layer.together)

    def call(x: torch.Tensor, masks: dict[str, Any]) -> list[torch.Tensor]:
        y, after = layer(x, state, **masks)
        return [y, *after]

    return found.call(packed.data, call)
