"""Module files: what loads, what is refused and why, saving, formats, and the check of the machine."""

import copy
import gc
import os
import pickle
import struct
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import runtime_sample as sample
import tvm_ffi
from refusals import refused
from soak import in_use
from tvm_ffi import libinfo

import ecornn
import ecornn.host_gpu
from ecornn import checksum
from ecornn.device import Device
from ecornn.errors import ArgumentError, CopyError, DeviceError, DTypeError, ModuleError, ShapeError, WeightsError
from ecornn.manifest import FORMAT
from ecornn.program import RUN, Buffer, Extent
from ecornn.runtime import Module, loader
from ecornn.runtime.plan import entry_plan

WEIGHTS = sample.weights()


@pytest.fixture(scope="module")
def module() -> Module:
    return ecornn.load(sample.build(sample.manifest()))


def test_manifest_and_repr(module: Module):
    assert module.manifest == sample.manifest()
    text = repr(module)
    for part in ("sample T=6 B=4 I=3 H=5 float32", "by_hand", "the CPU of this test", "written for a test"):
        assert part in text
    assert "2 threads" in repr(module.bind(WEIGHTS, threads=2))


def test_save_replaces_a_file_that_is_in_use(module: Module, tmp_path: Path):
    path = tmp_path / "copy.so"
    path.write_bytes(b"old")
    module.save(path)
    assert path.read_bytes() == module.path.read_bytes()
    first, x = ecornn.load(path).bind(WEIGHTS), sample.inputs()
    replaced(provenance="another").save(str(path))
    np.testing.assert_allclose(first(x)[0], sample.expected(x, WEIGHTS)[0], rtol=2.0**-23)
    assert ecornn.load(path).manifest.provenance == "another" and [p.name for p in tmp_path.iterdir()] == ["copy.so"]


def test_copies_and_pickles(module: Module, tmp_path: Path):
    path = tmp_path / "copy.so"
    module.save(path)
    one, x = ecornn.load(path), sample.inputs()
    assert copy.deepcopy(one) is one and copy.copy(one) is one
    content = pickle.dumps(one)
    path.unlink()
    again = pickle.loads(content)
    np.testing.assert_array_equal(again.bind(WEIGHTS)(x)[0], module.bind(WEIGHTS)(x)[0])
    for keep in (pickle.dumps, lambda one: one.save(tmp_path / "again.so")):
        refused(ModuleError, "is gone", keep, one)
    one.bind(WEIGHTS)(x)  # what is loaded stays loaded
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CopyError, match=r"copy or pickle layer\.module, and bind it"):
            make(again.bind(WEIGHTS))
    folder = again.path.parent
    del again
    gc.collect()
    assert not folder.exists()


def test_loading_again_takes_no_memory(module: Module, tmp_path: Path):
    """Nor a file of the same content, which brings no code that is not there already."""
    content, times, taken = pickle.dumps(module), 80, []
    for count in (20, times, times, times):  # the first warms up; other threads of the process may take some meanwhile
        before = in_use()
        for _ in range(count):
            assert pickle.loads(content).library is not ecornn.load(module.path).library
        taken.append(0 if before is None else in_use() - before)
    assert min(taken[1:]) < 100 * times, taken
    module.save(tmp_path / "equal.so")
    ecornn.load(tmp_path / "equal.so").bind(WEIGHTS)(sample.inputs())
    assert "equal.so" not in Path("/proc/self/maps").read_text()


def test_save_that_fails_leaves_nothing(module: Module, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("nowhere/copy.so", "folder", "pipe"):
        with pytest.raises(OSError) as caught:
            module.save(tmp_path / name)
        assert caught.value.filename == str(tmp_path / name) and ".copy" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "pipe"] and (tmp_path / "pipe").is_fifo()


def test_truncated_at_any_length(module: Module, tmp_path: Path):
    """The dynamic loader would be killed by some of these."""
    content, path = module.path.read_bytes(), tmp_path / "cut.so"
    for size in {0, 1, 5, 6, 63, 64, 1000, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:size])
        with pytest.raises(ModuleError):
            ecornn.load(path)


def test_one_bit_that_is_not_as_it_was(module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Anywhere in a file; the dynamic loader, which would run it, is not asked."""
    monkeypatch.setattr(tvm_ffi, "load_module", lambda path: pytest.fail("the file has been loaded"))
    content, path, rng = module.path.read_bytes(), tmp_path / "flipped.so", np.random.default_rng(0)
    places = [*rng.integers(0, len(content), 300), *range(len(content) - checksum.SIZE, len(content))]
    words = set()
    for place in map(int, places):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(ModuleError) as caught:
            ecornn.load(path)
        words.add(str(caught.value).rpartition("its ")[2])
    assert {"checksum does not match", "checksum is missing"} <= words


def test_files_that_are_no_modules(module: Module, tmp_path: Path):
    """Not there, of other kinds, stripped, and cut where headers and tables are whole, but not what they say."""
    missing, pipe, text, zeros, stripped, cut = (
        tmp_path / f"{name}.so" for name in ("missing", "pipe", "text", "zeros", "stripped", "cut"))
    os.mkfifo(pipe)
    text.write_text("not a library, but long enough to hold the header of one: " * 4)
    content = bytearray(module.path.read_bytes())
    zeros.write_bytes(content[:-4096] + bytes(4096))
    subprocess.run(["strip", "-o", stripped, module.path], check=True)
    (table,), (size, count) = struct.unpack_from("<Q", content, 32), struct.unpack_from("<2H", content, 54)
    at = max((struct.unpack_from("<Q", content, table + n * size + 8)[0], table + n * size) for n in range(count))[1]
    struct.pack_into("<Q", content, at + 32, len(content))  # p_filesz of the last one
    cut.write_bytes(content)
    cases = {missing: "there is no file", tmp_path: "cannot be read", text: "not a module file",
             Path(libinfo.find_libtvm_ffi()): "not one that ecornn made", pipe: "not a regular file",
             zeros: "its checksum is missing", cut: "shorter than its header says",
             stripped: r"stripped\.so is damaged, or was changed after it was compiled"}
    for path, words in cases.items():
        refused(ModuleError, words, ecornn.load, path)


OTHER, COMPILE = "does not fit this version of ecornn", rf"format {{}} of its manifest, not {FORMAT}\)"


@pytest.mark.parametrize(("change", "words"), [
    ("", OTHER), ("{}", OTHER), ('{"format": 1}', OTHER), ("[1]", OTHER), ("no json", OTHER), ({"later": 1}, "later"),
    ({"format": "2"}, OTHER), ({"format": None}, OTHER), ({"buffers": 1}, OTHER), ({"entries": None}, OTHER),
    *(({"format": found}, COMPILE.format(found)) for found in (0, 1, FORMAT - 1, FORMAT + 1, -1))], ids=str)
def test_other_manifests(change: str | dict[str, Any], words: str):
    text = change if isinstance(change, str) else msgspec.json.encode(
        msgspec.to_builtins(sample.manifest()) | change).decode()
    with pytest.raises(ModuleError, match=words):
        ecornn.load(sample.build_text(text))


def replaced(**changes: Any) -> Module:
    return ecornn.load(sample.build(sample.manifest(**changes)))


def test_a_cpu_without_the_instructions():
    cpu = msgspec.structs.replace(sample.HOST, arch="future", features=("no-such.thing",))
    with pytest.raises(ModuleError, match=r"future .* uses no-such.thing, which this CPU lacks"):
        replaced(device=cpu).bind(WEIGHTS)


def test_features_in_either_spelling(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "cpuinfo", lambda: {"flags": "avx2 avx512_vnni sse4_1 asimd"})
    able = Device("llvm", "any", "any", 1, features=("avx2", "avx512vnni", "sse4.1", "neon"))
    loader.check_host(able, 0)
    with pytest.raises(ModuleError, match="uses avx512f, which"):
        loader.check_host(msgspec.structs.replace(able, features=("avx2", "avx512f")), 0)


def test_gpu_modules_need_their_gpu(monkeypatch: pytest.MonkeyPatch):
    module = replaced(device=sample.GPU)
    monkeypatch.setattr(ecornn.host_gpu, "detect", lambda index=0: None)
    refused(DeviceError, r"device=3:.*sm_90a", module.bind, WEIGHTS, 3)
    other = msgspec.structs.replace(sample.GPU, arch="sm_80", name="another GPU")
    monkeypatch.setattr(ecornn.host_gpu, "detect", lambda index=0: other)
    refused(ModuleError, r"compiled for sm_90a .* GPU 0 is a another GPU, sm_80", module.bind, WEIGHTS)


@pytest.mark.parametrize(("arguments", "error"), [
    ({"device": 1}, DeviceError), ({"device": -1}, ArgumentError), ({"device": "0"}, ArgumentError),
    ({"threads": 0}, ArgumentError), ({"threads": 1025}, ArgumentError), ({"threads": True}, ArgumentError)])
def test_bad_options(module: Module, arguments: dict[str, Any], error: type[Exception]):
    with pytest.raises(error):
        module.bind(WEIGHTS, **arguments)


def test_weights_are_checked(module: Module):
    w, b = WEIGHTS["weight_l0"], WEIGHTS["bias_l0"]
    with pytest.raises(WeightsError, match="missing bias_l0; unexpected bias_l1; expected weight_l0, bias_l0") as e:
        module.bind({"weight_l0": w, "bias_l1": b})
    assert e.value.names == ("bias_l0", "bias_l1")
    for kind, words, weights in (
            (ShapeError, r"weights\['weight_l0'\].shape=\(3, 10\).*\(10, 3\)", {"weight_l0": w.T, "bias_l0": b}),
            (DTypeError, r"weights\['bias_l0'\].dtype='int64'", {"weight_l0": w, "bias_l0": b.astype(np.int64)}),
            (ArgumentError, r"weights\['bias_l0'\]=<class 'list'>", {"weight_l0": w, "bias_l0": b.tolist()}),
            (ArgumentError, "a dict of arrays", [w, b])):
        refused(kind, words, module.bind, weights)


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4", "longdouble"])
def test_weights_of_any_float_type(module: Module, dtype: str):
    weights = {name: value.astype(dtype) for name, value in WEIGHTS.items()}
    single = {name: value.astype(np.float32) for name, value in weights.items()}
    x = sample.inputs()
    np.testing.assert_allclose(module.bind(weights)(x)[0], sample.expected(x, single)[0], rtol=2.0**-23)


def test_weights_may_change_after_bind(module: Module):
    weights = {name: value.copy() for name, value in WEIGHTS.items()}
    layer = module.bind(weights)
    for value in weights.values():
        value[...] = np.nan
    x = sample.inputs()
    np.testing.assert_allclose(layer(x)[0], sample.expected(x, WEIGHTS)[0], rtol=2.0**-23)


BUFFERS = sample.manifest().buffers


@pytest.mark.parametrize("buffers", [
    BUFFERS[1:2], BUFFERS[:-3], (*BUFFERS, Buffer("x2", "given", "float32", tensor="x")),
    (*BUFFERS, Buffer("z", "other", "float32")), (*BUFFERS, Buffer("z", "given", "float32", tensor="other")),
    (*BUFFERS, Buffer.of("state_in", "float32", "b")), (*BUFFERS, Buffer("k", "kept", "float32", Extent(1))),
    tuple(msgspec.structs.replace(b, role="made") if b.tensor == "x" else b for b in BUFFERS),
    tuple(msgspec.structs.replace(b, part=1) if b.tensor == "y" else b for b in BUFFERS)])
def test_programs_with_other_buffers(buffers: tuple[Buffer, ...]):
    with pytest.raises(ModuleError, match="do not fit states"):
        entry_plan(sample.manifest(buffers=buffers), RUN)


def test_packed_buffers_say_how_they_are_packed():
    extra = Buffer("bias", "packed", "float32", Extent(9), None)
    with pytest.raises(ModuleError, match="how to pack"):
        replaced(buffers=(*BUFFERS, extra)).bind(WEIGHTS)


def test_the_longest_sequence_fits_int32():
    """One more step, and a buffer has elements that an int32 cannot count."""
    said = sample.manifest()
    work, limit = said.workload, said.longest
    def largest(steps: int) -> int:
        extents = [b.extent.at(steps) for b in said.buffers]
        return max(*extents, steps * work.batch * work.input, steps * work.batch * work.hidden)
    assert largest(limit) < 2**31 <= largest(limit + 1)


@pytest.mark.parametrize("steps", [1, 50, 51, 1000])
def test_workspace_parts_do_not_overlap(steps: int):
    plan = entry_plan(sample.manifest(), RUN)
    offsets, total = plan.offsets(steps)
    ends = [o + b.nbytes(steps) for o, (_, b) in zip(offsets, plan.scratch, strict=True)]
    assert all(o % 256 == 0 for o in offsets) and ends[-1] <= total
    assert all(ends[i] <= offsets[i + 1] for i in range(len(offsets) - 1))
