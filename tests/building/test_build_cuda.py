"""CUDA modules: built without a GPU, carried out by a driver that only takes notes, and on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_sample
import ml_dtypes
import numpy as np
import pytest
import tvm_ffi
from cuda_sample import child, raised, run

from ecornn.build import Generated, build_module, cuda, nvcc
from ecornn.build.cuda import lower
from ecornn.build.host_cuda import Kernel, host_program
from ecornn.errors import BuildError
from ecornn.host_gpu import detect, driver_version
from ecornn.manifest import decode
from ecornn.program import Extent, Fill, Launch, Loop, Parallel, Program
from ecornn.targets import KNOWN


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Generated]:
    out = tmp_path_factory.mktemp("module") / "sample.so"
    manifest = cuda_sample.manifest(detect() or KNOWN["sm_90a"])
    return out, build_module(cuda_sample.program(), manifest, out)


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    return lower(cuda_sample.program(), "sm_90a")[0]


def test_kernels_know_the_order_of_what_they_read(kernels: dict[str, Kernel]):
    assert kernels["total"].arguments == ("counter", "mask", "sums", "x", "T")  # w is not read
    assert kernels["step"].arguments == ("h_in", "sums", "w", "x", "y", "t") and kernels["last"].symbol == "last_kernel"
    assert kernels["last"].extents == {"blockIdx.x": 2, "threadIdx.x": 64, "clusterCtaIdx.x": 2}


def restricted(calls: tuple, **attributes: bool) -> set[str]:
    functions = {name: f.with_attr({f"tirx.{k}": v for k, v in attributes.items()}) if attributes else f
                 for name, f in cuda_sample.functions().items()}
    source = lower(Program.running(functions, cuda_sample.BUFFERS, calls), "sm_90a")[1]
    return {name for name in functions if "restrict" in source.split(f" {name}_kernel(")[1].split(")")[0]}


def test_memory_that_others_write_is_not_restrict():
    assert restricted(()) == {"step"} and restricted((Loop((Launch("step", 2, 64, cluster=2),)),)) == set()
    assert restricted((), noalias=False) == set() and restricted((), noalias=True) == {"total", "step", "last"}


def test_tvm_keeps_its_own_compile_hook():
    import tvm.support.nvcc  # noqa: F401  registers TVM's own hook
    name = "tvm_callback_cuda_compile"
    tvm_ffi.register_global_func(name, lambda code: b"kept", override=True)
    lower(cuda_sample.program(), "sm_90a")
    assert tvm_ffi.get_global_func(name)("") == b"kept"


@pytest.mark.parametrize("calls, message", [
    ((Launch("other", 1, 1),), "no function"), ((Fill("other", 0, Extent(1)),), "no buffer"),
    ((Fill("sums", 256, Extent(1)),), "no byte"), ((Launch("step", 2, 64),), "outside a loop"),
    ((Loop((Launch("step", 4, 64),)),), "grid=4, but the kernel has 2"),
    ((Loop((Launch("step", 2, 32),)),), "threads=32, but the kernel has 64"),
    ((Launch("total", 4, 32),), "needs cooperative"), ((Launch("last", 2, 64, cluster=2),), "needs shared"),
    ((Launch("last", 2, 64, 256),), "cluster=1, but the kernel has 2"),
    ((Launch("last", 3, 64, 256, cluster=2),), "whole number of clusters"),
    ((Launch("total", 0, 32, cooperative=True),), "positive"), ((Parallel("total"),), "cannot carry out")])
def test_calls_that_do_not_fit_are_refused(kernels: dict[str, Kernel], calls: tuple, message: str):
    with pytest.raises(BuildError, match=message):
        host_program(Program.running({}, cuda_sample.BUFFERS, calls), kernels, "sm_90a")


def test_functions_that_do_not_fit_are_refused():
    from tvm.script import tirx as S

    @S.prim_func
    def unknown(z: S.Buffer((64,), "float32")):
        S.device_entry()
        z[S.thread_id([64])] = S.float32(0)

    @S.prim_func
    def scalar(y: S.Buffer((64,), "float32"), steps: S.int32):
        S.device_entry()
        y[S.thread_id([64])] = S.cast(steps, "float32")

    @S.prim_func
    def host(y: S.Buffer((64,), "float32")):
        y[0] = S.float32(0)
    for function, message in ((unknown, "no buffer 'z'"), (scalar, "'steps'"), (host, "one kernel|lowered")):
        with pytest.raises(BuildError, match=message):
            lower(Program.running({"f": function}, cuda_sample.BUFFERS, ()), "sm_90a")
    with pytest.raises(BuildError, match="no functions"):
        lower(Program.running({}, cuda_sample.BUFFERS, ()), "sm_90a")


def test_file_holds_machine_code_and_no_source(built: tuple[Path, Generated]):
    out, generated = built
    content = out.read_bytes()
    assert generated.binaries["ecornn_cubin0"][:4] == b"\x7fELF" and generated.binaries["ecornn_cubin0"] in content
    assert b"__global__" not in content and b"threadIdx" not in content
    assert set(generated.resources) == {"total", "step", "last"}
    assert all(r["registers"] > 0 and r["spill_stores"] == 0 for r in generated.resources.values())


@pytest.mark.skipif(not shutil.which("readelf"), reason="readelf is not installed")
def test_file_needs_tvm_ffi_and_the_system_alone(built: tuple[Path, Generated]):
    text = subprocess.run(["readelf", "-dW", built[0]], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    system = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0"}
    assert "libtvm_ffi.so" in needed <= system | {"libtvm_ffi.so"}
    assert "PATH" not in text  # neither RPATH nor RUNPATH: the file can move


def test_manifest_comes_back_without_tvm(built: tuple[Path, Generated]):
    done = child("print(m['manifest'](), end='')", built[0])
    assert decode(done.stdout) == cuda_sample.manifest(detect() or KNOWN["sm_90a"])


def test_a_machine_without_driver_is_told(built: tuple[Path, Generated], tmp_path: Path):
    (tmp_path / "libcuda.so.1").touch()  # found first, and no library: also where there is a driver
    said = child(raised(run(3)) + raised("m['alloc'](0, 1)"), built[0], tmp_path).stdout.splitlines()
    assert len(said) == 2 and all("libcuda.so.1" in line and line.startswith(
        "RuntimeError this module needs a CUDA GPU and the NVIDIA driver") for line in said)


def test_run_makes_the_calls_in_order(built: tuple[Path, Generated], fake: Path):
    done = child(run(3) + run(1), built[0], fake, FAKE_MAJOR="9")
    first = done.calls.index("cuCtxPopCurrent")  # the end of loading
    assert done.calls[:first] == [
        "cuInit 0", "cuDeviceGet 0", "cuDevicePrimaryCtxRetain 10", "cuCtxPushCurrent 110",
        "cuModuleLoadData elf=1 capture_mode=2", "cuModuleGetFunction total_kernel", "cuModuleGetFunction step_kernel",
        "cuModuleGetFunction last_kernel", "cuFuncSetAttribute last_kernel 8 256"]
    def sequence(steps: int) -> list[str]:
        return [
            "cuCtxPushCurrent 110",
            "cuMemsetD8Async 7000 byte=0 size=4 stream=7",
            f"cuMemsetD8Async 8000 byte=255 size={4 * (2 + 3 * steps)} stream=7",
            "cuLaunchKernelEx total_kernel grid=4 threads=32 shared=0 stream=7 attribute2=1 "
            f"arguments 7000 8000 6000 1000 {steps}",
            *(f"cuLaunchKernelEx step_kernel grid=2 threads=64 shared=0 stream=7 "
              f"arguments 3000 6000 5000 1000 2000 {t}" for t in range(steps)),
            "cuLaunchKernelEx last_kernel grid=2 threads=64 shared=256 stream=7 attribute4=2 "
            f"arguments 3000 4000 2000 {steps}",
            "cuCtxPopCurrent",
        ]

    # The second call loads nothing; the end of the process unloads.
    unload = ["cuCtxPushCurrent 110", "cuModuleUnload", "cuCtxPopCurrent", "cuDevicePrimaryCtxRelease 10"]
    assert done.calls[first + 1:] == [*sequence(3), *sequence(1), *unload]


def test_a_large_projection_is_a_cubin_of_its_own_that_is_compiled_once(monkeypatch, tmp_path, fake):
    sources: list[str] = []
    compiled = nvcc._compile
    def compile(source: str, *rest: str) -> tuple[bytes, str]:
        sources.append(source)
        return compiled(source, *rest)
    for place, name, value in ((nvcc, "_compile", compile), (cuda, "PROJECTION", "step"), (cuda, "LARGE", 1)):
        monkeypatch.setattr(place, name, value)
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    program, out = cuda_sample.program(), tmp_path / "apart.so"
    for _ in range(2):
        generated = build_module(program, cuda_sample.manifest(KNOWN["sm_90a"]), out)
    assert len(sources) == 2
    assert [s for s in sources if "step_kernel" in s] == [s for s in sources if "last_kernel" not in s]
    assert set(generated.resources) == {"total", "step", "last"}
    if detect() is None:
        calls = child(run(1), out, fake, FAKE_MAJOR="9").calls
        assert sum(c.startswith("cuModuleLoadData") for c in calls) == calls.count("cuModuleUnload") == 2
        assert sum(c.startswith("cuLaunchKernelEx") for c in calls) == 3


def test_large_arrays_become_variables(monkeypatch: pytest.MonkeyPatch):
    source = """  alignas(64) float acc_ptr[2];
    alignas(64) uint words_ptr[2];
    alignas(64) uint words_ptr_1[2];
    alignas(64) float acc_ptr_1[2];
    product(acc_ptr[0], acc_ptr[1], acc_ptr_1[1], words_ptr[i], &(words_ptr_1[0]), acc_ptr[0]);
"""
    assert nvcc.as_variables(source) == source, "cheap as it is"
    monkeypatch.setattr(nvcc, "COSTLY", 10)
    monkeypatch.setattr(nvcc, "EACH", 2)
    expected = source.replace("alignas(64) float acc_ptr[2]", "float acc_ptr_e0, acc_ptr_e1").replace(
        "alignas(64) float acc_ptr_1[2]", "float acc_ptr_1_e0, acc_ptr_1_e1").replace(
        "acc_ptr[0]", "acc_ptr_e0").replace("acc_ptr[1]", "acc_ptr_e1").replace("acc_ptr_1[1]", "acc_ptr_1_e1")
    assert nvcc.as_variables(source) == expected
    monkeypatch.setattr(nvcc, "EACH", 5)
    assert "acc_ptr_e0" in nvcc.as_variables(source) and "acc_ptr_1[1]" in nvcc.as_variables(source)
    monkeypatch.setattr(nvcc, "COSTLY", 1000)
    assert nvcc.as_variables(source) == source
    monkeypatch.setattr(nvcc, "MANY", 4)  # declared, and used three times
    assert "acc_ptr_e0" in nvcc.as_variables(source) and "acc_ptr_1[1]" in nvcc.as_variables(source)


def test_memory_functions(built: tuple[Path, Generated], fake: Path):
    code = ("p = m['alloc'](0, 96)\nassert p == 4096 and m['alloc'](0, 0) == 0\n"
            "m['copy'](0, p, 5, 96, 3)\nm['copy'](0, p, 5, 0, 3)\nm['synchronize'](0, 3)\n"
            "m['free'](0, p)\nm['free'](0, 0)\n")
    calls = [c for c in child(code, built[0], fake).calls if "Mem" in c or "Synchronize" in c]
    assert calls == ["cuMemAlloc 96", "cuMemcpyAsync 4096 5 96 stream=3", "cuStreamSynchronize 3", "cuMemFree 4096"]


def test_a_captured_graph_outlives_what_is_loaded_made_and_freed_meanwhile(built: tuple[Path, Generated], fake: Path):
    """Python may collect a layer while a graph is captured, of whatever program; the module unloads at the end."""
    calls = child(run(3) + "m['free'](0, m['alloc'](0, 96))\n", built[0], fake, FAKE_CAPTURES="1").calls
    assert {"cuMemAlloc 96", "cuMemFree 4096", "cuModuleUnload"} <= set(calls)
    assert not [c for c in calls if "refused" in c]


@pytest.mark.parametrize("fail, message", [
    ("cuLaunchKernelEx:700", "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal address) in cuLaunchKernelEx of total"),
    ("cuMemsetD8Async:700", "(an illegal address) in cuMemsetD8Async of counter"),
    ("cuModuleLoadData:209", "cuModuleLoadData of a module for sm_90a on a GPU of compute capability 9.0"),
    ("cuInit:3", "CUDA_ERROR_OTHER (something else) in cuInit"),
    ("cuFuncSetAttribute:1", "in cuFuncSetAttribute of last")])
@pytest.mark.skipif(detect() is not None, reason="the module is for the GPU at hand, not for sm_90a")
def test_driver_errors_name_the_call(built: tuple[Path, Generated], fake: Path, fail: str, message: str):
    done = child(raised(run(2)) + raised(run(2)), built[0], fake, FAKE_FAIL=fail)
    first, second = done.stdout.splitlines()
    assert first == second and first.startswith("RuntimeError ") and message in first
    assert sum("CtxPush" in c for c in done.calls) == sum("CtxPop" in c for c in done.calls)


def test_wrong_arguments_are_refused(built: tuple[Path, Generated], fake: Path):
    messages = {
        "m['run'](1, 1, 0, 0)": "TypeError run(T, B, device, queue, *pointers) takes 12 arguments, not 4",
        "m['run'](1.5, 1, 0, 7, *range(8))": "TypeError argument 0 of run", run(0): "ValueError T=0:",
        run(1 << 31): "ValueError T=2147483648:",
        "m['run'](1, 0, 0, 7, *range(8))": "ValueError B=0:",
        run(1, device=64): "ValueError device=64:",
        run(1, device=-1): "ValueError device=-1:",
        "m['free'](0)": "TypeError free(device, pointer) takes 2 arguments, not 1"}
    done = child("".join(map(raised, messages)), built[0], fake)
    for line, message in zip(done.stdout.splitlines(), messages.values(), strict=True):
        assert line.startswith(message)
    assert not [c for c in done.calls if "Launch" in c or "Memset" in c]


def test_the_gpu_is_described_by_its_driver(built: tuple[Path, Generated], fake: Path):
    code = "from ecornn.host_gpu import detect, driver_version\n"
    done = child(code + "d = detect(1)\nprint(d.arch, d.name, d.cores, d.shared, d.registers, d.l2, "
                 "d.memory >> 30, detect(2), detect(-1))", built[0], fake)
    assert done.stdout.strip() == "sm_90a Fake GPU 1016 1097 1082 1038 80 None None"
    done = child(code + raised("detect()"), built[0], fake, FAKE_MAJOR="7")
    assert done.stdout.startswith("DeviceError device='Fake GPU': expected compute")
    assert child(code + "print(detect())", built[0], fake, FAKE_FAIL="cuInit:100").stdout == "None\n"


def tensors(steps: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(0)
    for most, shape in ((8, (steps, cuda_sample.N)), (8, cuda_sample.N), (4, cuda_sample.N)):
        yield random.integers(-most, most + 1, shape).astype(np.float64) / 8


def close(found: np.ndarray, wanted: np.ndarray, precision: float) -> None:
    assert np.abs(found.astype(np.float64) - wanted).max() <= 4 * precision * np.abs(wanted).max()


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 5])
def test_gpu_computes_the_sample(built: tuple[Path, Generated], steps: int):
    call: Callable[[str], Any] = tvm_ffi.load_module(str(built[0])).get_function
    x, h, w = tensors(steps)
    wanted_y, wanted_h = cuda_sample.expected(x, h, w)
    given = {"x": x.astype(np.float32), "h_in": h.astype(np.float16), "w": w.astype(ml_dtypes.bfloat16)}
    y, h_out = np.zeros((steps, cuda_sample.N), np.float32), np.zeros(cuda_sample.N, np.float16)
    sizes = {b.name: b.nbytes(steps) for b in cuda_sample.BUFFERS}
    sizes |= {n: a.nbytes for n, a in (*given.items(), ("y", y), ("h_out", h_out))}
    memory = {name: call("alloc")(0, size) for name, size in sizes.items()}
    try:
        for place in ("h_out", "h_in"):
            for name, array in given.items():
                call("copy")(0, memory[name], array.ctypes.data, array.nbytes, 0)
            pointers = [memory[place if b.name == "h_out" else b.name] for b in cuda_sample.BUFFERS]
            for _ in range(2 if place == "h_out" else 1):
                call("run")(steps, 1, 0, 0, *pointers)
            call("copy")(0, y.ctypes.data, memory["y"], y.nbytes, 0)
            call("copy")(0, h_out.ctypes.data, memory[place], h_out.nbytes, 0)
            call("synchronize")(0, 0)
            close(y, wanted_y, 2.0**-24)
            close(h_out, wanted_h, 2.0**-11)
    finally:
        for pointer in memory.values():
            call("free")(0, pointer)


@pytest.mark.gpu
def test_gpu_graph_captures_the_first_run(built: tuple[Path, Generated], tmp_path: Path):
    """Of a copy of the file, so that capturing also has to load the module."""
    import torch
    steps, module = 4, tvm_ffi.load_module(str(shutil.copy(built[0], tmp_path / "copied.so")))
    x, h, w = tensors(steps)
    wanted_y, wanted_h = cuda_sample.expected(x, h, w)
    types = {"uint32": torch.int32, **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}}
    values = {"x": x, "h_in": h, "w": w, "y": np.zeros_like(x), "h_out": np.zeros_like(h)}
    memory = {b.name: torch.tensor(values.get(b.name, np.zeros(b.extent.at(steps)))).to("cuda", types[b.dtype])
              for b in cuda_sample.BUFFERS}
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        module.run(steps, 1, 0, torch.cuda.current_stream().cuda_stream,
                   *(memory[b.name].data_ptr() for b in cuda_sample.BUFFERS))
    assert not memory["y"].any()  # captured, not run
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    close(memory["y"].cpu().numpy(), wanted_y, 2.0**-24)
    close(memory["h_out"].cpu().numpy(), wanted_h, 2.0**-11)


@pytest.mark.gpu
def test_gpu_is_found():
    device, version = detect(), driver_version()
    assert device is not None and device.cores > 0 and device.can.tensor_cores and device.memory > 1 << 30
    assert version is not None and re.match(r"\d|CUDA", version)
