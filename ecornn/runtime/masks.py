"""Lengths, resets and sequences of a call, checked and brought to where the module reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecornn.errors import ArgumentError, DTypeError, ShapeError
from ecornn.runtime.arrays import Arrays, Placed
from ecornn.runtime.columns import Columns
from ecornn.runtime.library import Library


def place_lengths(value: Any, steps: int, batch: int, arrays: Arrays, like: Any,
                  library: Library) -> tuple[Placed, int]:
    """The lengths as int32 on the device of ``like``, and how many steps the longest row has.

    Lengths that are on a GPU are not waited for: the steps are then all of x's, and no value is checked.
    Raises :class:`ArgumentError`, :class:`ShapeError` or :class:`DTypeError` for what is no (B,) of
    integers from 0 to T.
    """
    if value is None:
        value = np.full(batch, steps, np.int32)
    value, shape, dtype = _facts("lengths", value, like)
    if shape != (batch,):
        raise ShapeError("lengths.shape", shape, f"({batch},): (B,)")
    if not dtype.startswith(("int", "uint")):
        raise DTypeError("lengths.dtype", dtype, "an integer type")
    if isinstance(value, np.ndarray):
        if not 0 <= int(value.min()) <= int(value.max()) <= steps:
            raise ArgumentError("lengths", value.tolist(), f"integers from 0 to T={steps}")
        steps = max(1, int(value.max()))
    return arrays.rows(value, "int32", like, library), steps


def place_resets(value: Any, steps: int, batch: int, arrays: Arrays, like: Any, library: Library) -> Placed:
    """The mask as uint8 on the device of ``like``; all zeros for None.

    Raises :class:`ShapeError` or :class:`DTypeError` for what is no (T, B) of booleans or uint8.
    """
    if value is None:
        value = np.zeros((steps, batch), np.uint8)
    value, shape, dtype = _facts("resets", value, like)
    if shape != (steps, batch):
        raise ShapeError("resets.shape", shape, f"{(steps, batch)}: (T, B)")
    if dtype not in ("bool", "uint8"):
        raise DTypeError("resets.dtype", dtype, "bool or uint8")
    return arrays.rows(value, "uint8", like, library)


def place_sequences(value: Any, steps: int, batch: int, together: int, arrays: Arrays, like: Any,
                    library: Library) -> tuple[Placed, int]:
    """The table as int32 on the device of ``like``, and how many sequences there are; for None each column is one.

    Raises as :meth:`Columns.given`, :class:`ShapeError` for what is no (T, B), and :class:`ArgumentError` where a
    sequence goes from one group of ``together`` columns to the next.
    """
    if value is None:
        value = np.broadcast_to(np.arange(batch), (steps, batch))
    columns = value if isinstance(value, Columns) else Columns.given(value.cpu() if hasattr(value, "cpu") else value)
    if columns.table.shape != (steps, batch):
        raise ShapeError("sequences.shape", columns.table.shape, f"{(steps, batch)}: (T, B)")
    apart = columns.wrapped[(columns.wrapped + 1) % together == 0]
    if apart.size:
        raise ArgumentError("sequences", f"sequences that go on in another column than {apart.tolist()}",
                            f"those of Columns.of(lengths, width, together={together}), as layer.together says")
    return arrays.kept(columns.copies, columns.marked, "int32", like, library), columns.count


def _facts(name: str, value: Any, like: Any) -> tuple[Any, tuple[int, ...], str]:
    """A host array of the value with its shape and type; a torch tensor beside ``like`` on a GPU stays."""
    if getattr(value, "is_cuda", False):
        if getattr(like, "is_cuda", False):
            return value, tuple(value.shape), str(value.dtype).removeprefix("torch.")
        value = value.cpu()
    try:
        if hasattr(value, "data_ptr") and value.numel() and not value.data_ptr():
            raise ValueError("a tensor without memory of its own")
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ArgumentError(name, type(value), f"an array or a list ({error})") from error
    return found, found.shape, found.dtype.name
