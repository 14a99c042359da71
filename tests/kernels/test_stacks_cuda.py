"""Stacks, directions, lengths and resets on CUDA, emulated and compiled; which sequences go side by side, and why."""

from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cuda_on_cpu import Emulated, Memory, inputs
from cuda_sample import child
from emulated import TINY, task_of
from exact import ALL_CELLS, Wanted, of_stack
from msgspec.structs import replace
from refusals import refused

from ecornn import host_gpu
from ecornn.analysis import analyse
from ecornn.build import build_module
from ecornn.build.cuda import generate
from ecornn.cells import Cell, get
from ecornn.compiler import plan
from ecornn.compose import compose, parameter_prefix
from ecornn.device import Device
from ecornn.errors import ArgumentError, ScheduleError
from ecornn.manifest import Manifest, decode
from ecornn.overlap import wave_time
from ecornn.program import Concurrent, Extent, Program, Wave, chunk_extent, chunk_steps
from ecornn.schedules import all_schedules, rates
from ecornn.schedules.base import Task
from ecornn.schedules.rates import H100, PLAIN_CORE, ZEN, cpu_rates, gpu_rates
from ecornn.targets import KNOWN
from ecornn.task import make_manifest
from ecornn.tune import log as folders
from ecornn.tune.session import Session
from ecornn.workload import SERIAL, Overlap, Stack, Workload

T, B, I, H = 5, 6, 7, 37
SCHEDULES = all_schedules()


def cell_of(name: str) -> Cell:
    return ALL_CELLS.get(name) or get(name)


def program_of(schedule: str, cell: str, stack: Stack, dtype: str, cores: int = 3,
               forward: dict[str, int] | None = None, overlap: Overlap = SERIAL, **change: int) -> Program:
    whole, made, found = Workload(cell, H, I, B, T, dtype), {}, SCHEDULES[schedule]
    for part in stack.parts(whole):
        if (part.workload, part.traversal) not in made:
            graph = analyse(cell_of(cell), part.workload.input, H)
            task = Task(part.workload, graph, replace(TINY, cores=cores), part.traversal)
            assert found.serves(task) is None
            config = {**found.default(task), **change, **((not part.traversal.reverse and forward) or {})}
            assert found.check(task, config) is None
            made[part.workload, part.traversal] = found.program(task, found.plan(task, config))
    return compose(stack, whole, [made[p.workload, p.traversal] for p in stack.parts(whole)], overlap)


SIDES = Overlap("directions", 2)
CASES = [("fused_step", "lstm", Stack(2, True, True, True), "float32"),
         ("fused_step", "gru_reset_before", Stack(1, True, True, True), "bfloat16"),
         ("layout_transform", "gru", Stack(2, True, True, True), "float16"),
         ("layout_transform", "rnn_tanh", Stack(3, False, True, False), "float32"),
         ("layout_transform", "gru_reset_before", Stack(1, True, False, True), "float32"),
         ("persistent", "lstm", Stack(2, True, True, True), "bfloat16"),
         ("persistent", "gru", Stack(3, False, True, True), "float16"),
         ("persistent", "gru_reset_before", Stack(1, True, True, True), "float32"),
         ("persistent_wide", "lstm", Stack(2, True, True, True), "float16"),
         ("whole_step", "lstm", Stack(2, True, True, True), "float16"),
         ("fused_step", "lstm(layer_norm)", Stack(2, True, True, True), "float32"),
         ("persistent", "lstm(layer_norm)", Stack(2, True, True, True), "float16"),
         ("elementwise", "highway", Stack(2, True, True, True), "float32")]


@pytest.mark.parametrize(("schedule", "cell", "stack", "dtype", "overlap"), [
    *((*case, SERIAL) for case in CASES), *((*case, SIDES) for case in CASES if case[2].bidirectional)], ids=str)
def test_results(tmp_path, schedule, cell, stack, dtype, overlap):
    """Side by side launches of the directions are mixed: what one writes the other must not use."""
    program = program_of(schedule, cell, stack, dtype, overlap=overlap)
    assert overlap == SERIAL or len(program.calls) == stack.layers
    check_results(Emulated(program, tmp_path), cell, stack, dtype)


WAVES = [("fused_step", "gru_reset_before", Stack(3, False, True, True), "float32", 3, {}),
         ("layout_transform", "rnn_tanh", Stack(5, False, True), "float16", 2, {}),
         pytest.param(*("persistent", "gru", Stack(4, False, False, True), "float32", 3, {"cores": 7, "ahead": 0}),
                      marks=pytest.mark.exhaustive),
         ("persistent", "lstm", Stack(2, False, True, True), "float16", 2, {}),
         ("persistent_wide", "lstm", Stack(2, False, True, True), "float16", 2, {}),
         ("whole_step", "gru", Stack(3, False, True, True), "float32", 3, {}),
         ("persistent", "gru(layer_norm)", Stack(2, False, True, True), "float32", 2, {}),
         ("elementwise", "highway", Stack(2, False, True, True), "float32", 2, {})]


@pytest.mark.parametrize(("schedule", "cell", "stack", "dtype", "width", "change"), WAVES, ids=str)
def test_a_wavefront(tmp_path, schedule, cell, stack, dtype, width, change):
    program = program_of(schedule, cell, stack, dtype, overlap=Overlap("wavefront", width, 3, 5), **change)
    assert sum(isinstance(call, Wave) for call in program.calls) == max(1, stack.layers // width)
    emulated = Emulated(program, tmp_path)
    for steps in (1, 9, 19):
        check_results(emulated, cell, stack, dtype, steps)


def check_results(emulated: Emulated, cell: str, stack: Stack, dtype: str, T: int = T) -> None:
    generator, one = np.random.default_rng(2), cell_of(cell)
    parameters, weights, states = {}, {}, {}
    for part in stack.parts(Workload(cell, H, I, B, T, dtype)):
        x, first, found = inputs(cell, (T, B, part.workload.input, H), dtype, one.parameters(part.workload.input, H),
                                 one.states, seed=part.number)
        prefix, label = parameter_prefix(stack, part), f"{part.label}_" if stack.count > 1 else ""
        parameters |= {prefix + n: v for n, v in found.items()}
        weights |= {f"{n}_{part.label}": v.reshape(-1, *v.shape[2:]) for n, v in found.items()}
        states |= {label + n: v for n, v in first.items()}
        if not part.number:
            given = x
    masks = {"lengths": np.minimum([3, max(T, 5), 0, 8, 1, 12], T)} if stack.lengths else {}
    if stack.resets:
        masks["resets"] = generator.random((T, B)) < 0.4
        masks["resets"][8:9] = np.arange(B) % 2
    for b, n in enumerate(masks.get("lengths", ())):
        given[n:, b] = np.nan
    y, after = emulated.run(given, states, parameters, masks, stack.directions)
    start = [np.stack([v for n, v in states.items() if n.removesuffix(s) != n]).astype(np.float64) for s in one.states]
    start = start if stack.count > 1 else [s[0] for s in start]
    exact = np.nan_to_num(given.astype(np.float64))
    wanted = Wanted(dtype, lambda forward: of_stack(cell, stack, exact, start, weights, masks, forward))
    last = [np.stack([v for n, v in after.items() if n.removesuffix(name) != n]) for name in one.states]
    wanted.check(y, last if stack.count > 1 else [s[0] for s in last])
    for b, n in enumerate(masks.get("lengths", ())):
        assert not y[n:, b].astype(np.float32).any()


RUN = """
import numpy as np
T, B, file = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
buffers = dict(np.load(file))
m["run"](T, B, 0, 7, *(value.ctypes.data for value in buffers.values()))
np.savez(file, **buffers)
"""


class Hosted(Emulated):
    def __init__(self, program: Program, folder: Path, driver: Path) -> None:
        super().__init__(program, folder)
        self.folder, self.driver = folder, driver
        self.notes: list[str] = []
        manifest = Manifest(Workload("test", H, I), KNOWN["sm_90a"], "test", {}, "made by a test", ("h",), "h", (),
                            program.buffers, {"run": program.entries["run"].takes}, {"ecornn": "test"})
        build_module(program, manifest, folder / "module.so")

    def carry_out(self, memory: Memory, steps: int, batch: int, entry: str = "run") -> None:
        assert entry == "run", "the only entry of these modules"
        file = self.folder / "buffers.npz"
        np.savez(file, **{b.name: memory[b.name].view(np.uint8) for b in self.program.buffers})
        self.notes = child(RUN, self.folder / "module.so", self.driver, steps, batch, file,
                           FAKE_KERNELS=str(self.folder / "kernels.so")).calls
        for name, value in np.load(file).items():
            memory[name].view(np.uint8)[:] = value


@pytest.mark.slow
@pytest.mark.skipif(host_gpu.detect() is not None, reason="the driver without a GPU serves modules for sm_90a")
@pytest.mark.parametrize(("schedule", "cell", "stack", "dtype", "overlap", "change"), [
    ("persistent", "lstm", Stack(3, False, True, True), "bfloat16", Overlap("wavefront", 3, 3, 5), {}),
    pytest.param("layout_transform", "lstm", Stack(2, True, True, True), "float16", SIDES, {},
                 marks=pytest.mark.exhaustive)], ids=str)
def test_modules_compute_what_they_should(tmp_path, fake, schedule, cell, stack, dtype, overlap, change):
    module = Hosted(program_of(schedule, cell, stack, dtype, overlap=overlap, **change), tmp_path, fake)
    for steps in (1, 27):
        check_results(module, cell, stack, dtype, steps)
        streams = {note.split("stream=")[1].split()[0] for note in module.notes if "Launch" in note}
        assert len(streams) == (overlap.width if overlap == SIDES or steps > 8 else 1)


@pytest.mark.parametrize(("cell", "dtype"), [
    pytest.param("lstm", "bfloat16", marks=pytest.mark.exhaustive), ("gru_reset_before", "float32"),
    pytest.param("lstm", "float32", marks=pytest.mark.exhaustive),
    pytest.param("gru_reset_before", "bfloat16", marks=pytest.mark.exhaustive)])
def test_persistent_stacks_compile(cell, dtype, monkeypatch):
    stack = Stack(3, True, True, True)
    clusters = program_of("persistent", cell, stack, dtype, cores=132)
    assert sorted(clusters.functions) == sorted(f"{n}{end}" for n in ("project", "persistent") for end in ("", "_v1"))
    monkeypatch.setattr(Device, "clusters", lambda self, blocks: 0)
    monkeypatch.setattr(SCHEDULES["persistent"], "_known", {})
    before = program_of("persistent", cell, stack, dtype, cores=132, ahead=100)
    # one projection for each width of x, the others for each direction
    assert sorted(before.functions) == sorted(f"{n}{end}" for n in ("project", "persistent", "start")
                                              for end in ("", "_v1"))
    # kernels that have the projection in them are of one width, too
    beside = program_of("persistent", cell, stack, dtype, cores=132, ahead=100, forward={"ahead": 50})
    assert sum(name.startswith("persistent") for name in beside.functions) == 3
    for program in (before, beside, clusters):
        assert all(found["spill_stores"] == 0 for found in generate(program, KNOWN["sm_90a"]).resources.values())


def planned(**options: Any) -> Any:
    return plan(options.pop("cell", "gru"), **{"hidden": 64, "target": "sm_90a", "dtype": "float16", **options})


def composed(found: Any) -> Program:
    return compose(found.stack, found.workload, found.programs(), found.overlap)


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
    program = composed(found)
    assert [len(call.layers) for call in program.calls] == [4]
    names = [b.name for b in program.buffers]
    assert [n for n in names if n.startswith("between")] == ["between_0", "between_1", "between_2"]
    assert len(names) == len(set(names)) and sum(n.endswith("_recurrent_0") for n in names) == 4
    assert sum(name.startswith("persistent") for name in program.functions) == 1
    # too short to have chunks; a layer that needs the whole GPU; only two at a time fit
    assert planned(cell="lstm", hidden=256, layers=4, seq=8).overlap == SERIAL
    assert planned(cell="lstm", hidden=2048, batch=16, layers=2).overlap == SERIAL
    pairs = planned(cell="lstm", hidden=1400, batch=1, layers=5, seq=500, overlap="wavefront", schedule="persistent")
    program = composed(pairs)
    assert pairs.overlap.width in (2, 3) and isinstance(program.calls[0], Wave)
    assert sum(len(call.layers) for call in program.calls if isinstance(call, Wave)) in (4, 5)


def test_a_short_wave_has_few_chunks():
    overlap = planned(cell="lstm", hidden=256, layers=4, seq=256, overlap="wavefront").overlap
    assert overlap.least > 8  # what the launches of a chunk cost
    one = planned(layers=2, overlap="wavefront", seq=1).overlap
    assert one == Overlap("wavefront", 2, 1, one.least)


@pytest.mark.parametrize(("chunks", "least"), [(1, 1), (3, 5), (10, 16), (32, 40)])
def test_a_chunk_has_room(chunks, least):
    """Whatever T is; and layers do not need L times the memory of one."""
    extent = Extent(7, 100)
    for steps in range(1, 700):
        most = min(steps, chunk_steps(steps, chunks, least))
        assert -(-steps // chunk_steps(steps, chunks, least)) <= chunks
        assert extent.at(most) <= chunk_extent(extent, chunks, least).at(steps)
    alone, wave = (planned(cell="lstm", hidden=256, layers=4, seq=1000, batch=8, overlap=overlap)
                   for overlap in ("none", "wavefront"))
    sizes = [sum(b.nbytes(1000) for b in composed(p).buffers if b.name.endswith("hoisted")) for p in (alone, wave)]
    assert sizes[1] < sizes[0]


def test_what_is_asked_for():
    for overlap, kind in (("none", "none"), ("directions", "directions"), ("auto", "none")):
        assert planned(cell="lstm", hidden=2048, batch=4, bidirectional=True, overlap=overlap).overlap.kind == kind
    assert "directions side by side: as requested" in planned(bidirectional=True, overlap="directions").found.provenance


@pytest.mark.parametrize(("options", "words"), [
    ({"overlap": "both"}, "overlap='both': expected one of auto, none, directions, wavefront"),
    ({"overlap": "wavefront"}, "with layers=1"),
    ({"overlap": "wavefront", "layers": 2, "bidirectional": True}, "none or directions with bidirectional=True"),
    ({"overlap": "wavefront", "layers": 2, "reverse": True}, "reverse=True"),
    ({"overlap": "wavefront", "layers": 2, "target": "cpu", "dtype": "float32"}, "on a CPU"),
    ({"overlap": "directions"}, "expected auto or none without bidirectional=True"),
    ({"overlap": "directions", "layers": 2}, "bidirectional=True"),
    ({"overlap": "directions", "bidirectional": True, "target": "cpu", "dtype": "float32"}, "on a CPU")])
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str):
    refused(ArgumentError, words, planned, **options)


@pytest.mark.parametrize(("options", "words"), [
    ({"cell": "lstm", "hidden": 2816, "batch": 1, "schedule": "persistent"}, "do not fit on the 66 multiprocessors"),
    ({"target": replace(KNOWN["sm_90a"], cores=1)}, "too few")])
def test_shares_that_are_too_small(options: dict[str, Any], words: str):
    assert planned(**options, bidirectional=True).overlap == SERIAL
    refused(ScheduleError, words, planned, **options, bidirectional=True, overlap="directions")


def test_records_of_shares_are_for_shares(monkeypatch: pytest.MonkeyPatch):
    """What was measured on a whole GPU is not used on a half of it, what was measured on fewer is."""
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
    monkeypatch.setattr(host_gpu, "detect", lambda index=0: KNOWN["sm_90a"])
    for cores, wanted in ((66, 66), (500, 132)):
        assert Session(replace(KNOWN["sm_90a"], cores=cores)).device == replace(KNOWN["sm_90a"], cores=wanted)
    assert Session("cuda").device == Session("sm_90a").device == KNOWN["sm_90a"]


def test_the_manifest_says_it_and_old_ones_are_read():
    found = planned(bidirectional=True, overlap="directions")
    program = composed(found)
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
    for arch in rates.AS_BEFORE:
        assert changed(gpu_rates(KNOWN[arch]), bounds=H100.bounds) == H100
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rates.GPUS, "sm_80", own)
        patch.setitem(rates.GPUS, KNOWN["sm_86"].name, own)
        assert [gpu_rates(KNOWN[arch]) is own for arch in ("sm_80", "sm_86", "sm_89")] == [True, True, False]
    assert [cpu_rates(Device("llvm", arch, arch, 4)) for arch in ("znver4", "skylake-avx512", "neoverse-v1")] == [
        ZEN, PLAIN_CORE, PLAIN_CORE]
    assert PLAIN_CORE.slow_l3 and not ZEN.slow_l3


@pytest.mark.parametrize(("cell", "sizes", "schedules"), [
    ("lstm", (50, 16, 256, 256), ("persistent", "persistent_wide", "layout_transform", "fused_step")),
    ("lstm", (50, 16, 64, 64), ("persistent_block",)), ("indrnn", (50, 16, 256, 256), ("elementwise",))])
def test_estimates_read_the_row(monkeypatch, cell, sizes, schedules):
    task = task_of(cell, sizes, "float16", KNOWN["sm_90a"])
    configs = {one: one.default(task) for one in map(SCHEDULES.__getitem__, schedules)}
    def estimates() -> list[float]:
        return [one.features(task, one.plan(task, config))["estimate"] for one, config in configs.items()]
    fast = estimates()
    times = ("launch", "tensor_launch", "l2_exchange", "cluster_exchange", "l2_counted", "memory_latency")
    slower = changed(H100, **{name: 2 * getattr(H100, name) for name in times}, memory=H100.memory / 2,
                     mma_gemm=H100.mma_gemm / 2, wgmma_gemm=H100.wgmma_gemm / 2)
    monkeypatch.setitem(rates.GPUS, task.device.name, slower)
    assert all(a < b for a, b in zip(fast, estimates(), strict=True))
    assert wave_time(10, 1, 1, 100.0, changed(H100, sequence=5.0)) == 1005.0
