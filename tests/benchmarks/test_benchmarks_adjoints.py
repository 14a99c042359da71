"""Recurrences of adjoints as the benchmark holds them against float64, in the emulation in place of a GPU."""

from __future__ import annotations

from pathlib import Path

import compare_adjoints
import numpy as np
import pytest
from compare_adjoints import Case, Sample, fault_of
from cuda_on_cpu import Emulated

from ecornn.runtime.library import Library
from ecornn.schedules import all_schedules


@pytest.mark.parametrize(("cell", "schedule"), [("lstm", "persistent_wide"), ("gru", "persistent")])
def test_what_is_right_and_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, schedule: str):
    monkeypatch.setattr(compare_adjoints, "DEVICE", "cpu")
    monkeypatch.setattr(compare_adjoints, "CHECKED", 5)
    monkeypatch.setattr(compare_adjoints, "queue", lambda: 0)
    monkeypatch.setattr("ecornn.runtime.library.open_library", lambda path: Library(print, print))
    case = Case(cell, 3, 40, "float16")
    found = next(c for c in compare_adjoints.cuts(case, 9) if c.schedule == schedule)
    sample, ways = Sample(case), 1.0

    def run(self: compare_adjoints.Side) -> None:
        memory = {name: tensor.numpy() for name, tensor in self.memory.items()}
        memory["hoisted"] *= ways
        emulated.carry_out(memory, self.steps, case.B)
        memory["hoisted"] /= ways
        assert np.isfinite(memory["outputs"].astype(np.float32)).all()

    monkeypatch.setattr(compare_adjoints.Side, "__call__", run)
    of = all_schedules()[schedule]
    emulated = Emulated(of.program(sample.task, of.plan(sample.task, dict(found.config))), tmp_path)
    fault, error = fault_of(found, "", sample)
    assert not fault and 0 < error < 1e-3
    ways = 1.01
    assert "allowed" in fault_of(found, "", sample)[0]
