"""compare_programs.py: programs that run, and what is made of their times."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import compare_programs
import pytest


@pytest.mark.parametrize("name", compare_programs.PROGRAMS)
def test_every_program_runs(name: str):
    calls = [*compare_programs.PROGRAMS[name]("cpu")][1:]
    assert len(calls) >= 30
    assert all(math.isfinite(float(call().detach())) for call in calls[:2])


def test_rows_are_of_the_first_calls_the_longest_one_and_all_together(monkeypatch: pytest.MonkeyPatch):
    seconds = {"torch": [1.0] * 8, "cold": [3.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5], "warm": [0.5] * 8}

    def child(function: Any, name: str, device: str, side: str, cache: str) -> Any:
        assert (function, name, device) == (compare_programs.run, "policy", "cpu") and Path(cache).is_dir()
        part = {"seconds": seconds[side], "results": [1.0, 2.0, *[3.0] * 6]}
        then = {"seconds": [0.25 if side == "warm" else 1.0] * 8, "results": []}
        said = {"first": part, "then": then, "modules": 2, "errors": []}
        return said | {"first": part | {"results": [1.0, 2.2, *[3.0] * 6]}} if side == "warm" else said

    monkeypatch.setattr(compare_programs, "alone", child)
    row = compare_programs.measure("policy", "cpu", 3)
    assert row["cold"] == {"worst": 7 / 5, "all": 8.5 / 8, "longer_ms": 2000}
    assert row["warm"] == {"worst": 0.5, "all": 0.5, "longer_ms": -500}
    assert row["faster"] == 4 and row["modules"] == 2 and row["difference"] == pytest.approx(0.1)
    assert "| policy | 8 | 1.40x | 0.50x | +2000 ms | -500 ms | 4.00x as fast | 2 |" in compare_programs.table([row])
