"""The benchmarks of published cells and of heads as they run, with a CPU in the GPU's place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import compare_heads
import compare_published
import numpy as np
import pytest
import torch
from published_loop import CELLS, drawn, loop
from test_benchmarks_sides import on_cpu, rows_of, run  # noqa: F401
from test_published_cells import formula

SIZES = {"T": 4, "B": 2, "H": 8, "dtype": "float32"}


@pytest.mark.parametrize("name", CELLS)
def test_the_loop_is_the_formula(name: str):
    """PyTorch's operations against NumPy's."""
    cell, x = CELLS[name], torch.randn(3, 2, 8, dtype=torch.float64)
    states, weights = drawn(cell, 2, 8, 8, torch.float64, "cpu")
    wanted, _ = formula(cell, x.numpy(), {n: w.numpy() for n, w in weights.items()}, [s.numpy() for s in states])
    # both are float64, in other orders of summation
    np.testing.assert_allclose(loop(cell, x, states, weights).numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_published(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """A cell whose output is no state, one without products of a state; and the module of another cell is no result."""
    monkeypatch.setattr(compare_published, "CASES", [compare_published.Case(name, **SIZES)
                                                     for name in ("rwkv4", "sru", "mi_rnn")])
    sides = compare_published.Case.sides
    monkeypatch.setattr(compare_published.Case, "sides", lambda self: sides(
        replace(self, cell="fast_grnn") if self.cell == "mi_rnn" else self))
    path = tmp_path / "published.jsonl"
    assert run(monkeypatch, compare_published, "--output", path) == 1
    rows = {r["cell"]: r for r in rows_of(path)}
    assert rows.pop("mi_rnn")["failed"].startswith("ecornn: wrong result: error") and set(rows) == {"rwkv4", "sru"}
    for row in rows.values():
        assert row["sides"] == ["ecornn", "torch"] and row["errors"]["ecornn"] < 1e-5
        assert row["ratio"] == row["torch_us"] / row["ecornn_us"] and row["schedule"] == "cpu_sequence"
    text = path.with_suffix(".md").read_text()
    assert "| `sru` | Simple recurrent unit (Lei et al. 2018, arXiv 1709.02755) | cpu_sequence |" in text
    assert "- mi_rnn 4x2x8x8 float32: ecornn: wrong result" in text


@pytest.mark.exhaustive
@pytest.mark.slow
def test_heads(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """All sides compute the same, of one set of weights."""
    monkeypatch.setattr(compare_heads, "CASES", [compare_heads.Case(
        cell, 8, 4, B=2, T=4, heads=2, dtype="float32") for cell in compare_heads.KINDS])
    path = tmp_path / "heads.jsonl"
    assert run(monkeypatch, compare_heads, "--output", path) == 0
    rows = {r["cell"]: r for r in rows_of(path)}
    assert rows["sLSTM"]["sides"] == ["heads", "dense", "built_in"] and rows["block GRU"]["sides"] == ["heads", "dense"]
    for row in rows.values():
        assert max(row["errors"].values()) < 1e-5
        assert row["ratio"] == min(row[f"{s}_us"] for s in row["sides"][1:]) / row["heads_us"]
    assert "| sLSTM 4x2x4x8 |" in path.with_suffix(".md").read_text()


def test_sizes():
    """What the issue of these tables asks for, and each module once."""
    assert len(compare_published.CASES) >= 45
    assert {(c.cell, c.H) for c in compare_heads.CASES} == {
        ("sLSTM", 512), ("sLSTM", 1024), ("sLSTM", 2048), ("block GRU", 4096)}
    for cases in (compare_published.CASES, compare_heads.CASES):
        files = [made.file for case in cases for made in case.sides().values()]
        assert len(set(files)) == len(files)
