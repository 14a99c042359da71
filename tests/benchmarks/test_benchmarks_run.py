"""The GPU benchmarks as they run, with a CPU or a fake in the GPU's place."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import compare_grid
import fake_measuring
import pytest
from grid import Row
from grid_log import GridLog
from measuring_process import Limits, MeasuringProcess

import ecornn
from ecornn.floor import H100, floor
from ecornn.targets import KNOWN, resolve

LSTM, GRU, VANILLA = (Row(cell, 3, 2, 8, 8, "float32") for cell in ("lstm", "gru", "rnn_tanh"))
LIMITS = Limits(repeats=5, seconds=1.0, longest=1.0)


def test_a_row_that_fails_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_measuring.patient(monkeypatch, hangs="gru")
    file = tmp_path / "module.so"
    file.touch()
    process = MeasuringProcess(LIMITS, fake_measuring.serve)
    try:
        first = process.measure(LSTM, file)
        assert process.measure(LSTM, file)["process"] == first["process"]
        assert process.measure(VANILLA, file) == {"failed": "the process ended with 7"}
        second = process.measure(LSTM, file)
        assert second["ecornn_us"] == 2.0 and second["process"] != first["process"]
        assert process.measure(GRU, file) == {"failed": "nothing after 1 s"}
        assert process.measure(LSTM, file)["process"] not in (first["process"], second["process"])
    finally:
        process.close()


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch):
    fake_measuring.patient(monkeypatch)
    process = MeasuringProcess(LIMITS, fake_measuring.serve_nothing)
    try:
        with pytest.raises(RuntimeError, match="no GPU"):
            process.environment()
    finally:
        process.close()


def test_the_grid_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture):
    """Real compilations, for the CPU; a row that fails is recorded, and tried again the next time."""
    fake_measuring.patient(monkeypatch)
    path, tf32 = tmp_path / "grid.jsonl", Row(LSTM.cell, LSTM.T, LSTM.B, LSTM.I, LSTM.H, "tf32")
    chosen = [LSTM, tf32, VANILLA]
    monkeypatch.setattr(compare_grid, "select", lambda only, limit: chosen[:limit])
    monkeypatch.setattr(compare_grid, "resolve", lambda target: resolve("cpu"))
    monkeypatch.setattr(compare_grid, "MeasuringProcess", partial(MeasuringProcess, serve=fake_measuring.serve))

    def measure(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["compare_grid.py", "--output", str(path), "--jobs", "2", *arguments,
                                          "--lock", str(tmp_path / "lock")])
        with pytest.raises(SystemExit) as ended:
            compare_grid.main()
        return ended.value.code

    assert measure("--limit", "1") == 0
    assert measure() == 1
    out = capsys.readouterr().out
    assert f"1 rows are in {path} already" in out and "FAILED the process ended with 7" in out
    assert all(len(line) <= 110 for line in out.splitlines() if line.startswith(("lstm", "rnn")))
    log = GridLog(path)
    assert {row["name"] for row in log.rows} == {str(row) for row in chosen}
    found, least = log.of(tf32), floor(H100, "lstm", 2, 8, 8, "float32").total
    assert found["floor_us"] == least and found["over_floor"] == 2.0 / least
    assert log.of(VANILLA) is None
    assert found["module_bytes"] > 1000
    assert path.read_text().count('"row"') == 3


def test_both_sides_are_checked(monkeypatch: pytest.MonkeyPatch):
    """On the CPU, with wall-clock times."""
    import side_by_side
    import torch

    def graph(function: Callable[[], object]) -> SimpleNamespace:
        function()
        return SimpleNamespace(replay=function)

    def clock(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6

    monkeypatch.setattr(side_by_side, "DEVICE", "cpu")
    monkeypatch.setattr(side_by_side, "graph_of", graph)
    monkeypatch.setattr(side_by_side, "clock", clock)
    torch.manual_seed(0)
    modules = {c: ecornn.compile(c, hidden=8, input=8, batch=2, seq=3, target="cpu") for c in ("rnn_tanh", "rnn_relu")}
    row = side_by_side.compare("rnn_tanh", (3, 2, 8, 8), "float32", modules["rnn_tanh"], repeats=9)
    assert row["repetitions"] == 9 and row["error"] < 1e-6 and row["cudnn_error"] < 1e-6
    assert row["ecornn_p20"] <= row["ecornn_us"] <= row["ecornn_p80"]
    assert row["ratio"] == row["cudnn_us"] / row["ecornn_us"]
    with pytest.raises(side_by_side.WrongResultError, match=r"allowed 1\.00e-05"):
        side_by_side.compare("rnn_tanh", (3, 2, 8, 8), "float32", modules["rnn_relu"])


def test_seconds_end_a_row(monkeypatch: pytest.MonkeyPatch):
    import side_by_side

    now = [0.0]

    def clock(run: Callable[[], object]) -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(side_by_side, "clock", clock)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sides = {"a": lambda: None, "b": lambda: None}
    assert len(side_by_side.take_turns(sides, lambda: None, 30, 25.0)["a"]) == 13
    times = side_by_side.take_turns(sides, lambda: None, 30, 0.0)
    assert len(times["a"]) == len(times["b"]) == side_by_side.FEWEST
    assert len(side_by_side.take_turns(sides, lambda: None, 5, 1e9)["b"]) == 5


def test_everything_is_measured_and_put_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`make bench` on a GPU, with scripts that only write what they were asked for."""
    import run_all

    calls = []

    def fake(script: str, *arguments: object) -> bool:
        calls.append(script)
        assert (Path(run_all.HERE) / script).is_file()
        if script != "docs_tables.py" and "--output" in arguments:
            out = Path(str(arguments[-1]))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(script)
        return script != "compare_variants.py"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_all, "run", fake)
    assert run_all.on_gpu(KNOWN["sm_90a"]) is False, "one of them failed"
    results = {p.name: p.read_text() for p in (tmp_path / "benchmarks" / "results").iterdir()}
    assert results == {
        "h100.json": "compare_cudnn.py", "h100_grid.jsonl": "compare_grid.py",
        "h100_reasons.jsonl": "why_above_floor.py", "h100_ablation.jsonl": "compare_ablation.py",
        "h100_variants.jsonl": "compare_variants.py", "h100_stacks.json": "compare_stacks.py",
        "h100_packed.json": "compare_stacks.py", "h100_columns.json": "compare_columns.py",
        "h100_projection.jsonl": "compare_projection.py", "h100_compile_times.jsonl": "compile_times.py",
        "h100_published.jsonl": "compare_published.py", "h100_heads.jsonl": "compare_heads.py",
        "h100_classes.jsonl": "compare_classes.py"}
    assert not list((tmp_path / "build" / "bench").iterdir())
    assert calls.index("why_above_floor.py") > calls.index("compare_grid.py")


def test_what_is_said_of_the_tuner_is_run_and_held_against_it(tmp_path, monkeypatch, capsys):
    import run_tuner

    for target in ("cpu", "cuda"):
        for part in run_tuner.steps(target, tmp_path / "report.json").values():
            scripts = [step.arguments[0] for step in part if step.arguments[0].endswith(".py")]
            assert all(Path(script).is_file() for script in scripts)
    assert [len(p) for p in run_tuner.steps("cuda", tmp_path / "report.json").values()] == [3, 2, 2, 1, 1, 1, 1]
    (rate, _) = run_tuner.steps("cuda", tmp_path / "report.json")["rate"]
    assert [rate.holds({"rows": [{"per_second": n}]}) for n in (8.1, 7.9)] == [True, False]

    report = tmp_path / "rate.json"
    write = f"from pathlib import Path; Path({str(report)!r}).write_text('[3]'); print('é' * 5000)"
    given = {"a": [run_tuner.Step("fast", ("-c", write), 900, report, lambda found: found == [3])],
             "b": [run_tuner.Step("wrong", ("-c", write), 900, report, lambda found: found == [4]),
                   run_tuner.Step("slow", ("-c", "import time; time.sleep(0.2)"), 0.1),
                   run_tuner.Step("failing", ("-c", "import sys; sys.exit(3)"))], "c": []}
    monkeypatch.setattr(run_tuner, "steps", lambda *_: given)
    for parts, wanted in (("a", 0), ("b", 1)):
        monkeypatch.setattr(sys, "argv", ["run_tuner.py", parts, "--output", str(tmp_path / "out" / "report.json")])
        with pytest.raises(SystemExit) as caught:
            run_tuner.main()
        assert caught.value.code == wanted
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["parts"]["b"]
    assert [(row["name"], row["holds"], row["code"]) for row in rows] == [
        ("wrong", False, 0), ("slow", False, 0), ("failing", False, 3)]
    assert rows[0]["printed"].strip("\n") == "é" * 3999
    monkeypatch.setattr(sys, "argv", ["run_tuner.py", "nothing"])
    with pytest.raises(SystemExit):
        run_tuner.main()
    assert "PART: nothing; expected some of a, b, c" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_compile_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Real compilations, for the CPU, in new processes without the cache; the same command goes on."""
    import compile_times

    monkeypatch.setenv("ECORNN_CACHE", "on")
    monkeypatch.setattr(compile_times, "modules", lambda: [VANILLA, LSTM])
    path = tmp_path / "times.jsonl"

    def measure(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["compile_times.py", "--target", "cpu", "--output", str(path), *arguments])
        with pytest.raises(SystemExit) as ended:
            compile_times.main()
        assert ended.value.code == 0

    measure("--seconds", "0.001", "--limit", "1")
    measure()
    rows = GridLog(path).rows
    assert [r["cell"] for r in rows] == ["rnn_tanh", "lstm"]
    assert all(r["build"] > 0.1 and r["imports"] > 0 and r["module_bytes"] > 1000 for r in rows)
    text = path.with_suffix(".md").read_text()
    assert "- `cpu_sequence`: 2 modules" in text and "| LSTM 3x2x8x8 | float32 | cpu_sequence |" in text


def test_every_module_of_the_grid_is_compiled_once():
    import compile_times
    import grid

    found = [row.file for row in compile_times.modules()]
    assert len(found) == len(set(found)) == len({row.file for row in grid.rows()}) == 109
