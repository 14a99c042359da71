"""The projection on wgmma, emulated on the CPU, and what the compiler makes of it for the GPU."""

from __future__ import annotations

import pytest
from emulated import check_numbers, task_of
from msgspec.structs import replace
from test_persistent_emulated import CUT

from ecornn.device import KNOWN
from ecornn.program import Program
from ecornn.schedules.layout_transform import LayoutTransform
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.projection_wgmma import THREADS, shape_of

HOPPER = KNOWN["sm_90a"]

# T * B rows on 128 a tile, I on stages of 64, H on the units of a tile
CASES = [
    ("lstm", (5, 3, 24, 40), "bfloat16", 6),  # one tile, part of a stage
    ("lstm", (1, 1, 8, 1), "float16", 2),  # the smallest of everything
    ("lstm", (13, 10, 200, 72), "float16", 3),  # a second group of rows with two in it, two columns of tiles
    ("gru", (6, 22, 136, 88), "bfloat16", 2),  # 80 units, then 8; more tiles than multiprocessors
    ("gru", (3, 7, 64, 40), "float16", 4),  # a whole stage
    ("rnn_tanh", (7, 19, 72, 264), "bfloat16", 2),  # 17 octets a tile, odd number of them in all
    ("rnn_tanh", (40, 14, 328, 17), "float16", 2),  # more stages than the ring has, odd H, five groups of rows
    ("gated", (4, 33, 80, 40), "bfloat16", 3),
]


def task(cell, sizes, dtype, cores):
    made = task_of(cell, sizes, dtype, replace(HOPPER, cores=cores))
    assert shape_of(made) is not None
    return made


def config(made):
    """The smallest blocks of few that serve any of the layers."""
    schedule = Persistent()
    return {**schedule.default(made), "ahead": 100}


@pytest.mark.parametrize(("cell", "sizes", "dtype", "cores"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_matches_float64(tmp_path, cell, sizes, dtype, cores):
    made = task(cell, sizes, dtype, cores)
    check_numbers(tmp_path, LayoutTransform(), made, LayoutTransform().default(made))
