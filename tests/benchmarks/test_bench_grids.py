"""Grids in TOML: the layers that they name, sides of ours, and runs that go on where they were stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ecornn.bench import turns
from ecornn.bench.grid import read_grid, selected
from ecornn.bench.results import RowLog
from ecornn.cli import main
from ecornn.errors import ArgumentError
from ecornn.report.measured import measured

SMALL = """
title = "Small layers"
against = ["torch", "loop"]
calls = 3
[sides.tall]
schedule = "cpu_steps"
[sides.relu]
cell = "rnn_relu"
[sides.other]
weights = "int16"
[all]
target = "cpu"
threads = 1
[[layers]]
group = "tiny"
cell = ["rnn_tanh", "gru"]
size = "4x2x8"
dtype = "float32"
at_most = 100.0
"""


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "foreign", lambda: 0.0)
    monkeypatch.setattr(turns, "settle", lambda: None)


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["bench", "--seconds", "0.02", *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def written(folder: Path, text: str) -> Path:
    path = folder / "grid.toml"
    path.write_text(text)
    return path


def test_lists_are_combinations_in_their_order(tmp_path: Path):
    grid = read_grid(written(tmp_path, """
against = ["cudnn"]
[[layers]]
dtype = ["float16", "tf32", "tf32-both"]
cell = ["lstm", "gru"]
size = ["300x20x800", "1x5x100x300"]
[[layers]]
cell = "lstm"
size = "300x20x800"
dtype = "float16"
[[layers]]
cell = "tests/cells.py:Mine"
hidden = 8
layers = 2
training = true
against = ["none"]
sides.slow = {untuned = true}
at_least = 2
"""))
    layers = grid.expanded("grid.toml")
    assert [layer.name for layer in layers][:3] == ["lstm 300x20x800x800 float16", "lstm 1x5x100x300 float16",
                                                    "gru 300x20x800x800 float16"]
    assert len(layers) == 13, "a layer that is named twice is one"
    tf32, both = layers[4], layers[8]
    assert (tf32.against, tf32.case.dtype, tf32.case.precision) == (("cudnn-tf32",), "float32", None)
    assert (both.against, both.case.precision, both.name) == (("cudnn",), "tf32", "lstm 300x20x800x800 tf32-both")
    last = layers[-1]
    assert last.name == "Mine ?x?x8x8 2 layers training" and last.against == () and last.own["slow"].untuned
    assert last.at_least == 2 and [layer.name for layer in selected(layers, ["lstm 1x5", "Mine"])][-1] == last.name
    with pytest.raises(ArgumentError, match="--list shows them"):
        selected(layers, ["lstm gru"])


@pytest.mark.parametrize("text, said", [
    ("[[layers]]\ncel = 'lstm'\n", "cel"), ("[[layers]]\nsize = '300x20'\n", "300x20x800"), ("layers = 3", "array"),
    ("[[layers]]\ncell = 'lstm'\nhidden = 'x'\n", "hidden"), ("[[layers]\n", "TOML"), ("[sides.a]\nx = 1\n", "x")])
def test_what_is_no_grid_is_refused(text: str, said: str, tmp_path: Path):
    output = run("--grid", str(written(tmp_path, text)), code=2).output
    assert said in output and output.count("error: ") == 1


def test_sides_of_ours_and_a_file_that_goes_on(tmp_path: Path):
    grid, out = written(tmp_path, SMALL), tmp_path / "rows.jsonl"
    listed = run("--grid", str(grid), "--list").stdout.splitlines()
    assert listed == ["tiny rnn_tanh 4x2x8x8 float32 1 threads", "tiny gru 4x2x8x8 float32 1 threads"]
    said = run("--grid", str(grid), "--only", "rnn_tanh", "--output", str(out))
    (row,) = RowLog(out).rows
    assert {*row["us_per_step"]} == {"ecornn", "relu", "other", "torch", "loop"} and row["name"] in listed[0]
    assert "cpu_steps" in row["left_out"]["tall"] and "tall is left out" in said.stderr
    assert row["errors"]["relu"] < 1e-6 < row["errors"]["other"] < 1e-4 and row["calls"] == 3 and not row["wrong"]
    assert row["at_most"] == 100 and row["about"]["loop"].startswith("a loop over the step")
    said = run("--grid", str(grid), "--output", str(out))
    assert "1 of 2 layers are in" in said.stderr and len(RowLog(out).rows) == 2
    whole = out.read_bytes()
    out.write_bytes(whole[:-5])  # as it is where a process was killed while it wrote
    assert [f"tiny {r['name']}" for r in RowLog(out).rows] == listed[:1]
    out.write_text("nothing\n")
    with pytest.raises(ArgumentError, match="a line of results"):
        RowLog(out)
    out.write_bytes(whole)
    assert len(measured([out]).rows) == 2, "what `ecornn report --results` reads"


def test_rows_of_another_device_go_to_another_file(tmp_path: Path):
    log = RowLog(tmp_path / "rows.jsonl")
    log.begin({"gpu": "this"})
    with pytest.raises(ArgumentError, match="rows of that; this one has those of this"):
        RowLog(tmp_path / "rows.jsonl").begin({"device": "that"})


@pytest.mark.slow
def test_layers_in_processes_of_their_own(tmp_path: Path):
    """A layer that fails costs no other one anything."""
    text = SMALL.replace('"gru"', '"lstm(nothing)"').replace('"torch", "loop"', '"none"')
    found = json.loads(run("--grid", str(written(tmp_path, text)), "--jobs", "1", "--longest", "600", "--json",
                           code=1).stdout)["rows"]
    assert not found[0]["failed"] and {*found[0]["us_per_step"]} == {"ecornn", "relu", "other"}
    assert "nothing" in found[1]["failed"]
