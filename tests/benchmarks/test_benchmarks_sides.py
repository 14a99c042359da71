"""The benchmarks of many sides as they run, with a CPU in the GPU's place."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import cases
import compare_ablation
import compare_classes
import compare_projection
import compare_variants
import fake_measuring
import numpy as np
import pytest
import why_above_floor
from compiled_case import ALIKE, Made, knobs
from cuda_on_cpu import Emulated, inputs
from grid import Row
from grid_log import GridLog
from limits import limit, relative
from msgspec import structs
from rooms import ROOT
from stage_cells import Bare, bare_forward
from unmultiplied import Unmultiplied

import ecornn
from ecornn import floor as floors
from ecornn.build.cuda import lower
from ecornn.compiler import plan
from ecornn.schedules import all_schedules
from ecornn.targets import KNOWN, resolve

H100 = KNOWN["sm_90a"]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles for the CPU, in real processes; measures there, in another."""
    monkeypatch.setattr(cases, "resolve", lambda target: resolve("cpu"))
    monkeypatch.setattr(cases, "serve_gpu", fake_measuring.serve_cpu)
    fake_measuring.patient(monkeypatch, hangs="rnn_tanh")


def run(monkeypatch: pytest.MonkeyPatch, module, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", "--jobs", "2", "--repeats", "7", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    return ended.value.code


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line)["row"] for line in path.read_text().splitlines() if "row" in json.loads(line)]


@pytest.mark.slow
def test_the_ablation(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Two cells; what no schedule serves is said; a second run measures nothing."""
    made = {"fused_step": ("cpu_sequence", ()), "layout": ("cpu_sequence", ()), "persistent": ("persistent", ())}
    monkeypatch.setattr(compare_ablation, "SCHEDULES", made)
    monkeypatch.setattr(compare_ablation, "CASES", [compare_ablation.Case("EcoRNN", cell, 5, 3, 8, "float32")
                                                    for cell in ("lstm", "gru")])
    path = tmp_path / "ablation.jsonl"
    assert run(monkeypatch, compare_ablation, "--output", path) == 0
    rows = rows_of(path)
    assert {r["cell"] for r in rows} == {"lstm", "gru"}
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
    assert f"2 cases are in {path} already" in capsys.readouterr().out and len(rows_of(path)) == 2


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


@pytest.mark.exhaustive
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
def test_classes(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is chosen without records is what is chosen with them, where there are none: made and timed once."""
    row = compare_classes.Case("one_step", "gru", 2, 3, 4, 8, "float32")
    monkeypatch.setattr(compare_classes, "CASES", [row])
    monkeypatch.setattr(compare_classes, "MOST", {row: 1e-6})
    path = tmp_path / "classes.jsonl"
    assert run(monkeypatch, compare_classes, "--output", path) == 0
    (found,) = rows_of(path)
    assert found["sides"] == ["chosen", "cudnn"] and found["missing"]["default"].endswith(ALIKE)
    assert found["default_ratio"] == found["chosen_ratio"] == found["cudnn_us"] / found["chosen_us"]
    assert found["errors"]["chosen"] < 1e-6
    assert "1e-06 **missed** | cpu_sequence" in path.with_suffix(".md").read_text()
    assert any(line.startswith("| one step | 1 of 15 |") for line in compare_classes.lines_of(path, GridLog(path)))


@pytest.mark.slow
def test_variants(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Heads are weights; a name that is no option is said to be none, and costs the others nothing."""
    monkeypatch.setattr(compare_variants, "CASES", [compare_variants.Case(p, v, 16, "float32") for p, v in (
        ("lstm", "lstm(no_option)"), ("lstm", "lstm(peepholes)"), ("lstm", "heads"))])
    path = tmp_path / "variants.jsonl"
    assert run(monkeypatch, compare_variants, "--output", path) == 0
    rows = {r["variant"]: r for r in rows_of(path)}
    assert "expected an option of lstm" in rows.pop("lstm(no_option)")["failed"]
    assert len(rows) == 2
    for row in rows.values():
        assert row["variant_ratio"] == row["variant_us"] / row["plain_us"] and row["errors"]["variant"] < 1e-5
    assert rows["heads"]["errors"]["variant"] != rows["heads"]["errors"]["plain"], "other weights"
    text = path.with_suffix(".md").read_text()
    assert "| lstm(peepholes) | 16 | lstm |" in text and "- lstm(no_option) H=16: " in text


def test_the_library_has_the_weights_of_all_sides(monkeypatch: pytest.MonkeyPatch):
    import many_sides
    import side_by_side

    monkeypatch.setattr(side_by_side, "DEVICE", "cpu")
    sides, library, weights = many_sides.beside_library("rnn_tanh", (5, 2, 3, 4), "float64")
    assert sides.x.shape == (5, 2, 3) and not sides.row["sides"]
    y = side_by_side.float64_forward("rnn_tanh", sides.x, weights)
    assert y.shape == (5, 2, 4) and relative(library(sides.x)[0].detach().numpy(), y.numpy()) < 1e-12


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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_reasons(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Stages of real kernels add up, in every row; rows that are not begun in time are, when asked again."""
    grid, path = tmp_path / "grid.jsonl", tmp_path / "reasons.jsonl"
    grid_of(grid, *((cell, dtype, "cpu_sequence", {}) for cell, dtype in (
        ("lstm", "float32"), ("lstm", "tf32"), ("gru", "float32"))))
    assert run(monkeypatch, why_above_floor, grid, "--output", path, "--seconds", 0) == 0
    assert "3 were not begun within --seconds" in capsys.readouterr().out and not rows_of(path)
    assert path.with_suffix(".md").read_text().count("\n- ") == 3, "what is missing is named"
    assert run(monkeypatch, why_above_floor, grid, "--output", path) == 0
    rows = rows_of(path)
    assert [r["name"] for r in rows] == [f"{c} 5x3x8x8 {d}" for c, d in (
        ("lstm", "float32"), ("lstm", "tf32"), ("gru", "float32"))], "the furthest first"
    for row in rows:
        assert row["sides"] == ["whole", "bare", "recurrence"] and max(row["errors"].values()) < 1e-5
        assert sum(row["stages"].values()) == pytest.approx(row["whole_us"])
    text = path.with_suffix(".md").read_text()
    assert "| LSTM 5x3x8x8 | float32 | cpu_sequence" in text and "Not measured" not in text


@pytest.mark.slow
def test_a_row_that_fails_costs_itself(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One cannot be compiled, one kills its process, one hangs; the last is measured, and the file has all of them."""
    grid, path = tmp_path / "grid.jsonl", tmp_path / "reasons.jsonl"
    grid_of(grid, ("lstm", "float32", "no_schedule", {}), ("gru", "float32", "cpu_sequence", {}),
            ("rnn_tanh", "float32", "cpu_sequence", {}), ("lstm", "tf32", "cpu_sequence", {}))
    monkeypatch.setattr(why_above_floor, "compare", fake_measuring.breaks)
    assert run(monkeypatch, why_above_floor, grid, "--output", path, "--longest", 2) == 1
    rows = {r["name"]: r for r in rows_of(path)}
    assert "no_schedule" in rows["lstm 5x3x8x8 float32"]["failed"]
    assert rows["gru 5x3x8x8 float32"]["failed"] == "the process ended with 9"
    assert rows["rnn_tanh 5x3x8x8 float32"]["failed"] == "nothing after 2 s"
    assert rows["lstm 5x3x8x8 tf32"]["stages"]
    text = path.with_suffix(".md").read_text()
    assert text.count("\n| LSTM") == 1 and "- gru 5x3x8x8 float32: the process ended" in text


def test_stages_by_hand():
    us = {"whole_us": 2.0, "bare_us": 1.8, "recurrence_us": 1.6, "unmultiplied_us": 1.3}
    row = us | {"sides": ["whole", "bare", "recurrence", "unmultiplied"]}
    assert why_above_floor.stages_of(row) == pytest.approx(
        {"gate math": 0.2, "projection": 0.2, "products": 0.3, "exchange": 1.3})
    assert why_above_floor.stages_of(row | {"sides": ["whole", "bare", "recurrence"]}) == pytest.approx(
        {"gate math": 0.2, "projection": 0.2, "recurrence": 1.6})
    assert why_above_floor.stages_of(row | {"sides": ["whole"]}) == {}
    assert why_above_floor.stages_of(row | {"unmultiplied_us": 1.7}) == pytest.approx(
        {"gate math": 0.2, "projection": 0.2, "products": 0.0, "exchange": 1.6}), "hidden in the wait"


@pytest.mark.parametrize(("stages", "found", "words"), [
    ({"gate math": 0.1, "projection": 0.0, "products": 0.1, "exchange": 0.8}, ["exchange"],
     "0.79 is the way through L2 between the 16 blocks of a group; the floor has 0.15 for 16 blocks of a cluster"),
    ({"gate math": 0.4, "projection": 0.0, "products": 0.4, "exchange": 0.16}, ["gate math", "products"], "gate math"),
    ({"gate math": 0.4, "recurrence": 0.5}, ["gate math", "recurrence"], "not told apart"),
    ({"gate math": 0.0, "projection": 0.3, "products": 0.0, "exchange": 0.1}, ["projection"], "0.30 where")])
def test_reasons_by_hand(stages: dict, found: list[str], words: str):
    row = {"cell": "lstm", "T": 256, "B": 1, "I": 256, "H": 256, "dtype": "float16", "stages": stages, "whole_us": 9.0,
           "configs": {"whole": {"schedule": "persistent", "groups": 1, "units": 16, "registers": 100}}}
    assert why_above_floor.reasons(row, floors.H100) == found
    assert words in why_above_floor.in_words(row, floors.H100)
    least = floors.floor(floors.H100, "lstm", 1, 256, 256, "float16").total
    if found == ["exchange"]:
        more = why_above_floor.in_words(row | {"waits": 4, "unmultiplied_us": 0.9}, floors.H100)
        assert "h comes in 4 parts" in more and "without products a step takes 0.90" in more
        fewer = row | {"stages": stages | {"exchange": 0.7}}
        assert "0.70, all of it the way through L2 between the 16" in why_above_floor.in_words(fewer, floors.H100)
        shared = row | {"configs": {"whole": row["configs"]["whole"] | {"parts": 3}}}
        assert "partial sums go between the 3 blocks" in why_above_floor.in_words(shared, floors.H100)
    assert why_above_floor.in_words(row | {"whole_us": 1.49 * least}, floors.H100).startswith("at most 1.5 times")


def test_the_grid_that_ships_has_reasons_to_find():
    """Every row above 1.5 times its floor is a case, and its persistent schedule leaves products out, where h comes
    through L2: in a block, or a cluster, `persistent_block` has no side without."""
    path = ROOT / "benchmarks" / "results" / "h100_grid.jsonl"
    found = why_above_floor.cases_of(path)
    assert [str(case) for case in found] == [r["name"] for r in why_above_floor.Summary(GridLog(path).rows).high()]
    assert found and all("unmultiplied" in case.sides() for case in found
                         if case.schedule in ("persistent", "persistent_wide"))


@pytest.mark.parametrize(("cell", "dtype", "schedule"), [
    ("lstm", "float16", "persistent"), ("gru", "bfloat16", "persistent_wide"), ("rnn_tanh", "tf32", "persistent"),
    ("gru", "tf32-both", "layout_transform")])
def test_stages_are_left_out_in_the_same_configuration(cell: str, dtype: str, schedule: str):
    row = Row(cell, 20, 4, 256, 256, dtype)
    config = dict(all_schedules()[schedule].default(row.plan(H100).task))
    case = why_above_floor.Case(cell, 20, 4, 256, 256, dtype, schedule, knobs(config))
    sides = case.sides()
    assert ("unmultiplied" in sides) == (schedule != "layout_transform")
    for name, made in sides.items():
        found, alone = made.plan(H100), name in ("recurrence", "unmultiplied")
        assert found.found.schedule.name == schedule
        none = {name: value for name, value in (("ahead", 100), ("hoisted", "float32")) if alone and name in config}
        assert dict(found.found.config) == config | none, name
        assert found.workload.arithmetic == row.arithmetic
        graph, gates = found.task.graph, why_above_floor.GATES[cell]
        assert [len(p.products) for p in graph.phases] == [gates]
        assert len(graph.hoisted_products) == (0 if alone else gates)


def test_parts_of_h_that_are_waited_for():
    config = knobs({"ahead": 50, "carrier": "l2", "chains": 1, "fences": "every", "gate_warps": 4, "groups": 2,
                    "interleave": 0, "math": "exact", "registers": 25, "units": 16, "warps": 4})
    case = why_above_floor.Case("lstm", 300, 20, 800, 800, "float32", "persistent", config)
    assert why_above_floor.waits(case) == 4  # 13 pairs of k-tiles a warp, four of them at a time
    assert why_above_floor.waits(replace(case, schedule="persistent_wide")) == 1


@pytest.mark.parametrize(("schedule", "dtype", "change"), [
    ("persistent", "float16", {"registers": 100}), ("persistent", "float32", {"registers": 0}),
    ("persistent_wide", "bfloat16", {"registers": 50}),
    ("persistent_wide", "float16", {"groups": 1, "parts": 2, "row_teams": 2, "units": 64})])
def test_without_products(tmp_path: Path, schedule: str, dtype: str, change: dict):
    """No mma is left, the state is still waited for, and y is that of recurrent weights of zero."""
    small = structs.replace(H100, cores=8)
    cell = Bare(2, True, False)
    kwargs = {"hidden": 128, "input": 24, "batch": 9, "seq": 6, "dtype": dtype, "target": small}
    config = dict(plan(cell, schedule=schedule, **kwargs).found.config) | change
    planned = plan(cell, schedule=schedule, config=config, **kwargs)
    made = Unmultiplied.of(planned)
    with_products, without = (lower(p.programs()[0], "sm_90a")[1] for p in (planned, made))
    call = re.compile(r"^ +\w*mma_(?:sync|async)\w*\(", re.M)
    assert call.search(with_products) and not call.search(without)
    assert lower(planned.programs()[0], "sm_90a")[1] == with_products, "and only there"
    x, states, parameters = inputs(cell.name, (6, 9, 24, 128), dtype, made.task.graph.parameters, ("h", "c"))
    states = {name: np.zeros_like(value) for name, value in states.items()}
    y, _ = Emulated(made.programs()[0], tmp_path).run(x, states, parameters)
    import torch
    weights = {f"{k}_l0": torch.from_numpy(v.astype(np.float64).reshape(-1, *v.shape[2:]))
               for k, v in parameters.items()}
    expected = bare_forward(cell, torch.from_numpy(x.astype(np.float64)), weights, multiplied=False).numpy()
    assert relative(y, expected) <= limit(dtype, expected)
    assert relative(y, bare_forward(cell, torch.from_numpy(x.astype(np.float64)), weights).numpy()) > 0.01


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_bare_cells(given: bool, second: bool):
    """The cell's graph against the same formula in PyTorch, over enough steps for the state to settle."""
    import torch
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


def test_the_projection_is_timed_alone_and_whole():
    """Kernels of calls that take turns are told apart by name; a layer has all of its projection in front."""
    found = [("copy", 9.0), ("project_kernel", 3.0), ("step_kernel", 7.0), ("gemm", 2.0), ("split", 0.5)] * 2
    assert compare_projection.of_calls(found, {"gemm", "split"}, 2) == [2.5, 2.5]
    with pytest.raises(RuntimeError, match="3 kernels in 2 calls"):
        compare_projection.of_calls([*found, ("gemm", 2.0)], {"gemm"}, 2)
    beside = {"ahead": 0, "carrier": "l2", "chains": 1, "fences": "products", "gate_warps": 4, "groups": 2,
              "hoisted": "same", "interleave": 0, "math": "fast", "registers": 60, "units": 16, "warps": 4}
    layer = compare_projection.Hoisted("gru", 300, 20, 800, 800, "float16", "persistent", knobs(beside))
    assert layer.plan(H100).found.config == beside | {"ahead": 100}
    assert all(c.B >= 16 and "ecornn" in c.sides() for c in compare_projection.CASES)
