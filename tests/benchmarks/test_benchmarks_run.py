"""The programs of the benchmarks as they run, with what they run replaced."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecornn.bench.grid import Case, Layer
from ecornn.bench.results import RowLog
from ecornn.targets import KNOWN

CPU = {"hidden": 8, "batch": 2, "seq": 3, "dtype": "float32", "target": "cpu"}
SMALL = [Layer(name=f"{cell} 3x2x8x8 float32", case=Case(cell=cell, input=8, **CPU)) for cell in ("rnn_tanh", "lstm")]


def test_seconds_end_a_row(monkeypatch: pytest.MonkeyPatch):
    from ecornn.bench.turns import FEWEST, take_turns

    now = [0.0]

    def clock(run: Callable[[], object]) -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sides = {"a": lambda: None, "b": lambda: None}
    assert len(take_turns(sides, lambda: None, 30, 25.0, clock)["a"]) == 13
    times = take_turns(sides, lambda: None, 30, 0.0, clock)
    assert len(times["a"]) == len(times["b"]) == FEWEST
    assert len(take_turns(sides, lambda: None, 5, 1e9, clock)["b"]) == 5


def test_everything_is_measured_and_put_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`make bench` on a GPU, with programs that only write what they were asked for."""
    import run_all

    calls = []

    def fake(*arguments: object) -> bool:
        words = [*map(str, arguments)]
        calls.append(words)
        named = words[3] if words[:2] == ["-m", "ecornn"] else words[0]
        assert (run_all.HERE.parent / (words[4] if named == "--grid" else named)).is_file(), words
        if "--output" in words:
            Path(words[words.index("--output") + 1]).write_text(" ".join(words))
        return "variants" not in " ".join(words)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_all, "run", fake)
    monkeypatch.setattr(run_all.importlib.util, "find_spec", lambda name: name != "flashrnn")
    good = [run_all.measure(part, run_all.short_name(KNOWN["sm_90a"])) for part in run_all.GPU]
    assert good.count(False) == 1, "one of them failed"
    results = {path.name: path.read_text() for path in (tmp_path / "benchmarks" / "results").iterdir()}
    assert len(results) == len(run_all.GPU) - 2, "all but FlashRNN's"
    assert "grids/classes.toml" in results["h100_classes.jsonl"] and "compare_packed" in results["h100_packed.json"]
    assert not list((tmp_path / "build" / "bench").iterdir())
    said = [" ".join(words) for words in calls]
    assert "benchmarks/report.py benchmarks/results/h100_grid.jsonl --docs" in said
    assert [s for s in said if "why_above_floor" in s] and not [s for s in said if "report.py" in s and "reasons" in s]


def test_which_command_makes_which_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    import run_all

    monkeypatch.setattr(sys, "argv", ["run_all.py", "--list"])
    run_all.main()
    lines = capsys.readouterr().out.splitlines()
    every = [*run_all.GPU, *run_all.CPU, *run_all.NAMED]
    assert len(lines) == len(every) == len({part.name for part in every})
    grids = {path.stem for path in (run_all.HERE / "grids").glob("*.toml")}
    assert grids == {part.name for part in every if "--grid" in part.command}
    monkeypatch.setattr(sys, "argv", ["run_all.py", "nothing"])
    with pytest.raises(SystemExit):
        run_all.main()
    assert "PART: nothing; expected some of layers, grid" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_compile_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Real compilations, for the CPU, in new processes without the cache; the same command goes on."""
    import compile_times

    monkeypatch.setenv("ECORNN_CACHE", "on")
    path = tmp_path / "times.jsonl"

    def measure(modules: list[Layer]) -> None:
        monkeypatch.setattr(compile_times, "modules", lambda: modules)
        monkeypatch.setattr(sys, "argv", ["compile_times.py", "--target", "cpu", "--output", str(path)])
        with pytest.raises(SystemExit) as ended:
            compile_times.main()
        assert ended.value.code == 0

    measure(SMALL[:1])
    measure(SMALL)
    rows = RowLog(path).rows
    assert [r["cell"] for r in rows] == ["rnn_tanh", "lstm"]
    assert all(r["build"] > 0.1 and r["imports"] > 0 and r["module_bytes"] > 1000 for r in rows)
    text = path.with_suffix(".md").read_text()
    assert "- `cpu_sequence`: 2 modules" in text and "| LSTM 3x2x8x8 | float32 | cpu_sequence |" in text


def test_every_module_of_the_grid_is_compiled_once():
    import compile_times

    assert len(compile_times.modules()) == 109
