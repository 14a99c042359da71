"""The emulation itself: faults of a kernel end in an error, and no fence of blocks that exchange can be dropped.

Fences, releases and acquires are dropped one by one, but where others make up for one: then these together. It does not
see the order of shared memory between blocks of a cluster, which mbarriers count, and wgmma.fence."""

import ctypes
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import exact
import numpy as np
import pytest
import step_cells
from cuda_on_cpu import Emulated, Fault, compiled, inputs
from emulated import task_of
from exact import Wanted, relative
from msgspec.structs import replace
from step_cells import Thrice
from test_backward_recurrence_emulated import check_recurrence
from test_persistent_emulated import SMALL, cut
from test_persistent_wide import FOUR_PARTS, backward_config, config_of

from ecornn.schedules.base import Task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent import plan as persistent_plan
from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.workload import ALONE

SITE = re.compile(r"^ +(tvm_builtin_ptx_(?:fence_acq_rel|fence_proxy|fence_mbarrier_init|red_release|ld_acquire)\w*)\(",
                  re.M)
TINY = {"units": 8, "warps": 1}

# Programs: cell, (T, B, I, H), knobs; how many fences, releases and acquires there are; and which of them, in the order
# of the text, are dropped: one, or several that make up for each other. In each projection by wgmma two fences say that
# its mbarriers have begun, of which one would do, and a third one is behind cp.async.
CASES: dict[str, tuple[str, tuple[int, int, int, int], dict[str, Any], int, list[tuple[int, ...]]]] = {
    # of product warps, behind their reads; of gate warps, behind their wipes
    "every": ("rnn_tanh", (12, 3, 8, 24), {"fences": "every"}, 5, [(0, 1), (2,), (3,), (4,)]),
    "products": ("rnn_tanh", (80, 3, 8, 24), {"fences": "products"}, 5, [(3,), (4,)]),
    "rare": ("rnn_tanh", (80, 3, 8, 24), {"fences": "rare"}, 5, [(3,), (4,)]),
    # Gate warps read as well, with a fence behind that; what either kind of warp knows the other hears at a barrier.
    "statistics": ("thrice", (12, 3, 8, 24), {"fences": "every"}, 6, [(3, 4, 5)]),
    "rare statistics": ("thrice", (80, 3, 8, 24), {"fences": "rare"}, 6, [(3, 4), (5,)]),
    # The wait for rows of the projection is there three times; a fence before a release is one too many.
    "beside": ("rnn_tanh", (40, 5, 16, 24), {"ahead": 0}, 7, [(0,), (1, 2, 4), (3,), (5, 6)]),
    # mbarriers, which have one fence here; a fence for each of five pairs
    "streamed": ("echo", (6, 3, 0, 150), {"units": 32, "registers": 0}, 8, [(0,), (1,), (2,), (3,), (4,), (5,)]),
    "cluster": ("rnn_tanh", (12, 3, 8, 24), {"carrier": "cluster", "fences": "rare"}, 4, [(3,)]),
    # mbarriers; of the state's chunks: acquire, fence of who copies, fence of who wrote, release
    "wide": ("lstm", (20, 3, 24, 40), {}, 9, [(3, 4), (5,), (6,), (7,), (8,)]),
}


def program_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Task, Any]:
    cell, sizes, change, _, _ = CASES[name]
    device = SMALL
    if cell == "thrice":
        for known in (step_cells.CELLS, exact.ALL_CELLS):
            monkeypatch.setitem(known, cell, Thrice())
    if name == "streamed":
        monkeypatch.setattr(persistent_plan, "AHEAD_BYTES", 1)
        device = replace(SMALL, shared=7 << 10)
    task = task_of(cell, sizes, "float16", device)
    schedule = PersistentWide() if name == "wide" else Persistent()
    config = config_of() if name == "wide" else cut(task, **{**TINY, **change})
    assert schedule.check(task, config) is None
    return task, schedule.program(task, schedule.plan(task, config))


def without(text: str, numbers: tuple[int, ...], count: int) -> str:
    sites = list(SITE.finditer(text))
    assert len(sites) == count, [site[1] for site in sites]
    for number in reversed(numbers):
        start, end = sites[number].span(1)
        weaker = "//" if "fence" in text[start:end] else "relaxed_"
        text = text[:start] + weaker + text[start:]
    weak = re.findall(r"__forceinline__ __device__ void tvm_builtin_ptx_(?:red_release|ld_acquire)(?:.*\n)+?}", text)
    copies = "".join(w.replace(" tvm_", " relaxed_tvm_").replace("red.release", "red.relaxed")
                     .replace("ld.acquire", "ld.relaxed") + "\n" for w in weak)
    at = text.index('extern "C"')
    return text[:at] + copies + text[at:]


def run(name: str, task: Task, program: Any, folder: Path, numbers: tuple[int, ...] = ()) -> Any:
    w = task.workload
    sizes = w.seq, w.batch, w.input, w.hidden
    given = inputs(w.cell, sizes, w.dtype, task.graph.parameters, tuple(task.graph.states))
    own = Path(tempfile.mkdtemp(dir=folder))  # a library is known by its path
    emulated = Emulated(program, own, ordered=True, change=lambda text: without(text, numbers, CASES[name][3]))
    return emulated.run(*given)[0], given


@pytest.mark.parametrize("name", CASES)
def test_what_is_dropped_is_missed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    task, program = program_of(name, monkeypatch)
    right, given = run(name, task, program, tmp_path)
    x, states, parameters = given[0].astype(np.float64), *({n: v.astype(np.float64) for n, v in g.items()}
                                                           for g in given[1:])
    Wanted("float16", lambda forward: exact.expected(
        task.workload.cell, ALONE, x, states, parameters, {}, forward)).check(right)
    for numbers in CASES[name][4]:
        with suppress(Fault):
            y, _ = run(name, task, program, tmp_path, numbers)
            assert not relative(y, right.astype(np.float64)) < 0.01, numbers


# Fences that mbarriers have begun, of which either would do; of the state's chunks acquire, fence of who copies, fence
# of who wrote, release.
@pytest.mark.parametrize("change", [{"units": 16}, FOUR_PARTS], ids=str)
@pytest.mark.parametrize("numbers", [(), (2,), (3,), (4,), (5,)], ids=str)
def test_the_wide_kernel_of_an_adjoint(tmp_path: Path, numbers: tuple[int, ...], change: dict[str, int]):
    layer = task_of("lstm", (6, 3, 24, 40), "float16", SMALL)
    with pytest.raises((Fault, AssertionError), match="allowed") if numbers else nullcontext():
        check_recurrence(tmp_path, PersistentWide(), layer, backward_config(**change), ordered=True,
                         change=lambda text: without(text, numbers, 6))


COPY = """
extern "C" void copy(float* from, float* to, int waits) {
  emu::cp_async(16 * threadIdx.x, from + 4 * threadIdx.x, 16, 16);
  emu::commit();
  if (waits) emu::wait_group(0);
  __syncthreads();
  for (int i = 0; i < 4; ++i) to[4 * threadIdx.x + i] = ((float*)emu::shared)[4 * threadIdx.x + i];
}"""
FAULTS = [
    ("__syncthreads();", 64, ""),  # none
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


@pytest.mark.parametrize(("lazy", "waits", "comes"), [
    (True, True, True), (True, False, False), (False, True, True), (False, False, True)])
def test_a_copy_comes_as_late_or_as_early_as_it_may(tmp_path: Path, lazy: bool, waits: bool, comes: bool):
    source, to = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    given = [ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(to.ctypes.data), ctypes.c_int(waits)]
    array = (ctypes.c_void_p * 3)(*map(ctypes.addressof, given))
    compiled(COPY, ["copy"], tmp_path).emu_copy(1, 32, array, ctypes.c_bool(lazy), ctypes.c_bool(False), 1)
    assert (to == source).all() if comes else np.isnan(to).all()  # shared memory is NaN at first


@pytest.mark.parametrize(("code", "threads", "message"), FAULTS, ids=lambda v: str(v)[:24])
def test_a_fault_is_said(tmp_path: Path, code: str, threads: int, message: str):
    compiled(f'extern "C" void fault(float* to) {{ {code} }}', ["fault"], tmp_path)
    done = subprocess.run([sys.executable, "-c", LAUNCH, tmp_path / "kernels.so", str(threads)], capture_output=True,
                          text=True)
    assert (done.returncode, done.stdout) == ((-6, "") if message else (0, "ended\n")), done.stdout + done.stderr
    assert message in done.stderr
