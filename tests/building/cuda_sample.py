"""A CUDA program that uses all that host code can do, in NumPy, too; and what a driver (fake_driver.c) notes of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ecornn.device import Device
from ecornn.manifest import Manifest
from ecornn.program import Buffer, Extent, Fill, Launch, Loop, Program
from ecornn.targets import KNOWN
from ecornn.workload import Workload

N = 128
HALF = "__device__ __forceinline__ float half_of(float v) { return 0.5f * v; }"
BUFFERS = (
    Buffer.of("x", "float32"), Buffer.of("y", "float32"), Buffer.of("state_in", "float16", "h"),
    Buffer.of("state_out", "float16", "h"), Buffer("w", "packed", "bfloat16", Extent(N)),
    Buffer("sums", "workspace", "float32", Extent(8)), Buffer("counter", "workspace", "uint32", Extent(1)),
    Buffer("mask", "workspace", "uint32", Extent(2, 3)))
POINTERS = tuple(range(1000, 9000, 1000))  # of x, y, h_in, h_out, w, sums, counter, mask
CALLS = (
    Fill("counter", 0, Extent(1)),
    Fill("mask", 255, Extent(2, 3)),
    Fill("sums", 0, Extent(0)),  # nothing to do: the driver must not see it
    Launch("total", grid=4, threads=32, cooperative=True),
    Loop((Launch("step", grid=2, threads=64),)),
    Launch("last", grid=2, threads=64, shared=256, cluster=2),
)


def functions() -> dict[str, Any]:
    from tvm.script import tirx as S

    many = 1 << 20
    @S.prim_func
    def total(x: S.Buffer((many,), "float32"), w: S.Buffer((N,), "bfloat16"), sums: S.Buffer((8,), "float32"),
              counter: S.Buffer((1,), "uint32"), mask: S.Buffer((many,), "uint32"), T: S.int32):
        S.func_attr({"tirx.kernel_launch_params": ["tirx.use_cooperative_launch"]})
        S.device_entry()
        block = S.cta_id([4])
        thread = S.thread_id([32])
        own = S.alloc_local((1,), "float32")
        arrived = S.alloc_local((1,), "uint32")
        if thread == 0:
            own[0] = S.float32(0)
            for j in S.serial(N // 4):
                own[0] = own[0] + x[block * (N // 4) + j]
            sums[block] = own[0]
            S.ptx["red.release.gpu.global.add.u32"](counter.ptr_to([0]), S.uint32(1))
            S.cuda.wait_until(arrived, counter.ptr_to([0]), lambda seen: seen >= S.uint32(4), scope="gpu")
        if block + thread == 0:
            own[0] = sums[0] + sums[1] + sums[2] + sums[3] + S.cast(arrived[0], "float32")
            if mask[3 * T + 1] == S.uint32(0xFFFFFFFF):
                own[0] = own[0] + S.float32(1)
            sums[4] = own[0]

    @S.prim_func
    def step(h_in: S.Buffer((N,), "float16"), t: S.int32, x: S.Buffer((many,), "float32"),
             y: S.Buffer((many,), "float32"), w: S.Buffer((N,), "bfloat16"), sums: S.Buffer((8,), "float32")):
        S.device_entry()
        block = S.cta_id([2])
        thread = S.thread_id([64])
        before = S.alloc_local((1,), "float32")
        before[0] = S.cast(h_in[block * 64 + thread], "float32")
        if t > 0:
            before[0] = y[(t - 1) * N + block * 64 + thread]
        y[t * N + block * 64 + thread] = (
            before[0] * S.cast(w[block * 64 + thread], "float32") + sums[4]
            + S.cuda.func_call("half_of", x[t * N + block * 64 + thread], source_code=HALF,
                               return_type="float32"))

    @S.prim_func
    def last(h_out: S.Buffer((N,), "float16"), y: S.Buffer((many,), "float32"),
             h_in: S.Buffer((N,), "float16"), T: S.int32):
        S.device_entry()
        S.cluster_id([1])
        rank = S.cta_id_in_cluster([2])
        thread = S.thread_id([64])
        stage = S.alloc_buffer((64,), "float32", scope="shared.dyn")
        stage[thread] = y[(T - 1) * N + rank * 64 + thread]
        S.cuda.cta_sync()
        h_out[rank * 64 + thread] = S.cast(stage[63 - thread] + S.cast(h_in[rank * 64 + thread], "float32"), "float16")
    return {"total": total, "step": step, "last": last}


def program() -> Program:
    return Program.running(functions(), BUFFERS, CALLS)


def run(steps: int = 2, stream: int = 7, device: int = 0, batch: int = 1) -> str:
    return f"m['run']({steps}, {batch}, {device}, {stream}, *{POINTERS})\n"


def manifest(device: Device = KNOWN["sm_90a"]) -> Manifest:
    return Manifest(Workload("sample", N, N), device, "sample", {"tile": 2}, "made by a test", ("h",), "h",
                    (), BUFFERS, {"run": tuple(b.name for b in BUFFERS)}, {"ecornn": "test"})


def expected(x: np.ndarray, h: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y, before = np.empty_like(x), h
    for t in range(len(x)):
        y[t] = before = before * w + 0.5 * x[t] + x[0].sum() + 4 + 1
    return y, y[-1].reshape(2, 64)[:, ::-1].reshape(N) + h


PARAMETERS = "total_kernel:ppppi;step_kernel:pppppi;last_kernel:pppi;"  # of the kernels
# Every child process begins with this: the loader must not need TVM's compiler.
LOAD = "import sys, tvm_ffi; m = tvm_ffi.load_module(sys.argv[1]); assert 'tvm' not in sys.modules\n"
LOGGED = re.compile(r"^(cu[A-Z]\w+)(?: (.*))?$", re.MULTILINE)


def child(code: str, module: Path, driver: Path | None = None, *arguments: object, **environment: str) -> Any:
    """Runs ``LOAD`` and ``code`` in a new process; ``calls`` of the answer are the driver's notes."""
    env = {**os.environ, "FAKE_PARAMETERS": PARAMETERS, **environment}
    if driver:
        env["LD_LIBRARY_PATH"] = f"{driver}{os.pathsep}{env['LD_LIBRARY_PATH']}" if (
            "LD_LIBRARY_PATH" in env) else str(driver)
    done = subprocess.run([sys.executable, "-c", LOAD + code, str(module), *map(str, arguments)], env=env, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    done.calls = [" ".join(filter(None, match.groups())) for match in LOGGED.finditer(done.stderr)]
    return done


def raised(code: str) -> str:
    return f"try:\n    {code.strip()}\nexcept Exception as e:\n    print(type(e).__name__, e)\n"
