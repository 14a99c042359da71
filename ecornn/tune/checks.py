"""What a caller may ask of a search, checked before anything is started."""

from __future__ import annotations

import math
from typing import Any

from ecornn.errors import ArgumentError


def whole(name: str, value: Any, low: int, high: int) -> int:
    """``value``, an integer from ``low`` to ``high``; else :class:`ArgumentError`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ArgumentError(name, value, f"an integer from {low} to {high}")
    return value


def seconds(name: str, value: Any) -> float:
    """``value``, a finite number above 0; else :class:`ArgumentError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ArgumentError(name, value, "seconds, a finite number above 0")
    return float(value)


def called(name: str, value: Any) -> None:
    """:class:`ArgumentError` where ``value`` is no function."""
    if not callable(value):
        raise ArgumentError(name, value, "a function")


def one_of(name: str, value: Any, *kinds: type) -> None:
    """:class:`ArgumentError` where ``value`` is neither None nor of one of these types."""
    if value is not None and not isinstance(value, kinds):
        raise ArgumentError(name, value, f"{' or '.join(k.__name__ for k in kinds)}, or None")
