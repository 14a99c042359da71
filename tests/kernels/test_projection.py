"""The projection on wgmma, emulated on the CPU, and what the compiler makes of it for the GPU; how blocks share the
tiles of the one on mma."""

from __future__ import annotations

from collections import Counter

import pytest
from emulated import check_numbers, task_of
from msgspec.structs import replace
from test_persistent_emulated import cut
from without_spills import needs_ptxas, resources_without_spills

import ecornn.schedules.gemm.rows_wgmma as kernel
from ecornn.build.cuda import lower
from ecornn.program import Program
from ecornn.schedules import rates
from ecornn.schedules.assemble import shared_buffers
from ecornn.schedules.gemm.mma_mainloop import COLUMN_WARPS
from ecornn.schedules.gemm.projection import job_of, project
from ecornn.schedules.gemm.rows_mma import blocks_of, spares_warps
from ecornn.schedules.gemm.rows_mma import shape_of as shape_on_mma
from ecornn.schedules.gemm.rows_wgmma import shape_of
from ecornn.schedules.gemm.wgmma_mainloop import THREADS
from ecornn.schedules.hoisted import hoisted_of
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN

HOPPER = KNOWN["sm_90a"]

# T * B rows on 128 a tile, I on stages of 64, H on the units of a tile
CASES = [
    ("lstm", (5, 3, 24, 40), "bfloat16", 6),  # one tile, part of a stage
    ("lstm", (1, 1, 8, 1), "float16", 2),  # the smallest of everything
    ("lstm", (13, 10, 200, 72), "float16", 3),  # a second group of rows with two in it, two columns of tiles
    pytest.param(*("gru", (6, 22, 136, 88), "bfloat16", 2),
                 marks=pytest.mark.exhaustive),  # 80 units, then 8; more tiles than multiprocessors
    ("gru", (3, 7, 64, 40), "float16", 4),  # a whole stage
    ("rnn_tanh", (7, 19, 72, 264), "bfloat16", 2),  # 17 octets a tile, odd number of them in all
    ("rnn_tanh", (40, 14, 328, 17), "float16", 2),  # more stages than the ring has, odd H, five groups of rows
    ("gated", (4, 33, 80, 40), "bfloat16", 3),
    ("lstm", (13, 10, 204, 40), "float16", 3),  # rows of x 8-byte aligned, the last chunk half outside
    ("gru", (6, 23, 138, 24), "bfloat16", 2),  # 4-byte aligned, a quarter inside
    ("rnn_tanh", (3, 7, 2, 40), "float16", 2),
    ("lstm", (5, 3, 24, 40), "tf32", 6),  # stages of 32 values
    ("gru", (6, 23, 137, 24), "tf32", 2),  # rows of x 4-byte aligned
    ("rnn_tanh", (7, 19, 166, 264), "tf32", 2),  # 8-byte aligned, two columns of tiles
    pytest.param(*("lstm", (13, 10, 260, 72), "tf32", 3),
                 marks=pytest.mark.exhaustive),  # more stages than the ring has
]


@pytest.fixture
def wide(monkeypatch):
    """Tiles as of longer calls, though these have few steps."""
    monkeypatch.setattr(rates, "SHORT", 0)


def task(cell, sizes, dtype, cores):
    made = task_of(cell, sizes, dtype, replace(HOPPER, cores=cores))
    assert shape_of(job_of(made)) is not None
    return made


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("cell", "sizes", "dtype", "cores"), CASES, ids=str)
def test_matches_float64(tmp_path, cell, sizes, dtype, cores):
    made = task(cell, sizes, dtype, cores)
    check_numbers(tmp_path, LayoutTransform(), made, LayoutTransform().default(made))


@pytest.mark.parametrize(("cell", "sizes", "dtype"), [
    ("lstm", (26, 5, 72, 40), "bfloat16"), ("gru", (5, 3, 24, 48), "float16"), ("rnn_tanh", (9, 15, 96, 24), "float16"),
    ("gated", (4, 3, 136, 40), "bfloat16"),
], ids=str)
def test_before_the_persistent_kernel(tmp_path, cell, sizes, dtype):
    made = task(cell, sizes, dtype, 6)
    check_numbers(tmp_path, Persistent(), made, cut(made, units=8, warps=1 if sizes[3] < 40 else 2))


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("lag", [0, 1])
def test_copies_and_products_at_once(tmp_path, monkeypatch, lag):
    """Copies that come before the stage is free, and halves of the rows in step, show here."""
    monkeypatch.setattr(kernel, "LAG", lag)
    made = task("lstm", (9, 16, 520, 40), "bfloat16", 2)
    check_numbers(tmp_path, LayoutTransform(), made, LayoutTransform().default(made), lazy=False)


def test_fewer_rows_than_compiled(tmp_path):
    made = task("gru", (50, 9, 16, 24), "bfloat16", 2)
    check_numbers(tmp_path, LayoutTransform(), made, LayoutTransform().default(made), batch=4)


def test_what_it_does_not_serve():
    """These keep the kernel of ``schedules/gemm/rows_mma.py``."""
    def serves(cell="lstm", sizes=(40, 3, 64, 40), dtype="bfloat16", device=HOPPER):
        return shape_of(job_of(task_of(cell, sizes, dtype, device))) is not None

    assert serves() and serves(dtype="float16") and serves(sizes=(40, 3, 8, 1))
    assert not serves(dtype="float32") and serves(dtype="tf32") and serves(sizes=(40, 3, 61, 40), dtype="tf32")
    assert serves(sizes=(40, 3, 2, 40)) and not serves(sizes=(40, 3, 61, 40))  # rows of whole words
    assert not serves(device=KNOWN["sm_80"])
    assert not serves(device=replace(HOPPER, shared=64 << 10))
    assert not serves(cell="echo")  # no input product


def test_a_part_of_the_rows_ahead_keeps_one_packing():
    """Workers beside the recurrence read the weights as the other kernel does."""
    made = task("lstm", (40, 7, 24, 40), "bfloat16", 6)
    ahead = [next(b.packing for b in project(made, ahead=a).buffers if b.name == "input_weights") for a in (100, 50, 0)]
    assert ahead[0] != ahead[1] == ahead[2]


@needs_ptxas
@pytest.mark.parametrize(("cell", "hidden", "input", "dtype", "wide"), [
    ("lstm", 768, 768, "bfloat16", True), ("gru", 800, 800, "bfloat16", True),
    ("rnn_tanh", 2048, 2048, "bfloat16", True), ("lstm", 767, 3000, "bfloat16", True),
    ("lstm", 33, 64, "bfloat16", True), ("rnn_tanh", 100, 16, "bfloat16", False), ("gru", 7, 8, "bfloat16", False),
    ("lstm", 768, 768, "tf32", True), ("gru", 800, 803, "tf32", True),
])
def test_compiles_without_spills(cell, hidden, input, dtype, wide):
    made = task(cell, (64, 16, input, hidden), dtype, 132)
    part = project(made)
    assert part.calls[-1].threads == THREADS  # x may be copied before
    buffers = (*shared_buffers(made, hoisted_of(made)), *part.buffers)
    source = lower(Program.running(dict(part.functions), buffers, part.calls), "sm_90a")[1]
    found = resources_without_spills(source, "project_kernel")["project_kernel"]
    if wide:  # what setmaxnreg starts from is what a block of 384 threads gets; from less it would wait forever
        assert found["registers"] == 168 and "setmaxnreg" in source


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
    shape, (launch,) = shape_on_mma(job), project(task).calls
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
    assert not spares_warps(job, shape_on_mma(job)) and blocks_of(job, shape_on_mma(job)) % KNOWN["sm_80"].cores == 0
