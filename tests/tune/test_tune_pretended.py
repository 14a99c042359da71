"""Searches for an H100 on which builds and measurements are made up, of both passes; and on a real GPU."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import search_tables
from events import LIMIT
from msgspec import structs
from refusals import refused
from search_rate import PRETEND
from test_cli import run
from test_tune_lookup import trial

import ecornn
from ecornn.bench.grid import Case, Layer, name_of
from ecornn.build import c_tables
from ecornn.cells import get
from ecornn.compiler import plan
from ecornn.errors import EcornnError, ScheduleError
from ecornn.schedules import all_schedules
from ecornn.targets import KNOWN
from ecornn.task import adjoint_task, make_manifest, make_task
from ecornn.tune import Result, oracle, proposing, tune
from ecornn.tune import log as folders
from ecornn.tune import selection as verifying
from ecornn.tune import session as sessions
from ecornn.tune.choose import serving_or_raise
from ecornn.tune.log import Journal, Line, Log, read, shipped_folder
from ecornn.tune.lookup import how_far
from ecornn.tune.pool import Entries, Pool
from ecornn.tune.proposing import Elsewhere, Question, answers, defaults, joined, scan_parts, searching
from ecornn.tune.record import Choice, Finish, Start, Trial
from ecornn.tune.search import Search
from ecornn.tune.selection import best_lines
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.tune.transfer import distance, lent
from ecornn.workload import Workload

ENTRIES = Entries("search_rate:nothing", "search_rate:pretended_build", "search_rate:nothing",
                  "search_rate:pretended_measure")
H100 = KNOWN["sm_90a"]
WORK = Workload("lstm", 64, 64, 2, 10, "float16")
SMALL_LSTM: dict[str, Any] = {"hidden": 64, "batch": 2, "seq": 10, "dtype": "float16"}


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    monkeypatch.setenv(PRETEND, "[0.01, 0.002]")
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    monkeypatch.setattr(sessions, "present", lambda target: H100)
    with sessions.Session("cuda", entries=ENTRIES) as session:
        session._pool = Pool(ENTRIES, 2, poisoned=True)
        yield session


def test_a_layer_that_trains_is_searched_twice_and_compiled_with_both(pretended, tmp_path):
    seen: list[bool] = []
    result = pretended.tune("lstm", **SMALL_LSTM, training=True, trials=4,
                            report=lambda now: seen.append(now.trial.workload.backward))
    backward = result.backward
    assert backward is not None and backward.backward is None and backward.fresh == result.fresh == 4
    assert (result.workload.backward, backward.workload) == (False, result.workload.adjoint)
    assert seen == [False] * 4 + [True] * 4
    assert result.log != backward.log and {t.workload for t in read(backward.log).trials()} == {backward.workload}
    (start,) = [line.record for line in read(backward.log).lines if isinstance(line.record, Start)]
    assert {*start.schedules} == {n for n, s in all_schedules().items() if s.backward and s.serves(
        make_task(get("lstm"), backward.workload, H100)) is None}

    again = pretended.tune("lstm", **SMALL_LSTM, training=True, trials=4)
    assert again.fresh == again.backward.fresh == 0 and again.backward.finish == backward.finish

    planned = plan("lstm", **SMALL_LSTM, layers=2, bidirectional=True, training=True, target=H100, overlap="none")
    # a second layer's I is larger than that of the record
    assert [one.line is None for one in planned.chosen] == [False, False, True, True]
    for found, best in ((planned.chosen[:2], result.best), (planned.backward, backward.best)):
        assert all((one.schedule.name, one.config) == (best.schedule, best.config) for one in found)
    labels = [(at, why.partition(":")[0]) for at, _, why in planned.why()]
    assert [labels[0], labels[2]] == [("l0, l0_reverse", f"record {result.log.name}"),
                                      ("backward", f"record {backward.log.name}")]
    assert "; backward: record " in planned.found.provenance
    plain = plan("lstm", **SMALL_LSTM, target=H100)
    assert plain.backward == (None,) and len(plain.why()) == 1


def test_a_record_of_one_entry_says_nothing_of_the_other():
    task = make_task(get("lstm"), Workload("lstm", 64, 48, 2, 10, "float16"), H100)
    inner = adjoint_task(task)
    own, adjoint = (Line(Path("x.jsonl"), 1, trial(1.0, workload=t.workload, device=H100)) for t in (task, inner))
    for of, line in ((task, own), (inner, adjoint)):
        assert how_far(line.record, of.workload, H100) == (0, 0.0, 0.0, 0)
        other = adjoint if line is own else own
        assert how_far(other.record, of.workload, H100) is None
    assert distance(own.record.workload, adjoint.record.workload) == float("inf")
    peepholes = adjoint_task(make_task(get("lstm(peepholes)"), structs.replace(task.workload, cell="lstm(peepholes)"),
                                       H100))
    assert lent(inner, Log([own])) is None
    found = lent(peepholes, Log([own, adjoint]))
    assert found is None or all(line.record.workload.backward for line in found[1].lines)
    (best,) = [line for line in best_lines(Log([own]), {})]
    assert best == own and len(best_lines(Log([own, adjoint]), {})) == 2


def test_a_recurrence_alone_has_no_c_interface():
    """It is no layer, though its program has an entry of the usual name. Its tables say so, and how it packs."""
    workload = Workload("lstm", 128, 128, 8, 40, "bfloat16").adjoint
    task, schedule = make_task(get("lstm"), workload, H100), all_schedules()["persistent"]
    program = schedule.program(task, schedule.plan(task, config := schedule.default(task)))
    manifest = make_manifest(get("lstm"), task, schedule, config, program, "by a test")
    assert c_tables.tables(manifest, program.entries).startswith(bytes(8) + b"\2")


@pytest.mark.parametrize(("arguments", "word"), [
    ({"schedule": "persistent_block"}, "one that carries out adjoints: persistent"),
    ({"training": 1}, "training=1"), ({"weights": "int16"}, "expected None or int8 on a GPU")])
def test_what_cannot_train_is_said_before_anything_is_tried(arguments, word, pretended, tmp_path):
    asked = {**SMALL_LSTM, "training": True, **arguments}
    refused(EcornnError, word, pretended.tune, "lstm", **asked, trials=4)
    assert not (tmp_path / "logs").exists()


def test_forward_has_half_of_the_time_at_most_and_backward_the_rest(pretended, monkeypatch):
    limits: list[float | None] = []
    def tune_workload(self: Any, layer: Any, workload: Workload, *, time_limit: float | None, **_: Any) -> Result:
        limits.append(time_limit)
        finish = SimpleNamespace(seconds=next(seconds))
        return Result(workload, H100, finish, Path(), 0, 4, {})  # type: ignore[arg-type]
    monkeypatch.setattr(sessions.Session, "tune_workload", tune_workload)
    runs = ((30.0, 100.0), (51.0, 100.0), (500.0, 100.0), (30.0, None))
    seconds = iter([taken for taken, _ in runs for _ in range(2)])  # of the search of either pass
    for _, limit in runs:
        pretended.tune("lstm", **SMALL_LSTM, training=True, time_limit=limit)
    assert limits == [50.0, 70.0, 50.0, 50.0, 50.0, 50.0, None, None]


def test_on_a_cpu_there_is_one_search_and_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path))
    layer = ("--cell", "gru", "--hidden", "16", "--batch", "2", "--seq", "8", "--target", "cpu", "--no-torch")
    output = run("tune", *layer, "--training", "--trials", "2")
    assert "The backward pass has no knobs" in output
    assert "--training --target cpu -o gru16.so" in output and "backward:" not in output
    (log,) = tmp_path.glob("*.jsonl")
    assert all(not t.workload.backward for t in read(log).trials())
    planned = plan("gru", hidden=16, batch=2, seq=8, target="cpu", training=True)
    assert planned.backward == (None,) and f"record {log.name}" in planned.found.provenance


def test_the_layers_of_the_benchmark_are_searched_in_time(pretended, tmp_path, capsys, monkeypatch):
    def row(cell: str, seq: int, batch: int, input: int, hidden: int, dtype: str, both: bool = False) -> Layer:
        case = Case(cell=cell, seq=seq, batch=batch, input=input, hidden=hidden, dtype=dtype, bidirectional=both,
                    training=True, target="cuda")
        return Layer(name=name_of(case), case=case)
    both = row("gru", 300, 20, 64, 64, "float16", True)  # side by side, on a half each
    monkeypatch.setattr(search_tables, "ROWS", [both])
    assert {c: [*map(str, of)] for c, of in search_tables.layers([], H100).items()} == {
        H100.cores // 2: ["gru T=300 B=20 H=64 float16, backward"]}
    small = [row("rnn_tanh", 9, 2, width, 64, "float16") for width in (64, 24)]
    monkeypatch.setattr(search_tables, "ROWS", [*small, row("gru", 9, 2, 32, 32, "float32")])
    (cores, wanted), = search_tables.layers(["rnn_tanh 9x2", "gru"], H100).items()
    assert cores == H100.cores and len(wanted) == 2  # one for both I
    log = tmp_path / "set.jsonl"
    found = search_tables.search(pretended, wanted, log, 3, 60.0, 2)
    assert {w: r.finish.trials for w, r in found.items()} == dict.fromkeys(wanted, 3)
    text = search_tables.report(wanted, found)
    assert "2 of 2 searched, geometric mean" in text and text.count("us/step") == 2
    assert search_tables.spent(log, H100).keys() == wanted.keys()
    again = search_tables.search(pretended, wanted, log, 3, 60.0, 2)
    assert all(r.fresh == 0 for r in again.values())
    late = search_tables.search(pretended, wanted, tmp_path / "late.jsonl", 3, 1.0, 2)
    assert late == {} and "not begun" in search_tables.report(wanted, late) and "default" in capsys.readouterr().out


def test_workers_say_what_this_process_would(tmp_path: Path):
    task = make_task(get("lstm"), WORK, H100)
    expected = tuple(Candidate.of(s.name, s.default(task)) for s in serving_or_raise(task))
    here, there = tmp_path / "here.npz", tmp_path / "there.npz"
    oracle.write(here, get("lstm"), WORK, 3)
    with Pool(ENTRIES, 1) as pool:
        assert defaults(pool, Question("lstm", WORK, H100)) == expected
        assert [c.schedule for c in defaults(pool, Question("lstm", WORK, H100, "fused_step"))] == ["fused_step"]
        answers(pool, Question("lstm", WORK, H100, seed=3))(there)
        space = ConfigSpace(task, serving_or_raise(task))
        assert joined(space, scan_parts(pool, Question("lstm", WORK, H100), space)()) == space.scan()
        with pytest.raises(ScheduleError, match=r"^no schedule serves .* is for llvm, not cuda$"):
            defaults(pool, Question("lstm", WORK, H100, "cpu_sequence"))
        with pytest.raises(ScheduleError, match=r"^dtype='float64': expected"):
            defaults(pool, Question("lstm", structs.replace(WORK, dtype="float64"), H100))
    with np.load(here) as a, np.load(there) as b:
        assert a.files == b.files and all((a[name] == b[name]).all() for name in a.files)


def few_records(_: None) -> bool:
    folders.shipped_folder = lambda: Path(os.environ["FEW_RECORDS"])
    return proposing.ready(None)


def test_a_search_elsewhere_proposes_what_one_here_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever it is told, also of a run that goes on; the space is scanned once that is needed."""
    (tmp_path / "few").mkdir()
    shutil.copy(shipped_folder() / "h100-rows.jsonl.xz", tmp_path / "few")
    monkeypatch.setenv("FEW_RECORDS", str(tmp_path / "few"))
    monkeypatch.setattr(folders, "shipped_folder", lambda: tmp_path / "few")
    cell, run = get("lstm"), Journal(tmp_path / "log.jsonl", "1-1")
    with Pool(replace(ENTRIES, propose_ready=f"{__name__}:few_records"), 1, proposers=1) as pool:
        asked = Question("lstm", WORK, H100, "persistent_wide", 7)
        given = defaults(pool, asked)
        def spaced() -> ConfigSpace:
            return ConfigSpace(make_task(cell, WORK, H100), [all_schedules()[c.schedule] for c in given], given)
        parts = scan_parts(pool, asked, spaced())
        with searching(pool, cell, spaced(), asked, parts, run) as there, \
                searching(pool, cell, spaced(), asked, parts, run) as here:
            assert isinstance(there, Elsewhere) and isinstance(here, Search) and there.first == here.first
            assert len(here.model)
            here.space.scans = lambda: joined(here.space, parts())
            default = here.space.defaults()[0]
            for one in (there, here):
                one.tell(default, 3.0)
            opening = here.ask(here.waiting())
            assert there.waiting() == len(opening) and there.ask(len(opening)) == opening
            assert there.parts is not None  # nothing waited for the scan
            for one in (there, here):
                one.prepare()
            for number, candidate in enumerate(opening):
                for one in (there, here):
                    one.tell(candidate, None if number % 5 == 4 else 2.0 + number % 3)
            for count in (4, 5):
                batch = here.ask(count)
                assert len(batch) == count and there.ask(count) == batch
            assert there.tried == here.tried and default in there.tried
            there.worker.kill()
            refused(ScheduleError, "has ended unexpectedly; run the same command", there.ask, 1)


def test_given_candidates_cost_this_process_no_search(tmp_path, monkeypatch, pretended, capsys):
    task = make_task(get("lstm"), WORK, H100)
    preferred = serving_or_raise(task)[0]
    default = dict(preferred.default(task))
    other = {**default, "math": next(v for v in ("fast", "approx") if v != default["math"])}
    given = Choice(preferred.name, other), Choice(preferred.name, default)
    item = search_tables.Item("lstm:64:2:10:float16", given)
    (tmp_path / "set.jsonl").write_bytes(search_tables.msgspec.json.encode(item) + b"\n")

    forbidden = Mock(side_effect=AssertionError("a default was looked for in the process that tunes"))
    monkeypatch.setattr(sessions, "Session", lambda target, **options: pretended)
    for kind in {type(s) for s in all_schedules().values() if s.kind == "cuda"}:
        monkeypatch.setattr(kind, "default", forbidden)
        monkeypatch.setattr(kind, "expected", forbidden)
    search_tables.run(tmp_path / "set.jsonl", 60.0, 2, 60.0)
    assert "2 trials, 0 workloads failed" in capsys.readouterr().out
    (log,) = (tmp_path / "logs").glob("*.jsonl")
    (finish,) = [line.record for line in read(log).lines if isinstance(line.record, Finish)]
    assert finish.default == Choice(preferred.name, default) and finish.default_us


def test_records_are_verified_again_and_told_in_their_order(pretended):
    lines = [line for line in read(shipped_folder() / "h100.jsonl.xz").lines if isinstance(line.record, Trial)]
    small = [line for line in lines if line.record.workload.hidden <= 256]  # type: ignore[union-attr]
    drawn, left = verifying.sample(small, H100, 10, 0)
    checks = list(verifying.verify(drawn, pretended))
    assert [check.line for check in checks] == drawn and len(drawn) == 10 and "of another device" not in left
    assert all(check.outcome.times and check.drift for check in checks)


@pytest.mark.parametrize("quiet", [False, True])
def test_several_are_built_at_a_time_where_that_disturbs_no_measurement(quiet: bool, monkeypatch: pytest.MonkeyPatch):
    together, running, most = threading.Barrier(2), list[int](), list[int]()
    def measured(line: int, session: object) -> int:
        running.append(line)
        most.append(len(running))
        if not quiet:
            together.wait(LIMIT)  # broken where the other one waits for this one
        running.remove(line)
        return line

    monkeypatch.setattr(verifying, "measured", measured)
    session: Any = SimpleNamespace(pool=SimpleNamespace(quiet=quiet))
    lines: Any = range(6)
    assert list(verifying.verify(lines, session)) == [*range(6)] and (max(most) == 1) == quiet


@pytest.mark.gpu
@pytest.mark.parametrize(("cell", "dtype"), [("lstm", "bfloat16"), ("gru", "float32"), ("indrnn", "float16")])
def test_on_a_gpu_both_passes_are_searched_and_a_module_has_both_records(cell, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path))
    asked = {"hidden": 128, "batch": 8, "seq": 40, "dtype": dtype}
    result = tune(cell, **asked, training=True, trials=5, target="cuda")
    for one in (result, result.backward):
        assert one.fresh == 5 and one.best is not None and not any("wrong" in why for why in one.failures), one.failures
    planned = plan(cell, **asked, training=True, target="cuda")
    (backward,) = planned.backward
    assert (backward.schedule.name, backward.config) == (result.backward.best.schedule, result.backward.best.config)
    layer = ecornn.compile(cell, **asked, training=True, target="cuda")
    assert f"backward: record {result.backward.log.name}" in layer.manifest.provenance
