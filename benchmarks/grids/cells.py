"""Cells of tests/published with other numbers of heads, for heads.toml."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from published import heads as published


@dataclass(frozen=True)
class SLSTM(published.SLSTMHeads):
    """With any number of heads."""

    heads: int


@dataclass(frozen=True)
class BlockGRU(published.BlockGRU):
    """With any number of heads."""

    heads: int


slstm1, slstm8, block_gru1, block_gru8 = SLSTM(1), SLSTM(8), BlockGRU(1), BlockGRU(8)
