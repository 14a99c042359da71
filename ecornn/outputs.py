"""Several outputs of a cell: how they lie in rows of y, H values each, of one direction after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def by_output(rows: Any, names: Sequence[str], directions: int) -> dict[str, Any]:
    """Each output (..., D*H), by name, of ``rows`` (..., D*O*H), arrays of any framework: views, unless there are two
    directions."""
    outer, width = tuple(rows.shape[:-1]), rows.shape[-1]
    hidden = width // (directions * len(names))
    if directions == 1:
        return {name: rows[..., n * hidden:(n + 1) * hidden] for n, name in enumerate(names)}
    parts = rows.reshape((*outer, directions, len(names), hidden))
    return {name: parts[..., n, :].reshape((*outer, directions * hidden)) for n, name in enumerate(names)}
