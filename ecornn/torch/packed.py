"""Packed sequences on a GPU: laid end to end in fewer columns than there are sequences.

A module for the whole batch steps through the longest row, and rows that have ended keep their places in every
product. Laid end to end the same steps take about as many columns as the rows have valid steps for each step of the
longest; x and y stay packed, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ecornn.errors import ScheduleError
from ecornn.runtime.columns import Columns, steps_of
from ecornn.runtime.layer import Layer
from ecornn.runtime.torch_arrays import on_device
from ecornn.torch.engine import called, engine_of

LEAST = 16  # columns; fewer do not make steps shorter
FIXED = 32  # a step of C columns takes about as long as C + 32 do: the way of the state between blocks


@dataclass(frozen=True)
class Layout:
    """Packed sequences in columns: for each place of x (T, C) the row of the packed data, then for each of those its
    place."""

    columns: Columns
    index: torch.Tensor

    def call(self, data: torch.Tensor, call: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """What ``call`` makes of x (T, C, I), with y as packed as ``data`` (N, I) is."""
        shape = self.columns.table.shape
        there, back = on_device(self.index, data).split((shape[0] * shape[1], len(data)))
        y, *after = call(data.index_select(0, there).reshape(*shape, -1))
        return [y.reshape(len(there), -1).index_select(0, back), *after]


@lru_cache(maxsize=16)  # the layers of a model have the same lengths, one after the other
def layout(batch_sizes: bytes, width: int | None = None) -> Layout | None:
    """Where the sequences of int64 ``batch_sizes`` lie in ``width`` columns, or in as few as gain; None: none do."""
    sizes = np.frombuffer(batch_sizes, np.int64)
    lengths = np.searchsorted(-sizes, -np.arange(sizes[0]), side="left")  # the longest first
    width = width or columns_for(lengths)
    if width is None:
        return None
    columns = Columns.of(lengths, width)
    (steps, width), first = columns.table.shape, np.arange(len(sizes), dtype=np.int32)
    places = (first[:, None] + columns.start) * width + columns.column
    back = places[np.arange(columns.count) < sizes[:, None]]
    there = np.zeros(steps * width, np.int32)
    there[back] = np.arange(len(back))
    return Layout(columns, torch.from_numpy(np.concatenate((there, back))))


def columns_for(lengths: np.ndarray[Any, Any]) -> int | None:
    """How many columns to lay them in, a power of two, so that few modules are compiled and records are at hand; None
    where as many as there are sequences are best."""
    longest, count, valid = int(lengths.max()), len(lengths), int(lengths.sum())
    least = max(LEAST, 1 << (valid // longest).bit_length() - 1)
    costs = {width: steps_of(lengths, width) * (width + FIXED) for width in (least, 2 * least) if width < count}
    best = min(costs, key=lambda width: costs[width], default=None)
    return best if best is not None and costs[best] < longest * (count + FIXED) else None


def run(module: Any, packed: PackedSequence, state: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Packed y and the states (L*D, S, H) from ``state`` or zeros, rows in packed order; None where columns gain
    nothing."""
    if not packed.data.is_cuda or (module.num_layers > 1 and not module.bidirectional):
        return None  # layers of one direction may work at the same time instead, which columns do not allow
    found = layout(packed.batch_sizes.numpy().tobytes())
    engine, data = engine_of(module), packed.data
    if found is None or (data.dtype, found.columns.table.shape[1]) in engine.refused:
        return None
    width = found.columns.table.shape[1]
    try:
        layer = engine.layer(module, data, width, len(packed.batch_sizes), "sequences")
    except ScheduleError:  # weights that do not fit on the chip
        engine.refused.add((data.dtype, width))
        return None
    return found.call(data, lambda x: called(module, layer, x, state, sequences=found.columns))


def call_layer(layer: Layer, packed: PackedSequence, state: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """A layer compiled with ``sequences=True`` on packed sequences: packed y, and the states."""
    found = layout(packed.batch_sizes.numpy().tobytes(), layer.manifest.workload.batch)
    assert found is not None, "a width was given"

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        y, after = layer(x, state, sequences=found.columns)
        return [y, *after]

    return found.call(packed.data, call)
