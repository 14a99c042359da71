"""The recurrence of adjoints in the wide persistent kernel, emulated on the CPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest
from emulated import task_of
from test_backward_recurrence_emulated import check_recurrence
from test_persistent_wide import SMALL, config_of

from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.workload import ALONE, Traversal

Sizes = tuple[int, int, int, int]


def cut(**change: Any) -> dict[str, Any]:
    return config_of(math="exact", **{"units": 64, **change})


CASES: list[tuple[str, Sizes, str, dict[str, Any], Traversal]] = [
    ("lstm", (5, 3, 24, 40), "bfloat16", {}, ALONE),
    ("lstm", (7, 5, 24, 41), "float16", {"units": 24, "hoisted": "same"}, Traversal(False, 2, True, True)),
    ("gru", (6, 9, 24, 130), "bfloat16", {"units": 48, "groups": 2}, Traversal(True, 1, True, True)),
    ("rnn_tanh", (6, 9, 5, 70), "float16", {"units": 16}, Traversal(resets=True)),
    ("rnn_tanh", (1, 1, 1, 1), "bfloat16", {"units": 8}, ALONE),
]



# 2 or 3 warpgroups with rows of their own, and blocks that share K
SHARED: list[tuple[str, Sizes, str, dict[str, Any], Traversal]] = [
    ("lstm", (6, 11, 7, 90), "bfloat16", {"units": 96, "row_teams": 2, "parts": 4}, ALONE),  # an operand each
    ("lstm", (5, 5, 7, 70), "float16", {"units": 72, "row_teams": 2, "parts": 3, "registers": 50},
     Traversal(True, 2, True, True)),  # three chunks each of eight, the last of which only pads K
    ("gru", (7, 9, 5, 128), "float16", {"units": 128, "row_teams": 2, "parts": 6, "hoisted": "same"},
     Traversal(False, 1, True, True)),  # blocks of 22 units, and the last one of 18
    ("gru", (6, 21, 8, 136), "bfloat16", {"units": 136, "row_teams": 3, "groups": 2, "parts": 3, "registers": 0}, ALONE),
    ("rnn_tanh", (6, 5, 3, 250), "bfloat16", {"units": 128, "row_teams": 2, "parts": 2}, Traversal(resets=True)),
    ("pair", (6, 5, 24, 70), "bfloat16", {"units": 36, "row_teams": 2, "parts": 3}, Traversal(True, 2, True, True)),
]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal"), CASES + SHARED,
                         ids=lambda v: str(v).replace(" ", ""))
def test_matches_float64(tmp_path, cell, sizes, dtype, change, traversal):
    check_recurrence(tmp_path, PersistentWide(), task_of(cell, sizes, dtype, SMALL, traversal), cut(**change))
