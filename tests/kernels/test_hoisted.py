"""Values of x that all steps share: its layout in 16 bits, and the projection that makes it, emulated."""

from collections import Counter

import numpy as np
import pytest
from cuda_on_cpu import Emulated, inputs
from emulated import check_numbers, task_of
from msgspec.structs import replace
from test_persistent_emulated import SMALL, cut

import ecornn.schedules.gemm.rows_wgmma as kernel
from ecornn.schedules import all_schedules, rates
from ecornn.schedules.elementwise import Elementwise
from ecornn.schedules.gemm.mma_mainloop import COLUMN_WARPS
from ecornn.schedules.gemm.projection import job_of, project
from ecornn.schedules.gemm.rows_mma import blocks_of, spares_warps
from ecornn.schedules.gemm.rows_mma import shape_of as shape_on_mma
from ecornn.schedules.gemm.rows_wgmma import shape_of
from ecornn.schedules.hoisted import Hoisted, unhidden
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN
from ecornn.tune.choose import serving_or_raise

HOPPER = KNOWN["sm_90a"]


def places(layout: Hoisted, units: int) -> dict[tuple[int, int], int]:
    words = [(p.base * 2 + i * 4, p.apart * 2) for p in layout.pieces(units) for i in range(p.words)]
    return {(unit + e, q): words[k][0] + unit * words[k][1] + 2 * upper for unit in range(0, layout.units, units)
            for e, own in enumerate(layout.order(units)) for q, (k, upper) in enumerate(own)}


@pytest.mark.parametrize("outputs", range(1, 13))
def test_every_value_has_one_place_however_many_units_are_taken_at_a_time(outputs):
    layout = Hoisted("float16", outputs, 37)
    one = places(layout, 1)
    assert sorted(one.values()) == list(range(0, layout.row * 2, 2)) and len(one) == outputs * layout.units
    assert places(layout, 2) == one == places(layout, 4)


@pytest.mark.parametrize("outputs", range(1, 13))
@pytest.mark.parametrize("units", [1, 2, 4])
def test_pieces_are_aligned_and_in_whole_sectors(outputs, units):
    layout = Hoisted("bfloat16", outputs, 37)
    for p in layout.pieces(units):
        size = min(p.words * 4, units * p.apart * 2)
        assert all((p.base + unit * p.apart) * 2 % size == 0 for unit in range(0, layout.units, units))
    assert layout.row * 2 % 32 == 0


@pytest.mark.parametrize(("outputs", "bytes"), [(1, 32), (2, 32), (3, 32), (4, 64), (8, 64)])
def test_a_quad_of_the_projection_fills_sectors(outputs, bytes):
    layout = Hoisted("float16", outputs, 64)
    for p in layout.pieces(layout.span):
        assert p.words * 4 * 4 >= bytes and p.words * 4 == layout.span * p.apart * 2


def test_one_unit_a_thread_needs_an_even_number_of_values():
    schedule, task = Elementwise(), task_of("highway", (5, 3, 7, 8), "float16")
    config = {**schedule.default(task), "hoisted": "same"}
    assert "even number" in str(schedule.check(task, {**config, "units": 1}))
    assert schedule.check(task, {**config, "units": 2}) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_values_stay_finite(tmp_path, dtype):
    """float16 has no number for what is hoisted here; its largest one does as well, infinity would not."""
    sizes = (3, 2, 8, 16)
    task = task_of("rnn_tanh", sizes, dtype, SMALL)
    x, states, parameters = inputs("rnn_tanh", sizes, dtype, task.graph.parameters, ("h",))
    x[...] = 3e4
    for name, value in parameters.items():
        value[...] = {"weight_ih": 100.0, "weight_hh": -60000.0}.get(name, 0.0)  # infinity would stay what it is
    states["h"][...] = 1.0
    config = cut(task, units=8, warps=1, hoisted="same")
    y, _ = Emulated(Persistent().program(task, Persistent().plan(task, config)), tmp_path).run(x, states, parameters)
    assert (np.abs(y.astype(np.float32)) == 1).all()
    assert (y[0].astype(np.float32) == (-1 if dtype == "float16" else 1)).all()


@pytest.mark.parametrize(("schedule", "cell"), [
    (Persistent, "lstm"), (PersistentWide, "gru"), (LayoutTransform, "rnn_tanh"), (Elementwise, "indrnn")])
def test_who_has_the_choice(schedule, cell):
    def values(name, dtype):
        task = task_of(name, (9, 4, 8, 16), dtype, HOPPER)
        return next(k for k in schedule().knobs(task) if k.name == "hoisted").values
    assert values(cell, "float16") == values(cell, "bfloat16") == ("float32", "same")
    assert values(cell, "float32") == values(cell, "tf32") == ("float32",)
    assert schedule is not Elementwise or values("decay", "float16") == ("float32",)  # nothing is hoisted


@pytest.mark.parametrize(("cell", "sizes", "dtype", "found"), [
    ("lstm", (256, 64, 1024, 1024), "float16", "same"),
    ("gru", (256, 32, 512, 512), "bfloat16", "same"),
    ("lstm", (256, 64, 1024, 1024), "float32", "float32"),
    ("lstm", (256, 1, 256, 256), "float16", "float32"),  # nothing to gain
    ("rnn_tanh", (512, 32, 1024, 1024), "float16", "float32"),
])
def test_defaults(cell, sizes, dtype, found):
    task = task_of(cell, sizes, dtype, HOPPER)
    for schedule in (Persistent(), PersistentWide(), LayoutTransform()):
        if schedule.serves(task) is None:
            config = schedule.default(task)
            assert config["hoisted"] == found and schedule.check(task, config) is None


def test_default_without_a_recurrent_product():
    """One value of 16 bits cannot be copied alone: two units a thread."""
    task = task_of("indrnn", (1024, 16, 768, 768), "bfloat16", HOPPER)
    config = Elementwise().default(task)
    assert (config["hoisted"], config["units"]) == ("same", 2) and Elementwise().check(task, config) is None
    odd = Elementwise().default(task_of("indrnn", (1024, 16, 767, 767), "bfloat16", HOPPER))
    assert (odd["hoisted"], odd["units"]) == ("float32", 1)


def test_memory_counts_where_rows_are_many():
    """LSTM 256 B=512 took 4.0 µs by `persistent`, 3.3 by `persistent_wide`; 2.57 and 2.65 were expected."""
    def rank(name: str, batch: int) -> float:
        return all_schedules()[name].rank(task_of("lstm", (300, batch, 256, 256), "float16", KNOWN["sm_90a"])) / 1000
    assert unhidden(task_of("lstm", (300, 64, 256, 256), "float16", KNOWN["sm_90a"]), 1_000, 0.33) < 10
    block, wide, state = (rank(name, 512) for name in ("persistent_block", "persistent_wide", "persistent"))
    assert block < wide and 0.9 < block / 3.0 < 1.1 and 0.9 < wide / 3.3 < 1.1 and 0.9 < state / 4.0 < 1.1
    task = task_of("lstm", (300, 512, 256, 256), "float16", KNOWN["sm_90a"])
    chosen = serving_or_raise(task)[0]
    assert (chosen.name, chosen.default(task)["rows"]) == ("persistent_block", 18)
    wide_schedule = all_schedules()["persistent_wide"]
    plan = wide_schedule.plan(task, {**wide_schedule.default(task), "hoisted": "float32"})
    parts, features = wide_schedule.stages(task, plan), wide_schedule.features(task, plan)
    assert parts["memory"] > 0 and abs(sum(parts.values()) - features["estimate"]) < 1


HOPPER = KNOWN["sm_90a"]

# T * B rows on 128 a tile, I on stages of 64, H on the units of a tile
CASES = [
    ("lstm", (5, 3, 24, 40), "bfloat16", 6, "float32"),  # one tile, part of a stage
    ("lstm", (1, 1, 8, 1), "float16", 2, "float32"),  # the smallest of everything
    ("lstm", (13, 10, 200, 72), "float16", 3, "same"),  # a second group of rows with two in it, two columns of tiles
    ("gru", (6, 22, 136, 87), "float16", 2, "same"),  # 80 units, then 7; more tiles than multiprocessors
    ("gru", (3, 7, 64, 40), "float16", 4, "float32"),  # a whole stage
    ("rnn_tanh", (7, 19, 72, 264), "bfloat16", 2, "float32"),  # 17 octets a tile, odd number of them in all
    ("rnn_tanh", (40, 14, 328, 17), "bfloat16", 2, "same"),  # more stages than the ring has, odd H, five groups of rows
    ("gated", (4, 33, 80, 40), "bfloat16", 3, "same"),
    ("lstm", (13, 10, 204, 40), "float16", 3, "float32"),  # rows of x 8-byte aligned, the last chunk half outside
    ("gru", (6, 23, 138, 24), "bfloat16", 2, "float32"),  # 4-byte aligned, a quarter inside
    ("rnn_tanh", (3, 7, 2, 40), "float16", 2, "float32"),
    ("lstm", (5, 3, 24, 40), "tf32", 6, "float32"),  # stages of 32 values
    ("gru", (6, 23, 137, 24), "tf32", 2, "float32"),  # rows of x 4-byte aligned
    ("rnn_tanh", (7, 19, 166, 264), "tf32", 2, "float32"),  # 8-byte aligned, two columns of tiles
    pytest.param(*("lstm", (13, 10, 260, 72), "tf32", 3, "float32"),
                 marks=pytest.mark.exhaustive),  # more stages than the ring has
]


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setattr(rates, "SHORT", 0)


def task(cell, sizes, dtype, cores):
    made = task_of(cell, sizes, dtype, replace(HOPPER, cores=cores))
    assert shape_of(job_of(made)) is not None
    return made


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("cell", "sizes", "dtype", "cores", "hoisted"), CASES, ids=str)
def test_matches_float64(tmp_path, cell, sizes, dtype, cores, hoisted):
    made = task(cell, sizes, dtype, cores)
    check_numbers(tmp_path, LayoutTransform(), made, LayoutTransform().default(made) | {"hoisted": hoisted})


@pytest.mark.parametrize(("cell", "sizes", "dtype", "hoisted"), [
    ("lstm", (26, 5, 72, 40), "bfloat16", "float32"), ("gru", (5, 3, 24, 48), "float16", "float32"),
    ("rnn_tanh", (9, 15, 96, 24), "float16", "float32"), ("gated", (4, 3, 136, 40), "bfloat16", "float32"),
    ("rnn_tanh", (26, 5, 72, 29), "float16", "same"), ("gru", (26, 5, 72, 45), "bfloat16", "same")], ids=str)
def test_before_the_persistent_kernel(tmp_path, cell, sizes, dtype, hoisted):
    made = task(cell, sizes, dtype, 6)
    check_numbers(tmp_path, Persistent(), made, cut(made, units=8, warps=1 if sizes[3] < 40 else 2, hoisted=hoisted))


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("lag", [0, 1])
def test_copies_and_products_at_once(tmp_path, monkeypatch, lag):
    monkeypatch.setattr(kernel, "LAG", lag)
    made = task("lstm", (9, 16, 520, 40), "bfloat16", 2)
    check_numbers(tmp_path, LayoutTransform(), made, LayoutTransform().default(made), lazy=False)


def test_what_it_does_not_serve():
    def serves(cell="lstm", sizes=(40, 3, 64, 40), dtype="bfloat16", device=HOPPER):
        return shape_of(job_of(task_of(cell, sizes, dtype, device))) is not None
    assert serves() and serves(dtype="float16") and serves(sizes=(40, 3, 8, 1))
    assert not serves(dtype="float32") and serves(dtype="tf32") and serves(sizes=(40, 3, 61, 40), dtype="tf32")
    assert serves(sizes=(40, 3, 2, 40)) and not serves(sizes=(40, 3, 61, 40))  # rows of whole words
    assert not serves(device=KNOWN["sm_80"]) and not serves(device=replace(HOPPER, shared=64 << 10))
    assert not serves(cell="echo")  # no input product


def test_a_part_of_the_rows_ahead_keeps_one_packing():
    made = task("lstm", (40, 7, 24, 40), "bfloat16", 6)
    ahead = [next(b.packing for b in project(made, ahead=a).buffers if b.name == "input_weights") for a in (100, 50, 0)]
    assert ahead[0] != ahead[1] == ahead[2]


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
