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
from ecornn.runtime.columns import Columns
from ecornn.runtime.layer import Layer
from ecornn.torch.engine import called, engine_of

TILE = 8  # columns of a product come in multiples of this
FIXED = 32  # a step of C columns takes about as long as C + 32 do: the way of the state between blocks


def run(module: Any, packed: PackedSequence, state: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Packed y and the states (L*D, S, H) from ``state`` or zeros, rows in packed order; None where columns gain
    nothing."""
    if not packed.data.is_cuda or (module.num_layers > 1 and not module.bidirectional):
        return None  # layers of one direction may work at the same time instead, which columns do not allow
    lengths = lengths_of(packed.batch_sizes.numpy())
    width = columns_for(lengths)
    if width is None:
        return None
    try:
        layer = engine_of(module).layer(module, packed.data, width, len(packed.batch_sizes), "sequences")
    except ScheduleError:  # weights that do not fit on the chip
        return None
    columns = Columns.of(lengths, layer.manifest.workload.batch)
    return called_in(columns, packed, lambda x: called(module, layer, x, state, sequences=columns))


def lengths_of(batch_sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The lengths (S,), the longest first, from how many sequences each step has."""
    return np.searchsorted(-batch_sizes, -np.arange(batch_sizes[0]), side="left")


def columns_for(lengths: np.ndarray[Any, Any]) -> int | None:
    """How many columns to lay them in; None where as many as there are sequences are best."""
    longest, count = int(lengths.max()), len(lengths)
    least = max(TILE, int(lengths.sum()) // longest // TILE * TILE)
    costs = {width: len(Columns.of(lengths, width).table) * (width + FIXED)
             for width in (least, least + TILE) if width < -(-count // TILE) * TILE}
    best = min(costs, key=lambda width: costs[width], default=None)
    whole = longest * (-(-count // TILE) * TILE + FIXED)
    return best if best is not None and costs[best] < whole else None


def called_in(columns: Columns, packed: PackedSequence, call: Any) -> list[torch.Tensor]:
    """What ``call`` makes of x (T, C, I), with y as packed as ``packed`` is."""
    sizes, inside = packed.batch_sizes.numpy(), columns.inside
    offsets = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    steps = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.arange(len(steps)) - offsets[steps]
    there = np.maximum(offsets[inside] + columns.table, 0).reshape(-1)
    back = (columns.start[rows] + steps) * inside.shape[1] + columns.column[rows]
    places = torch.from_numpy(np.concatenate((there, back)).astype(np.int32)).to(packed.data.device)
    x = packed.data.index_select(0, places[:len(there)]).reshape(*inside.shape, -1)
    y, *after = call(x)
    return [y.reshape(len(there), -1).index_select(0, places[len(there):]), *after]


def call_layer(layer: Layer, packed: PackedSequence, state: Sequence[torch.Tensor] | None = None) -> Any:
    """A layer compiled with ``sequences=True`` on packed sequences: packed y, and the states."""
    columns = Columns.of(lengths_of(packed.batch_sizes.numpy()), layer.manifest.workload.batch)

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        y, after = layer(x, state, sequences=columns)
        return [y, *after]

    return called_in(columns, packed, call)
