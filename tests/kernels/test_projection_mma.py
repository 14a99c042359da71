"""How blocks share the tiles of the projection on mma."""

from __future__ import annotations

from collections import Counter

import pytest
from emulated import task_of

from ecornn.schedules.gemm.mma_mainloop import COLUMN_WARPS
from ecornn.schedules.gemm.projection import job_of, project
from ecornn.schedules.gemm.rows_mma import blocks_of, shape_of, spares_warps
from ecornn.targets import KNOWN

HOPPER = KNOWN["sm_90a"]


@pytest.mark.parametrize(("cell", "sizes", "spared"), [
    ("gru", (300, 200, 100, 100), True),  # four columns of 32 units, the last one of four
    ("lstm", (100, 1000, 100, 100), True),
    ("rnn_tanh", (300, 64, 100, 140), True),  # two of 128
    ("gru", (300, 64, 96, 96), False),  # three whole ones
    ("lstm", (300, 64, 256, 256), False),
    ("gru", (300, 64, 20, 20), True),  # one column: nothing to share
], ids=str)
def test_blocks_of_float32_share_the_columns(cell: str, sizes: tuple[int, int, int, int], spared: bool):
    """Each block has as many tiles of the last column, where warps have less to do, as any other, but for one."""
    task = task_of(cell, sizes, "float32", HOPPER)
    job = job_of(task)
    shape, (launch,) = shape_of(job), project(task).calls
    blocks = blocks_of(job, shape)
    assert spares_warps(job, shape) is spared and launch.grid == blocks and 2 * HOPPER.cores - 4 < blocks
    assert (shape.units * shape.columns - sizes[3] >= shape.units // COLUMN_WARPS) is spared
    tiles = -(-sizes[0] * sizes[1] // shape.height) * shape.columns
    last = Counter(tile % blocks for tile in range(tiles) if tile % shape.columns == shape.columns - 1)
    if spared:
        counts = [last[block] for block in range(min(blocks, tiles))]
        assert max(counts) - min(counts) <= 1
    else:
        assert blocks == 2 * HOPPER.cores


def test_other_types_have_whole_multiprocessors():
    """They multiply padding, too: all columns take as long."""
    job = job_of(task_of("gru", (300, 200, 100, 100), "float16", KNOWN["sm_80"]))
    assert not spares_warps(job, shape_of(job)) and blocks_of(job, shape_of(job)) % KNOWN["sm_80"].cores == 0
