"""The page of a tuning log: what it shows is what the log has, nothing is loaded, no name in a log is markup; and what
results add to it, which are of the same layer on the same device alone."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from ecornn.bench import turns
from ecornn.bench.grid import Case
from ecornn.bench.results import CsvFile, Row
from ecornn.cli import main
from ecornn.device import Device
from ecornn.errors import ArgumentError
from ecornn.report import page, svg
from ecornn.report.layers import layers, step_of, task_of, teraflops
from ecornn.report.measured import measured
from ecornn.report.searches import effects, explained, searches
from ecornn.tune.log import Line, Log, read, shipped_folder
from ecornn.tune.record import Choice, Finish, Times, Trial
from ecornn.workload import Workload

HOSTILE = "</code><script>alert(1)</script>"
NO_RESULTS = "with times of single layers"


@pytest.fixture(scope="module")
def shipped() -> Log:
    """A few layers of an H100."""
    log = read(shipped_folder() / "h100.jsonl.xz")
    return Log([line for line in log.lines if isinstance(line.record, Trial | Finish)
                and (isinstance(line.record, Finish) or line.record.workload.cell == "rnn_tanh")])


class Balanced(HTMLParser):
    """Fails on tags that do not match; ``names`` are all tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.names.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Balanced:
    found = Balanced()
    found.feed(text)
    assert not found.open
    return found


def trial(index: int = 0, us: float = 4.0, **changes: object) -> Trial:
    fields = {"run": "ab-1", "index": index, "stage": "search", "workload": Workload("lstm", 8, 8, 2, 5, "float32"),
              "device": Device("llvm", "znver4", "CPU", 4), "schedule": "no_more", "revision": 1, "generation": 0,
              "config": {"a": index % 2}, "versions": {"ecornn": "0"},
              "seed": 0, "seconds": 1.0, "times": Times.of([us]), "check": 1e-7}
    return Trial(**{**fields, **changes})


def logged(*records: Trial | Finish) -> Log:
    return Log([Line(Path("x.jsonl"), number, record) for number, record in enumerate(records, 1)])


def reported(*words: object, code: int = 0) -> str:
    """The output of ``ecornn report``, which ends with ``code``."""
    done = CliRunner().invoke(main, ["report", *map(str, words)])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done.output


def lines_of(*records: Trial) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def test_a_page_of_what_ships(shipped):
    text = page.render(shipped, most=2)
    found = parsed(text)
    assert "svg" in found.names and not {"script", "link", "img", "iframe"} & found.names
    assert not re.search(r"https?://|url\(|@import|src=", text)
    run = searches(shipped)[0]
    assert f"{run.best.times.median:.4g} µs a step" in text and str(run.best.workload) in text
    assert text.count("<section ") == 2 and "The latest 2 of " in text and "Time of a step by size" in text
    assert "explains " in text and "of what the cost model gains" in text and "against the floor" in text
    assert "Map of the chip" in text and 'class="made"' in text


def test_a_search_is_told_as_it_went():
    finish = Finish(run="ab-1", reason="time", trials=4, seconds=2.0, best=Choice("no_more", {"a": 1}), best_us=2.5,
                    default=Choice("no_more", {"a": 0}), default_us=5.0)
    (run,) = searches(logged(
        trial(0, 4.0), trial(1, 2.0), trial(2, 9.0, times=None, error="run: wrong output\nmore"), trial(3, 3.0),
        trial(4, 2.5, stage="final", config={"a": 1}), trial(5, 5.0, stage="final", config={"a": 0}), finish))
    assert run.curve() == [(1, 4.0, 4.0), (2, 2.0, 2.0), (4, 3.0, 2.0)]
    assert run.best.times.median == 2.5 and run.default.times.median == 5.0 and run.gain.ratio == 2.0
    assert run.failures == [("run: wrong output", 1)]
    (effect,) = effects(run, None)
    assert [(v.value, v.fastest, v.median, v.chosen) for v in effect.values] == [
        (0, 4.0, 4.0, False), (1, 2.0, 2.5, True)]


def test_a_run_whose_best_trial_is_gone_shows_the_fastest_that_is_left():
    """As in a log that was pruned, or merged from parts."""
    gone = Finish(run="ab-1", reason="trials", trials=9, seconds=2.0, best=Choice("no_more", {"a": 7}), best_us=1.5,
                  default=Choice("no_more", {"a": 8}), default_us=5.0)
    log = logged(trial(0, 4.0), trial(1, 2.0), gone)
    assert searches(log)[0].best.times.median == 2.0
    assert "2 µs a step" in page.render(log)


def test_the_share_of_a_knob_is_that_of_an_analysis_of_variance():
    rng = np.random.default_rng(0)
    groups = [list(np.exp(rng.normal(mean, 0.3, 50))) for mean in (0.0, 0.5, 1.5)]
    means = np.repeat([np.log(g).mean() for g in groups], 50)
    assert explained(groups) == pytest.approx(np.var(means) / np.var(np.log(groups)), rel=1e-9)
    assert explained([[2.0, 2.0], [2.0]]) == 0.0


def test_operations_of_a_step_are_counted():
    one = trial(0, 10.0, workload=Workload("lstm", 64, 32, 4, 10, "float32"))
    found = step_of(task_of(one))
    assert teraflops(one, found) == pytest.approx(2 * 4 * (4 * 64 * 64 + 4 * 64 * 32) / 10e-6 / 1e12)


def test_names_in_a_log_are_no_markup():
    named = trial(0, 4.0, config={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE}, schedule=HOSTILE,
                  device=msgspec.structs.replace(trial(0, 1.0).device, name=HOSTILE), times=Times.of([4.0]))
    other = msgspec.structs.replace(named, index=1, config={HOSTILE: "b"}, times=Times.of([5.0]))
    failed = msgspec.structs.replace(named, index=2, times=None, error=HOSTILE)
    text = page.render(replace(logged(named, other, failed), problems=[HOSTILE]), title=HOSTILE)
    assert "script" not in parsed(text).names and "&lt;script&gt;" in text


def test_axes_have_round_marks_within():
    for low, high in ((0.93, 1.07), (1e-3, 5e4), (976.5, 3436.0), (3.0, 3.0)):
        axis = svg.Axis.of([low, high], 0, 100, log=True)
        marks = axis.ticks()
        assert 2 <= len(marks) <= 10 and all(axis.low <= m <= axis.high for m in marks), (low, high, marks)
        assert axis(axis.low) == 0 and axis(axis.high) == 100 and axis(math.sqrt(axis.low * axis.high)) == 50
    places = svg.beside([100, 101, 102, 5, 260, 261])
    assert all(abs(a - b) >= 13.9 for i, a in enumerate(places) for b in places[:i])
    assert all(0 < p < svg.HEIGHT for p in places)


def test_layers_have_floors_where_a_gpu_is_known(shipped):
    found = layers(shipped)
    assert len(found) > 10 and all(one.floor and one.floor.total_us > 0 for one in found)
    assert [one.floor for one in layers(logged(trial(0, 4.0, schedule="cpu_sequence")))] == [None]


def test_the_command_writes_a_page_or_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    out = tmp_path / "pages" / "r.html"
    assert "`ecornn tune` makes one" in reported("-o", out, code=2)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.jsonl").write_bytes(lines_of(trial()))
    reported("-o", out)
    assert parsed(out.read_text()).names >= {"section", "svg"}
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install 'jinja2>=3.1'" in reported("-o", out, code=2)


def row(work: Workload, device: str, **us: float) -> Row:
    """Of `ecornn bench`, at these medians."""
    case = Case(cell=work.cell, hidden=work.hidden, batch=work.batch, seq=work.seq, dtype=work.dtype)
    return Row(case=case, command="", device=device, workload=work, seq=work.seq, batch=work.batch,
               us_per_step={side: turns.Times.of([value * work.seq / 1e6], work.seq) for side, value in us.items()})


def written(folder: Path, one: Row) -> list[Path]:
    """Files of each kind that have this row."""
    paths = [folder / "one.json", folder / "several.csv"]
    paths[0].write_bytes(msgspec.json.encode(one))
    with paths[1].open("w", newline="") as file:
        CsvFile(file).add(one)
    return paths


def test_rows_of_bench_are_those_of_their_layer_alone(tmp_path: Path):
    one = trial()
    for path in written(tmp_path, row(one.workload, one.device.name, ecornn=4.0, torch=9.0, cudnn=6.0)):
        found = measured([path])
        assert list(found.peers(one).items()) == [("cudnn", pytest.approx(6.0)), ("torch", pytest.approx(9.0))]
        for what in ("hidden", "batch", "seq", "input"):
            other = msgspec.structs.replace(one.workload, **{what: 16})
            assert not found.peers(trial(workload=other)), what
        assert not found.peers(trial(device=msgspec.structs.replace(one.device, name="another")))


@pytest.mark.parametrize("change", [{"training": True}, {"layers": 2}, {"bidirectional": True}], ids=str)
def test_training_and_stacks_are_other_layers(tmp_path: Path, change: dict[str, object]):
    one = row(trial().workload, trial().device.name, torch=9.0)
    one.case = msgspec.structs.replace(one.case, **change)
    for path in written(tmp_path, one):
        with pytest.raises(ArgumentError, match=NO_RESULTS):
            measured([path])


def grid_line(one: Trial, dtype: str = "float32", **more: object) -> str:
    work = one.workload
    return json.dumps({"row": {"cell": work.cell, "T": work.seq, "B": work.batch, "I": work.input, "H": work.hidden,
                               "dtype": dtype, "schedule": one.schedule, "config": sorted(one.config.items()), **more}})


def test_stages_are_those_of_the_same_configuration(tmp_path: Path):
    one, other, path = trial(), trial(config={"a": 7}), tmp_path / "reasons.jsonl"
    path.write_text("\n".join([json.dumps({"environment": {"gpu": one.device.name}}), grid_line(
        one, stages={"gate math": 0.5, "projection": -0.1, "exchange": 2.0, "products": 1.5}, cudnn_us=7.0)]))
    found = measured([path])
    assert found.stages(one) == {"gates": 0.5, "product of x": 0.0, "exchange": 2.0, "products": 1.5}
    assert not found.stages(other) and found.peers(other) == {"cudnn": 7.0}
    text = page.render(logged(one), results=found)
    assert "cuDNN takes 1.75 times" in text and "Stages were measured" in text and "reasons.jsonl" in text
    assert "exchange: 2 µs" in text and "takes 1.75" not in page.render(logged(one))
    path.write_text(grid_line(one, "tf32", cudnn_us=7.0))  # the library rounds, ours does not
    with pytest.raises(ArgumentError, match=NO_RESULTS):
        measured([path])


def test_the_command_takes_them_or_says_what_is_no_result(tmp_path: Path):
    one, log, out, path = trial(), tmp_path / "x.jsonl", tmp_path / "r.html", tmp_path / "r.json"
    log.write_bytes(lines_of(one))
    path.write_bytes(msgspec.json.encode(row(one.workload, one.device.name, onnxruntime=8.0)))
    reported(log, "-o", out, "--results", path)
    assert "ONNX Runtime takes 2.00 times" in out.read_text()
    for junk in ("[", "[1]", "{}", '[{"a": 1}]'):
        path.write_text(junk)
        assert "error: " in reported(log, "-o", out, "--results", path, code=2), junk
    (tmp_path / "r.jsonl").write_text("junk\n")
    assert "r.jsonl:1" in reported(log, "-o", out, "--results", tmp_path / "r.jsonl", code=2)


def test_some_layers_alone(tmp_path: Path):
    one, log, out = trial(), tmp_path / "x.jsonl", tmp_path / "r.html"
    other = trial(run="cd-1", workload=msgspec.structs.replace(one.workload, hidden=16, input=16))
    log.write_bytes(lines_of(one, other))
    reported(log, "-o", out, "--only", "H=16")
    assert str(other.workload) in out.read_text() and str(one.workload) not in out.read_text()
    assert str(other.workload) in reported(log, "-o", out, "--only", "H=17", code=2)
