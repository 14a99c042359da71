"""The tuner of adjoints: what their recurrences are checked against, how a module of one is measured, and searches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import search_tables
import step_cells
from click.testing import CliRunner
from cuda_on_cpu import DTYPES, Emulated
from msgspec import structs
from runtime_sample import FakeGPU
from search_rate import PRETEND
from test_persistent_emulated import SMALL
from test_tune_lookup import trial

import ecornn
from ecornn.analysis import backpropagation
from ecornn.bench.grid import Case, Layer, name_of
from ecornn.build import c_tables
from ecornn.cells import get
from ecornn.cli import main as cli
from ecornn.compiler import plan
from ecornn.errors import CellError, EcornnError, ScheduleError
from ecornn.program import RUN
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.targets import KNOWN
from ecornn.task import adjoint_task, make_manifest, make_task
from ecornn.tune import Result, adjoint_oracle, measuring, tune
from ecornn.tune import session as sessions
from ecornn.tune.log import Line, Log, read
from ecornn.tune.lookup import how_far
from ecornn.tune.measuring import Measure, measure
from ecornn.tune.pool import Entries, Pool
from ecornn.tune.record import Start, tolerance
from ecornn.tune.selection import best_lines
from ecornn.tune.transfer import distance, lent
from ecornn.workload import Workload


@dataclass
class Device:
    """The library of a module: device memory that is the host's, and kernels in the emulation."""

    emulated: Emulated
    gpu: FakeGPU
    runs: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gpu.library, name)

    def run(self, steps: int, batch: int, device: int, queue: int, *pointers: int) -> None:
        self.runs += 1
        program, given = self.emulated.program, {}
        takes = program.entries[RUN].takes
        assert len(takes) == len(pointers) and all(pointers)
        for buffer, pointer in zip((b for n in takes for b in program.buffers if b.name == n), pointers, strict=True):
            first = max(p for p in self.gpu.held if p <= pointer)
            room = first + self.gpu.held[first][1] - pointer
            assert room >= buffer.nbytes(steps), buffer.name
            raw = (ctypes.c_char * room).from_address(pointer)
            given[buffer.name] = np.frombuffer(raw, np.uint8)[:room // buffer.itemsize * buffer.itemsize].view(
                DTYPES[buffer.dtype])
        self.emulated.carry_out(given, steps, batch)


def module_of(cell: Any, task: Task, schedule: str, change: dict[str, Any], folder: Path) -> SimpleNamespace:
    """What ``load`` gives of a module, in the emulation."""
    found = all_schedules()[schedule]
    config = {**found.default(task), **change}
    assert found.check(task, config) is None
    program = found.program(task, found.plan(task, config))
    manifest = make_manifest(cell, task, found, config, program, "test")
    device = Device(Emulated(program, folder), FakeGPU(manifest, folder, None))
    return SimpleNamespace(manifest=manifest, library=device)


@pytest.mark.parametrize(("name", "sizes", "dtype", "schedule", "change"), [
    ("lstm", (3, 40), "bfloat16", "persistent", {"hoisted": "same"}),
    ("gru", (5, 24), "float32", "layout_transform", {}),
    pytest.param("indrnn", (3, 7), "tf32", "elementwise", {}, marks=pytest.mark.exhaustive),
    ("pair", (2, 24), "float16", "persistent", {"units": 8, "hoisted": "float32"}),
], ids=str)
def test_a_module_of_a_recurrence_is_checked_and_timed(name, sizes, dtype, schedule, change, tmp_path, monkeypatch):
    """As the process with the GPU does it: within the tolerance, and beyond it where a weight or an output is off."""
    batch, hidden = sizes
    cell = step_cells.CELLS.get(name) or get(name)
    kind, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, None)
    work = Workload(cell.identity(), hidden, hidden, batch, 5, kind, precision=precision).adjoint
    module = module_of(cell, make_task(cell, work, SMALL), schedule, change, tmp_path)
    monkeypatch.setattr("ecornn.runtime.loader.load", lambda path: module)
    monkeypatch.setattr("ecornn.tune.timing.torch_sees_gpu", lambda: False)
    monkeypatch.setattr("ecornn.runtime.loader.check_host", lambda device, number: None)
    monkeypatch.setattr(measuring, "race", lambda runs, bound, fewest, seconds: [[one.clock(one.run)] for one in runs])
    path = tmp_path / "answers.npz"
    adjoint_oracle.write(path, cell, work, seed=1)
    request = Measure(("module.so",), str(path), tolerance(work), work.seq, 0)
    (one,) = measure(request)
    # that of indrnn multiplies nothing, and what it leaves has all bits of float32
    assert 0 < one.check <= (2e-5 if name == "indrnn" else tolerance(work)) and one.times.median > 0
    assert module.library.runs == 3  # two are checked, one is timed

    kept = dict(np.load(path))
    for wrong in ("y", "last_0", *(["w:"] if name != "indrnn" else [])):  # whose factors have the weights in them
        other = tmp_path / f"{wrong[:1]}.npz"
        np.savez(other, **{n: 1.1 * v + 0.1 if n.startswith(wrong) else v for n, v in kept.items()})
        with pytest.raises(ScheduleError, match="wrong output"):
            measure(structs.replace(request, answers=str(other)))


def test_a_recurrence_alone_has_no_c_interface():
    """It is no layer, though its program has an entry of the usual name. Its tables say so, and how it packs."""
    workload = Workload("lstm", 128, 128, 8, 40, "bfloat16").adjoint
    task = make_task(get("lstm"), workload, H100)
    schedule = all_schedules()["persistent"]
    program = schedule.program(task, schedule.plan(task, config := schedule.default(task)))
    manifest = make_manifest(get("lstm"), task, schedule, config, program, "by a test")
    assert c_tables.tables(manifest, program.entries).startswith(bytes(8) + b"\2")


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_relu", "lstm(layer_norm)", "lstm(peepholes,clip=0.75)", "slstm",
                                  "indrnn", "blend"])
def test_answers_are_proven_by_somebody_who_knows_nothing_of_the_analysis(name, monkeypatch):
    """An error of a derivative, of a sum over steps or of the direction is seen, whatever the cell."""
    cell = step_cells.CELLS.get(name) or get(name)
    work = Workload(cell.identity(), 12, 12, 3, 9, "float16").adjoint
    x, y, first, last, flat = adjoint_oracle.answers(cell, work, np.random.default_rng(0))
    graph = make_task(cell, work, SMALL).graph
    assert x.shape == (8, 3, len(graph.hoisted_outputs), 12) and y.shape == (8, 3, len(graph.outputs), 12)
    assert len(first) == len(last) == len(graph.states) and {*flat} == {
        cell.parameter_name(n) for n in cell.parameters(12, 12)}

    def one_off(*arguments: Any) -> Any:
        found = backpropagation.carry_out(*arguments)
        weight = next(iter(found.parameters))
        return replace(found, parameters=found.parameters | {weight: found.parameters[weight] * 1.01})

    monkeypatch.setattr(adjoint_oracle, "carry_out", one_off)
    with pytest.raises(CellError, match=f"gradients that were derived for {name.partition('(')[0]}.* are wrong: of"):
        adjoint_oracle.answers(cell, work, np.random.default_rng(0))


ENTRIES = Entries("search_rate:nothing", "search_rate:pretended_build", "search_rate:nothing",
                  "search_rate:pretended_measure")
H100 = KNOWN["sm_90a"]
SMALL_LSTM: dict[str, Any] = {"hidden": 64, "batch": 2, "seq": 10, "dtype": "float16"}


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """An H100 on which every build and measurement is made up, and an empty folder of records."""
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


@pytest.mark.parametrize(("arguments", "word"), [
    ({"schedule": "persistent_block"}, "one that carries out adjoints: persistent"),
    ({"training": 1}, "training=1"), ({"weights": "int16"}, "expected None or int8 on a GPU")])
def test_what_cannot_train_is_said_before_anything_is_tried(arguments, word, pretended, tmp_path):
    asked = {**SMALL_LSTM, "training": True, **arguments}
    with pytest.raises(EcornnError, match=word):
        pretended.tune("lstm", **asked, trials=4)
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
    done = CliRunner().invoke(cli, ["tune", *layer, "--training", "--trials", "2"], catch_exceptions=False)
    assert done.exit_code == 0 and "A CPU's backward pass has no knobs" in done.output
    assert "--training --target cpu -o gru16.so" in done.output and "backward:" not in done.output
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
    assert late == {} and "not begun" in search_tables.report(wanted, late)
    assert "default" in capsys.readouterr().out


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
