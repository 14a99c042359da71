"""Modules with several entries: each is a function of the module, and takes the buffers that it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cuda_sample
import numpy as np
import pytest
from driver_notes import child, raised
from msgspec import structs

from ecornn.build import build_module
from ecornn.build.cuda import lower
from ecornn.build.host_cuda import host_program
from ecornn.build.llvm import tables
from ecornn.errors import BuildError, ModuleError
from ecornn.host_cpu import detect
from ecornn.host_gpu import detect as detect_gpu
from ecornn.manifest import Manifest
from ecornn.program import (
    RUN,
    Buffer,
    Call,
    Entry,
    Extent,
    Fill,
    Launch,
    Packing,
    Parallel,
    Program,
    Relay,
    Wave,
    WaveLayer,
)
from ecornn.runtime.plan import entry_plan
from ecornn.schedules.cpu.emit import Emitter
from ecornn.targets import KNOWN
from ecornn.workload import Workload

without_gpu = pytest.mark.skipif(detect_gpu() is not None,
                                 reason="the driver without a GPU serves modules for sm_90a")
LAST = Launch("last", grid=2, threads=64, shared=256, cluster=2)


def built(program: Program, folder: Path) -> Path:
    """Its module file."""
    build_module(program, cuda_sample.manifest(KNOWN["sm_90a"]), folder / "made.so")
    return folder / "made.so"


def with_entry(*calls: Call, takes: tuple[str, ...]) -> Program:
    """The CUDA sample with an entry ``backward`` beside ``run``."""
    program = cuda_sample.program()
    return replace(program, entries={**program.entries, "backward": Entry(calls, takes)})


@without_gpu
def test_an_entry_of_a_cuda_module_takes_its_own_buffers_in_its_own_order(tmp_path: Path, fake: Path):
    chunk = WaveLayer((LAST,), {"y": 1}, (("h_in", "h_out"),))
    program = with_entry(LAST, Fill("mask", 3, Extent(1)), Wave((chunk, chunk), 2, 8),
                         takes=("mask", "h_out", "y", "h_in"))
    out = built(program, tmp_path)
    code = "m['backward'](16, 1, 0, 7, 1000, 2000, 3000, 4000)\n"
    done = child(code + raised("m['backward'](1, 1, 0, 7)"), out, fake, FAKE_MAJOR="9")
    notes = [note for note in done.calls if note.startswith(("cuLaunchKernelEx", "cuMemset"))]
    launched = [note.split("arguments ")[1] for note in notes if "arguments" in note]  # h_in, h_out, y, T
    assert launched[0] == "4000 2000 3000 16" and notes[1].startswith("cuMemsetD8Async 1000 byte=3 size=4")
    # the second chunk: of y from step 8 on, and from the state that the first one left
    assert sorted(launched[1:]) == sorted(2 * ["4000 2000 3000 8", f"2000 2000 {3000 + 8 * 4} 8"])
    assert done.stdout.startswith("TypeError backward(T, B, device, queue, *pointers) takes 8 arguments, not 4")
    everything = child(f"m['run'](2, 1, 0, 7, *{cuda_sample.POINTERS})", out, fake, FAKE_MAJOR="9").calls
    assert sum(note.startswith("cuLaunchKernelEx") for note in everything) == 4


@without_gpu
def test_a_launch_whose_results_nobody_wants_is_left_out(tmp_path: Path, fake: Path):
    program = with_entry(LAST, replace(LAST, wanted=("y", "h_out")), takes=("h_out", "y", "h_in"))
    out = built(program, tmp_path)
    for pointers, launches in (("2000, 3000", 2), ("2000, 0", 2), ("0, 3000", 2), ("0, 0", 1)):
        done = child(f"m['backward'](16, 1, 0, 7, {pointers}, 4000)\n", out, fake, FAKE_MAJOR="9")
        assert sum(note.startswith("cuLaunchKernelEx") for note in done.calls) == launches, pointers


@without_gpu
def test_steps_pass_a_state_on(tmp_path: Path, fake: Path):
    """From the caller's memory through two workspaces; one step reads a copy if it writes where it reads."""
    step = replace(LAST, names={"h_in": "mask", "y": "sums"})
    program = with_entry(Relay((step,), "mask", "sums", "h_in", "h_out", 64), LAST,
                         takes=("mask", "sums", "h_out", "y", "h_in"))
    out = built(program, tmp_path)
    one, other, given = 1000, 1500, 4000
    apart, copied = [(given, other)], [(one, other)]
    for steps, written, passed in (
            (1, 2000, apart), (1, given, copied), (1, given + 255, copied), (1, given + 256, apart),
            (1, given - 255, copied), (1, given - 256, apart),
            (4, given, [(given, other), (other, one), (one, other), (other, one)])):
        code = f"m['backward']({steps}, 2, 0, 7, {one}, {other}, {written}, 9000, {given})\n"
        notes = child(code, out, fake, FAKE_MAJOR="9").calls
        launched = [note.split("arguments ")[1].split() for note in notes if note.startswith("cuLaunchKernelEx")]
        found = [(int(first), int(then)) for first, _, then, _ in launched]  # of h_in, h_out, y, T
        assert found == [*passed, (given, 9000)]
        copies = [note for note in notes if note.startswith("cuMemcpyAsync")]
        assert copies == ([f"cuMemcpyAsync {one} {given} 256 stream=7"] if passed is copied else [])


@without_gpu
def test_a_cuda_module_packs(tmp_path: Path, fake: Path):
    """What the kernel knows; a program that packs something else has none, nor has one without weights."""
    def with_packing(dtype: str) -> Program:
        found, size = cuda_sample.program(), (1, cuda_sample.N)
        packing = Packing((("w", 0),), size, size, (0, 1), dtype)
        return replace(found, buffers=tuple(structs.replace(b, packing=packing) if b.name == "w" else b
                                            for b in found.buffers))

    out = built(with_packing("bfloat16"), tmp_path)
    code = ("m['pack'](0, 7, 1000, 2000, 3000, 4000, 17, 2, 50, 60)\n" + raised("m['pack'](0, 7, 1000, 2000)")
            + raised("m['pack'](0, 7, 1000, 2000, 3000, 4000, 0, 2)") + raised(f"m['pack'](*{[1] * 137})"))
    done = child(code, out, fake, FAKE_MAJOR="9", FAKE_PARAMETERS="ecornn_pack_weights:ppppiip")
    launched = [note for note in done.calls if note.startswith("cuLaunchKernelEx")]
    assert launched == ["cuLaunchKernelEx ecornn_pack_weights grid=3 threads=256 shared=0 stream=7 arguments "
                        "1000 2000 3000 4000 17 2 50"]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["TypeError", "ValueError", "TypeError"]
    assert "count=0" in done.stdout
    for other in (cuda_sample.program(), with_packing("int8")):
        assert "no kernel that packs" in child(raised("m['pack'](0)"), built(other, tmp_path)).stdout


@pytest.mark.parametrize(("calls", "takes", "message"), [
    ((LAST,), ("h_in", "h_out"), "launch of 'last' that reads 'y', which is no buffer that the entry takes"),
    ((Fill("mask", 0, Extent(1)),), ("y",), "Fill of 'mask'"),
    ((Fill("mask", 0, Extent(1)),), ("mask", "other"), "entry 'backward': the program has no buffer other")])
def test_a_call_uses_only_what_its_entry_takes(calls: tuple[Call, ...], takes: tuple[str, ...], message: str):
    program = with_entry(*calls, takes=takes)
    with pytest.raises(BuildError, match=message):
        host_program(program, lower(program, "sm_90a")[0], "sm_90a")


def scaled(name: str, factor: float) -> Program:
    """A CPU program with the one entry ``name``: y = ``factor`` * x, 8 elements of each."""
    e = Emitter(8)
    for scalar in ("thread", "threads", "T", "B"):
        e.scalar(scalar)
    x, y = e.pointer("x"), e.pointer("y")
    e.vstore(y, 0, e.vload(x, 0) * e.splat(factor))
    buffers = tuple(Buffer(n, "workspace", "float32") for n in ("x", "other", "y"))
    return Program({name: e.function(name)}, buffers, {name: Entry((Parallel(name, most=1),), ("x", "y"))})


def test_entries_of_a_cpu_module(tmp_path: Path):
    import tvm_ffi

    twice, thrice = scaled("twice", 2.0), scaled("thrice", 3.0)
    program = replace(twice, functions={**twice.functions, **thrice.functions}, entries={
        "run": replace(twice.entries["twice"], takes=("y", "other", "x")),
        "both": Entry((Parallel("twice", most=1), Parallel("thrice", {"x": "y", "y": "other"}, 1)),
                      ("x", "y", "other"))})
    manifest = Manifest(Workload("lstm", 1, 1), detect(), "test", {}, "", (), "", (), program.buffers,
                        {name: entry.takes for name, entry in program.entries.items()}, {})
    build_module(program, manifest, tmp_path / "two.so")
    module = tvm_ffi.load_module(str(tmp_path / "two.so"))
    x = np.arange(8, dtype=np.float32)
    y, other = np.zeros((2, 8), np.float32)
    module["run"](1, 1, 0, 2, y.ctypes.data, 0, x.ctypes.data)
    assert (y == 2 * x).all() and not other.any()
    module["both"](1, 1, 0, 2, *(a.ctypes.data for a in (x, y, other)))
    assert (other == 6 * x).all()
    with pytest.raises(TypeError, match=r"both\(T, B, device, threads, \*pointers\) got another number"):
        module["both"](1, 1, 0, 2, x.ctypes.data)
    with pytest.raises(BuildError, match="no buffer y that entry 'run' takes"):
        tables(replace(twice, entries={"run": Entry((Parallel("twice"),), ("x", "other"))}))
    with pytest.raises(ModuleError, match="no entry 'run'; it has back"):
        entry_plan(structs.replace(manifest, entries={"back": ("x",)}), RUN)
    with pytest.raises(ModuleError, match="no buffer z for its entry 'run'"):
        entry_plan(structs.replace(manifest, entries={"run": ("x", "z")}), RUN)
