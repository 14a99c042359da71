"""Rates of devices, which estimates read; which sequences of a stack are put side by side by these, and why."""

from __future__ import annotations

from dataclasses import replace as changed
from typing import Any

import msgspec
import pytest
from emulated import task_of
from msgspec.structs import replace

from ecornn.compiler import plan
from ecornn.compose import compose
from ecornn.device import Device
from ecornn.errors import ArgumentError, ScheduleError
from ecornn.manifest import decode
from ecornn.overlap import wave_time
from ecornn.program import Concurrent, Extent, Wave, chunk_extent, chunk_steps
from ecornn.schedules import all_schedules, rates
from ecornn.schedules.rates import H100, PLAIN_CORE, ZEN, cpu_rates, gpu_rates
from ecornn.targets import KNOWN
from ecornn.task import make_manifest
from ecornn.workload import SERIAL, Overlap


def planned(**options: Any) -> Any:
    return plan(options.pop("cell", "gru"), **{"hidden": 64, "target": "sm_90a", "dtype": "float16", **options})


def test_auto_takes_what_is_expected_to_be_fastest():
    found = planned(hidden=512, layers=2, bidirectional=True, batch=8, seq=200)
    assert found.overlap == Overlap("directions", 2)
    assert found.device.cores == 132 and {task.device.cores for task in found.tasks} == {66}
    assert "on 66 of 132 multiprocessors, directions side by side: about" in found.found.provenance
    assert "one after the other" in found.found.provenance
    # weights that fit on the whole GPU, but not on a half
    large = planned(cell="lstm", hidden=2048, batch=16, bidirectional=True)
    assert large.found.schedule.name.startswith("persistent") and large.overlap == SERIAL
    assert {task.device.cores for task in large.tasks} == {132}


def test_layers_as_a_wavefront():
    found = planned(cell="lstm", hidden=256, layers=4, seq=256)
    assert found.overlap.kind == "wavefront" and found.overlap.width == 4 and found.overlap.chunks > 3
    assert {task.device.cores for task in found.tasks} == {33}
    program = compose(found.stack, found.workload, found.programs(), found.overlap)
    assert [len(call.layers) for call in program.calls] == [4]
    names = [b.name for b in program.buffers]
    assert [n for n in names if n.startswith("between")] == ["between_0", "between_1", "between_2"]
    assert len(names) == len(set(names)) and sum(n.endswith("_recurrent_0") for n in names) == 4
    assert sum(name.startswith("persistent") for name in program.functions) == 1
    # too short to have chunks; a layer that needs the whole GPU; only two at a time fit
    assert planned(cell="lstm", hidden=256, layers=4, seq=8).overlap == SERIAL
    assert planned(cell="lstm", hidden=2048, batch=16, layers=2).overlap == SERIAL
    pairs = planned(cell="lstm", hidden=1400, batch=1, layers=5, seq=500, overlap="wavefront", schedule="persistent")
    program = compose(pairs.stack, pairs.workload, pairs.programs(), pairs.overlap)
    assert pairs.overlap.width in (2, 3) and isinstance(program.calls[0], Wave)
    assert sum(len(call.layers) for call in program.calls if isinstance(call, Wave)) in (4, 5)


def test_a_short_wave_has_few_chunks():
    overlap = planned(cell="lstm", hidden=256, layers=4, seq=256, overlap="wavefront").overlap
    assert overlap.least > 8  # what the launches of a chunk cost
    one = planned(layers=2, overlap="wavefront", seq=1).overlap
    assert one == Overlap("wavefront", 2, 1, one.least)


@pytest.mark.parametrize(("chunks", "least"), [(1, 1), (3, 5), (10, 16), (32, 40)])
def test_a_chunk_has_room(chunks: int, least: int):
    """Whatever T is; and layers do not need L times the memory of one."""
    extent = Extent(7, 100)
    for steps in range(1, 700):
        most = min(steps, chunk_steps(steps, chunks, least))
        assert -(-steps // chunk_steps(steps, chunks, least)) <= chunks
        assert extent.at(most) <= chunk_extent(extent, chunks, least).at(steps)
    alone, wave = (planned(cell="lstm", hidden=256, layers=4, seq=1000, batch=8, overlap=overlap)
                   for overlap in ("none", "wavefront"))
    sizes = [sum(b.nbytes(1000) for b in compose(p.stack, p.workload, p.programs(), p.overlap).buffers
                 if b.name.endswith("hoisted")) for p in (alone, wave)]
    assert sizes[1] < sizes[0]


def test_what_is_asked_for():
    for overlap, kind in (("none", "none"), ("directions", "directions"), ("auto", "none")):
        found = planned(cell="lstm", hidden=2048, batch=4, bidirectional=True, overlap=overlap)
        assert found.overlap.kind == kind
    assert "directions side by side: as asked for" in planned(bidirectional=True, overlap="directions").found.provenance


@pytest.mark.parametrize(("options", "words"), [
    ({"overlap": "both"}, "overlap='both' is not allowed; expected one of auto, none, directions, wavefront"),
    ({"overlap": "wavefront"}, "with layers=1"),
    ({"overlap": "wavefront", "layers": 2, "bidirectional": True}, "none or directions with bidirectional=True"),
    ({"overlap": "wavefront", "layers": 2, "reverse": True}, "reverse=True"),
    ({"overlap": "wavefront", "layers": 2, "target": "cpu", "dtype": "float32"}, "on a CPU"),
    ({"overlap": "directions"}, "expected auto or none without bidirectional=True"),
    ({"overlap": "directions", "layers": 2}, "bidirectional=True"),
    ({"overlap": "directions", "bidirectional": True, "target": "cpu", "dtype": "float32"}, "on a CPU"),
])
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(ArgumentError, match=words):
        planned(**options)


def test_a_schedule_that_does_not_serve_a_share():
    sizes = {"cell": "lstm", "hidden": 2816, "batch": 1, "bidirectional": True, "schedule": "persistent"}
    assert planned(**sizes).overlap == SERIAL
    with pytest.raises(ScheduleError, match="do not fit on the 66 multiprocessors"):
        planned(**sizes, overlap="directions")


def test_records_of_shares_are_for_shares(monkeypatch: pytest.MonkeyPatch):
    """What was measured on a whole GPU is not used on a half of it, what was measured on fewer is."""
    from ecornn.tune import log as folders

    log = folders.read_all()
    one = next(line for line in log.lines if getattr(line.record, "times", None) and line.record.device.cores == 132
               and not line.record.workload.backward
               and line.record.workload.hidden == 512 and line.record.schedule == "persistent"
               and line.record.config["groups"] * 512 / line.record.config["units"] <= 64)
    work = one.record.workload
    sizes = {"cell": work.cell, "hidden": work.hidden, "batch": work.batch, "seq": work.seq, "dtype": work.dtype,
             "input": work.input, "bidirectional": True, "overlap": "directions"}
    share = replace(one.record, device=replace(KNOWN["sm_90a"], name="a small one", cores=60))
    for record, used in ((one.record, False), (share, True)):
        held = folders.Log([type(one)(one.path, one.number, record)])
        monkeypatch.setattr(folders, "read_all", lambda held=held, **_: held)
        assert (planned(**sizes).chosen[0].line is not None) == used


def test_a_share_can_be_tuned_for(monkeypatch: pytest.MonkeyPatch):
    from ecornn import host_gpu
    from ecornn.tune.session import Session

    monkeypatch.setattr(host_gpu, "detect", lambda index=0: KNOWN["sm_90a"])
    for cores, wanted in ((66, 66), (500, 132)):
        assert Session(replace(KNOWN["sm_90a"], cores=cores)).device == replace(KNOWN["sm_90a"], cores=wanted)
    assert Session("cuda").device == Session("sm_90a").device == KNOWN["sm_90a"]


def test_a_gpu_with_one_multiprocessor_is_not_shared():
    one = replace(KNOWN["sm_90a"], cores=1)
    assert planned(bidirectional=True, target=one).overlap == SERIAL
    with pytest.raises(ScheduleError, match="too few"):
        planned(bidirectional=True, target=one, overlap="directions")


def test_the_manifest_says_it_and_old_ones_are_read():
    found = planned(bidirectional=True, overlap="directions")
    program = compose(found.stack, found.workload, found.programs(), found.overlap)
    assert [type(call) for call in program.calls] == [Concurrent]
    manifest = make_manifest(found.cell, found.task, found.found.schedule, found.found.config, program, "",
                             found.stack, found.overlap)
    text = msgspec.json.encode(manifest)
    assert decode(text.decode()) == manifest
    old = msgspec.json.decode(text)
    del old["overlap"]
    assert decode(msgspec.json.encode(old).decode()).overlap == SERIAL


def test_rows():
    own = changed(H100, clock=2.0)
    assert all(gpu_rates(device) is H100 for device in KNOWN.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rates.GPUS, "sm_80", own)
        patch.setitem(rates.GPUS, KNOWN["sm_86"].name, own)
        assert [gpu_rates(KNOWN[arch]) is own for arch in ("sm_80", "sm_86", "sm_89")] == [True, True, False]
    assert [cpu_rates(Device("llvm", arch, arch, 4)) for arch in ("znver4", "skylake-avx512", "neoverse-v1")] == [
        ZEN, PLAIN_CORE, PLAIN_CORE]
    assert PLAIN_CORE.slow_l3 and not ZEN.slow_l3


@pytest.mark.parametrize(("cell", "sizes", "schedules"), [
    ("lstm", (50, 16, 256, 256), ("persistent", "persistent_wide", "layout_transform", "fused_step")),
    ("lstm", (50, 16, 64, 64), ("persistent_block",)),
    ("indrnn", (50, 16, 256, 256), ("elementwise",))])
def test_estimates_read_the_row(monkeypatch: pytest.MonkeyPatch, cell: str, sizes: tuple[int, int, int, int],
                                schedules: tuple[str, ...]):
    """Each estimate is larger where rates are halved and times are doubled."""
    task = task_of(cell, sizes, "float16", KNOWN["sm_90a"])
    configs = {name: all_schedules()[name].default(task) for name in schedules}

    def estimates() -> list[float]:
        of = {all_schedules()[name]: config for name, config in configs.items()}
        return [one.features(task, one.plan(task, config))["estimate"] for one, config in of.items()]

    fast = estimates()
    times = ("launch", "tensor_launch", "l2_exchange", "cluster_exchange", "l2_counted", "memory_latency")
    slower = changed(H100, **{name: 2 * getattr(H100, name) for name in times}, memory=H100.memory / 2,
                     mma_gemm=H100.mma_gemm / 2, wgmma_gemm=H100.wgmma_gemm / 2)
    monkeypatch.setitem(rates.GPUS, task.device.name, slower)
    assert all(a < b for a, b in zip(fast, estimates(), strict=True))


def test_waves_read_the_row():
    assert wave_time(10, 1, 1, 100.0, changed(H100, sequence=5.0)) == 1005.0
