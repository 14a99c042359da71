"""The operator library, called by a program in ONNX Runtime's place: sanitizers, GPUs, versions that are too old."""

import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from c_abi_sample import close, compiled, drawn, read, run, run_both, weights_of, write
from cuda_on_cpu import Emulated
from rooms import ROOT
from test_stacks_cuda import SCHEDULES, TINY

import ecornn
from ecornn import checksum
from ecornn.analysis import analyse
from ecornn.build import build_module
from ecornn.cells import get
from ecornn.host_gpu import detect
from ecornn.onnxruntime import library
from ecornn.schedules.base import Task
from ecornn.task import make_manifest
from ecornn.workload import Workload

SOURCES, HOST = ROOT / "ecornn" / "onnxruntime", Path(__file__).with_name("ort_host.cc")
T, B, I, H = 6, 3, 5, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    return compiled(HOST, folder / "ort_host", f"-I{SOURCES}")


def arguments(folder: Path, operator: str, module: Path, threads: int, arrays: Mapping[str, Any],
              weights: Mapping[str, Any]) -> list[str]:
    there = {name: array for name, array in arrays.items() if array is not None}
    write(folder, there | dict(weights))
    inputs = [f"{name}:{','.join(map(str, there[name].shape))}" if name in there else "-" for name in arrays]
    inputs += [f"{name}:{','.join(map(str, array.shape))}" for name, array in weights.items()]
    digest = checksum.said(module.read_bytes()).hex()
    return [str(folder / library.NAME), operator, module.name, digest, str(folder), str(threads), *inputs]


def refused(program: Path, *arguments: str | Path, **environment: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3
    return done.stdout


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_under_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sanitizer: str):
    """Called from three threads, of which each call takes two; test_c_abi.py has modules under sanitizers."""
    here, flags = tmp_path, (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g")
    lstm = ecornn.compile("lstm", hidden=H, input=I, batch=B, seq=T, target="cpu", bidirectional=True, lengths=True,
                          out=here / "lstm.so")
    monkeypatch.setenv("CXX", " ".join(("c++", *flags)))
    library.write(here)
    program, weights = compiled(HOST, here / "ort_host", f"-I{SOURCES}", *flags), weights_of(lstm)
    (x, h), lengths = drawn(x=(T, B, I), h=(2, B, H)).values(), np.array([T, 2, 4], np.int32)  # c begins with zeros
    given = arguments(here, "CpuRecurrent", here / "lstm.so", 3, {"x": x, "lens": lengths, "h": h, "c": None}, weights)
    # TSan's shadow memory wants an address space that is not laid out at random
    command = [*(["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []), program, *given]
    assert run(*command) == ""
    y, states = ecornn.reference("lstm", x, weights, (h, np.zeros((2, B, H))), lengths=lengths)
    close(read(here, "out0", T, B, 2 * H), y)
    for number, state in enumerate(states, 1):
        close(read(here, f"out{number}", 2, B, H), state)


@pytest.mark.skipif(detect() is not None, reason="the driver without a GPU serves modules for sm_90a")
def test_on_a_gpu(tmp_path: Path, program: Path, fake: Path):
    """Of the session's number, on its stream, with weights from the host."""
    task = Task(Workload("gru", H, I, B, T), analyse(get("gru"), I, H), TINY)
    schedule = SCHEDULES["layout_transform"]
    made = schedule.program(task, schedule.plan(task, config := schedule.default(task)))
    Emulated(made, tmp_path)
    manifest = make_manifest(get("gru"), task, schedule, config, made, "by a test")
    build_module(made, manifest, tmp_path / "gru.so")
    library.write(tmp_path)
    x, h = drawn(x=(T, B, I), h=(1, B, H)).values()
    weights = weights_of(ecornn.load(tmp_path / "gru.so"))
    arrays = {"x": x, "lens": None, "h": h, "c": None}
    given = arguments(tmp_path, "CudaRecurrent", tmp_path / "gru.so", 1, arrays, weights)
    environment = {"FAKE_KERNELS": str(tmp_path / "kernels.so"), "LD_LIBRARY_PATH": str(fake)}
    _, notes = run_both(program, *given, **environment)
    y, (state,) = ecornn.reference("gru", x, weights, (h[0],))
    close(read(tmp_path, "out0", T, B, H), y)
    close(read(tmp_path, "out1", 1, B, H)[0], state)
    copied = [int(size) for size in re.findall(r"cuMemcpyAsync \S+ \S+ (\d+)", notes)]
    packed = [prod(b.packing.split) * 4 for b in manifest.buffers if b.packing]
    zeros = B * H * 4  # a state
    assert sorted(copied) == sorted([zeros, *packed]), "those of two nodes, packed on the host, are there once"
    assert "stream=7" in notes and "cuDeviceGet 1" in notes and "cuDeviceGet 0" not in notes
    more = [word.replace(f":{T},{B},", f":{T},{B + 1},").replace(f":1,{B},", f":1,{B + 1},") for word in given]
    assert "no more rows than its module was compiled for" in refused(program, *more, **environment)
    assert "its module is for GPUs" in refused(program, *(w.replace("Cuda", "Cpu") for w in given), **environment)


def test_an_onnx_runtime_that_is_too_old(folder: Path, program: Path):
    library.write(folder)
    said = refused(program, folder / library.NAME, "CpuRecurrent", "none.so", "", folder, "1", ORT_HOST_VERSION="17")
    assert said == "ecornn's operators need ONNX Runtime 1.18 or newer; this is 1.17.3\n"
