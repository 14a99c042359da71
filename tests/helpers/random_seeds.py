"""Which cases the exhaustive random tests draw: ``ECORNN_RANDOM=FIRST:END``, so that a large run can be split."""

from __future__ import annotations

import os


def seeds(usual: range) -> range:
    """Those that are asked for, else ``usual``."""
    asked = os.environ.get("ECORNN_RANDOM")
    return range(*map(int, asked.split(":"))) if asked else usual
