"""Modules without a GPU: what entries take and call, and in which order of streams and events, as a driver notes it."""

import re
from dataclasses import replace
from pathlib import Path

import cuda_sample
import numpy as np
import pytest
import tvm_ffi
from cuda_sample import POINTERS, N, child, raised, run
from msgspec import structs

from ecornn import program as programs
from ecornn.build import build_module
from ecornn.build.cuda import lower
from ecornn.build.host_cuda import host_program
from ecornn.build.llvm import tables
from ecornn.errors import BuildError, ModuleError
from ecornn.host_cpu import detect as detect_cpu
from ecornn.host_gpu import detect
from ecornn.manifest import Manifest
from ecornn.program import Chunks, Concurrent, Entry, Extent, Fill, Launch, Loop, Program, Wave, WaveLayer
from ecornn.runtime.plan import entry_plan
from ecornn.schedules.backward.weights import zero_kernel
from ecornn.schedules.cpu.emit import Emitter
from ecornn.targets import KNOWN
from ecornn.workload import Workload

TOTAL, STEP = Launch("total", 4, 32, cooperative=True), Launch("step", 2, 64)
LAST = Launch("last", 2, 64, 256, cluster=2)
BOTH = (Fill("counter", 0, Extent(1)), Concurrent(((TOTAL, LAST), (Loop((STEP,)),))), LAST)
STATES = (("h_in", "h_out"),)
WAVE = (Fill("counter", 0, Extent(1)), Wave((
    WaveLayer((TOTAL,), {"x": N}, ()), WaveLayer((Loop((STEP,)),), {"y": N}, STATES),
    WaveLayer((Fill("mask", 1, Extent(0, 1)), LAST), {"x": 1, "y": N}, STATES)), 3, 5))
NOTE = re.compile(r"(\w+) (.*?)\s*stream=(\d+)")


def build(of: Program | tuple[programs.Call, ...], folder: Path) -> Path:
    if not isinstance(of, Program):
        names = {launch.function for launch in programs.launches(of)}
        functions = {name: f for name, f in cuda_sample.functions().items() if name in names}
        of = Program.running(functions, cuda_sample.BUFFERS, of)
    build_module(of, cuda_sample.manifest(KNOWN["sm_90a"]), folder / "sample.so")
    return folder / "sample.so"


@pytest.fixture
def fake(fake: Path) -> Path:
    if detect() is not None:
        pytest.skip("the driver without a GPU serves modules for sm_90a")
    return fake


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(BOTH, tmp_path_factory.mktemp("both"))


@pytest.fixture(scope="module")
def wave(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(WAVE, tmp_path_factory.mktemp("wave"))


def arguments(notes: list[str]) -> list[list[int]]:
    return [[int(v) for v in note.split(" arguments ")[1].split()] for note in notes if " arguments " in note]


def count(notes: list[str], start: str) -> int:
    return sum(note.startswith(start) for note in notes)


def history(notes: list[str]) -> list[tuple[str, int, set[int]]]:
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
    inner = Concurrent(((Loop((STEP,)),), (LAST,)))
    out = build((Concurrent(((TOTAL, inner, TOTAL), (LAST, inner))), LAST), tmp_path)
    found = history(child(run(1) + run(1), out, fake).calls)
    assert [name for name, *_ in found] == 2 * ["total", "step", "last", "total", "last", "step", "last", "last"]
    assert [before for *_, before in found[:8]] == [set(), {0}, {0}, {0, 1, 2}, set(), {4}, {4}, set(range(7))]
    assert len({stream for _, stream, _ in found}) == 4


def test_callers_share_no_streams_and_no_events(both: Path, fake: Path):
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
    kernel = zero_kernel("fresh", 0, 4, 1, add=True)
    fresh = Launch("fresh", 1, 256, names={"into": "sums"})
    calls = fresh, Chunks((Concurrent(((fresh,), (fresh,))), fresh), {}, STATES, 8), fresh
    buffers = (*cuda_sample.BUFFERS, programs.Buffer.of("existing", "float32"))
    out = build(Program.running({"fresh": kernel}, buffers, calls), tmp_path)
    notes = child(f"m['run'](19, 1, 0, 7, *{POINTERS}, {existing})\n", out, fake,
                  FAKE_PARAMETERS="fresh_kernel:pi").calls
    assert arguments(notes) == [[6000, added] for added in [existing] * 4 + [1] * 6 + [existing]]


def test_threads_may_call_at_once(both: Path, fake: Path):
    code = ("from threading import Thread\n"
            f"work = lambda stream: [m['run'](3, 1, 0, stream, *{POINTERS}) for _ in range(20)]\n"
            "threads = [Thread(target=work, args=(7 + i % 2,)) for i in range(4)]\n"
            "[t.start() for t in threads], [t.join() for t in threads]\n")
    notes = child(code, both, fake).calls
    assert count(notes, "cuStreamCreate") == 2 and count(notes, "cuLaunchKernelEx") == 4 * 20 * 6


def test_two_threads_may_take_two_devices_in_turns(both: Path, fake: Path):
    code = ("from threading import Thread\n"
            f"call = lambda device: m['run'](3, 1, device, 70 + device, *{POINTERS})\n"
            "work = lambda first: [call((first + i) % 2) for i in range(20)]\n"
            "threads = [Thread(target=work, args=(first,)) for first in range(2)]\n"
            "[t.start() for t in threads], [t.join() for t in threads]\n"
            + "".join(f"m['run'](3, 1, {device}, {70 + device}, *{POINTERS})\n" for device in range(2)))
    notes = child(code, both, fake, FAKE_CONTEXTS="1").calls
    assert count(notes, "cuModuleLoadData") == 2 and notes.count("cuInit 0") == 1
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
    assert [sum(what in note for note in done.calls) for what in ("Create", "Destroy")] == [3 + ("Create" in fail), 3]


@pytest.mark.parametrize(("steps", "batch", "chunks"), [
    (19, 1, (8, 8, 3)), (24, 2, (8, 8, 8)), (25, 3, (16, 9)), (9, 1, (8, 1)), (100, 1, (40, 40, 20))])
def test_a_wave_has_its_chunks(wave: Path, fake: Path, steps: int, batch: int, chunks: tuple[int, ...]):
    notes = child(run(steps, batch=batch), wave, fake).calls
    assert programs.chunk_steps(steps, 3, 5) == chunks[0]
    found = history(notes)
    numbers = [i for i, (name, *_) in enumerate(found) if name != "fill"]
    given = dict(zip(numbers, arguments(notes), strict=True))
    calls = {layer: [i for i in numbers if found[i][0] == layer] for layer in ("total", "step", "last")}
    assert [{found[i][1] for i in each} for each in calls.values()] == [{7}, {900}, {901}]
    starts, row = [sum(chunks[:k]) for k in range(len(chunks))], batch * N * 4
    # x, y, h_in, h_out, w, sums, counter, mask at 1000, 2000, ...
    assert [given[i] for i in calls["total"]] == [
        [7000, 8000, 6000, 1000 + row * first, size] for first, size in zip(starts, chunks, strict=True)]
    assert [given[i] for i in calls["step"]] == [
        [4000 if first else 3000, 6000, 5000, 1000, 2000 + row * first, t]
        for first, size in zip(starts, chunks, strict=True) for t in range(size)]
    assert [given[i] for i in calls["last"]] == [
        [4000 if first else 3000, 4000, 2000 + row * first, size] for first, size in zip(starts, chunks, strict=True)]
    fills = [note for note in notes if note.startswith("cuMemset") and "stream=901" in note]
    assert [note.split()[3] for note in fills] == [f"size={4 * size}" for size in chunks]
    ends = [first + size for first, size in zip(starts, chunks, strict=True)]  # of the steps of a chunk, one past
    for k in range(len(chunks)):
        assert found[calls["total"][k]][2] == {0, *calls["total"][:k]}
        assert found[calls["step"][starts[k]]][2] == {0, *calls["total"][:k + 1], *calls["step"][:starts[k]]}
        before = found[calls["last"][k]][2]
        assert set(calls["step"][:ends[k]]) <= before and not set(calls["step"][ends[k]:]) & before
    assert count(notes, "cuStreamCreate") == 2


def test_the_stream_goes_on_after_the_wave(wave: Path, fake: Path):
    found = history(child(run(19) + run(19), wave, fake).calls)
    second = [i for i, (name, stream, _) in enumerate(found) if name == "fill" and stream == 7][1]
    assert found[second][2] == set(range(second)) and all(before >= set(range(second)) for *_, before in found[second:])


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
    assert {marks[event] for event in joined} == used and count(done.calls[second:], "cuLaunchKernelEx") == 3 + 19 + 3


def test_branches_that_cannot_be(tmp_path: Path):
    for branches in (((TOTAL,),), ((STEP,),) * 33):
        with pytest.raises(BuildError, match="from 2 to 32"):
            build((Concurrent(branches),), tmp_path)


def test_the_longest_call_is_one_that_can_be_counted(tmp_path: Path, fake: Path):
    layers = tuple(WaveLayer((TOTAL,), {"x": N}, ()) for _ in range(2))
    notes = child(run((1 << 31) - 1), build((Wave(layers, 1, 1),), tmp_path), fake).calls
    assert [note.split()[-1] for note in notes if "Launch" in note] == [str((1 << 31) - 1)] * 2


def with_entry(*calls: programs.Call, takes: tuple[str, ...]) -> Program:
    program = cuda_sample.program()
    return replace(program, entries={**program.entries, "backward": Entry(calls, takes)})


def test_an_entry_of_a_cuda_module_takes_its_own_buffers_in_its_own_order(tmp_path: Path, fake: Path):
    chunk = WaveLayer((LAST,), {"y": 1}, (("h_in", "h_out"),))
    program = with_entry(LAST, Fill("mask", 3, Extent(1)), Wave((chunk, chunk), 2, 8),
                         takes=("mask", "h_out", "y", "h_in"))
    out, code = build(program, tmp_path), "m['backward'](16, 1, 0, 7, 1000, 2000, 3000, 4000)\n"
    done = child(code + raised("m['backward'](1, 1, 0, 7)"), out, fake, FAKE_MAJOR="9")
    launched = arguments(done.calls)  # h_in, h_out, y, T
    notes = [note for note in done.calls if note.startswith(("cuLaunchKernelEx", "cuMemset"))]
    assert launched[0] == [4000, 2000, 3000, 16] and notes[1].startswith("cuMemsetD8Async 1000 byte=3 size=4")
    # the second chunk: of y from step 8 on, and from the state that the first one left
    assert sorted(launched[1:]) == sorted(2 * [[4000, 2000, 3000, 8], [2000, 2000, 3000 + 8 * 4, 8]])
    assert done.stdout.startswith("TypeError backward(T, B, device, queue, *pointers) takes 8 arguments, not 4")
    assert len(arguments(child(run(), out, fake, FAKE_MAJOR="9").calls)) == 4


def test_a_launch_whose_results_nobody_wants_is_left_out(tmp_path: Path, fake: Path):
    out = build(with_entry(LAST, replace(LAST, wanted=("y", "h_out")), takes=("h_out", "y", "h_in")), tmp_path)
    for pointers, launches in (("2000, 3000", 2), ("2000, 0", 2), ("0, 3000", 2), ("0, 0", 1)):
        done = child(f"m['backward'](16, 1, 0, 7, {pointers}, 4000)\n", out, fake, FAKE_MAJOR="9")
        assert len(arguments(done.calls)) == launches, pointers


def test_steps_pass_a_state_on(tmp_path: Path, fake: Path):
    step = replace(LAST, names={"h_in": "mask", "y": "sums"})
    program = with_entry(programs.Relay((step,), "mask", "sums", "h_in", "h_out", 64), LAST,
                         takes=("mask", "sums", "h_out", "y", "h_in"))
    out = build(program, tmp_path)
    one, other, given = 1000, 1500, 4000
    apart, copied = [(given, other)], [(one, other)]
    for steps, written, passed in (
            (1, 2000, apart), (1, given, copied), (1, given + 255, copied), (1, given + 256, apart),
            (1, given - 255, copied), (1, given - 256, apart),
            (4, given, [(given, other), (other, one), (one, other), (other, one)])):
        code = f"m['backward']({steps}, 2, 0, 7, {one}, {other}, {written}, 9000, {given})\n"
        notes = child(code, out, fake, FAKE_MAJOR="9").calls
        found = [(first, then) for first, _, then, _ in arguments(notes)]  # of h_in, h_out, y, T
        assert found == [*passed, (given, 9000)]
        copies = [note for note in notes if note.startswith("cuMemcpyAsync")]
        assert copies == ([f"cuMemcpyAsync {one} {given} 256 stream=7"] if passed is copied else [])


def test_a_cuda_module_packs(tmp_path: Path, fake: Path):
    def with_packing(dtype: str) -> Program:
        found, size = cuda_sample.program(), (1, cuda_sample.N)
        packing = programs.Packing((("w", 0),), size, size, (0, 1), dtype)
        return replace(found, buffers=tuple(structs.replace(b, packing=packing) if b.name == "w" else b
                                            for b in found.buffers))

    out = build(with_packing("bfloat16"), tmp_path)
    code = ("m['pack'](0, 7, 1000, 2000, 3000, 4000, 17, 2, 50, 60)\n" + raised("m['pack'](0, 7, 1000, 2000)")
            + raised("m['pack'](0, 7, 1000, 2000, 3000, 4000, 0, 2)") + raised(f"m['pack'](*{[1] * 137})"))
    done = child(code, out, fake, FAKE_MAJOR="9", FAKE_PARAMETERS="ecornn_pack_weights:ppppiip")
    launched = [note for note in done.calls if note.startswith("cuLaunchKernelEx")]
    assert launched == ["cuLaunchKernelEx ecornn_pack_weights grid=3 threads=256 shared=0 stream=7 arguments "
                        "1000 2000 3000 4000 17 2 50"]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["TypeError", "ValueError", "TypeError"]
    assert "count=0" in done.stdout
    for other in (cuda_sample.program(), with_packing("int8")):
        assert "no kernel that packs" in child(raised("m['pack'](0)"), build(other, tmp_path)).stdout


@pytest.mark.parametrize(("calls", "takes", "message"), [
    ((LAST,), ("h_in", "h_out"), "launch of 'last' that reads 'y', which is no buffer that the entry takes"),
    ((Fill("mask", 0, Extent(1)),), ("y",), "Fill of 'mask'"),
    ((Fill("mask", 0, Extent(1)),), ("mask", "other"), "entry 'backward': the program has no buffer other")])
def test_a_call_uses_only_what_its_entry_takes(calls: tuple[programs.Call, ...], takes: tuple[str, ...], message: str):
    program = with_entry(*calls, takes=takes)
    with pytest.raises(BuildError, match=message):
        host_program(program, lower(program, "sm_90a")[0], "sm_90a")


def scaled(name: str, factor: float) -> Program:
    e = Emitter(8)
    for scalar in ("thread", "threads", "T", "B"):
        e.scalar(scalar)
    x, y = e.pointer("x"), e.pointer("y")
    e.vstore(y, 0, e.vload(x, 0) * e.splat(factor))
    buffers = tuple(programs.Buffer(n, "workspace", "float32") for n in ("x", "other", "y"))
    return Program({name: e.function(name)}, buffers, {name: Entry((programs.Parallel(name, most=1),), ("x", "y"))})


def test_entries_of_a_cpu_module(tmp_path: Path):
    twice, thrice = scaled("twice", 2.0), scaled("thrice", 3.0)
    program = replace(twice, functions={**twice.functions, **thrice.functions}, entries={
        "run": replace(twice.entries["twice"], takes=("y", "other", "x")),
        "both": Entry((programs.Parallel("twice", most=1), programs.Parallel("thrice", {"x": "y", "y": "other"}, 1)),
                      ("x", "y", "other"))})
    manifest = Manifest(Workload("lstm", 1, 1), detect_cpu(), "test", {}, "", (), "", (), program.buffers,
                        {name: entry.takes for name, entry in program.entries.items()}, {})
    build_module(program, manifest, tmp_path / "two.so")
    module, x = tvm_ffi.load_module(str(tmp_path / "two.so")), np.arange(8, dtype=np.float32)
    y, other = np.zeros((2, 8), np.float32)
    module["run"](1, 1, 0, 2, y.ctypes.data, 0, x.ctypes.data)
    assert (y == 2 * x).all() and not other.any()
    module["both"](1, 1, 0, 2, *(a.ctypes.data for a in (x, y, other)))
    assert (other == 6 * x).all()
    with pytest.raises(TypeError, match=r"both\(T, B, device, threads, \*pointers\) got another number"):
        module["both"](1, 1, 0, 2, x.ctypes.data)
    with pytest.raises(BuildError, match="no buffer y that entry 'run' takes"):
        tables(replace(twice, entries={"run": Entry((programs.Parallel("twice"),), ("x", "other"))}))
    with pytest.raises(ModuleError, match="no entry 'run'; it has back"):
        entry_plan(structs.replace(manifest, entries={"back": ("x",)}), programs.RUN)
    with pytest.raises(ModuleError, match="no buffer z for its entry 'run'"):
        entry_plan(structs.replace(manifest, entries={"run": ("x", "z")}), programs.RUN)
