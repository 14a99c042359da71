"""The emulation itself: it does what waits, barriers and copies say, and faults of a kernel end in an error."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import compiled

COPY = """
extern "C" void copy(float* from, float* to, int waits) {
  emu::cp_async(16 * threadIdx.x, from + 4 * threadIdx.x, 16, 16);
  emu::commit();
  if (waits) emu::wait_group(0);
  __syncthreads();
  for (int i = 0; i < 4; ++i) to[4 * threadIdx.x + i] = ((float*)emu::shared)[4 * threadIdx.x + i];
}"""
# Threads of two blocks give a number to the next thread, the last of a warp to the first of the next warp.
GIVE = """
extern "C" void give(int* to) {
  unsigned me = threadIdx.x, next = (me + 1) % 64;
  int* words = (int*)emu::shared;
  words[next] = 1000 * blockIdx.x + me;
  __syncthreads();
  to[64 * blockIdx.x + me] = words[me] + __shfl_sync(0xffffffff, words[me], 31, 32);
}"""
FAULTS = [
    ("if (threadIdx.x < 32) __syncthreads();", 64, "deadlock: a barrier that not every thread reaches"),
    ("emu::cp_async(4, to, 16, 16);", 32, "a misaligned asynchronous copy"),
    ("to[0] = *(float*)emu::at(1 << 20);", 32, "an address beyond shared memory"),
    ("emu::mbarrier_wait(8, 0);", 32, "an mbarrier that was not initialized"),
    ("if (!threadIdx.x) emu::mbarrier_init(8, 2), emu::mbarrier_arrive(8);", 32, "in the middle of a phase at the end"),
    ("if (!threadIdx.x) emu::mbarrier_init(8, 1), emu::mbarrier_wait(8, 0);", 32, "deadlock"),
    ("if (!threadIdx.x) emu::mbarrier_init(8, 1), emu::bulk_copy(16, emu::at(32), 16, 8);", 32, "with no fence behind"),
    ("emu::send(emu::mapa(0, 2), 1, emu::mapa(8, 2));", 32, "a block that the cluster does not have"),
    ("float d[4]; emu::wgmma(0, 8, 0, 0, false, {d, d + 1, d + 2, d + 3});", 128, "products that nobody waited for"),
    ("emu::launch(nullptr, 1, 33, nullptr, false, false, 1, false);", 32, "threads are no whole number of warps"),
]
LAUNCH = """
import ctypes, sys
to = (ctypes.c_float * 64)()
argument = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_void_p(ctypes.addressof(to))))
library = ctypes.CDLL(sys.argv[1])
library.emu_fault(1, int(sys.argv[2]), argument, ctypes.c_bool(False), ctypes.c_bool(False), 1)
print("ended")
"""


def launch(library: ctypes.CDLL, name: str, grid: int, threads: int, *arguments: object, lazy: bool = True,
           together: bool = False) -> None:
    given = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_int(a) for a in arguments]
    array = (ctypes.c_void_p * len(given))(*(ctypes.addressof(g) for g in given))
    getattr(library, f"emu_{name}")(grid, threads, array, ctypes.c_bool(lazy), ctypes.c_bool(together), 1)


@pytest.mark.parametrize(("lazy", "waits", "comes"), [
    (True, True, True), (True, False, False), (False, True, True), (False, False, True)])
def test_a_copy_comes_as_late_or_as_early_as_it_may(tmp_path: Path, lazy: bool, waits: bool, comes: bool):
    source, to = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    launch(compiled(COPY, ["copy"], tmp_path), "copy", 1, 32, source, to, int(waits), lazy=lazy)
    assert (to == source).all() if comes else np.isnan(to).all()  # shared memory is NaN at first


def test_kernels_of_several_libraries_in_turn(tmp_path: Path):
    for name in "ab":
        (tmp_path / name).mkdir()
    one, other = compiled(COPY, ["copy"], tmp_path / "a"), compiled(GIVE, ["give"], tmp_path / "b")
    source = np.arange(128, dtype=np.float32)
    for _ in range(2):
        to, sums = np.zeros(128, np.float32), np.zeros(128, np.int32)
        launch(one, "copy", 1, 32, source, to, 1)
        launch(other, "give", 2, 64, sums)
        assert (to == source).all()
        before = np.concatenate([1000 * b + (np.arange(64) - 1) % 64 for b in range(2)])
        assert (sums == before + before.reshape(4, 32)[:, 31:].repeat(32, 1).reshape(-1)).all()


@pytest.mark.parametrize(("code", "threads", "message"), FAULTS, ids=lambda v: str(v)[:24])
def test_a_fault_is_said(tmp_path: Path, code: str, threads: int, message: str):
    compiled(f'extern "C" void fault(float* to) {{ {code} }}', ["fault"], tmp_path)
    done = subprocess.run([sys.executable, "-c", LAUNCH, tmp_path / "kernels.so", str(threads)], capture_output=True,
                          text=True)
    assert done.returncode == -6 and message in done.stderr, done.stdout + done.stderr


def test_without_a_fault_the_same_ends(tmp_path: Path):
    compiled('extern "C" void fault(float* to) { __syncthreads(); }', ["fault"], tmp_path)
    done = subprocess.run([sys.executable, "-c", LAUNCH, tmp_path / "kernels.so", "64"], capture_output=True, text=True,
                          check=True)
    assert done.stdout == "ended\n"
