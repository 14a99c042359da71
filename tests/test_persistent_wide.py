"""The wide persistent kernel, emulated on the CPU: every way in which a layer can be cut."""

from __future__ import annotations

from typing import Any

import pytest
from emulated import check_numbers, task_of
from msgspec.structs import replace

from ecornn.device import KNOWN
from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.schedules.persistent_wide.plan import plan_of
from ecornn.workload import Place

HOPPER = KNOWN["sm_90a"]
SMALL = replace(HOPPER, cores=6)

# (cell, (T, B, I, H), dtype, config)
CASES: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any]]] = [
    ("lstm", (5, 3, 24, 40), "bfloat16", {}),  # less than a chunk; a block of half its units
    ("rnn_relu", (1, 1, 1, 1), "float16", {"units": 8}),  # the smallest of everything
    ("lstm", (6, 8, 64, 64), "float16", {"registers": 0}),  # whole tiles; a warpgroup with padding only
    ("lstm", (4, 9, 7, 130), "bfloat16", {"units": 26}),  # odd rows of x, three chunks, blocks across chunks
    ("lstm", (4, 9, 7, 130), "float16", {"units": 26, "registers": 50}),  # two tiles, weights in both places
    ("gru", (5, 20, 16, 200), "float16", {"units": 40, "registers": 50}),  # padding rows of the second tile
    ("gru", (5, 20, 16, 136), "bfloat16", {"units": 24, "registers": 0}),  # 72 rows, all read from shared memory
    ("gru", (4, 11, 31, 90), "float16", {"units": 48, "groups": 2}),  # six rows and five
    ("rnn_tanh", (6, 33, 5, 300), "bfloat16", {"units": 56, "registers": 50}),  # one more than a tile in B
    ("lstm", (5, 9, 16, 64), "float16", {"cluster": 2}),  # two clusters
    ("gru", (5, 9, 16, 140), "bfloat16", {"units": 24, "cluster": 2, "registers": 0}),
    ("rnn_tanh", (6, 15, 5, 500), "float16", {"units": 128, "cluster": 4, "registers": 50}),
    ("echo", (4, 3, 0, 150), "bfloat16", {"units": 48, "registers": 0}),  # no hoisted product
]


def config_of(**change: Any) -> dict[str, Any]:
    return {"groups": 1, "units": 16, "cluster": 1, "registers": 100, "math": "fast", **change}


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_matches_float64(tmp_path, cell, sizes, dtype, change):
    check_numbers(tmp_path, PersistentWide(), task_of(cell, sizes, dtype, SMALL), config_of(**change))


PLACES: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any], Place]] = [
    ("lstm", (5, 3, 24, 40), "bfloat16", {}, Place(reverse=True)),
    ("gru", (5, 3, 7, 40), "float16", {"units": 8}, Place(directions=2)),
    ("lstm", (7, 5, 24, 40), "float16", {}, Place(lengths=True)),
    ("lstm", (7, 5, 24, 40), "bfloat16", {}, Place(resets=True)),
    ("gru", (6, 10, 9, 80), "bfloat16", {"units": 16}, Place(True, 2, True, True)),
    ("rnn_tanh", (6, 23, 31, 140), "float16", {"groups": 2, "units": 64}, Place(False, 2, True, True)),
]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "place"), PLACES, ids=lambda v: str(v).replace(" ", ""))
def test_directions_lengths_and_resets(tmp_path, cell, sizes, dtype, change, place):
    check_numbers(tmp_path, PersistentWide(), task_of(cell, sizes, dtype, SMALL, place), config_of(**change))


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(("registers", "cluster"), [(0, 1), (50, 1), (50, 2), (0, 3)])
def test_more_chunks_than_stages_over_many_steps(tmp_path, registers, cluster, lazy):
    """Stages are given back and used again within a step, an odd number of times in one step for some."""
    task, config = task_of("rnn_tanh", (9, 9, 8, 600), "float16", SMALL), config_of(
        units=104, registers=registers, cluster=cluster)
    plan = plan_of(task, config)
    room = plan.shared - 2 * 2 * (plan.stage_bytes + 16)
    task = task_of("rnn_tanh", (9, 9, 8, 600), "float16", replace(SMALL, shared=room))
    plan = plan_of(task, config)
    assert (plan.chunks, plan.stages) == (5, 3)
    check_numbers(tmp_path, PersistentWide(), task, config, lazy=lazy)


def test_fewer_rows_than_compiled(tmp_path):
    task = task_of("lstm", (5, 9, 16, 34), "float16", SMALL, Place(True, 2, True, True))
    check_numbers(tmp_path, PersistentWide(), task, config_of(groups=2), batch=2)


def test_the_default_of_small_layers(tmp_path):
    task = task_of("gru", (3, 33, 31, 129), "bfloat16", SMALL)
    check_numbers(tmp_path, PersistentWide(), task, PersistentWide().default(task))
