"""Packed sequences on a GPU: laid end to end in fewer columns than there are sequences.

A module for the whole batch steps through the longest row, and rows that have ended keep their places in every
product. Laid end to end the same steps take about as many columns as the rows have valid steps for each step of the
longest; x and y stay packed, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ecornn.errors import ScheduleError
from ecornn.runtime.columns import Columns, steps_of
from ecornn.runtime.layer import Layer
from ecornn.torch.engine import called, engine_of

LEAST = 16  # columns; fewer do not make steps shorter
FIXED = 32  # a step of C columns takes about as long as C + 32 do: the way of the state between blocks


def run(module: Any, packed: PackedSequence, state: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Packed y and the states (L*D, S, H) from ``state`` or zeros, rows in packed order; None where columns gain
    nothing."""
    if not packed.data.is_cuda or (module.num_layers > 1 and not module.bidirectional):
        return None  # layers of one direction may work at the same time instead, which columns do not allow
    lengths = lengths_of(packed.batch_sizes.numpy())
    width = columns_for(lengths)
    engine = engine_of(module)
    if width is None or (packed.data.dtype, width) in engine.refused:
        return None
    try:
        layer = engine.layer(module, packed.data, width, len(packed.batch_sizes), "sequences")
    except ScheduleError:  # weights that do not fit on the chip
        engine.refused.add((packed.data.dtype, width))
        return None
    columns = Columns.of(lengths, width)
    return called_in(columns, packed, lambda x: called(module, layer, x, state, sequences=columns))


def lengths_of(batch_sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The lengths (S,), the longest first, from how many sequences each step has."""
    return np.searchsorted(-batch_sizes, -np.arange(batch_sizes[0]), side="left")


def columns_for(lengths: np.ndarray[Any, Any]) -> int | None:
    """How many columns to lay them in, a power of two, so that few modules are compiled and records are at hand; None
    where as many as there are sequences are best."""
    longest, count, valid = int(lengths.max()), len(lengths), int(lengths.sum())
    least = max(LEAST, 1 << (valid // longest).bit_length() - 1)
    costs = {width: steps_of(lengths, width) * (width + FIXED) for width in (least, 2 * least) if width < count}
    best = min(costs, key=lambda width: costs[width], default=None)
    return best if best is not None and costs[best] < longest * (count + FIXED) else None


def called_in(columns: Columns, packed: PackedSequence, call: Any) -> list[torch.Tensor]:
    """What ``call`` makes of x (T, C, I), with y as packed as ``packed`` is."""
    sizes, (steps, width) = packed.batch_sizes.numpy(), columns.table.shape
    places = (np.arange(len(sizes), dtype=np.int32)[:, None] + columns.start) * width + columns.column
    back = places[np.arange(columns.count) < sizes[:, None]]  # for each row of the packed data, its place in columns
    there = np.zeros(steps * width, np.int32)
    there[back] = np.arange(len(back))
    index = torch.from_numpy(np.concatenate((there, back))).to(packed.data.device)
    x = packed.data.index_select(0, index[:len(there)]).reshape(steps, width, -1)
    y, *after = call(x)
    return [y.reshape(len(there), -1).index_select(0, index[len(there):]), *after]


def call_layer(layer: Layer, packed: PackedSequence, state: Sequence[torch.Tensor] | None = None) -> Any:
    """A layer compiled with ``sequences=True`` on packed sequences: packed y, and the states."""
    columns = Columns.of(lengths_of(packed.batch_sizes.numpy()), layer.manifest.workload.batch)

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        y, after = layer(x, state, sequences=columns)
        return [y, *after]

    return called_in(columns, packed, call)
