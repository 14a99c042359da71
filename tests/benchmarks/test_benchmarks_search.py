"""The benchmarks of the search, with builds and measurements that sleep."""

import json
import lzma
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import search_quality
import search_rate
import search_tables
from rooms import ROOT

from ecornn.device import Device
from ecornn.schedules.base import Task
from ecornn.tune import session as sessions
from ecornn.tune.building import Build
from ecornn.tune.log import parse, read
from ecornn.tune.pool import Entries, Pool
from ecornn.tune.record import Choice
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.worker import Worker

H100 = search_tables.resolve("sm_90a")
ENTRIES = Entries("search_rate:nothing", "search_rate:pretended_build", "search_rate:nothing",
                  "search_rate:pretended_measure")
SMALL = ["lstm:64:2:10:bfloat16", "gru:64:1:10:float16"]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv(search_rate.PRETEND, json.dumps([0.01, 0.002]))
    monkeypatch.setattr(sessions, "present", lambda target: H100)
    class Pretended(sessions.Session):
        def __init__(self, target: str, **options: float) -> None:
            super().__init__(target, entries=ENTRIES, **options)
            self._pool = Pool(ENTRIES, 2, poisoned=True)
    monkeypatch.setattr(sessions, "Session", Pretended)


def space_of(text: str, device: Device = H100) -> ConfigSpace:
    return ConfigSpace(*search_tables.task_of(search_tables.workload_of(text), device))


def test_the_workloads_are_spread():
    works = {search_tables.workload_of(text) for text in search_tables.WORKLOADS["cuda"]}
    cells, dtypes, hidden, batches = ({getattr(w, of) for w in works} for of in ("cell", "dtype", "hidden", "batch"))
    assert len(works) == 12 and cells == {"lstm", "gru", "rnn_tanh", "rnn_relu"}
    assert dtypes == {"bfloat16", "float16", "float32"}
    assert (min(hidden), max(hidden), min(batches), max(batches)) == (128, 2816, 1, 128)


def test_a_table_is_a_prefix_of_one_uniform_order():
    space = space_of(SMALL[0])
    short, long = search_tables.first(space, 50), search_tables.first(space, 400)
    assert long[:50] == short and len(set(long)) == 400
    assert long[:len(space.defaults())] == space.defaults() and all(space.fits(c) for c in long)
    for name, numbers in space.fitting.items():  # four standard deviations of a binomial
        share, drawn = len(numbers) / len(space), sum(c.schedule == name for c in long)
        assert abs(drawn - 400 * share) <= 4 * (400 * share * (1 - share)) ** 0.5 + 1
    whole = search_tables.first(space, 10**9)
    assert len(whole) == len(space) and set(whole) == set(space.listing())


def test_a_list_is_built_whatever_the_order_of_its_knobs(pretended, tmp_path, monkeypatch):
    path, wanted, asked, call = tmp_path / "set.jsonl", set(), set[bytes](), Worker.call
    def watched(self: Worker, function: str, argument: Any, *rest: Any) -> Any:
        if isinstance(argument, Build):
            asked.add(msgspec.json.encode(msgspec.structs.replace(argument, out="")))
        return call(self, function, argument, *rest)
    monkeypatch.setattr(Worker, "call", watched)
    for text in SMALL:
        work, given = search_tables.workload_of(text), search_tables.first(space_of(text), 6)
        choices = tuple(Choice(c.schedule, dict(reversed(c.knobs))) for c in given)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(search_tables.Item(text, choices)) + b"\n")
        wanted |= {msgspec.json.encode(Build(work.cell, work, H100, c.schedule, c.config, "")) for c in given}
    search_tables.run(path, 60.0, 2, 60.0)
    assert len(wanted) == 12 and asked == wanted


@pytest.mark.exhaustive
def test_searches_are_replayed_on_tables_that_were_measured(pretended, tmp_path, monkeypatch):
    listed, path, output = (tmp_path / name for name in ("list.jsonl", "table.jsonl", "quality"))
    search_tables.write_list(listed, SMALL, H100, 48)
    search_tables.run(listed, 1e6, 2, 60.0)
    path.write_bytes(b"".join(log.read_bytes() for log in sorted((tmp_path / "logs").glob("*.jsonl"))))
    trials = [t for t in read(path).trials() if t.stage == "search"]
    for text in SMALL:
        mine = [t for t in trials if t.workload == search_tables.workload_of(text)]
        assert {Candidate.of(t.schedule, t.config) for t in mine} == set(search_tables.first(space_of(text), 48))
        best = search_tables.fastest(path, search_tables.workload_of(text), 3)
        assert len(best) == 3 and best[0] in {Candidate.of(t.schedule, t.config) for t in mine}
    monkeypatch.setattr(sys, "argv", ["search_quality.py", "--table", str(path), "--seeds", "2", "--budget", "32",
                                      "--output", str(output)])
    search_quality.main()
    report = json.loads(output.with_suffix(".json").read_text())
    assert list(report["configurations"].values()) == [48, 48] and output.with_suffix(".png").stat().st_size > 10_000
    at = {(r["workload"], r["search"], r["trials"]): r for r in report["rows"]}
    assert len(at) == 2 * 3 * 3
    assert all(report["budgets_behind_random"][w]["random"] == [0, 1] for w in report["configurations"])
    assert all(1 <= r["best"] <= r["median"] <= r["worst"] for r in at.values())


def test_a_replay_is_the_tuner_on_the_table(monkeypatch: pytest.MonkeyPatch):
    (table,) = search_quality.tables_of([ROOT / "benchmarks" / "results" / "search_quality_cpu.jsonl.xz"])
    assert len(table.times) == 384
    asked, real = [], search_quality.Looked.submit
    monkeypatch.setattr(search_quality.Looked, "submit",
                        lambda self, batch, bound: (asked.append(len(batch)), real(self, batch, bound)))
    found = search_quality.replay(table, "model", 0, 64)
    assert len(found) == 64 and found == sorted(found, reverse=True) and found[-1] >= 1
    assert sum(asked) == 64 and found == search_quality.replay(table, "model", 0, 64)
    assert search_quality.replay(table, "random", 0, 384)[-1] == 1.0


def test_how_many_trials_it_takes():
    runs = {"random": [[1.4, 1.2, 1.2, 1.2], [1.3, 1.3, 1.3, 1.3], [1.04, 1.0, 1.0, 1.0]],
            "model": [[1.4, 1.2, 1.1, 1.03], [1.4, 1.05, 1.04, 1.04], [1.4, 1.4, 1.1, 1.0]],
            "warmed": [[1.2, 1.03, 1.0, 1.0], [1.2, 1.2, 1.2, 1.2], [1.02, 1.01, 1.0, 1.0]]}
    found = search_quality.reached("work", runs)
    assert (found["random"], found["model"], found["warmed"]) == (None, 4, 2)
    assert found["end"] == 1.03 and (found["model_as_good"], found["warmed_as_good"]) == (4, 2)
    assert search_quality.needed([3.0, None, 2.0], 2.0) == 3 and search_quality.needed([], 2.0) == float("inf")


@pytest.mark.exhaustive
def test_tables_of_before_a_knob_are_of_what_was_done_then():
    """The table of random configurations is older than the knobs `hoisted` and `carrier`."""
    path = ROOT / "benchmarks" / "results" / "search_quality_h100.jsonl.xz"
    old = {tuple(sorted(t.config)) for t in parse(lzma.decompress(path.read_bytes()), path).trials()
           if t.schedule == "persistent"}
    tables = search_quality.tables_of([path])
    assert len(tables) == 12 and {t.schedule for t in tables[0].trials} == {
        "persistent", "persistent_wide", "layout_transform", "fused_step"}
    for table in tables:
        space = search_quality.TableSpace(*search_tables.task_of(table.work, table.device), table.times)
        for candidate in table.times:
            assert ConfigSpace.fits(space, candidate)
            assert candidate.schedule != "persistent" or tuple(k for k, _ in candidate.knobs) not in old
        if table.work.dtype != "float32":
            assert all(c.config["hoisted"] == "float32" for c in table.times if c.schedule == "persistent")


def test_no_record_of_the_workload_itself_warms_a_replay():
    left = {t.workload for t in search_quality.others(search_tables.workload_of("lstm:512:16:100:bfloat16")).trials()}
    batches = {w.batch for w in left if (w.cell, w.hidden, w.input, w.dtype) == ("lstm", 512, 512, "bfloat16")}
    assert 16 not in batches and batches & {1, 4, 8, 32, 64}


def test_drawing_from_a_table_reaches_all_of_it():
    task: Task = search_tables.task_of(search_tables.workload_of(SMALL[0]), H100)[0]
    space = space_of(SMALL[0])
    chosen = search_tables.first(space, 30)
    tiny = search_quality.TableSpace(task, list(space.schedules.values()), dict.fromkeys(chosen))
    rng = random.Random(0)
    assert {tiny.draw(rng) for _ in range(2000)} == set(chosen)
    assert all(n is None or n in chosen for n in (tiny.neighbour(c, rng) for c in chosen))


@pytest.mark.exhaustive
def test_the_rate_of_a_search(tmp_path: Path):
    output = tmp_path / "rate.json"
    command = ["--layers", "lstm:64:2:10:float16", *SMALL, "--at-once", "2", "--records", "others", "--trials", "24",
               "--pretend-builds", "0.05", "--pretend", "0.01", "--builders", "2", "--output", str(output)]
    done = subprocess.run([sys.executable, "benchmarks/search_rate.py", *command], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    row, last = json.loads(output.read_text())["rows"]
    assert row["trials"] == 48 and last["trials"] == 24 and row["failed"] == 0
    assert [f["trials"] for f in row["found"].values()] == [24, 24] and last["found"]
    assert all(len(f["trials_us"]) == 24 and min(f["trials_us"]) > 0 for f in row["found"].values())
    assert 0 < row["per_second_all"] < row["per_second"]
    assert 0 < row["builders"] <= 1 and 0 < row["measurer"] <= 1 and 0 <= row["proposing"] <= 1
    assert row["measurer"] + row["starved"] == pytest.approx(1)
    assert row["measure"]["median"] >= 0.01 and row["first"] < row["seconds"]


def test_live_searches_are_set_against_what_a_gpu_like_theirs_measured(tmp_path: Path):
    first, second = "first", "second"
    def table(work: str, best: float) -> Any:
        return SimpleNamespace(work=work, device=H100, best=best)

    def report(name: str, device: str, us: list[float | None], works: tuple[str, ...] = (first, second)) -> Path:
        found = {work: {"best_us": 3.0, "default_us": 4.0, "trials": len(us), "trials_us": us} for work in works}
        (path := tmp_path / name).write_text(json.dumps({"device": device, "records": "none",
                                                         "rows": [{"found": found}]}))
        return path

    on = [([table(first, 2.0), table(second, 4.0)],
            [report("a", H100.name, [4.0, None, 3.0]), report("x", "it", [1.0])]),
          ([table(second, 2.0)], [report("b", H100.name, [6.0, 3.0]), report("c", H100.name, [9.0], ("third",))])]
    found = search_quality.lives(on)
    assert [(one.report, one.workload, 3.0 / one.ratio) for one in found] == [
        ("a", first, 2.0), ("a", second, 4.0), ("b", first, 2.0), ("b", second, 2.0)]
    assert [one.curve for one in found] == [[2.0, 2.0, 1.5], [1.0, 1.0, 0.75], [3.0, 1.5], [3.0, 1.5]]
    assert search_quality.medians(found, 2) == {first: (1.75, [2.0, 1.5]), second: (1.25, [1.0, 1.5])}
    assert (late := search_quality.medians(found, 3)) == {first: (1.5, [1.5]), second: (0.75, [0.75])}
    assert search_quality.until(found, 1.5) == (2.5 + 1.5, 0) and search_quality.until(found, 1.0) == (2.5 + 1.5, 3)
    assert search_quality.line("none", 3, late) == "| none | 3 | 1.061 | 1.500 | 1 of 2 | 1 of 2 |"


@pytest.mark.exhaustive
def test_the_notes_have_what_the_reports_of_live_searches_say(capsys, monkeypatch):
    results = ROOT / "benchmarks" / "results"
    reports = [str(results / f"search_live_{name}_h100.json") for name in ("quarter", "none")]
    fastest = str(results / "search_fastest_h100.jsonl.xz")
    monkeypatch.setattr(sys, "argv", ["search_quality.py", "--live", fastest, *reports])
    search_quality.main()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(printed) == 9 and set(printed) <= set((ROOT / "benchmarks/notes/search.md").read_text().splitlines())
