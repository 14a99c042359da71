"""Module files called from C and C++: results, refusals, threads under sanitizers, calls without memory or locks."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import cuda_on_cpu
import numpy as np
import pytest
from c_abi_sample import HERE, check_gradients, close, compiled, read, run, run_both, training_arrays, weights_of, write
from cuda_as_cpp import translate
from rooms import ROOT

import ecornn
from ecornn import checksum, compiler
from ecornn.analysis import analyse
from ecornn.build import build_module, c_tables, cuda
from ecornn.build.generated import Generated
from ecornn.build.link import link
from ecornn.cells import get
from ecornn.host_gpu import detect
from ecornn.layer_spec import LayerSpec
from ecornn.runtime.loader import Module
from ecornn.schedules.base import Task
from ecornn.task import make_manifest
from ecornn.workload import Workload

T, B, I, H = 9, 3, 5, 12
# what c_program.c asks for: its code in ecornn.h, and a word of the message
REFUSED = {
    "shape": (2, "expected (T, B, 5)"), "memory": (1, "x has no memory"),
    "dtype": (3, "x is of float64; expected float32"),
    "alignment": (4, "16 bytes"), "strides": (4, "not contiguous"), "device": (5, "x is on DLPack's device (2, 0)"),
    "no x": (1, "x is NULL"), "workspace": (8, "workspace has 16 bytes"), "threads": (1, "threads is 2000"),
    "size": (11, "size is 3"), "newer program": (11, "too old"), "too few weights": (6, "is missing"),
    "weight's name": (6, "weight_of_another is no parameter of lstm"), "weight's dtype": (3, "is of int32"),
    "weight's shape": (2, "expected (48, 5)"), "GPU": (5, "device is 1; expected 0"),
    "no module": (10, "is no module file")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c")


@pytest.fixture(scope="module")
def generated(folder: Path) -> Generated:
    """An LSTM that trains, whose module file is lstm.so."""
    layer = LayerSpec("lstm", hidden=H, input=I, batch=B, seq=T, training=True)
    return compiler.build(compiler.plan_layer(layer, target="cpu"), folder / "lstm.so")


@pytest.fixture(scope="module")
def lstm(folder: Path, generated: Generated) -> Module:
    return ecornn.load(folder / "lstm.so")


@pytest.fixture(scope="module")
def gru(folder: Path) -> Module:
    return ecornn.compile("gru", hidden=H, input=I, batch=B, seq=T, target="cpu", layers=2, bidirectional=True,
                          lengths=True, out=folder / "gru.so")


@pytest.fixture(scope="module")
def documented(folder: Path) -> Module:
    return ecornn.compile("lstm", hidden=H, input=I, target="cpu", out=folder / "documented.so")


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    return compiled(HERE / "c_program.c", folder / "c_program")


OPENS = """#include <ecornn.h>
int main(int count, char** paths) {
  for (int n = 1; n < count; ++n) {
    ecornn_error error = {0, ""};
    ecornn_module module;
    int32_t code = ecornn_open(paths[n], &module, &error);
    printf("%d %s\\n", code, error.message);
    ecornn_close(&module);
  }
  return 0;
}
"""


def test_a_file_whose_bytes_have_changed_is_refused_from_c(folder: Path, lstm: Module):
    """And contents of each length to two blocks of SHA-256, with Python's digest behind them, reach the loader."""
    (folder / "opens.c").write_text(OPENS)
    whole, rng = lstm.path.read_bytes(), np.random.default_rng(9)
    places = [0, len(whole) // 2, len(whole) - checksum.SIZE - 1, len(whole) - checksum.SIZE, len(whole) - 17]
    damaged, sound = [], []
    for at in places:
        damaged.append(folder / f"changed{at}.so")
        damaged[-1].write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    for size in range(130):
        sound.append(folder / f"sound{size}")
        sound[-1].write_bytes(rng.bytes(size))
        checksum.append(sound[-1])
    lines = run(compiled(folder / "opens.c", folder / "opens"), lstm.path, *damaged, *sound).splitlines()
    assert lines[0] == "0 "
    for line in lines[1:1 + len(damaged)]:
        assert line.startswith("10 ") and "has changed since it was written" in line
    assert len(lines) == 1 + len(damaged) + len(sound)
    for line in lines[1 + len(damaged):]:  # the loader's own word: no shared library
        assert line.startswith("10 ") and "has changed" not in line and "no module file" not in line, line


@pytest.mark.parametrize("threads", [1, 2])
def test_a_layer_from_c(folder: Path, lstm: Module, program: Path, threads: int):
    rng, weights, here = np.random.default_rng(1), weights_of(lstm), folder / "of_lstm"
    x, h, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((T, B, I), (B, H), (B, H)))
    write(here, weights | {"x": x, "h_in": h, "c_in": c})
    said = run(program, lstm.path, here, T, B, threads)
    y, states = ecornn.reference("lstm", x, weights, (h, c))
    close(read(here, "y", T, B, H), y)
    for name, state in zip("hc", states, strict=True):
        close(read(here, f"{name}_out", B, H), state)
    y, _ = ecornn.reference("lstm", x, weights)
    close(read(here, "y_from_zeros", T, B, H), y)
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    assert lines.keys() == REFUSED.keys()
    for what, (code, words) in REFUSED.items():
        assert lines[what].startswith(f"{code} ") and words in lines[what], f"{what}: {lines[what]}"


def test_a_stack_in_both_directions_with_lengths_from_c(folder: Path, gru: Module, program: Path):
    rng, weights, here = np.random.default_rng(2), weights_of(gru), folder / "of_gru"
    x, h = (rng.standard_normal(shape).astype(np.float32) for shape in ((T, B, I), (4, B, H)))
    lengths = np.array([4, 7, 0], np.int32)
    write(here, weights | {"x": x, "h_in": h, "lengths": lengths})
    refused = run(program, gru.path, here, T, B, 1)
    assert "is no parameter of gru" in refused
    y, (state,) = ecornn.reference("gru", x, weights, (h,), lengths=lengths)
    close(read(here, "y", T, B, 2 * H), y)
    close(read(here, "h_out", 4, B, H), state)


def test_threads_and_a_training_step_from_cpp(folder: Path, lstm: Module):
    here, arrays = folder / "training", training_arrays(lstm)
    write(here, arrays)
    run(compiled(HERE / "cpp_program.cc", folder / "cpp_program"), lstm.path, here, T, B)
    check_gradients(here, arrays, lstm)


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_under_sanitizers(folder: Path, lstm: Module, generated: Generated, monkeypatch: pytest.MonkeyPatch,
                          sanitizer: str):
    """The program, and the module's host code."""
    here, flags = folder / sanitizer[:4], (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g")
    write(here, training_arrays(lstm))
    monkeypatch.setenv("CXX", " ".join(("c++", *flags)))
    link(generated, here / "module.so")
    program = compiled(HERE / "cpp_program.cc", here / "program", *flags)
    # TSan's shadow memory wants an address space that is not laid out at random
    before = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    run(*before, program, here / "module.so", here, T, B)


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_the_program_of_the_documentation(folder: Path, documented: Module, language: str):
    text = (ROOT / "docs" / "C.md").read_text()
    source = folder / f"documented.{ {'c': 'c', 'cpp': 'cc'}[language] }"
    source.write_text(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[0])
    said = run(compiled(source, folder / f"documented_{language}"), documented.path)
    if language == "c":
        weights = {p.name: np.zeros(p.shape) for p in documented.manifest.parameters}
        for value in weights.values():
            value.reshape(-1)[:len(value)] = 0.1
        x = np.zeros((3, 1, documented.manifest.workload.input))
        x[:, 0, 0] = range(3)
        wanted = ecornn.reference("lstm", x, weights)[0][:, 0, 0]
        # six decimals are printed: half of the last is 5e-7, the rest is float32's, of which 1e-7 is two roundings
        np.testing.assert_allclose([float(v) for v in re.findall(r"= (\S+)", said)], wanted, atol=6e-7)
    else:
        assert said == "y[T-1][0] = 0\n"


def test_versions(folder: Path, lstm: Module, program: Path):
    """A file whose interface has another version, and one from before there was one."""
    function = ctypes.CDLL(str(lstm.path)).ecornn_module_api
    function.restype = ctypes.POINTER(ctypes.c_int32 * 2)
    assert not function(2) and not function(0)
    assert function(1).contents[0] == 1
    older = folder / "older.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", older], input="int before;", text=True,
                   check=True)
    checksum.append(older)
    result = subprocess.run([program, older, folder, "1", "1", "1"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "open: 11 " in result.stderr and "before modules had a C interface" in result.stderr


def test_what_version_1_of_the_interface_stays(folder: Path):
    """Places of members, sizes and numbers that programs and module files of this version have in them."""
    run(compiled(HERE / "c_version1.c", folder / "c_version1"))


def test_steps_allocate_nothing_and_take_no_lock(folder: Path, lstm: Module):
    program = compiled(HERE / "real_time_program.c", folder / "real_time", "-rdynamic")
    allocated, freed, locked = map(int, re.findall(r"\d+", run(program, lstm.path, 200)))
    assert (allocated, freed, locked) == (0, 0, 0)


@pytest.mark.skipif(detect() is not None, reason="the driver without a GPU serves modules for sm_90a")
@pytest.mark.parametrize("packs", [False, True])
def test_a_layer_on_a_gpu_from_c(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, packs: bool):
    """With weights from the host and from the GPU, on the caller's stream; these packed there by a module that has the
    kernel for it."""
    from test_stacks_cuda import SCHEDULES, TINY, B, H, I, T

    if not packs:
        for builder in (cuda, c_tables):
            monkeypatch.setattr(builder, "packs", lambda program: False)
    task = Task(Workload("gru", H, I, B, T), analyse(get("gru"), I, H), TINY)
    schedule, folder = SCHEDULES["layout_transform"], tmp_path / "arrays"
    program = schedule.program(task, schedule.plan(task, config := schedule.default(task)))
    kernels, source = cuda.lower(program, "sm_90a")
    texts, names = [source], [kernel.symbol for kernel in kernels.values()]
    if packs:
        texts.append(resources.files("ecornn.build").joinpath("pack_weights.cu").read_text())
        names.append(cuda.PACK_SYMBOL)
    cuda_on_cpu.compiled(translate("\n".join(texts)), names, tmp_path)
    build_module(program, make_manifest(get("gru"), task, schedule, config, program, "by a test"), tmp_path / "gru.so")
    weights = weights_of(ecornn.load(tmp_path / "gru.so"))
    rng = np.random.default_rng(4)
    x, h = (rng.standard_normal(shape).astype(np.float32) for shape in ((T, B, I), (B, H)))
    write(folder, weights | {"x": x, "h_in": h})
    program_file = compiled(HERE / "c_program.c", tmp_path / "c_program")
    _, notes = run_both(program_file, tmp_path / "gru.so", folder, T, B, 0, FAKE_KERNELS=str(tmp_path / "kernels.so"),
                        LD_LIBRARY_PATH=str(fake))
    y, (state,) = ecornn.reference("gru", x, weights, (h,))
    close(read(folder, "y", T, B, H), y)
    close(read(folder, "h_out", B, H), state)
    for name, sign in (("y_from_zeros", 1), ("y_of_there", 1), ("y_of_negated", -1)):
        signed = {parameter: sign * value for parameter, value in weights.items()}
        close(read(folder, name, T, B, H), ecornn.reference("gru", x, signed)[0])
    assert {*re.findall(r"Launch.* stream=(\d+)", notes)} == {"7"}
    assert notes.count("cuMemAlloc ") == notes.count("cuMemFree ") > 3
    _, bound, *again = notes.partition("repacked")[0].split(" there\n")
    for asked in (bound, *again):
        assert asked.count(f"cuLaunchKernelEx {cuda.PACK_SYMBOL} ") == packs
    for asked in again if packs else []:  # nothing is allocated, copied or waited for
        assert not re.search("cuMem|Synchronize", asked)
