"""Benchmarks of packed sequences and of columns: what of them needs no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def test_the_model_of_the_issue(monkeypatch: pytest.MonkeyPatch):
    """pytorch#149194 at a small size on this CPU, and its row; times are made up, since events are a GPU's."""
    import compare_packed

    calls: list[str] = []

    def timed(sides: dict[str, Any], _: Any, repeats: int, steps: int, clock: Any) -> dict[str, float]:
        for name, call in sides.items():
            y = call()
            if name == "cudnn_padded":
                continue
            assert y.shape == (9, 4, 5 if name == "packing" else 6) and not y[-1, :3].any() and y[-1, 3].any()
            calls.append(name)
        assert repeats == 20 and steps == 18
        made = {"ecornn": 2.0, "cudnn": 8.0, "cudnn_padded": 1.0, "packing": 0.5}
        return {f"{name}_{end}": value for name, value in made.items() for end in ("us", "p20", "p80")}

    monkeypatch.setattr(compare_packed, "timed", timed)
    row = compare_packed.compare_issue(("lstm", 9, 4, 5, 6, 2, False), 20, "cpu")
    assert calls == ["ecornn", "cudnn", "packing"]
    assert (row["case"], row["T"], row["layers"], row["ratio"]) == ("pytorch#149194", 9, 2, 4.0)
    assert row["dtype"] == "float32"
    assert row["valid"] == 5 / 9 and 0 < row["error"] < 1e-6 and 0 < row["cudnn_error"] < 1e-6
    told = compare_packed.told(row)
    assert "case=pytorch#149194" in told and "valid=0.5556" in told and "ecornn_us=2 [2, 2]" in told


def test_lengths_of_the_issue():
    import compare_packed

    assert compare_packed.triangular(9, 4).tolist() == [1, 4, 6, 9]
    lengths = compare_packed.triangular(4000, 32)
    assert (int(lengths[0]), int(lengths[-1])) == (1, 4000) and lengths.dtype == torch.int64
    assert not set(compare_packed.ISSUE) & set(compare_packed.PACKED)


def test_cases_of_columns():
    import compare_packed

    draws = []
    for seed in range(3):
        lengths = np.random.default_rng(seed).integers(1, 301, 32)
        found = compare_packed.laid(lengths, 16, 8)
        least = max(int(lengths.max()), -(-int(lengths.sum()) // 16))
        steps = {name: len(columns.table) / least for name, columns in found.items()}
        assert 1 <= steps["columns"] < 1.01 < steps["whole"]
        draws.append({f"{side}_us": seed + 1.0 for side in compare_packed.SIDES} | {
            "share": 0.9 + seed / 100, "whole_share": 0.8, "steps": steps, "together": 8})
    shape, width = compare_packed.CASES[0]
    row = compare_packed.of_draws(shape, width, draws)
    assert row["share"] == pytest.approx([0.91, 0.904, 0.916]) and row["columns_us"][0] == 2.0
    assert (row["cell"], row["H"], row["columns"]) == ("lstm", 512, 16)
    assert "columns=16" in compare_packed.told(row) and "share=0.91 [0.904, 0.916]" in compare_packed.told(row)


def test_a_row_of_training_in_columns():
    """The median of its draws."""
    import compare_packed as benchmark

    sides = [f"{side}{part}_us" for side in benchmark.TRAINED for part in ("", "_step")]
    draws = [{name: seed + 1.0 for name in (*sides, "cudnn_step_us", "share", "step_share")} | {"error": 1e-4}
             for seed in range(3)]
    row = benchmark.of_draws(*benchmark.CASES[0], draws)
    assert row["columns_us"] == [2.0, 1.4, 2.6] and row["columns"] == benchmark.CASES[0][1]
    assert row["share"] == [2.0, 1.4, 2.6] and row["draws"] == draws
