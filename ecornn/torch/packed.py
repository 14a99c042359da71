"""Packed sequences: padded by one gather, or on a GPU laid end to end in fewer columns than there are sequences.

Rows that have ended keep their places in every product. Laid end to end they take about as many columns as rows have
valid steps for each step of the longest. Where that gains nothing each sequence is a row of x, and the module has their
lengths. x, y and gradients are gathers, since a packed row has one place; indices are kept for the next call with the
same lengths. Places of no sequence have some row's values, which the module does not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import PackedSequence

from ecornn.errors import DTypeError, ScheduleError, ShapeError
from ecornn.runtime.columns import Columns, steps_of
from ecornn.runtime.layer import Layer
from ecornn.runtime.torch_arrays import TorchArrays
from ecornn.torch.engine import by_layer, engine_of, layers_of, weights_of
from ecornn.torch.kind import text_of
from ecornn.torch.operator import directly

LEAST = 16  # columns; fewer do not make steps shorter
FIXED = 32  # columns whose work takes as long as the way of the state between blocks, in each step

Ints = NDArray[np.int32]
Call = Callable[[torch.Tensor, dict[str, Any]], Sequence[torch.Tensor]]
_arrays = TorchArrays()


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of N packed rows in x (T, C, I), ``shape`` T and C. ``index``: for each place its row, 0 without one;
    for each row its place; and, without columns, the C lengths."""

    shape: tuple[int, int]
    index: Ints
    columns: Columns | None = None  # the module's argument for sequences that lie end to end; None: each is a row of x
    _copies: dict[Any, Any] = field(default_factory=dict, repr=False)

    def index_on(self, data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The three parts of ``index`` on the device of ``data`` (N, I)."""
        steps, width = self.shape
        # a graph would read copies that may be gone when it is replayed
        copy = _arrays.rows if data.is_cuda and not _arrays.keeps_workspace() else partial(_arrays.kept, self._copies)
        index, _ = copy(self.index, "int32", data, None)
        parts: tuple[torch.Tensor, ...] = index.split((steps * width, len(data),
                                                       len(index) - steps * width - len(data)))
        return parts

    def call(self, data: torch.Tensor, call: Call) -> list[torch.Tensor]:
        """The results of ``call`` on x and the module's masks, y packed as ``data`` (N, I) is."""
        steps, width = self.shape
        there, back, lengths = self.index_on(data)
        masks = {"lengths": lengths} if self.columns is None else {"sequences": self.columns}
        y, *after = call(data.index_select(0, there).view(steps, width, -1), masks)
        return [y.view(steps * width, -1).index_select(0, back), *after]


@lru_cache(maxsize=16)
def rows_of(batch_sizes: bytes) -> int:
    """The number of packed rows. Raises :class:`ShapeError` for sizes with which kernels would read beside x."""
    sizes = np.frombuffer(batch_sizes, np.int64)
    if not len(sizes) or sizes[-1] < 0 or (np.diff(sizes) > 0).any():
        raise ShapeError("input.batch_sizes", sizes.tolist(), "a size for each step, at least 0 and not larger than "
                         "the one before")
    return int(sizes.sum())


def checked(packed: PackedSequence) -> PackedSequence:
    """The sequence without rows beyond ``batch_sizes``. Raises errors where its parts do not fit each other."""
    data, sizes, *orders = packed
    if sizes.dtype != torch.int64 or not sizes.is_cpu:
        raise DTypeError("input.batch_sizes", f"{sizes.dtype} on {sizes.device}", "torch.int64 on the host")
    rows = rows_of(sizes.numpy().tobytes())
    if rows > len(data):
        raise ShapeError("input.data.shape", tuple(data.shape), f"{rows} rows, the sum of batch_sizes")
    return packed if rows == len(data) else PackedSequence(data[:rows], sizes, *orders)


def sizes_of(batch_sizes: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """int64 ``batch_sizes`` as an array, and the lengths, the longest first."""
    sizes = np.frombuffer(batch_sizes, np.int64)
    return sizes, np.searchsorted(-sizes, -np.arange(sizes[0]), side="left")


@lru_cache(maxsize=16)  # the layers of a model have the same lengths, one after the other
def padded(batch_sizes: bytes) -> Layout:
    sizes, lengths = sizes_of(batch_sizes)
    shape = len(sizes), len(lengths)
    return Layout(shape, _index(shape, np.flatnonzero(np.arange(shape[1]) < sizes[:, None]), lengths))


@lru_cache(maxsize=16)
def laid(batch_sizes: bytes, width: int, together: int) -> Layout:
    """The layout of sequences in ``width`` columns, of which ``together`` neighbours may share a sequence."""
    sizes, lengths = sizes_of(batch_sizes)
    columns = Columns.of(lengths, width, together)
    steps, numbers = np.nonzero(np.arange(columns.count) < sizes[:, None])  # of packed rows
    back = columns.places[columns.first[numbers] + steps]
    return Layout(columns.table.shape, _index(columns.table.shape, back), columns)


def _index(shape: tuple[int, ...], back: NDArray[Any], *more: NDArray[Any]) -> Ints:
    """The index of a :class:`Layout`, from the places of packed rows."""
    there = np.zeros(shape[0] * shape[1], np.int32)
    there[back] = np.arange(len(back))
    return np.concatenate((there, back, *more), dtype=np.int32)


@lru_cache(maxsize=16)
def _width(gpu: bool, batch_sizes: bytes) -> int | None:
    """The number of columns for sequences with int64 ``batch_sizes``; None if they gain nothing."""
    return columns_for(sizes_of(batch_sizes)[1]) if gpu else None


def columns_for(lengths: np.ndarray[Any, Any]) -> int | None:
    """The number of columns, a power of two, so that modules are few; None if one for each sequence is best."""
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
    width = _width(data.is_cuda, sizes) if module.num_layers == 1 or module.bidirectional else None
    if width is not None and (data.dtype, width) not in engine.refused:
        try:
            return run_in(width, "sequences", lambda layer: laid(sizes, width, layer.together))
        except ScheduleError:  # weights that do not fit on the chip
            engine.refused.add((data.dtype, width))
    rows = padded(sizes)
    return run_in(rows.shape[1], "lengths", lambda layer: rows)


def train(module: Any, packed: PackedSequence, state: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Does what :func:`run` does, with gradients; None if columns gain nothing, or no schedule serves them."""
    sizes, engine, data = packed.batch_sizes.numpy().tobytes(), engine_of(module), packed.data
    weights, width, together = weights_of(module), _width(data.is_cuda, sizes), 0
    if width is None or (data.dtype, width, "training") in engine.refused:
        return None
    parts = [(engine, weights, state)]
    if by_layer(module, weights):
        parts = [(engine.part(number, text_of(module, number)), [*its], first)
                 for number, (its, first) in enumerate(layers_of(module, weights, state))]
    try:  # x is not laid before it is known which columns may share a sequence
        like = data[:1].detach().expand(len(packed.batch_sizes), width, -1)
        for part, its, _ in parts:
            with torch.no_grad(), part.training(its, like, "sequences", again=True) as layer:
                together = gcd(together, layer.together)
    except ScheduleError:  # weights that do not fit on the chip
        engine.refused.add((data.dtype, width, "training"))
        return None
    layout = laid(sizes, width, together)
    assert layout.columns is not None
    there, back, _ = layout.index_on(data)
    y, after = _Gather.apply(data, there, back).view(*layout.shape, -1), []
    for part, its, first in parts:
        y, *states = directly(part, y, first, layout.columns, its)
        after.append(states)
    last = after[0] if len(parts) == 1 else [torch.cat(states) for states in zip(*after, strict=True)]
    return [_Gather.apply(y.flatten(0, 1), back, there), *last]


class _Gather(torch.autograd.Function):
    """Gathers rows of ``data`` by ``index``, whose inverse is ``inverse`` but for rows that nobody reads."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return data.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        index, inverse = ctx.saved_tensors
        return _Gather.apply(gradients[0], inverse, index), None, None
