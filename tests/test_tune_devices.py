"""Which devices are the same to runs, records and servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from test_records import WORK, trial
from tune_fakes import DEVICE

from ecornn.device import KNOWN, Device
from ecornn.tune import building, remote
from ecornn.tune.building import Build
from ecornn.tune.environment import Environment
from ecornn.tune.journal import digest_of
from ecornn.tune.log import Line, Log
from ecornn.tune.record import Times
from ecornn.tune.remote import Connection, NoServer, Tracker
from ecornn.tune.selection import best_lines, worth_keeping
from ecornn.tune.serving import Description

# Either side of a GiB: what a host has after an update of its kernel.
BEFORE = structs.replace(DEVICE, memory=(64 << 30) - 4096)
AFTER = structs.replace(DEVICE, memory=(64 << 30) + 4096)
OTHERS = [structs.replace(AFTER, **other) for other in ({"cores": 3}, {"name": "Test CPU 2"}, {"arch": "znver3"},
                                                        {"l2": 1 << 20}, {"features": ("avx2",)})]
TRACKER = Tracker("127.0.0.1", 9190, "test")


class Held:
    """A session with a server."""

    def get_function(self, name: str) -> str:
        return name


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
    for other in OTHERS:
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
    gpu = KNOWN["sm_90a"]
    for device in (gpu, structs.replace(gpu, memory=80 << 30), structs.replace(gpu, cores=66)):
        building.build(Build("lstm", WORK, device, "persistent", {}, str(tmp_path / "module.so")))
    assert [device.cores for device in made] == [132, 66]
