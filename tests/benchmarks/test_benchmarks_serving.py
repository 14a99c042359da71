"""What benchmarks/serving.py says of two services under load."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import serving
from serving_load import Load


def test_a_row(monkeypatch: pytest.MonkeyPatch):
    """Ratios are of turns beside each other: the machine is slower in some, for both sides; the first warms up."""
    slower = {"ecornn": iter([9, 1, 2, 4]), "torch": iter([1, 1, 2, 4])}

    async def load(port: str, sessions: int, input: int, seconds: float) -> Load:
        times = {"ecornn": 0.010, "torch": 0.015}[port] * next(slower[port])
        return Load(seconds=[times] * 10, rate=sessions / times)

    monkeypatch.setattr(serving, "LOAD", load)
    monkeypatch.setattr(serving.SERVING, "check", lambda found, hidden, input: None)
    sizes = argparse.Namespace(turns=3, input=1, hidden=2, batch=3, seconds=1.0)
    row = serving.row_of(3, {"ecornn": "ecornn", "torch": "torch"}, sizes)
    assert row["ratio"] == 1.5 and row["sessions"] == 3
    assert row["ecornn"]["rate"] == 150 and row["torch"]["rate"] == 100
    assert row["torch"]["p50_ms"] == 30 and np.isclose(row["torch"]["p99_ms"], 60)
