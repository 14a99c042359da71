"""The benchmarks of many sides as they run, with a CPU in the GPU's place."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import cases
import compare_ablation
import compare_variants
import fake_measuring
import floor as floors
import numpy as np
import pytest
import why_above_floor
from grid import Row
from grid_log import GridLog
from made import Made, knobs
from stage_cells import Bare, bare_forward

import ecornn
from ecornn.compiler import plan
from ecornn.device import KNOWN, resolve
from ecornn.schedules import all_schedules

H100 = KNOWN["sm_90a"]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles for the CPU, in real processes; measures there, in another."""
    pytest.importorskip("torch")
    monkeypatch.setattr(cases, "resolve", lambda target: resolve("cpu"))
    monkeypatch.setattr(cases, "serve_gpu", fake_measuring.serve_cpu)


def run(monkeypatch: pytest.MonkeyPatch, module, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", "--jobs", "2", "--repeats", "7", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    return ended.value.code


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line)["row"] for line in path.read_text().splitlines() if "row" in json.loads(line)]


@pytest.mark.slow
def test_the_ablation(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """All cells; what no schedule serves is said; a second run measures nothing."""
    made = {"fused_step": ("cpu_sequence", ()), "layout": ("cpu_sequence", ()), "persistent": ("persistent", ())}
    monkeypatch.setattr(compare_ablation, "SCHEDULES", made)
    monkeypatch.setattr(compare_ablation, "CASES", [compare_ablation.Case("EcoRNN", cell, 5, 3, 8, "float32")
                                                    for cell in ("lstm", "gru", "rnn_tanh")])
    path = tmp_path / "ablation.jsonl"
    assert run(monkeypatch, compare_ablation, "--output", path) == 0
    rows = rows_of(path)
    assert {r["cell"] for r in rows} == {"lstm", "gru", "rnn_tanh"}
    for row in rows:
        assert row["sides"] == ["per_gate", "per_cell", "fused_step", "layout", "cudnn"]
        assert max(row["errors"].values()) < 1e-6
        assert "is for cuda, not llvm" in row["missing"]["persistent"]
        assert list(compare_ablation.chain(row)) == row["sides"]
        found = compare_ablation.gains(row)
        assert found["per_gate"][0] is None and found["cudnn"] == (None, 1.0)
        assert found["layout"][0] == row["fused_step_us"] / row["layout_us"]
    text = path.with_suffix(".md").read_text()
    assert "| LSTM 5x3x8x8 | float32 |" in text and "not served" in text and "float32 | against cuDNN" in text
    assert run(monkeypatch, compare_ablation, "--output", path) == 0
    path.with_suffix(".md").unlink()
    monkeypatch.setattr(sys, "argv", ["compare_ablation.py", "--output", str(path), "--report"])
    compare_ablation.main()
    assert path.with_suffix(".md").read_text() == text
    assert f"3 cases are in {path} already" in capsys.readouterr().out and len(rows_of(path)) == 3


@pytest.mark.slow
def test_a_wrong_side_is_no_result(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of another cell, where the ablation expects an LSTM's."""
    monkeypatch.setattr(compare_ablation.Case, "sides", lambda self: {
        "fused_step": Made("lstm(clip=0.01)", self.T, self.B, self.I, self.H, self.dtype)})
    monkeypatch.setattr(compare_ablation, "CASES", [compare_ablation.Case("EcoRNN", "lstm", 5, 3, 8, "float32")])
    path = tmp_path / "ablation.jsonl"
    assert run(monkeypatch, compare_ablation, "--output", path) == 1
    (row,) = rows_of(path)
    assert row["wrong"] == ["fused_step"] and row["sides"] == ["per_gate", "per_cell", "cudnn"]
    assert "fused_step: wrong result: error" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_wrong_variant_is_no_result(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare_variants, "CASES", [compare_variants.Case("lstm", "lstm(clip=3)", 8, "float32")])
    monkeypatch.setattr(compare_variants.Case, "sides", lambda self: {
        "plain": self._made("lstm"), "variant": self._made("lstm(clip=0.01)"), "alike": self._made("lstm(clip=3)")})
    path = tmp_path / "variants.jsonl"
    assert run(monkeypatch, compare_variants, "--output", path) == 1
    assert rows_of(path)[0]["failed"].startswith("variant: wrong result: error")


def test_nothing_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["compare_ablation.py", "--output", str(tmp_path / "none.jsonl"), "--report"])
    with pytest.raises(SystemExit, match=r"none\.jsonl has no results"):
        compare_ablation.main()
    monkeypatch.setattr(sys, "argv", ["compare_ablation.py", "--list", "--only", "gru7"])
    with pytest.raises(SystemExit, match="no case has 'gru7'"):
        compare_ablation.main()


def test_the_faster_persistent_schedule_stands_for_both():
    row = {"sides": ["layout", "persistent", "persistent_wide", "cudnn"], "layout_us": 6.0, "persistent_us": 3.0,
           "persistent_wide_us": 2.0, "cudnn_us": 4.0}
    assert compare_ablation.chain(row)["persistent"] == "persistent_wide"
    assert compare_ablation.gains(row) == {"layout": (None, 4 / 6), "persistent": (3.0, 2.0), "cudnn": (None, 1.0)}


@pytest.mark.slow
def test_variants(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Heads are weights; a name that is no option is said to be none, and costs the others nothing."""
    monkeypatch.setattr(compare_variants, "CASES", [compare_variants.Case(p, v, 16, "float32") for p, v in (
        ("lstm", "lstm(no_option)"), ("lstm", "lstm(peepholes)"), ("lstm", "heads"), ("lstm", "slstm"),
        ("rnn_relu", "indrnn"))])
    path = tmp_path / "variants.jsonl"
    assert run(monkeypatch, compare_variants, "--output", path) == 0
    rows = {r["variant"]: r for r in rows_of(path)}
    assert "expected an option of lstm" in rows.pop("lstm(no_option)")["failed"]
    assert len(rows) == 4
    for row in rows.values():
        assert row["variant_ratio"] == row["variant_us"] / row["plain_us"] and row["errors"]["variant"] < 1e-5
    assert rows["heads"]["errors"]["variant"] != rows["heads"]["errors"]["plain"], "other weights"
    text = path.with_suffix(".md").read_text()
    assert "| lstm(peepholes) | 16 | lstm |" in text and "- lstm(no_option) H=16: " in text


def test_heads_are_blocks():
    weights = compare_variants.random_weights(ecornn.cells.get("lstm"), 8, 4, np.random.default_rng(0))["weight_hh"]
    assert weights.shape == (4, 8, 8)
    assert np.array_equal(weights != 0, np.broadcast_to(np.kron(np.eye(4), np.ones((2, 2))) != 0, (4, 8, 8)))


def test_bounds_of_variants():
    row = {"variant": "lstm(projection)", "H": 1024, "dtype": "float16"}
    assert compare_variants.allowed(row, None) is None
    plain = floors.floor(floors.H100, "lstm", 16, 1024, 1024, "float16").total
    more = floors.floor(floors.H100, "rnn_tanh", 16, 1024, 1024, "float16")
    assert compare_variants.allowed(row, floors.H100) == pytest.approx(
        1.25 * (plain + more.exchange + more.recurrent) / plain)
    assert compare_variants.allowed(row | {"variant": "lstm(layer_norm)"}, None) == 1.6
    assert compare_variants.allowed(row | {"variant": "gru_reset_before"}, None) == 1.25


def grid_of(path: Path, *entries: tuple[str, str, str, dict]) -> None:
    """A file of rows (cell, dtype, schedule, config) of 5x3x8x8, far above their floors."""
    lines = [{"environment": {"gpu": fake_measuring.GPU}}]
    for cell, dtype, schedule, config in entries:
        lines.append({"row": {"name": f"{cell} 5x3x8x8 {dtype}", "cell": cell, "T": 5, "B": 3, "I": 8, "H": 8,
                              "dtype": dtype, "schedule": schedule, "config": config, "ecornn_us": 3.0,
                              "over_floor": 4.0 - len(lines) / 10}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_reasons(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stages of real kernels add up; a row that needs none of this, or is like another, is not timed."""
    grid, path = tmp_path / "grid.jsonl", tmp_path / "reasons.jsonl"
    grid_of(grid, *(("lstm", d, "cpu_sequence", {}) for d in ("float32", "tf32")),
            ("gru", "float32", "cpu_sequence", {}), ("rnn_tanh", "float32", "cpu_sequence", {}))
    assert run(monkeypatch, why_above_floor, grid, "--output", path) == 0
    rows = rows_of(path)
    assert {r["cell"]: r["like"] for r in rows} == {"lstm": ["lstm 5x3x8x8 tf32"], "gru": [], "rnn_tanh": []}
    for row in rows:
        assert row["sides"] == ["whole", "bare", "recurrence", "narrow"] and max(row["errors"].values()) < 1e-5
        assert sum(row["stages"].values()) == pytest.approx(row["whole_us"])
    text = path.with_suffix(".md").read_text()
    assert "| LSTM 5x3x8x8 | float32 |" in text and "lstm 5x3x8x8 tf32 |" in text


def test_stages_by_hand():
    us = {"whole_us": 2.0, "bare_us": 1.8, "recurrence_us": 1.6, "narrow_us": 1.3}
    row = us | {"sides": ["whole", "bare", "recurrence", "narrow"]}
    assert why_above_floor.stages_of(row, 4, 1) == pytest.approx(
        {"gate math": 0.2, "projection": 0.2, "products": 0.4, "exchange": 1.2})
    assert why_above_floor.stages_of(row | {"narrow_us": 2.0}, 1, 2) == pytest.approx(
        {"gate math": 0.2, "projection": 0.2, "products": 0.4, "exchange": 1.2})
    assert why_above_floor.stages_of(row | {"sides": ["whole", "bare", "recurrence"]}, 1, 2) == pytest.approx(
        {"gate math": 0.2, "projection": 0.2, "recurrence": 1.6})
    assert why_above_floor.stages_of(row | {"sides": ["whole"]}, 1, 2) == {}


@pytest.mark.parametrize(("stages", "found", "words"), [
    ({"gate math": 0.1, "projection": 0.0, "products": 0.1, "exchange": 0.8}, ["exchange"],
     "0.79 is the way through L2 between the 16 blocks of a group; the floor has 0.46 for 8 blocks of a cluster"),
    ({"gate math": 0.4, "projection": 0.0, "products": 0.4, "exchange": 0.46}, ["gate math", "products"], "gate math"),
    ({"gate math": 0.4, "recurrence": 0.9}, ["gate math", "recurrence"], "not told apart"),
    ({"gate math": 0.0, "projection": 0.3, "products": 0.0, "exchange": 0.1}, ["projection"], "0.30 where")])
def test_reasons_by_hand(stages: dict, found: list[str], words: str):
    row = {"cell": "lstm", "T": 256, "B": 1, "I": 256, "H": 256, "dtype": "float16", "stages": stages,
           "configs": {"whole": {"schedule": "persistent", "groups": 1, "units": 16, "registers": 100}}}
    assert why_above_floor.reasons(row, floors.H100) == found
    assert words in why_above_floor.in_words(row, floors.H100)


def test_the_grid_that_ships_has_reasons_to_find():
    """Every row above 1.5 times its floor is a case or like one."""
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "h100_grid.jsonl"
    found = why_above_floor.cases_of(path)
    names = [name for case in found for name in (str(case), *case.like)]
    assert sorted(names) == sorted(r["name"] for r in why_above_floor.Summary(GridLog(path).rows).high())
    assert len(found) < len(names)


@pytest.mark.parametrize(("cell", "dtype", "schedule", "others"), [
    ("lstm", "float16", "persistent", 1), ("gru", "bfloat16", "persistent_wide", 1),
    ("rnn_tanh", "tf32", "persistent", 2), ("gru", "tf32-both", "layout_transform", 1)])
def test_stages_are_left_out_in_the_same_configuration(cell: str, dtype: str, schedule: str, others: int):
    row = Row(cell, 20, 4, 256, 256, dtype)
    config = dict(all_schedules()[schedule].default(row.plan(H100).task))
    case = why_above_floor.Case(cell, 20, 4, 256, 256, dtype, schedule, knobs(config), ())
    assert why_above_floor.other_gates(case) == others
    for name, made in case.sides().items():
        found = made.plan(H100)
        assert found.found.schedule.name == schedule
        alone = {"ahead": 100} if name in ("recurrence", "narrow") else {}
        changed = alone | ({"interleave": 0} if name == "narrow" else {})
        assert dict(found.found.config) == config | {k: v for k, v in changed.items() if k in config}, name
        assert found.workload.arithmetic == row.arithmetic
        graph = found.task.graph
        gates = others if name == "narrow" else why_above_floor.GATES[cell]
        assert [len(p.rows) for p in graph.phases] == [gates]
        assert len(graph.hoisted_rows) == (0 if name in ("recurrence", "narrow") else gates)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_bare_cells(given: bool, second: bool):
    """The cell's graph against the same formula in PyTorch, over enough steps for the state to settle."""
    torch = pytest.importorskip("torch")
    cell = Bare(3, second, given)
    weights = {k: v.astype(np.float32) for k, v in cell.random(6, 10, np.random.default_rng(0)).items()}
    x = np.random.default_rng(1).standard_normal((30, 2, 6)).astype(np.float32)
    y, _ = ecornn.compile(cell, hidden=10, input=6, batch=2, seq=30, target="cpu").bind(weights)(x)
    expected = bare_forward(cell, torch.from_numpy(x), {k: torch.from_numpy(v) for k, v in weights.items()}).numpy()
    assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected)
    assert 0.05 < np.abs(expected[-1]).mean() < 10


def test_made_modules():
    """Knobs that are changed, and those of another cell."""
    base = Made("lstm", 20, 4, 64, 64, "float16", "layout_transform")
    plain = base.plan(H100).found
    turned = replace(base, changed=(("layout", "hidden"),)).plan(H100).found
    assert dict(turned.config) == dict(plain.config) | {"layout": "hidden"} != dict(plain.config)
    alike = Made("lstm(peepholes)", 20, 4, 64, 64, "float16", like="lstm").plan(H100)
    assert alike.workload.cell == "lstm(peepholes)"
    assert dict(alike.found.config) == dict(plan("lstm", hidden=64, batch=4, seq=20, dtype="float16",
                                                 target=H100).found.config)
    assert len({m.file for m in (base, Made("gru", 20, 4, 64, 64, "float16"), Made(Bare(2), 20, 4, 64, 64, "float16"),
                                 Made(Bare(3), 20, 4, 64, 64, "float16"))}) == 4
    assert knobs({"b": 1, "a": 2}) == (("a", 2), ("b", 1))
