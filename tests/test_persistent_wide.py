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
    ("lstm", (5, 3, 24, 40), "bfloat16", {"units": 16}),  # less than a chunk; a block of half its units
]


def config_of(**change: Any) -> dict[str, Any]:
    return {"groups": 1, "units": 16, "registers": 100, "math": "fast", **change}


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_matches_float64(tmp_path, cell, sizes, dtype, change):
    check_numbers(tmp_path, PersistentWide(), task_of(cell, sizes, dtype, SMALL), config_of(**change))
