"""The block kernel, emulated on the CPU: every way in which a layer can be cut."""

from __future__ import annotations

from typing import Any

import pytest
from emulated import check_numbers, task_of
from msgspec.structs import replace

from ecornn.schedules.persistent_block import PersistentBlock
from ecornn.targets import KNOWN
from ecornn.workload import Traversal

SMALL = replace(KNOWN["sm_90a"], cores=6)
CUT = {"products": "fma", "rows": 1, "units": 1, "lanes": 2, "registers": 100, "resident": 1, "hoisted": "float32",
       "math": "exact"}
MMA = {"products": "mma", "lanes": 1}

CASES: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any]]] = [
    ("lstm", (5, 1, 24, 64), "float32", {}),
    ("lstm", (7, 3, 5, 17), "float32", {"lanes": 4, "rows": 3, "math": "relative"}),
    ("gru", (4, 7, 3, 40), "float16", MMA | {"rows": 7}),
]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_matches_float64(tmp_path, cell, sizes, dtype, change):
    check_numbers(tmp_path, PersistentBlock(), task_of(cell, sizes, dtype, SMALL), CUT | change)
