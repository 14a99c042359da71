"""`ecornn bench` on this CPU: tiny layers, as a user gives them."""

import csv
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner, Result
from refusals import refused
from rooms import ROOT
from test_cli import ended, from_json

import ecornn
from ecornn.bench import measure, turns
from ecornn.bench.expected import limits_of
from ecornn.bench.grid import Case
from ecornn.bench.measure import Plan
from ecornn.bench.results import CsvFile, Row, compared, read_cases, read_row
from ecornn.bench.turns import Side, Times
from ecornn.cli import main
from ecornn.errors import ArgumentError, MissingPackageError
from ecornn.tune.timing import TorchArrays, wall_clock
from ecornn.workload import Workload

SMALL = ["--hidden", "8", "--batch", "2", "--seq", "4", "--target", "cpu", "--threads", "1", "--seconds", "0.02"]
LSTM = ["--cell", "lstm", *SMALL]
OWN = f"{ROOT / 'examples' / '02_own_cell.py'}:MinimalGatedUnit"


@pytest.fixture(scope="module", autouse=True)
def still() -> Any:
    """Other tests run beside these: no round is made again for that, and nobody waits for threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "foreign", lambda: 0.0)
        patch.setattr(turns, "settle", lambda: None)
        yield


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "own.so"
    ecornn.compile(OWN, hidden=8, batch=2, seq=4, target="cpu", training=True, out=path)
    return path


def run(*arguments: str, code: int = 0) -> Result:
    return ended("bench", *arguments, code=code)


def test_a_layer_against_others(tmp_path: Path):
    said = run(*LSTM, "--against", "torch,onnxruntime,cudnn", "--json", "--csv", str(tmp_path / "rows.csv"))
    assert "compiling" in said.stderr and "leaving out cudnn: cuDNN only runs on GPUs" in said.stderr
    row = json.loads(said.stdout)
    assert {*row["us_per_step"]} == {*row["errors"]} == {"ecornn", "torch", "onnxruntime"}
    assert all(0 < error < 1e-6 for error in row["errors"].values()) and not row["wrong"]
    for times in row["us_per_step"].values():
        assert 0 < times["p20"] <= times["median"] == times["p50"] <= times["p80"] <= times["p95"] <= times["p99"]
        assert times["runs"] >= 3
    own = row["us_per_step"]["ecornn"]["median"]
    assert row["ratios"]["torch"] == pytest.approx(row["us_per_step"]["torch"]["median"] / own)
    assert row["command"].startswith("ecornn bench --cell lstm --hidden 8 --batch 2 --seq 4 --dtype float32")
    assert row["case"]["threads"] >= 1 and row["environment"]["ecornn"]
    (tmp_path / "row.json").write_text(said.stdout)
    for name in ("row.json", "rows.csv:1"):
        earlier = read_row(str(tmp_path / name))
        assert earlier.case == Case(**row["case"]) and earlier.medians["ecornn"] == pytest.approx(own)
        assert {"torch", "onnxruntime"} <= {*earlier.against}
    again = run("--reproduce", str(tmp_path / "rows.csv"), "--seconds", "0.02").stdout
    flags = Row(case=Case(cell="gru", hidden=8, training=True, reverse=True, layers=2), command="",
                us_per_step={"ecornn": Times.of([1e-5], 4)})
    with (tmp_path / "flags.csv").open("w", newline="") as file:
        CsvFile(file).add(flags)
    assert read_row(str(tmp_path / "flags.csv")).case == flags.case
    assert "lstm T=4 B=2 I=8 H=8 float32 on " in again and "torch (torch.nn.LSTM) takes " in again
    assert again.count("times as long now") == 3


def test_a_cell_of_ones_own_trains_beside_a_loop_over_its_step(module: Path):
    row = from_json("bench", str(module), "--cell", OWN, "--training", "--against", "torch", "--seconds", "0.02")
    assert row["about"]["torch"] == "a loop over the step in PyTorch"
    assert max(row["errors"].values()) < 1e-6 and {*row["us_per_step"]} == {"ecornn", "torch"}
    assert row["command"].startswith(f"ecornn bench {module} --cell") or "--training" in row["command"]


def test_a_module_alone_says_what_it_cannot_check(module: Path):
    said = run(str(module), "--against", "none", "--seconds", "0.02")
    assert "ecornn is not checked" in said.stderr and said.stdout.strip().endswith("not checked")
    for option, value, why in (("--cell", "gru", "expected the cell of"), ("--batch", "3", "at most 2"),
                               ("--hidden", "9", "with a module file"),
                               ("--grid", str(module), "a grid or a module file"),
                               ("--reproduce", "rows.csv", "no options that describe")):
        assert why in run(str(module), option, value, code=2).output


def test_a_grid_goes_on_after_a_layer_that_fails(tmp_path: Path):
    grid, out = tmp_path / "grid.csv", tmp_path / "out.csv"
    grid.write_text("cell,hidden,dtype,weights\n# two layers\nrnn_tanh,8,,int16\ngru,8,float16,int16\n")
    said = run("--grid", str(grid), *SMALL, "--against", "none", "--csv", str(out), "--json", code=1)
    first, second = json.loads(said.stdout)["rows"]
    assert first["case"]["weights"] == "int16" and first["case"]["batch"] == 2 and first["us_per_step"]["ecornn"]
    assert "float16" in second["failed"] and "[2/2] error: weights='int16'" in said.stderr
    lines = list(csv.DictReader(out.read_text().splitlines()))
    assert [line["cell"] for line in lines] == ["rnn_tanh", "gru"] and float(lines[0]["ecornn_p99"]) > 0
    assert [case.cell for case in read_cases(out)] == ["rnn_tanh", "gru"]
    refused(ArgumentError, "a row of results, with the times", read_row, f"{out}:2")
    refused(ArgumentError, "N from 1 to 2", read_row, str(out))


@pytest.mark.parametrize("text, said", [
    ("cell,hidde\nlstm,8\n", "hidde"), ("cell,hidden\nlstm,many\n", "many"), ("cell,hidden\n", "a first line"),
    ("cell,hidden\nlstm,8,9\n", "a first line")])
def test_a_grid_that_is_none_is_refused(text: str, said: str, tmp_path: Path):
    (tmp_path / "grid.csv").write_text(text)
    output = run("--grid", str(tmp_path / "grid.csv"), code=2).output
    assert said in output and output.count("error: ") == 1
    (tmp_path / "grid.json").write_text("{")
    assert "JSON" in run("--grid", str(tmp_path / "grid.json"), code=2).output


def off(side: Side, factor: Callable[[], float] = lambda: 1.001) -> Side:
    return replace(side, call=lambda: {n: v * np.float32(factor()) for n, v in side.call().items()})


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    real, others = measure.ours, measure.peer
    monkeypatch.setattr(measure, "peer", lambda *arguments: off(others(*arguments)))
    row = from_json("bench", *LSTM, "--against", "torch")
    assert "error 1.00e-03, allowed 1.00e-05" in row["wrong"]["torch"] and {*row["us_per_step"]} == {"ecornn"}
    monkeypatch.setattr(measure, "ours", lambda *arguments: off(real(*arguments)))
    said = run(*LSTM, "--against", "none", code=1).stdout
    assert "ecornn      not timed, its result is wrong: y: error 1.00e-03" in said and "µs/step" not in said
    calls = iter(range(1000))
    monkeypatch.setattr(measure, "ours", lambda *arguments: off(real(*arguments), lambda: 1 + 1e-7 * next(calls)))
    assert "two runs with the same input differ" in run(*LSTM, "--against", "none", code=1).stdout


def test_a_library_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch):
    others, fails = measure.peer, Mock(side_effect=RuntimeError("not on this device\nand a stack of calls"))
    monkeypatch.setattr(measure, "peer", lambda *arguments: replace(others(*arguments), call=fails))
    row = from_json("bench", *LSTM, "--against", "torch")
    assert row["left_out"] == {"torch": "RuntimeError: not on this device"} and {*row["errors"]} == {"ecornn"}
    monkeypatch.setattr(measure, "ours", fails)
    assert isinstance(CliRunner().invoke(main, ["bench", *LSTM]).exception, RuntimeError)


def test_a_side_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *more: None if name in ("torch", "onnxruntime") else find(name, *more))
    output = run(*LSTM, "--against", "onnxruntime", code=2).output
    assert "error: onnxruntime is not installed, but --against onnxruntime needs it: install ecornn's extra" in output
    output = run(*LSTM, "--against", "jax", code=2).output
    assert "expected none, or some of cudnn, cudnn-tf32, torch, loop, onnxruntime" in output
    monkeypatch.setattr("ecornn.compiler.build", lambda *_: pytest.fail("compiled before that is said"))
    with pytest.raises(MissingPackageError):
        measure.measure(Case(cell="lstm", hidden=8, target="cpu"), Plan(("torch",)))


def test_ctrl_c_keeps_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = measure.measure
    def one(case: Case, plan: Plan) -> Any:
        if case.cell == "gru":
            raise KeyboardInterrupt
        return real(case, plan)
    monkeypatch.setattr(measure, "measure", one)
    (tmp_path / "grid.json").write_text('[{"cell": "rnn_relu"}, {"cell": "gru"}, {"cell": "lstm"}]')
    said = run("--grid", str(tmp_path / "grid.json"), *SMALL, "--against", "none", "--json", "--csv",
               str(tmp_path / "out.csv"), code=130)
    assert "stopped after 1 of 3 layers" in said.stderr
    assert [row["case"]["cell"] for row in json.loads(said.stdout)["rows"]] == ["rnn_relu"]
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 2


def test_a_graph_s_results_are_those_of_its_replays(module: Path, monkeypatch: pytest.MonkeyPatch):
    import torch

    class OnCpu(TorchArrays):
        def weight(self, values: Any) -> Any:
            return torch.from_numpy(values)

    def captured(function: Any) -> tuple[Any, Any]:
        found = {name: value.detach().clone() for name, value in function().items()}
        def replay() -> None:
            for name, value in function().items():
                found[name].copy_(value)
        return SimpleNamespace(replay=replay), found

    monkeypatch.setattr(turns, "captured", captured)
    monkeypatch.setattr(turns, "gpu_clock", lambda run, wait: wall_clock(run))
    monkeypatch.setattr(measure, "machine_of", lambda module, seed: turns.Gpu(OnCpu("float32"), seed, "cpu"))
    row = measure.measure(Case(module=str(module), cell=OWN, training=True), Plan(("torch",), 0.02))
    assert row.good and not row.wrong and row.us_per_step["torch"].runs >= 7
    assert max(error or 0 for error in row.errors.values()) < 1e-6


def test_limits_of_16_bits_are_twice_a_library_s_error():
    cell = object()
    sides = {name: Side(name, dict, "", cell, {}) for name in ("ecornn", "torch")}  # type: ignore[arg-type]
    errors = {"ecornn": {"y": 1.0}, "torch": {"y": 2e-3}}
    for dtype, own, peers in (("bfloat16", 4e-3 + 1e-6, 2e-2), ("float32", 1e-5, 1e-5)):
        subject: Any = SimpleNamespace(work=Workload("lstm", 8, 8, 2, 4, dtype), training=False)
        assert limits_of(subject, sides["ecornn"], errors, sides) == {"y": pytest.approx(own)}
        assert limits_of(subject, sides["torch"], errors, sides) == {"y": pytest.approx(peers)}


def test_rounds_that_others_disturb_are_made_again(monkeypatch: pytest.MonkeyPatch):
    used, rounds = iter([0.0, 9.0, 9.0, 9.0, 9.0, 9.0]), []
    monkeypatch.setattr(turns, "foreign", lambda: next(used))
    times, again = turns.host_turns({"a": lambda: time.sleep(0.003)}, lambda: rounds.append(1), 2, 60.0, wall_clock)
    assert again == 1 and len(rounds) == 3 and len(times["a"]) == 2
    monkeypatch.setattr(turns, "foreign", lambda: 9.0 * len(rounds))
    times, _ = turns.host_turns({"a": lambda: None}, lambda: rounds.append(1), 2, 60.0, wall_clock)
    assert len(times["a"]) == 2 and len(rounds) == 3 + turns.AGAIN * 2 + 2


def test_a_ratio_of_times_that_did_not_settle_is_a_range():
    def row(*slow: float) -> Row:
        times = {"ecornn": Times.of([1e-3] * 5, 10), "torch": Times.of(slow, 10)}
        return Row(case=Case(cell="lstm", hidden=8), command="", us_per_step=times, ratios={"torch": 3.0})
    assert compared(row(3e-3, 3e-3, 3.1e-3), "torch") == "3.00 times as long as ecornn"
    said = compared(row(*[2e-3] * 4, *[9e-3] * 4), "torch")
    assert said == "2.00 to 9.00 times as long as ecornn; the timings were noisy"
