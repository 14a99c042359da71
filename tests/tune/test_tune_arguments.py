"""Arguments of a search: what it refuses at once, which device a target means, which devices are the same."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from events import until
from msgspec import structs
from refusals import refused
from rich.console import Console
from test_records import WORK, trial
from tune_fakes import DEVICE, ENTRIES, Fake, make

from ecornn import host_gpu
from ecornn.cells.naming import load_cell
from ecornn.cli.tune_command import run
from ecornn.device import Device
from ecornn.errors import ArgumentError, BuildError, CellError, DeviceError, MissingPackageError, RecordError
from ecornn.layer_spec import LayerSpec
from ecornn.targets import KNOWN, resolve
from ecornn.tune import Session, building, remote, search, tune
from ecornn.tune.building import Build
from ecornn.tune.choose import Environment, matched, present
from ecornn.tune.log import Line, Log, digest_of
from ecornn.tune.pool import ProcessEvaluator
from ecornn.tune.record import Choice, Finish, Times
from ecornn.tune.remote import WARM, Connection, Description, NoServer, Tracker
from ecornn.tune.selection import best_lines, worth_keeping
from ecornn.tune.session import Result

LAYER = {"hidden": 8, "batch": 2, "seq": 5, "target": "cpu"}
CELL = '''
import ecornn
class Half(ecornn.Cell):
    name, states = "half", ("h",)
    def parameters(self, input, hidden):
        return {"w": (1, hidden, input)}
    def step(self, x, states, p):
        (h,), wx = states, ecornn.product(x, p["w"], 0)
        return [ecornn.pointwise(lambda b, j: 0.5 * h[b, j] + wx[b, j], h)]
'''


@pytest.mark.parametrize(("argument", "value"), [
    ("trials", 0), ("trials", -3), ("trials", 2.5), ("trials", "4"), ("trials", True), ("timeout", 0), ("timeout", "x"),
    ("timeout", float("nan")), ("timeout", None), ("time_limit", 0), ("time_limit", "3"), ("time_limit", float("inf")),
    ("seed", -1), ("seed", 1.5), ("seed", None), ("seed", 1 << 70), ("report", 3), ("begin", 3), ("logger", 3),
    ("target", 5), ("tracker", "127.0.0.1:9190"), ("output", 5), ("cell", 5), ("cell", None)])
def test_a_bad_argument_is_named_and_nothing_is_written(argument, value, tmp_path, monkeypatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path))
    arguments = {"cell": "lstm", **LAYER, argument: value}
    with pytest.raises(ArgumentError, match=argument):
        tune(arguments.pop("cell"), **arguments)
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_it_says_so_and_tries_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused(BuildError, "no-such-compiler", tune, "lstm", **LAYER, output=tmp_path / "log.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_log_is_not_written_to(tmp_path):
    path = tmp_path / "lstm.so"
    path.write_bytes(b"\x7fELF\n\x00\x01")
    refused(RecordError, "is not a tuning log", tune, "lstm", **LAYER, output=path)
    assert path.read_bytes() == b"\x7fELF\n\x00\x01"


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path):
    (tmp_path / "script.py").write_text(CELL + "import ecornn.tune\necornn.tune.tune(Half(), hidden=8, target='cpu')\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "RecursionError" not in done.stderr
    assert done.stderr.count("put the call under `if __name__") == 1


def test_a_cell_that_no_process_can_import_is_tuned(tmp_path):
    code = CELL + "import ecornn.tune\nprint(ecornn.tune.tune(Half(), hidden=8, target='cpu', trials=1).best)\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, check=False,
                          env=os.environ | {"ECORNN_TUNING_LOGS": str(tmp_path)})
    assert "Choice(schedule='cpu_sequence'" in done.stdout, done.stderr


@pytest.mark.parametrize(("text", "said"), [
    (CELL.replace('"half"', '"ha/lf"'), "letters, digits"), (CELL.replace('"half"', '"../half"'), "letters, digits"),
    (CELL.replace('{"w": (1, hidden, input)}', "7"), "must return names with shapes"),
    (CELL.replace('{"w": (1, hidden, input)}', '{"w": 7}'), "must return names with shapes"),
    (CELL + "    def __init__(self):\n        raise KeyError('no')\n", "KeyError: 'no'"),
    ("import sys\nsys.exit(3)\n", "SystemExit: 3"), ("1 / 0", "ZeroDivisionError")])
def test_a_cell_that_cannot_be_used_is_an_error_that_names_it(text, said, tmp_path):
    (tmp_path / "cells.py").write_text(text)
    with pytest.raises(CellError, match=said):
        load_cell(f"{tmp_path / 'cells.py'}:Half").identity()


def test_ctrl_c_stops_what_a_process_does_before_anything_is_built(monkeypatch, tmp_path):
    """And the session starts other processes for its next run."""
    monkeypatch.setattr("ecornn.tune.session.present", lambda _: DEVICE)
    with Session("cpu", entries=ENTRIES) as session:
        first, begun = session.pool, tmp_path / "begun"
        with pytest.raises(KeyboardInterrupt), ProcessEvaluator(
                make(), "lstm", lambda _: first.builders[0].call("tune_fakes:sleep_on", str(begun), bool, 1e6), first,
                limit=1e6, seed=0):
            until(begun.exists)
            raise KeyboardInterrupt
        assert first.closed and session.pool is not first


# Either side of a GiB: what a host has after an update of its kernel.
BEFORE = structs.replace(DEVICE, memory=(64 << 30) - 4096)
AFTER = structs.replace(DEVICE, memory=(64 << 30) + 4096)
OTHERS = [structs.replace(AFTER, **other) for other in ({"cores": 3}, {"name": "Test CPU 2"}, {"arch": "znver3"},
                                                        {"l2": 1 << 20}, {"features": ("avx2",)})]
H100 = KNOWN["sm_90a"]
TRACKER = Tracker("127.0.0.1", 9190, "test")


class Held:
    older, warmed = False, 0

    def get_function(self, name: str) -> Any:
        if name != WARM:
            return name
        if self.older:
            raise AttributeError(name)
        return self.warm

    def warm(self) -> None:
        Held.warmed += 1


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch):
    def served(device: Device) -> None:
        monkeypatch.setattr(Tracker, "servers", lambda _: 1)
        monkeypatch.setattr(remote, "_request", lambda _: Held())
        monkeypatch.setattr(remote, "_describe", lambda _: Description(device, Environment()))
    return served


def test_a_run_goes_on_after_a_reboot_and_is_of_a_device_a_seed_revisions_and_a_list():
    newer, given = Fake(), [Choice("fake", {"a": 1}), Choice("fake", {"a": 2})]
    newer.revision = 4
    asked = [(WORK, device, [Fake()], 0) for device in (AFTER, *OTHERS)]
    asked += [(WORK, AFTER, [Fake()], 1), (WORK, AFTER, [newer], 0),
              *((WORK, AFTER, [Fake()], 0, only) for only in (given[:1], given))]
    assert len({digest_of(*one) for one in asked}) == len(asked)
    assert digest_of(WORK, BEFORE, [Fake()], 0, None) == digest_of(*asked[0])
    assert digest_of(WORK, BEFORE, [Fake()], 0, list(given)) == digest_of(*asked[-1])


def test_records_of_equal_machines_are_rivals():
    def lines(*devices: Device) -> list[Line]:
        return [Line(Path("a.jsonl"), n, trial(index=n, device=device, config={"k": n}, times=Times.of([1.0 + n])))
                for n, device in enumerate(devices)]
    for among in (best_lines(Log(lines(BEFORE, AFTER)), {}), worth_keeping(lines(BEFORE, AFTER), {}, 1)):
        assert [line.record.config for line in among] == [{"k": 0}]
    assert len(best_lines(Log(lines(BEFORE, *OTHERS)), {})) == 1 + len(OTHERS)


def test_equal_servers_measure_for_one_run(serve):
    serve(AFTER)
    Connection(TRACKER, BEFORE)
    serve(OTHERS[-1])  # with more features than are used
    Connection(TRACKER, BEFORE)
    for other in OTHERS[:-1]:
        serve(other)
        refused(NoServer, "start it with another key", Connection, TRACKER, BEFORE)


def test_what_was_built_for_a_gpu_serves_its_equals(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "generate", generate := Mock(return_value=("digest", b"module")))
    monkeypatch.setattr("ecornn.build.nvcc.identity", lambda: "nvcc")
    for device in (H100, structs.replace(H100, memory=80 << 30), structs.replace(H100, cores=66)):
        building.build(Build("lstm", WORK, device, "persistent", {}, str(tmp_path / "module.so")))
    assert [made.args[0].device.cores for made in generate.call_args_list] == [132, 66]


@pytest.mark.parametrize("target", ["cuda", "sm_90", "sm_90a", H100, structs.replace(H100, cores=500), None])
def test_a_target_that_servers_measure_on(target, serve):
    serve(H100)
    assert Session(target, tracker=TRACKER).device == H100


@pytest.mark.parametrize(("target", "said"), [
    ("sm_80", "target='sm_80': .*'sm_90a'"), ("gpu0 (typo)", "target='gpu0"), ("cpu", "target='cpu'"),
    ("znver4", "target='znver4'"), (KNOWN["sm_80"], r"target='NVIDIA A100 \(sm_80, 108 cores\)'")])
def test_a_target_that_servers_do_not_measure_on_is_refused(target, said, serve):
    serve(H100)
    refused(DeviceError, said, Session, target, tracker=TRACKER)


def test_a_share_of_a_servers_gpu_can_be_tuned_for(serve, monkeypatch):
    serve(H100)
    share = structs.replace(H100, cores=66)
    assert Session(share, tracker=TRACKER).device == share
    before = Held.warmed
    Connection(TRACKER, share)
    assert Held.warmed == before + 1
    monkeypatch.setattr(Held, "older", True)
    Connection(TRACKER, share)
    for other in (structs.replace(H100, cores=60), KNOWN["sm_80"]):  # too small, or another GPU
        serve(other)
        refused(NoServer, "start it with another key", Connection, TRACKER, share)


def test_a_cpu_by_name_is_not_this_one():
    here = resolve("cpu")
    other = resolve("neoverse-v1" if here.arch != "neoverse-v1" else "znver4")
    for target in (other, other.arch):
        refused(DeviceError, f"target='{other.arch}.*must be in this machine", Session, target)
    assert all(Session(t).device == here for t in (here, structs.replace(here, name="mine", memory=0), here.arch))


def test_all_cores_of_a_cpu_measure_with_the_features_that_are_asked_for():
    here = structs.replace(DEVICE, features=("avx", "avx2", "fma"))
    narrow = structs.replace(here, features=("avx",))
    assert matched(narrow, here) == narrow
    with pytest.raises(DeviceError, match=r"target\.cores=2: .*4, the cores"):
        matched(structs.replace(here, cores=2), here)
    with pytest.raises(DeviceError, match=r"target\.features='avx512f': "):
        matched(structs.replace(here, features=("avx", "avx512f")), here)


def test_without_a_gpu_the_error_names_the_target(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_gpu, "detect", lambda index=0: None)
    for target in ("cuda", "sm_90a"):
        refused(DeviceError, f"target='{target}': .*no CUDA GPU.* behind a tracker", present, target)
    assert present(None) == resolve("cpu")


@pytest.mark.parametrize(("tracker", "target", "said"), [
    (None, None, ""), (None, "cuda", " --target cuda"), (TRACKER, None, " --target sm_90a"),
    (TRACKER, "cuda", " --target sm_90a")])
def test_what_was_measured_elsewhere_is_compiled_for_elsewhere(tracker, target, said, monkeypatch):
    monkeypatch.setattr(Tracker, "servers", lambda self: 1)
    best = Choice("persistent", {"blocks": 100})
    finish = Finish(run="ab-1", reason="trials", trials=2, seconds=3.0, best=best, best_us=1.0, default=best,
                    default_us=2.0)
    result = Result(WORK, H100, finish, Path("log.jsonl"), 0, 2, {})
    session = SimpleNamespace(tracker=tracker, device=H100, tune_layer=lambda layer, **_: result,
                              layer=lambda **asked: SimpleNamespace(training=False, **asked))
    for count, expected in ((1, f"--dtype bfloat16{said} -o lstm800.so"), (2, f"`ecornn compile{said}` uses")):
        console = Console(soft_wrap=True, file=io.StringIO())
        run(console, session, [{"cell": "lstm"}] * count, target, {}, found := [], torch=False)
        assert found == [result] * count and expected in console.file.getvalue()


def test_without_xgboost_a_search_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The error comes before anything is started."""
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    stages = list[str]()
    with Session("cpu") as session, pytest.raises(MissingPackageError, match=r"XGBoost is not.*\[tune\]"):
        session.tune_layer(LayerSpec("lstm", 8, batch=2, seq=5), trials=1, output=tmp_path / "log", stage=stages.append)
    assert not stages and not (tmp_path / "log").exists()
