"""What results add to a report: other libraries and measured stages, of the same layer on the same device alone."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from test_report import logged, trial

from ecornn.bench.grid import Case
from ecornn.bench.results import CsvFile, Row
from ecornn.bench.turns import Times
from ecornn.cli import main
from ecornn.errors import ArgumentError
from ecornn.report import page
from ecornn.report.measured import measured
from ecornn.tune.record import Trial
from ecornn.workload import Workload


def timed(**changes: object) -> Trial:
    return trial(0, 4.0, **changes)


def row(work: Workload, device: str, **us: float) -> Row:
    """Of `ecornn bench`, at these medians."""
    case = Case(cell=work.cell, hidden=work.hidden, batch=work.batch, seq=work.seq, dtype=work.dtype)
    return Row(case=case, command="", device=device, workload=work, seq=work.seq, batch=work.batch,
               us_per_step={side: Times.of([value * work.seq / 1e6], work.seq) for side, value in us.items()})


def test_rows_of_bench_are_those_of_their_layer_alone(tmp_path: Path):
    one = timed()
    same = row(one.workload, one.device.name, ecornn=4.0, torch=9.0, cudnn=6.0)
    (tmp_path / "one.json").write_bytes(msgspec.json.encode(same))
    with (tmp_path / "several.csv").open("w", newline="") as file:
        CsvFile(file).add(same)
    for name in ("one.json", "several.csv"):
        found = measured([tmp_path / name])
        assert list(found.peers(one).items()) == [("cudnn", pytest.approx(6.0)), ("torch", pytest.approx(9.0))]
        for what in ("hidden", "batch", "seq", "input"):
            other = msgspec.structs.replace(one.workload, **{what: 16})
            assert not found.peers(timed(workload=other)), what
        assert not found.peers(timed(device=msgspec.structs.replace(one.device, name="another")))


def test_training_and_stacks_are_other_layers(tmp_path: Path):
    one = timed()
    for change in ({"training": True}, {"layers": 2}, {"bidirectional": True}):
        same = row(one.workload, one.device.name, torch=9.0)
        same.case = msgspec.structs.replace(same.case, **change)
        (tmp_path / "x.json").write_bytes(msgspec.json.encode(same))
        with (tmp_path / "x.csv").open("w", newline="") as file:
            CsvFile(file).add(same)
        for name in ("x.json", "x.csv"):
            with pytest.raises(ArgumentError, match="with times of single layers"):
                measured([tmp_path / name])


def grid_line(one: Trial, dtype: str = "float32", **more: object) -> str:
    work = one.workload
    return json.dumps({"row": {"cell": work.cell, "T": work.seq, "B": work.batch, "I": work.input, "H": work.hidden,
                               "dtype": dtype, "schedule": one.schedule, "config": sorted(one.config.items()), **more}})


def test_stages_are_those_of_the_same_configuration(tmp_path: Path):
    one = timed()
    path = tmp_path / "reasons.jsonl"
    path.write_text("\n".join([json.dumps({"environment": {"gpu": one.device.name}}), grid_line(
        one, stages={"gate math": 0.5, "projection": -0.1, "exchange": 2.0, "products": 1.5}, cudnn_us=7.0)]))
    found = measured([path])
    assert found.stages(one) == {"gates": 0.5, "product of x": 0.0, "exchange": 2.0, "products": 1.5}
    assert not found.stages(timed(config={"a": 7})) and found.peers(timed(config={"a": 7})) == {"cudnn": 7.0}
    text = page.render(logged(one), results=found)
    assert "cuDNN takes 1.75 times" in text and "Stages were measured" in text and "reasons.jsonl" in text
    assert "exchange: 2 µs" in text and "takes 1.75" not in page.render(logged(one))
    path.write_text(grid_line(one, "tf32", cudnn_us=7.0))  # the library rounds, ours does not
    with pytest.raises(ArgumentError, match="with times of single layers"):
        measured([path])


def test_the_command_takes_them_or_says_what_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = timed()
    log, path = tmp_path / "x.jsonl", tmp_path / "r.json"
    log.write_bytes(msgspec.json.encode(one) + b"\n")
    path.write_bytes(msgspec.json.encode(row(one.workload, one.device.name, onnxruntime=8.0)))
    words = ["report", str(log), "-o", str(tmp_path / "r.html"), "--results"]
    done = CliRunner().invoke(main, [*words, str(path)], catch_exceptions=False)
    assert done.exit_code == 0 and "ONNX Runtime takes 2.00 times" in (tmp_path / "r.html").read_text()
    for junk in ("[", "[1]", "{}", '[{"a": 1}]'):
        path.write_text(junk)
        done = CliRunner().invoke(main, [*words, str(path)], catch_exceptions=False)
        assert done.exit_code == 2 and "error: " in done.output, junk
    (tmp_path / "r.jsonl").write_text("junk\n")
    done = CliRunner().invoke(main, [*words, str(tmp_path / "r.jsonl")], catch_exceptions=False)
    assert done.exit_code == 2 and "r.jsonl:1" in done.output


def test_some_layers_alone(tmp_path: Path):
    one = timed()
    other = timed(run="cd-1", workload=msgspec.structs.replace(one.workload, hidden=16, input=16))
    log, out = tmp_path / "x.jsonl", tmp_path / "r.html"
    log.write_bytes(b"\n".join(msgspec.json.encode(t) for t in (one, other)) + b"\n")
    words = ["report", str(log), "-o", str(out), "--only"]
    assert CliRunner().invoke(main, [*words, "H=16"], catch_exceptions=False).exit_code == 0
    assert str(other.workload) in out.read_text() and str(one.workload) not in out.read_text()
    done = CliRunner().invoke(main, [*words, "H=17"], catch_exceptions=False)
    assert done.exit_code == 2 and str(other.workload) in done.output
