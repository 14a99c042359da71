"""Calls that must be refused, one a line."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: Any, words: str, call: Callable[..., Any], /, *given: Any, **options: Any) -> None:
    """Fails unless the call raises that error, with a text that has a match of the pattern ``words``."""
    with pytest.raises(error, match=words):
        call(*given, **options)
