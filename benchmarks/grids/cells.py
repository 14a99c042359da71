"""Cells of tests/published with other numbers of heads, for heads.toml."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from published import heads as published


def with_heads(cell: type, heads: int) -> Any:
    return make_dataclass(cell.__name__, [("heads", int)], bases=(cell,), frozen=True)(heads)


slstm1, slstm8 = (with_heads(published.SLSTMHeads, heads) for heads in (1, 8))
block_gru1, block_gru8 = (with_heads(published.BlockGRU, heads) for heads in (1, 8))
