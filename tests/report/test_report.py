"""The page of a tuning log, and its pictures: what they show is the log's and the code's, and can be read on phones."""

import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import chromium
import msgspec
import numpy as np
import pytest
import site_step
from refusals import refused
from test_cli import ended
from test_readable import CASES, kernels, made, notes, text_of

from ecornn import svg
from ecornn.bench import turns
from ecornn.bench.grid import Case
from ecornn.bench.results import CsvFile, Row
from ecornn.device import Device
from ecornn.errors import ArgumentError
from ecornn.explain import summary
from ecornn.report import page
from ecornn.report.measured import measured
from ecornn.report.of_log import cut_of, effects, explained, layers, marked, searches, stages_of, task_of, teraflops
from ecornn.report.page import TERMS, chip_map, chip_words, rooflines
from ecornn.report.roles import Kernel, kernel_of, picture
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Cut
from ecornn.tune.log import Line, Log, gain_of, read, shipped_folder
from ecornn.tune.lookup import up_to_date
from ecornn.tune.record import Choice, Finish, Times, Trial
from ecornn.workload import Workload

HOSTILE = "</code><script>alert(1)</script>"
NO_RESULTS = "with times of single layers"


@pytest.fixture(scope="module")
def shipped() -> Log:
    log = read(shipped_folder() / "h100.jsonl.xz")
    return Log([line for line in log.lines if isinstance(line.record, Trial | Finish)
                and (isinstance(line.record, Finish) or line.record.workload.cell == "rnn_tanh")])


class Balanced(HTMLParser):
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


def parsed(text: str) -> set[str]:
    found = Balanced()
    found.feed(text)
    assert not found.open
    return found.names


def trial(index: int = 0, us: float = 4.0, **changes: object) -> Trial:
    fields = {"run": "ab-1", "index": index, "stage": "search", "workload": Workload("lstm", 8, 8, 2, 5, "float32"),
              "device": Device("llvm", "znver4", "CPU", 4), "schedule": "no_more", "revision": 1, "generation": 0,
              "config": {"a": index % 2}, "versions": {"ecornn": "0"},
              "seed": 0, "seconds": 1.0, "times": Times.of([us]), "check": 1e-7}
    return Trial(**{**fields, **changes})


def logged(*records: Trial | Finish) -> Log:
    return Log([Line(Path("x.jsonl"), number, record) for number, record in enumerate(records, 1)])


def reported(*words: object, code: int = 0) -> str:
    return ended("report", *words, code=code).output


def lines_of(*records: Trial) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def test_a_page_of_what_ships(shipped):
    text = page.render(shipped, most=2)
    names = parsed(text)
    assert "svg" in names and not {"script", "link", "img", "iframe"} & names
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
    assert run.best.times.median == 2.5 and run.default.times.median == 5.0 and gain_of(run).ratio == 2.0
    assert run.failures == [("run: wrong output", 1)]
    (effect,) = effects(run, None)
    assert [(v.value, v.fastest, v.median, v.chosen) for v in effect.values] == [
        (0, 4.0, 4.0, False), (1, 2.0, 2.5, True)]


def test_the_bottom_line_is_the_gain_of_all_searches(tmp_path: Path):
    def run(name: str, default: float, best: float, finished: bool = True) -> list[Trial | Finish]:
        trials = [trial(n, us, stage=stage, config={"a": n}, run=name) for stage in ("search", "final")
                  for n, us in enumerate((default, best))]
        end = Finish(run=name, reason="time", trials=2, seconds=1.0, best=Choice("no_more", {"a": int(best < default)}),
                     best_us=min(best, default), default=Choice("no_more", {"a": 0}), default_us=default)
        return [*trials, *[end] * finished]

    one = searches(logged(*run("ab-1", 4.0, 2.0)))
    assert page.bottom_line(one) == "2.00 times as fast as the untuned default"
    peers = measured(written(tmp_path, row(trial().workload, trial().device.name, torch=9.0, cudnn=6.0)))
    assert page.bottom_line(one, peers).endswith("default and 3.00 times as fast as the fastest other library")
    three = searches(logged(*run("ab-1", 4.0, 2.0), *run("ab-2", 4.0, 5.0), *run("ab-3", 9.0, 1.0, finished=False)))
    assert page.bottom_line(three) == "1.41 times (geometric mean of 2, 1.00 to 2.00) as fast as the untuned default"
    assert "What was found is 2.00 times" in page.render(logged(*run("ab-1", 4.0, 2.0)))
    assert "What was found" not in page.render(logged(trial(0, 4.0)))


def test_a_run_whose_best_trial_is_gone_shows_the_fastest_that_is_left():
    """As in a log that was pruned, or merged from parts."""
    gone = Finish(run="ab-1", reason="trials", trials=9, seconds=2.0, best=Choice("no_more", {"a": 7}), best_us=1.5,
                  default=Choice("no_more", {"a": 8}), default_us=5.0)
    log = logged(trial(0, 4.0), trial(1, 2.0), gone)
    assert searches(log)[0].best.times.median == 2.0 and "2 µs a step" in page.render(log)


def test_the_share_of_a_knob_is_that_of_an_analysis_of_variance():
    rng = np.random.default_rng(0)
    groups = [list(np.exp(rng.normal(mean, 0.3, 50))) for mean in (0.0, 0.5, 1.5)]
    means = np.repeat([np.log(g).mean() for g in groups], 50)
    assert explained(groups) == pytest.approx(np.var(means) / np.var(np.log(groups)), rel=1e-9)
    assert explained([[2.0, 2.0], [2.0]]) == 0.0


def test_operations_of_a_step_are_counted():
    one = trial(0, 10.0, workload=Workload("lstm", 64, 32, 4, 10, "float32"))
    assert teraflops(one, summary(task_of(one))) == pytest.approx(2 * 4 * (4 * 64 * 64 + 4 * 64 * 32) / 10e-6 / 1e12)


def test_names_in_a_log_are_no_markup():
    named = trial(0, 4.0, config={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE}, schedule=HOSTILE,
                  device=msgspec.structs.replace(trial(0, 1.0).device, name=HOSTILE), times=Times.of([4.0]))
    other = msgspec.structs.replace(named, index=1, config={HOSTILE: "b"}, times=Times.of([5.0]))
    failed = msgspec.structs.replace(named, index=2, times=None, error=HOSTILE)
    text = page.render(replace(logged(named, other, failed), problems=[HOSTILE]), title=HOSTILE)
    assert "script" not in parsed(text) and "&lt;script&gt;" in text


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
    assert parsed(out.read_text()) >= {"section", "svg"}
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install 'jinja2>=3.1'" in reported("-o", out, code=2)


def row(work: Workload, device: str, **us: float) -> Row:
    case = Case(cell=work.cell, hidden=work.hidden, batch=work.batch, seq=work.seq, dtype=work.dtype)
    return Row(case=case, command="", device=device, workload=work, seq=work.seq, batch=work.batch,
               us_per_step={side: turns.Times.of([value * work.seq / 1e6], work.seq) for side, value in us.items()})


def written(folder: Path, one: Row) -> list[Path]:
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
            assert not found.peers(trial(workload=msgspec.structs.replace(one.workload, **{what: 16}))), what
        assert not found.peers(trial(device=msgspec.structs.replace(one.device, name="another")))


@pytest.mark.parametrize("change", [{"training": True}, {"layers": 2}, {"bidirectional": True}], ids=str)
def test_training_and_stacks_are_other_layers(tmp_path: Path, change: dict[str, object]):
    one = row(trial().workload, trial().device.name, torch=9.0)
    one.case = msgspec.structs.replace(one.case, **change)
    for path in written(tmp_path, one):
        refused(ArgumentError, NO_RESULTS, measured, [path])


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
    refused(ArgumentError, NO_RESULTS, measured, [path])


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


STYLE = (Path(page.__file__).with_name("page.html")).read_text()
PHONE = 390 - 2 * (10 + 11 + 1)  # px of a picture on a phone: paddings of page and section, and a border
FONT = 12  # of the page's svg rule
LETTER = 0.56  # of the font's size, in the mean: Segoe, Roboto, SF and Helvetica have 0.5 to 0.55

laid_out = pytest.mark.skipif(chromium.program() is None, reason="no Chromium: neither report nor site is laid out")


def boxes(picture: str) -> Iterator[tuple[str, float, float, float, float]]:
    for one in ET.fromstring(picture).iter("text"):
        if one.get("x") is not None:
            x, y, words = float(one.get("x", 0)), float(one.get("y", 0)), one.text or ""
            width = LETTER * FONT * len(words)
            left = x - width * {"start": 0, "middle": 0.5, "end": 1}[one.get("text-anchor", "start")]
            yield words, left, y - 0.75 * FONT, left + width, y + 0.2 * FONT


def readable(picture: str) -> None:
    _, _, width, height = map(float, ET.fromstring(picture).get("viewBox", "").split())
    found = list(boxes(picture))
    for words, left, top, right, bottom in found:
        assert left >= -1 and top >= -1 and right <= width + 1 and bottom <= height + 1, f"{words} leaves the picture"
    for n, (words, left, top, right, bottom) in enumerate(found):
        for other, a, b, c, d in found[:n]:
            assert right <= a or c <= left or bottom <= b or d <= top, f"{words!r} covers {other!r}"


def test_words_can_be_read_on_a_phone(shipped):
    assert f"font: {FONT}px" in STYLE.split("\nsvg {")[1].split("}")[0]
    assert FONT * PHONE / svg.WIDTH >= 10  # px there
    pictures = re.findall(r"<svg.*?</svg>", page.render(shipped, most=5), re.DOTALL)
    assert len(pictures) > 30
    for each in pictures:
        readable(each)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[n:n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_from_the_paper(theme):
    """WCAG 2: 4.5 for words, which names of lines are, too."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    of = dict(re.findall(r"--(\w+): (#\w+)", light if theme == "light" else dark.split("} }")[0]))
    for paper in ("paper", "card"):
        for name in ("ink", "soft", "blue", "orange", *(f"c{n}" for n in range(6))):
            bright, dim = sorted((luminance(of[paper]), luminance(of[name])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (name, paper)


def test_stages_are_those_of_the_estimate(shipped):
    """Their sum is the estimate, where nothing runs beside the recurrence; all of a search's configurations."""
    seen = set()
    for run in searches(shipped):
        task = task_of(run.search[0])
        for one in run.search:
            schedule, stages = all_schedules()[one.schedule], stages_of(one, task)
            if stages and "hoisted" in one.config and one.config.get("ahead", 100) == 100:
                assert set(stages) <= set(TERMS) and all(us >= 0 for us in stages.values())
                more = schedule.features(task, schedule.plan(task, one.config))["estimate"] / 1e3
                gained = sum(stages.values()) - more  # by hoisted values of 16 bits, which the estimate takes off
                if one.config["hoisted"] == "float32":
                    assert sum(stages.values()) == pytest.approx(more, rel=1e-9), one
                    seen.add((one.schedule, one.config.get("carrier")))
                else:
                    assert gained >= -1e-9
    assert {name for name, _ in seen} >= {"persistent"} and ("persistent", "cluster") in seen


def test_a_map_has_each_multiprocessor_once(shipped):
    maps = 0
    for run in searches(shipped):
        task, best = task_of(run.best), run.best
        cut = cut_of(best, task)
        if cut is None:
            continue
        maps += 1
        kinds = [one.get("class") for one in ET.fromstring(chip_map(cut, best.device)).iter("rect")]
        assert len(kinds) == best.device.cores
        assert sum(kind.startswith("fill") for kind in kinds) == cut.groups * cut.blocks
        assert cut.groups // cut.heads * cut.rows >= best.workload.batch
        whole = task.workload.hidden ** 2 * {"float32": 4}.get(task.workload.dtype, 2)  # rnn_tanh: one matrix
        assert whole <= cut.blocks * sum(cut.held.values()) < 2 * whole + cut.blocks * 16 * 1024
        assert f"{cut.rows} row" in chip_words(cut, best.device)
    assert maps > 20


def test_lines_of_code_are_marked_by_the_knobs_that_make_them(shipped):
    run = next(run for run in searches(shipped) if run.best and run.best.schedule == "persistent")
    task, schedule = task_of(run.best), all_schedules()["persistent"]
    found, config = marked(run.best, task), up_to_date(run.best, schedule, task).config
    functions = schedule.program(task, schedule.plan(task, config)).functions
    assert "\n".join(text for text, _ in found.lines) == functions[found.name].script()
    assert set(found.others) | set(found.alone) == set(config) and {"units", "warps"} <= set(found.others)
    for knob, value in found.others.items():
        functions = schedule.program(task, schedule.plan(task, {**config, knob: value})).functions
        rest = iter(line.strip() for line in functions[found.name].script().splitlines())
        kept = [text.strip() for text, knobs in found.lines if knob not in knobs]
        assert all(line in rest for line in kept) and len(kept) > 20
    assert any("units" in knobs for _, knobs in found.lines)
    assert marked(msgspec.structs.replace(run.best, schedule="no_more"), task) is None


def test_words_of_a_map():
    device = Device("cuda", "sm_90a", "NVIDIA H100 80GB HBM3", 132)
    said = chip_words(Cut(1, 130, 8, 1, "L2", {"registers": 2048, "shared memory": 0}, workers=1), device)
    assert "1 row of" in said and "the 129 others" in said and "1 blocks multiply x" in said and "1 idle" in said
    assert "2 KiB in registers." in said and "shared memory" not in said
    alone = chip_words(Cut(4, 1, 8, 2, "cluster", {"registers": 1024}), device)
    assert "No block waits" in alone and "4 groups" in alone


def test_rooflines_are_of_gpus_whose_rates_are_known(shipped):
    pictures = dict(rooflines(layers(shipped)))
    assert any(name.startswith("bfloat16 on NVIDIA H100") for name in pictures)
    assert all("tensor cores" in picture and "TFLOP/s" in picture for picture in pictures.values())
    assert rooflines(layers(logged(trial(0, 4.0, schedule="cpu_sequence")))) == [] == rooflines(layers(Log()))


@laid_out
def test_the_report(shipped: Log, tmp_path: Path):
    (tmp_path / "report.html").write_text(page.render(shipped, most=4))
    found = chromium.looked(tmp_path, ["report.html"])
    assert {one["width"] for one in found} == set(chromium.WIDTHS)
    chromium.fits(found)


PERSISTENT = [name for name, case in CASES.items() if case[0].startswith("persistent")]
ROLES = {"persistent": {"MMA warps", "gate warps", "projection CTAs"}, "persistent_block": {"all warps"},
         "persistent_wide": {"producer", "MMA warpgroups"}}


def kernel(name: str) -> Kernel:
    found = kernel_of(made(name)[1].functions)
    assert found is not None
    return found


@pytest.mark.parametrize("name", PERSISTENT)
def test_each_note_of_a_step_is_in_the_picture(name: str):
    """Notes of the text that people read, from the indentation of the loop over steps on."""
    own, drawn = kernel(name), picture(kernel(name))
    readable(drawn)
    words = " ".join(text.text or "" for text in ET.fromstring(drawn).iter("text"))
    assert {role.name for role in own.roles} <= ROLES[own.name]
    for note in notes(kernels(text_of(name))[own.name]):
        if "no thread leaves" not in note:  # behind the last step
            assert re.sub(r"^[\w ]+?(, \w+)?: ", "", note) in words, note


def test_roles_are_those_of_the_plan():
    own = {role.name: role for role in kernel("workers").roles}
    text = kernels(text_of("workers"))["persistent"]
    bounds = [int(n) for n in re.findall(r"if \(thread < (\d+)\) \{", text)]
    assert own["MMA warps"].threads == bounds[0] and own["MMA warps"].threads + own["gate warps"].threads == bounds[1]
    blocks = int(re.findall(r"if \(block < (\d+)\)", text)[0])
    assert own["gate warps"].blocks == own["MMA warps"].blocks == blocks
    assert own["projection CTAs"].blocks == kernel("workers").blocks - blocks > 0


def acts(name: str, role: str) -> list[tuple[str, str]]:
    return [(act.kind, act.words) for one in kernel(name).roles if one.name == role for phase in one.steps
            for act in phase.acts if act.kind != "note"]


def test_what_warps_wait_for_and_send():
    barrier = ("wait", "named barrier of 128 threads")
    assert acts("l2", "MMA warps") == [("wait", "polls exchange_0 in L2"), ("multiply", "mma m16n8k16"), barrier]
    assert acts("l2", "gate warps") == [barrier, ("send", "to exchange_0 in L2")]
    assert acts("cluster", "gate warps") == [barrier, ("send", "to the shared memory of the cluster's CTAs")]
    assert acts("workers", "gate warps")[-1] == ("wait", "polls ready in L2")
    assert ("wait", "polls counters in L2") in acts("wide", "producer")
    assert ("send", "counts in counters in L2") in acts("wide", "MMA warpgroups")
    for name in PERSISTENT:  # as often as the text has it
        text = kernels(text_of(name))[kernel(name).name]
        phases = [phase for role in kernel(name).roles for phase in role.phases]
        waits = [act for phase in phases for act in phase.acts if act.kind == "wait"]
        assert any("named barrier" in act.words for act in waits) == ("ptx_bar_sync" in text)
        assert any("polls" in act.words for act in waits) == bool(re.search("ptx_ld_.*(relaxed|acquire)", text))
        assert any("mbarrier" in act.words for act in waits) == ("ecornn_mbarrier_wait" in text)


def test_lanes_meet_and_what_is_sent_arrives():
    drawn = picture(kernel("statistics"))
    meets = {float(d) for d in re.findall(r'class="meets" d="M0 ([\d.]+)H', drawn)}
    assert len(meets) == 2 and drawn.count('class="sent"') == 1 and picture(kernel("l2")).count('class="meets"') == 1
    assert 'class="meets"' not in picture(kernel("mma"))  # one role


@pytest.mark.parametrize("name", ["elementwise", "fused_step", "whole_step"])
def test_where_each_step_is_a_launch_there_is_none(name: str):
    assert kernel_of(made(name)[1].functions) is None


def test_the_picture_of_the_docs_is_that_of_the_code():
    """``python docs/site/site_step.py`` writes it."""
    assert site_step.IMAGE.read_text(encoding="utf-8") == site_step.picture()
