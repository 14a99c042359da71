"""Outputs of a cell that has several, and their gradients: how a caller has them, and how they lie in rows of y."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecornn.errors import ArgumentError, ShapeError
from ecornn.manifest import Manifest
from ecornn.outputs import by_output
from ecornn.runtime.arrays import Arrays


def named(manifest: Manifest, rows: Any) -> Any:
    """y as a caller has it: the rows themselves; of a module with several outputs each of them, by name."""
    return by_output(rows, manifest.outputs, manifest.stack.directions) if manifest.outputs else rows


def rows_of(manifest: Manifest, arrays: Arrays, given: Any, steps: int, batch: int, like: Any) -> Any:
    """Gradients by name as one of rows of y; whoever is not named has zeros. Anything but a mapping is returned.

    Raises :class:`ArgumentError` and :class:`ShapeError` where a name or a shape is none of the outputs'.
    """
    if not isinstance(given, Mapping):
        return given
    names, hidden, directions = manifest.outputs or (), manifest.workload.hidden, manifest.stack.directions
    if strange := sorted({*map(str, given)} - {*names}):
        raise ArgumentError("dy", strange, f"gradients of {', '.join(names)}" if names else "an array: there is one "
                            "output")
    found, wanted, kind = {}, (steps, batch, directions * hidden), arrays.facts(like)[1:]
    for name in names:
        value = given.get(name)
        if value is None:
            found[name] = arrays.zeros(wanted, like, manifest.workload.dtype)[0]
            continue
        found[name] = arrays.take(value, f"dy[{name!r}]")
        shape, *facts = arrays.facts(found[name])
        if shape != wanted:
            raise ShapeError(f"dy[{name!r}].shape", shape, str(wanted))
        if tuple(facts) != tuple(kind):
            raise ArgumentError(f"dy[{name!r}]", " on ".join(facts), f"{' on '.join(kind)}, as x")
    first, *others = (found[name][..., d * hidden:(d + 1) * hidden] for d in range(directions) for name in names)
    return arrays.beside(first, others, hidden)
