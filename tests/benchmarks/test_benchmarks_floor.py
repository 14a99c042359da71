"""Why rows are above their floors, and the projection alone: what of these benchmarks needs no GPU."""

import re
from pathlib import Path

import compare_projection
import numpy as np
import pytest
import why_above_floor
from cuda_on_cpu import Emulated, inputs
from exact import limit, relative
from measured_rows import Summary, of_bench, read
from msgspec import structs, to_builtins
from rooms import ROOT
from why_above_floor import Bare, spec, without_products

import ecornn
from ecornn import floor as floors
from ecornn.bench import turns
from ecornn.bench.measure import Plan, measure
from ecornn.bench.results import RowLog, append
from ecornn.build.cuda import lower
from ecornn.cells.naming import load_cell
from ecornn.compiler import plan
from ecornn.errors import ScheduleError
from ecornn.report.measured import measured
from ecornn.schedules import all_schedules
from ecornn.targets import KNOWN

H100 = KNOWN["sm_90a"]


def row_of(cell: str, dtype: str, schedule: str, config: dict, size: tuple[int, ...] = (20, 4, 256, 256)) -> dict:
    return dict(zip("TBIH", size, strict=True)) | {
        "name": f"{cell} {'x'.join(map(str, size))} {dtype}", "cell": cell, "dtype": dtype, "schedule": schedule,
        "config": config}


def test_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "foreign", lambda: 0.0)
    monkeypatch.setattr(turns, "settle", lambda: None)
    layer = why_above_floor.layer_of(row_of("lstm", "float32", "cpu_sequence", {}, (5, 3, 8, 8)))
    found = measure(structs.replace(layer.case, target="cpu", threads=1), Plan((), 0.02, own=layer.own))
    row = of_bench(to_builtins(found))
    assert {*row["sides"]} == {"ecornn", "whole", "bare", "recurrence"} and not row["missing"]
    assert max(found.errors.values()) < 1e-5
    assert sum(why_above_floor.stages_of(row).values()) == pytest.approx(row["whole_us"])
    assert why_above_floor.knobs_of(row)["schedule"] == "cpu_sequence"
    log = RowLog(tmp_path / "reasons.jsonl")
    append(log, found, why_above_floor.described(layer, found))
    (beside,) = measured([log.path]).rows.values()
    assert beside.schedule == "cpu_sequence" and {"gates", "product of x", "recurrence"} == {*beside.stages}
    assert why_above_floor.reasons(log.rows[0] | row, floors.H100)


def test_stages_by_hand():
    sides = ["whole", "bare", "recurrence", "unmultiplied"]
    row = {"whole_us": 2.0, "bare_us": 1.8, "recurrence_us": 1.6, "unmultiplied_us": 1.3, "sides": sides}
    both = {"gate math": 0.2, "projection": 0.2}
    for change, stages in (({}, both | {"products": 0.3, "exchange": 1.3}),
                           ({"sides": sides[:3]}, both | {"recurrence": 1.6}), ({"sides": sides[:1]}, {}),
                           # hidden in the wait
                           ({"unmultiplied_us": 1.7}, both | {"products": 0.0, "exchange": 1.6})):
        assert why_above_floor.stages_of(row | change) == pytest.approx(stages)


@pytest.mark.parametrize(("stages", "found", "words"), [
    ({"gate math": 0.1, "projection": 0.0, "products": 0.1, "exchange": 0.8}, ["exchange"],
     "0.79 is the way through L2 between the 16 blocks of a group; the floor has 0.15 for 16 blocks of a cluster"),
    ({"gate math": 0.4, "projection": 0.0, "products": 0.4, "exchange": 0.16}, ["gate math", "products"], "gate math"),
    ({"gate math": 0.4, "recurrence": 0.5}, ["gate math", "recurrence"], "not told apart"),
    ({"gate math": 0.0, "projection": 0.3, "products": 0.0, "exchange": 0.1}, ["projection"], "0.30 where")])
def test_reasons_by_hand(stages: dict, found: list[str], words: str):
    row = {"cell": "lstm", "T": 256, "B": 1, "I": 256, "H": 256, "dtype": "float16", "stages": stages, "whole_us": 9.0,
           "waits": 1, "configs": {"whole": {"schedule": "persistent", "groups": 1, "units": 16, "registers": 100}}}
    assert why_above_floor.reasons(row, floors.H100) == found and words in why_above_floor.in_words(row, floors.H100)
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
    """`persistent` leaves products out where h comes through L2; `persistent_block` has no side without."""
    path = ROOT / "benchmarks" / "results" / "h100_grid.jsonl"
    found, rows = why_above_floor.layers_of(path), Summary(read(path).rows).high()
    assert [layer.name for layer in found] == [r["name"] for r in rows] and found
    assert all(("unmultiplied" in layer.own) == (row["schedule"] in ("persistent", "persistent_wide"))
               for layer, row in zip(found, rows, strict=True))


@pytest.mark.parametrize(("cell", "dtype", "schedule"), [
    ("lstm", "float16", "persistent"), ("gru", "bfloat16", "persistent_wide"), ("rnn_tanh", "tf32", "persistent"),
    ("gru", "tf32-both", "layout_transform")])
def test_stages_are_left_out_in_the_same_configuration(cell: str, dtype: str, schedule: str):
    layer = why_above_floor.layer_of(row_of(cell, dtype, schedule, {}))
    case = structs.replace(layer.case, target="sm_90a")
    config = dict(all_schedules()[schedule].default(layer.own["whole"].planned(case).task))
    layer = why_above_floor.layer_of(row_of(cell, dtype, schedule, config))
    assert ("unmultiplied" in layer.own) == (schedule != "layout_transform")
    for name, own in layer.own.items():
        found, alone = own.planned(case), name in ("recurrence", "unmultiplied")
        assert found.found.schedule.name == schedule
        none = {name: value for name, value in (("ahead", 100), ("hoisted", "float32")) if alone and name in config}
        assert dict(found.found.config) == config | none, name
        graph, gates = found.task.graph, why_above_floor.GATES[cell]
        assert [len(p.products) for p in graph.phases] == [gates]
        assert len(graph.hoisted_products) == (0 if alone else gates)


def bare_forward(cell: Bare, x: np.ndarray, p: dict[str, np.ndarray], multiplied: bool = True) -> np.ndarray:
    """y (T, B, H) in float64 of x (T, B, I), from zeros. Unless ``multiplied``, recurrent weights count as zero."""
    p = {k: v.astype(np.float64) for k, v in p.items()}
    hidden = p["weight_hh_l0"].shape[1]
    h = c = np.zeros((x.shape[1], hidden))
    out = []
    for row in x.astype(np.float64):
        gates = h @ p["weight_hh_l0"].T * multiplied + p["bias_ih_l0"]
        if cell.given:
            gates = gates + row @ p["weight_ih_l0"].T
        h = gates.reshape(-1, cell.gates, hidden).max(1)
        if cell.second:
            h = np.maximum(h, c)
            c = h / 2
        out.append(h)
    return np.stack(out)


def test_parts_of_h_that_are_waited_for():
    config = {"ahead": 50, "carrier": "l2", "chains": 1, "fences": "every", "gate_warps": 4, "groups": 2,
              "interleave": 0, "math": "exact", "registers": 25, "units": 16, "warps": 4}
    row = row_of("lstm", "float32", "persistent", config, (300, 20, 800, 800))
    whole = {"configs": {"whole": {"schedule": "persistent", **config}}}
    assert why_above_floor.waits(row | whole) == 4  # 13 pairs of k-tiles a warp, four of them at a time
    whole["configs"]["whole"]["schedule"] = "persistent_wide"
    assert why_above_floor.waits(row | whole) == 1


@pytest.mark.parametrize(("schedule", "dtype", "change"), [
    ("persistent", "float16", {"registers": 100}), ("persistent", "float32", {"registers": 0}),
    ("persistent_wide", "bfloat16", {"registers": 50}),
    ("persistent_wide", "float16", {"groups": 1, "parts": 2, "row_teams": 2, "units": 64})])
def test_without_products(tmp_path: Path, schedule: str, dtype: str, change: dict):
    small, cell = structs.replace(H100, cores=8), Bare(2, True, False)
    kwargs = {"hidden": 128, "input": 24, "batch": 9, "seq": 6, "dtype": dtype, "target": small}
    config = dict(plan(cell, schedule=schedule, **kwargs).found.config) | change
    planned = plan(cell, schedule=schedule, config=config, **kwargs)
    with without_products():
        made = planned.programs()[0]
        without = lower(made, "sm_90a")[1]
    with_products = lower(planned.programs()[0], "sm_90a")[1]
    call = re.compile(r"^ +\w*mma_(?:sync|async)\w*\(", re.M)
    assert call.search(with_products) and not call.search(without)
    assert lower(planned.programs()[0], "sm_90a")[1] == with_products, "and only there"
    x, states, parameters = inputs(cell.name, (6, 9, 24, 128), dtype, planned.task.graph.parameters, ("h", "c"))
    y, _ = Emulated(made, tmp_path).run(x, {name: np.zeros_like(value) for name, value in states.items()}, parameters)
    weights = {f"{k}_l0": v.reshape(-1, *v.shape[2:]) for k, v in parameters.items()}
    expected = bare_forward(cell, x, weights, multiplied=False)
    assert relative(y, expected) <= limit(dtype, expected) and relative(y, bare_forward(cell, x, weights)) > 0.01


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_bare_cells(given: bool, second: bool):
    cell, rng = Bare(3, second, given), np.random.default_rng(0)
    weights = {cell.parameter_name(k): cell.sample(k, shape, rng).astype(np.float32).reshape(-1, *shape[2:])
               for k, shape in cell.parameters(6, 10).items()}
    x = np.random.default_rng(1).standard_normal((30, 2, 6)).astype(np.float32)
    y, _ = ecornn.compile(cell, hidden=10, input=6, batch=2, seq=30, target="cpu").bind(weights)(x)
    expected = bare_forward(cell, x, weights)
    assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected) and 0.05 < np.abs(expected[-1]).mean() < 10
    assert load_cell(spec(cell)) == cell


def test_the_projection_is_timed_alone_and_whole(tmp_path: Path):
    """Kernels of calls that take turns are told apart by name; a layer has all of its projection in front."""
    found = [("copy", 9.0), ("project_kernel", 3.0), ("step_kernel", 7.0), ("gemm", 2.0), ("split", 0.5)] * 2
    assert compare_projection.of_calls(found, {"gemm", "split"}, 2) == [2.5, 2.5]
    with pytest.raises(RuntimeError, match="3 kernels in 2 calls"):
        compare_projection.of_calls([*found, ("gemm", 2.0)], {"gemm"}, 2)
    layer = next(one for one in compare_projection.layers() if one.name == "gru 300x20x800x800 float16")
    planned = compare_projection.WHOLE["hoisted"].planned(structs.replace(layer.case, target="sm_90a"))
    assert planned.found.config["ahead"] == 100 and all(one.case.batch >= 16 for one in compare_projection.layers())
    with pytest.raises(ScheduleError):
        compare_projection.file_of(tmp_path)
    (tmp_path / "ecornn.so").touch()
    assert compare_projection.file_of(tmp_path).name == "ecornn.so"
