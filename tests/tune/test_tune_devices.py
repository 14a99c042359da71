"""Which devices are the same to runs, records and servers, and which one a target means."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from test_records import WORK, trial
from tune_fakes import DEVICE

from ecornn import host_gpu
from ecornn.cli.tune_command import run
from ecornn.device import Device
from ecornn.errors import DeviceError
from ecornn.targets import KNOWN, resolve
from ecornn.tune import Session, building, remote
from ecornn.tune.building import Build
from ecornn.tune.choose import Environment, matched, present
from ecornn.tune.journal import digest_of
from ecornn.tune.log import Line, Log
from ecornn.tune.record import Choice, Finish, Times
from ecornn.tune.remote import WARM, Connection, Description, NoServer, Tracker
from ecornn.tune.selection import best_lines, worth_keeping
from ecornn.tune.session import Result

# Either side of a GiB: what a host has after an update of its kernel.
BEFORE = structs.replace(DEVICE, memory=(64 << 30) - 4096)
AFTER = structs.replace(DEVICE, memory=(64 << 30) + 4096)
OTHERS = [structs.replace(AFTER, **other) for other in ({"cores": 3}, {"name": "Test CPU 2"}, {"arch": "znver3"},
                                                        {"l2": 1 << 20}, {"features": ("avx2",)})]
H100 = KNOWN["sm_90a"]
TRACKER = Tracker("127.0.0.1", 9190, "test")


class Held:
    """A session with a server, which may be ``older`` than what asks it to get ready."""

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
    """Makes a server that measures on a device."""
    def served(device: Device) -> None:
        monkeypatch.setattr(Tracker, "servers", lambda _: 1)
        monkeypatch.setattr(remote, "_request", lambda _: Held())
        monkeypatch.setattr(remote, "_describe", lambda _: Description(device, Environment()))
    return served


def test_a_run_goes_on_after_a_reboot():
    assert digest_of(WORK, BEFORE, [], 0) == digest_of(WORK, AFTER, [], 0)
    assert len({digest_of(WORK, device, [], 0) for device in (AFTER, *OTHERS)}) == 1 + len(OTHERS)


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
        with pytest.raises(NoServer, match="give it another key"):
            Connection(TRACKER, BEFORE)


def test_what_was_built_for_a_gpu_serves_its_equals(tmp_path, monkeypatch: pytest.MonkeyPatch):
    made: list[Device] = []

    def generate(request: Build) -> tuple[str, bytes]:
        made.append(request.device)
        return "digest", b"module"

    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "generate", generate)
    monkeypatch.setattr("ecornn.build.nvcc.identity", lambda: "nvcc")
    for device in (H100, structs.replace(H100, memory=80 << 30), structs.replace(H100, cores=66)):
        building.build(Build("lstm", WORK, device, "persistent", {}, str(tmp_path / "module.so")))
    assert [device.cores for device in made] == [132, 66]


@pytest.mark.parametrize("target", ["cuda", "sm_90", "sm_90a", H100, structs.replace(H100, cores=500), None])
def test_a_target_that_servers_measure_on(target, serve):
    serve(H100)
    assert Session(target, tracker=TRACKER).device == H100


@pytest.mark.parametrize(("target", "said"), [
    ("sm_80", "target='sm_80' .* 'sm_90a'"), ("gpu0 (typo)", "target='gpu0"), ("cpu", "target='cpu'"),
    ("znver4", "target='znver4'"), (KNOWN["sm_80"], r"target='NVIDIA A100 \(sm_80, 108 cores\)'")])
def test_a_target_that_servers_do_not_measure_on_is_refused(target, said, serve):
    serve(H100)
    with pytest.raises(DeviceError, match=said):
        Session(target, tracker=TRACKER)


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
        with pytest.raises(NoServer, match="give it another key"):
            Connection(TRACKER, share)


def test_a_cpu_by_name_is_not_this_one():
    here = resolve("cpu")
    other = resolve("neoverse-v1" if here.arch != "neoverse-v1" else "znver4")
    for target in (other, other.arch):
        with pytest.raises(DeviceError, match=f"target='{other.arch}.*must be in this machine"):
            present(target)
    assert present(here) == present(structs.replace(here, name="mine", memory=0)) == present(here.arch) == here


def test_all_cores_of_a_cpu_measure_with_the_features_that_are_asked_for():
    here = structs.replace(DEVICE, features=("avx", "avx2", "fma"))
    narrow = structs.replace(here, features=("avx",))
    assert matched(narrow, here) == narrow
    with pytest.raises(DeviceError, match=r"target\.cores=2 .* 4, all cores"):
        matched(structs.replace(here, cores=2), here)
    with pytest.raises(DeviceError, match=r"target\.features='avx512f' "):
        matched(structs.replace(here, features=("avx", "avx512f")), here)


def test_without_a_gpu_the_error_names_the_target(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_gpu, "detect", lambda index=0: None)
    for target in ("cuda", "sm_90a"):
        with pytest.raises(DeviceError, match=f"target='{target}' .*no CUDA GPU.* behind a tracker"):
            present(target)
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
    for count, expected in ((1, f"--dtype bfloat16{said} -o lstm800.so"), (2, f"`ecornn compile{said}` uses it")):
        console = Console(soft_wrap=True, file=io.StringIO())
        run(console, session, [{"cell": "lstm"}] * count, target, {}, found := [], torch=False)
        assert found == [result] * count
        assert expected in console.file.getvalue()
