"""CUDA modules without a GPU: streams and events, as a driver takes notes of them, and what whole modules compute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cuda_sample
import numpy as np
import pytest
from cuda_on_cpu import Emulated, Memory
from cuda_sample import POINTERS, N, run
from driver_notes import child, raised
from test_stacks_cuda import SIDES, H, I, check_results, program_of

from ecornn.build import build_module
from ecornn.errors import BuildError
from ecornn.host_gpu import detect
from ecornn.manifest import Manifest
from ecornn.program import (
    Buffer,
    Call,
    Chunks,
    Concurrent,
    Extent,
    Fill,
    Launch,
    Loop,
    Program,
    Wave,
    WaveLayer,
    chunk_steps,
    launches,
)
from ecornn.schedules.backward.weights import zero_kernel
from ecornn.targets import KNOWN
from ecornn.workload import Overlap, Stack, Workload

pytestmark = pytest.mark.skipif(detect() is not None, reason="the driver without a GPU serves modules for sm_90a")
TOTAL, STEP = Launch("total", 4, 32, cooperative=True), Launch("step", 2, 64)
LAST = Launch("last", 2, 64, 256, cluster=2)
BOTH = (Fill("counter", 0, Extent(1)), Concurrent(((TOTAL, LAST), (Loop((STEP,)),))), LAST)
STATES = (("h_in", "h_out"),)
WAVE = (Fill("counter", 0, Extent(1)), Wave((
    WaveLayer((TOTAL,), {"x": N}, ()), WaveLayer((Loop((STEP,)),), {"y": N}, STATES),
    WaveLayer((Fill("mask", 1, Extent(0, 1)), LAST), {"x": 1, "y": N}, STATES)), 3, 5))
NOTE = re.compile(r"(\w+) (.*?)\s*stream=(\d+)")


def build(calls: tuple[Call, ...], folder: Path) -> Path:
    names = {launch.function for launch in launches(calls)}
    functions = {name: f for name, f in cuda_sample.functions().items() if name in names}
    out = folder / "sample.so"
    build_module(Program.running(functions, cuda_sample.BUFFERS, calls), cuda_sample.manifest(KNOWN["sm_90a"]), out)
    return out


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(BOTH, tmp_path_factory.mktemp("both"))


@pytest.fixture(scope="module")
def wave(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(WAVE, tmp_path_factory.mktemp("wave"))


def history(notes: list[str]) -> list[tuple[str, int, set[int]]]:
    """What each launch or fill is, its stream, and the numbers of those that must be done before it starts."""
    done: dict[str, set[int]] = {}  # of a stream
    marks: dict[str, set[int]] = {}  # of an event
    found: list[tuple[str, int, set[int]]] = []
    for note in notes:
        if (match := NOTE.match(note)) is None:
            continue
        call, what, stream = match.groups()
        before = done.setdefault(stream, set())
        if call == "cuEventRecord":
            marks[what] = set(before)
        elif call == "cuStreamWaitEvent":
            before |= marks[what]
        else:
            name = what.split()[0].removesuffix("_kernel") if "Launch" in call else "fill"
            found.append((name, int(stream), set(before)))
            before.add(len(found) - 1)
    return found


def test_branches_come_after_what_was_before_and_before_what_follows(both: Path, fake: Path):
    notes = child(run() + run(1), both, fake).calls
    found = history(notes)
    assert [name for name, *_ in found] == ["fill", "total", "last", "step", "step", "last",
                                            "fill", "total", "last", "step", "last"]
    assert [stream for _, stream, _ in found] == [7, 7, 7, 900, 900, 7, 7, 7, 7, 900, 7]
    assert [before for *_, before in found[:6]] == [set(), {0}, {0, 1}, {0}, {0, 3}, {0, 1, 2, 3, 4}]
    assert found[6][2] == set(range(6)) and found[10][2] == set(range(10))
    # Made in the first call only, whatever is being captured; gone with the module.
    assert [n for n in notes if "Create" in n] == ["cuEventCreate flags=2 capture_mode=2",
                                                   "cuStreamCreate flags=1 capture_mode=2",
                                                   "cuEventCreate flags=2 capture_mode=2"]
    gone = ["cuEventDestroy 500", "cuEventDestroy 501", "cuStreamDestroy 900"]
    assert sorted(n for n in notes if "Destroy" in n) == gone
    assert notes.index("cuStreamDestroy 900") < notes.index("cuModuleUnload")


def test_branches_may_have_branches(tmp_path: Path, fake: Path):
    """Those of a branch come after what it has before them, and before what follows, as everywhere."""
    inner = Concurrent(((Loop((STEP,)),), (LAST,)))
    out = build((Concurrent(((TOTAL, inner, TOTAL), (LAST, inner))), LAST), tmp_path)
    found = history(child(run(1) + run(1), out, fake).calls)
    assert [name for name, *_ in found] == 2 * ["total", "step", "last", "total", "last", "step", "last", "last"]
    assert [before for *_, before in found[:8]] == [set(), {0}, {0}, {0, 1, 2}, set(), {4}, {4}, set(range(7))]
    assert len({stream for _, stream, _ in found}) == 4


def test_callers_share_no_streams_and_no_events(both: Path, fake: Path):
    """Neither two streams of one device, nor of two devices, nor the default stream."""
    code = run(stream=7) + run(stream=8) + run(stream=0) + run(stream=7, device=1) + run(stream=8)
    notes = child(code, both, fake).calls
    users: dict[str, set[str]] = {}
    for index in (i for i, note in enumerate(notes) if note.startswith("cuStreamWaitEvent")):
        event, stream = re.findall(r"\d+", notes[index])
        users.setdefault(event, set()).add(stream)
    sides = [stream for _, stream, _ in history(notes) if stream >= 900]
    assert sides == [900] * 2 + [901] * 2 + [902] * 2 + [903] * 2 + [901] * 2
    assert users == {"500": {"900"}, "501": {"7"}, "502": {"901"}, "503": {"8"}, "504": {"902"}, "505": {"0"},
                     "506": {"903"}, "507": {"7"}}


@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_run_one_after_the_other(reverse: bool, tmp_path: Path, fake: Path):
    module = build((Chunks((Fill("mask", 1, Extent(0, 1)), Loop((STEP,))), {"mask": 1}, STATES, 8, reverse), TOTAL),
                   tmp_path)
    notes = child(run(19), module, fake).calls
    sizes = [3, 8, 8] if reverse else [8, 8, 3]
    assert [name for name, *_ in history(notes)] == [n for s in sizes for n in ("fill", *["step"] * s)] + ["total"]
    fills = [note for note in notes if "Memset" in note]
    assert len(fills) == 3
    for note, size, first in zip(fills, sizes, [16, 8, 0] if reverse else [0, 8, 16], strict=True):
        assert note.startswith(f"cuMemsetD8Async {POINTERS[7] + 4 * first} byte=1 size={4 * size} "), note


@pytest.mark.parametrize("existing", [0, 1])
def test_chunks_after_the_first_add_to_gradients(existing: int, tmp_path: Path, fake: Path):
    """Whatever the call says of the first one; also in what goes on beside something else."""
    kernel = zero_kernel("fresh", 0, 4, 1, add=True)
    fresh = Launch("fresh", 1, 256, names={"into": "sums"})
    calls = fresh, Chunks((Concurrent(((fresh,), (fresh,))), fresh), {}, STATES, 8), fresh
    buffers = (*cuda_sample.BUFFERS, Buffer.of("existing", "float32"))
    out = tmp_path / "sample.so"
    build_module(Program.running({"fresh": kernel}, buffers, calls), cuda_sample.manifest(KNOWN["sm_90a"]), out)
    notes = child(f"m['run'](19, 1, 0, 7, *{POINTERS}, {existing})\n", out, fake,
                  FAKE_PARAMETERS="fresh_kernel:pi").calls
    added = [int(n) for note in notes for n in re.findall(r"arguments 6000 (\d+)$", note)]
    assert added == [existing] * 4 + [1] * 6 + [existing]


def test_threads_may_call_at_once(both: Path, fake: Path):
    code = ("from threading import Thread\n"
            f"work = lambda stream: [m['run'](3, 1, 0, stream, *{POINTERS}) for _ in range(20)]\n"
            "threads = [Thread(target=work, args=(7 + i % 2,)) for i in range(4)]\n"
            "[t.start() for t in threads], [t.join() for t in threads]\n")
    notes = child(code, both, fake).calls
    assert sum(note.startswith("cuStreamCreate") for note in notes) == 2
    assert sum(note.startswith("cuLaunchKernelEx") for note in notes) == 4 * 20 * 6


def test_two_threads_may_take_two_devices_in_turns(both: Path, fake: Path):
    """Each device has the module loaded once, and every kernel is launched in the context of its own."""
    code = ("from threading import Thread\n"
            f"call = lambda device: m['run'](3, 1, device, 70 + device, *{POINTERS})\n"
            "work = lambda first: [call((first + i) % 2) for i in range(20)]\n"
            "threads = [Thread(target=work, args=(first,)) for first in range(2)]\n"
            "[t.start() for t in threads], [t.join() for t in threads]\n"
            + "".join(f"m['run'](3, 1, {device}, {70 + device}, *{POINTERS})\n" for device in range(2)))
    notes = child(code, both, fake, FAKE_CONTEXTS="1").calls
    assert sum(note.startswith("cuModuleLoadData") for note in notes) == 2
    assert sorted(note for note in notes if "PrimaryCtxRetain" in note) == [
        f"cuDevicePrimaryCtxRetain {10 + device}" for device in range(2)]
    launched = [tuple(map(int, re.findall(r"stream=(\d+).* context=(\d+)", note)[0]))
                for note in notes if note.startswith("cuLaunchKernelEx")]
    assert len(launched) == 42 * 6
    contexts: dict[int, set[int]] = {}
    for stream, context in launched:
        contexts.setdefault(stream, set()).add(context)
    assert contexts[70] == {110} and contexts[71] == {111} and all(len(found) == 1 for found in contexts.values())
    assert [sum(context == 110 + device for _, context in launched) for device in range(2)] == [21 * 6] * 2


@pytest.mark.parametrize(("fail", "message", "joined"), [
    ("cuLaunchKernelEx:700:1", "(an illegal address) in cuLaunchKernelEx of total", True),
    ("cuLaunchKernelEx:700:4", "(an illegal address) in cuLaunchKernelEx of step", True),
    ("cuEventRecord:1:1", "in cuEventRecord", False),  # before anything was forked
    ("cuStreamWaitEvent:1:1", "in cuStreamWaitEvent", False),
    ("cuEventRecord:1:2", "in cuEventRecord", False),  # the join itself
    ("cuStreamCreate:2:1", "in cuStreamCreate", False),
    ("cuEventCreate:2:2", "in cuEventCreate", False),
])
def test_what_was_forked_is_joined_after_an_error(both: Path, fake: Path, fail: str, message: str, joined: bool):
    """A capture would be lost otherwise. The next call works, with what was made by then."""
    done = child(raised(run()) + run(), both, fake, FAKE_FAIL=fail)
    assert message in done.stdout
    second = [i for i, note in enumerate(done.calls) if note.startswith("cuMemset")][1]
    waits = [note for note in done.calls[:second] if note.startswith("cuStreamWaitEvent") and note.endswith("stream=7")]
    assert len(waits) == joined
    found = history(done.calls[second:])
    assert [name for name, *_ in found] == ["fill", "total", "last", "step", "step", "last"]
    assert found[5][2] == set(range(5))
    created = [note for note in done.calls if "Create" in note]
    assert len(created) == 3 + ("Create" in fail)
    assert sum("Destroy" in note for note in done.calls) == 3


@pytest.mark.parametrize(("steps", "batch", "chunks"), [
    (19, 1, (8, 8, 3)), (24, 2, (8, 8, 8)), (25, 3, (16, 9)), (9, 1, (8, 1)), (100, 1, (40, 40, 20))])
def test_a_wave_has_its_chunks(wave: Path, fake: Path, steps: int, batch: int, chunks: tuple[int, ...]):
    """Each with its rows, its steps and its states, after the one before it and that of the layer before."""
    notes = child(run(steps, batch=batch), wave, fake).calls
    assert chunk_steps(steps, 3, 5) == chunks[0]
    found = history(notes)
    given = [[int(v) for v in note.split(" arguments ")[1].split()] for note in notes if " arguments " in note]
    numbers = [i for i, (name, *_) in enumerate(found) if name != "fill"]
    calls: dict[str, list[int]] = {"total": [], "step": [], "last": []}  # the launches of each layer
    arguments = dict(zip(numbers, given, strict=True))
    for i in numbers:
        calls[found[i][0]].append(i)
    assert [{found[i][1] for i in each} for each in calls.values()] == [{7}, {900}, {901}]
    starts = [sum(chunks[:k]) for k in range(len(chunks))]
    row = batch * N * 4
    # x, y, h_in, h_out, w, sums, counter, mask at 1000, 2000, ...
    assert [arguments[i] for i in calls["total"]] == [
        [7000, 8000, 6000, 1000 + row * first, size] for first, size in zip(starts, chunks, strict=True)]
    assert [arguments[i] for i in calls["step"]] == [
        [4000 if first else 3000, 6000, 5000, 1000, 2000 + row * first, t]
        for first, size in zip(starts, chunks, strict=True) for t in range(size)]
    assert [arguments[i] for i in calls["last"]] == [
        [4000 if first else 3000, 4000, 2000 + row * first, size] for first, size in zip(starts, chunks, strict=True)]
    fills = [note for note in notes if note.startswith("cuMemset") and "stream=901" in note]
    assert [note.split()[3] for note in fills] == [f"size={4 * size}" for size in chunks]
    ends = [first + size for first, size in zip(starts, chunks, strict=True)]  # of the steps of a chunk, one past
    for k in range(len(chunks)):
        assert found[calls["total"][k]][2] == {0, *calls["total"][:k]}
        expected = {0, *calls["total"][:k + 1], *calls["step"][:starts[k]]}
        assert found[calls["step"][starts[k]]][2] == expected
        before = found[calls["last"][k]][2]
        assert set(calls["step"][:ends[k]]) <= before and not set(calls["step"][ends[k]:]) & before
    assert sum(note.startswith("cuStreamCreate") for note in notes) == 2


def test_the_stream_goes_on_after_the_wave(wave: Path, fake: Path):
    found = history(child(run(19) + run(19), wave, fake).calls)
    second = [i for i, (name, stream, _) in enumerate(found) if name == "fill" and stream == 7][1]
    assert found[second][2] == set(range(second))
    assert all(before >= set(range(second)) for *_, before in found[second:])


def test_a_wave_of_one_chunk_stays_in_its_stream(wave: Path, fake: Path):
    notes = child(run(8), wave, fake).calls
    assert {stream for _, stream, _ in history(notes)} == {7}
    assert not any("Event" in note or "StreamCreate" in note for note in notes)


@pytest.mark.parametrize("launch", [1, 2, 9, 10, 25])
def test_a_wave_is_joined_after_an_error(wave: Path, fake: Path, launch: int):
    done = child(raised(run(19)) + run(19), wave, fake, FAKE_FAIL=f"cuLaunchKernelEx:700:{launch}")
    assert "(an illegal address) in cuLaunchKernelEx" in done.stdout
    second = [i for i, note in enumerate(done.calls) if note.startswith("cuMemset") and note.endswith("stream=7")][1]
    first = done.calls[:second]
    used = {match[1] for note in first if (match := re.search(r"stream=(9\d+)", note))}
    joined = [note.split()[1] for note in first if note.startswith("cuStreamWaitEvent") and note.endswith("stream=7")]
    marks = {note.split()[1]: note.split("stream=")[1] for note in first if note.startswith("cuEventRecord")}
    assert {marks[event] for event in joined} == used
    assert sum(note.startswith("cuLaunchKernelEx") for note in done.calls[second:]) == 3 + 19 + 3


def test_branches_that_cannot_be(tmp_path: Path):
    for branches in (((TOTAL,),), ((STEP,),) * 33):
        with pytest.raises(BuildError, match="from 2 to 32"):
            build((Concurrent(branches),), tmp_path)


def test_the_longest_call_is_one_that_can_be_counted(tmp_path: Path, fake: Path):
    layers = tuple(WaveLayer((TOTAL,), {"x": N}, ()) for _ in range(2))
    notes = child(run((1 << 31) - 1), build((Wave(layers, 1, 1),), tmp_path), fake).calls
    assert [note.split()[-1] for note in notes if "Launch" in note] == [str((1 << 31) - 1)] * 2


RUN = """
import numpy as np
T, B, file = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
buffers = dict(np.load(file))
m["run"](T, B, 0, 7, *(value.ctypes.data for value in buffers.values()))
np.savez(file, **buffers)
"""


class Hosted(Emulated):
    """An emulated program whose calls are made by its module."""

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


CASES: list[Any] = [
    ("persistent", "lstm", Stack(3, False, True, True), "bfloat16", Overlap("wavefront", 3, 3, 5), {}),
    pytest.param("persistent", "gru", Stack(3), "float32", Overlap("wavefront", 2, 3, 5), {"cores": 7, "ahead": 0},
                 marks=pytest.mark.exhaustive),
    pytest.param("layout_transform", "lstm", Stack(2, True, True, True), "float16", SIDES, {},
                 marks=pytest.mark.exhaustive)]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "cell", "stack", "dtype", "overlap", "change"), CASES, ids=str)
def test_modules_compute_what_they_should(tmp_path: Path, fake: Path, schedule: str, cell: str, stack: Stack,
                                          dtype: str, overlap: Overlap, change: dict[str, Any]):
    module = Hosted(program_of(schedule, cell, stack, dtype, overlap=overlap, **change), tmp_path, fake)
    for steps in (1, 27):
        check_results(module, cell, stack, dtype, steps)
        streams = {note.split("stream=")[1].split()[0] for note in module.notes if "Launch" in note}
        assert len(streams) == (overlap.width if overlap == SIDES or steps > 8 else 1)
