"""Fences, releases and acquires of kernels whose blocks exchange: without any of them the result is wrong.

The emulation shows threads as little of each other's stores as PTX promises (``memory_order.cc``). Of each program here
fences, releases and acquires are dropped one by one, but where others make up for one: then these are dropped together.
What it does not see: the order of shared memory between blocks of a cluster, which mbarriers count, and wgmma.fence.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import exact
import numpy as np
import pytest
import step_cells
from cuda_on_cpu import Emulated, Fault, compiled, inputs
from emulated import task_of
from limits import Wanted, relative
from msgspec.structs import replace
from step_cells import Thrice
from test_emulation import launch
from test_persistent_emulated import SMALL, cut
from test_persistent_wide import config_of

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
    "wide": ("lstm", (6, 3, 24, 40), {}, 9, [(3, 4), (5,), (6,), (7,), (8,)]),
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
    """The source with these sites dropped: no fence; relaxed instead of release or acquire."""
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
    """y of the program without these sites, and what it was given."""
    w = task.workload
    sizes = w.seq, w.batch, w.input, w.hidden
    given = inputs(w.cell, sizes, w.dtype, task.graph.parameters, tuple(task.graph.states))
    own = Path(tempfile.mkdtemp(dir=folder))  # a library is known by its path
    emulated = Emulated(program, own, ordered=True, change=lambda text: without(text, numbers, CASES[name][3]))
    return emulated.run(*given)[0], given


@pytest.fixture(scope="module")
def right() -> dict[str, Any]:
    """y of programs as they are."""
    return {}


@pytest.mark.parametrize("name", CASES)
def test_nobody_sees_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: dict[str, Any], name: str):
    task, program = program_of(name, monkeypatch)
    y, given = run(name, task, program, tmp_path)
    x, states, parameters = given[0].astype(np.float64), *({n: v.astype(np.float64) for n, v in g.items()}
                                                           for g in given[1:])
    Wanted("float16", lambda forward: exact.expected(
        task.workload.cell, ALONE, x, states, parameters, {}, forward)).check(y)


@pytest.mark.parametrize(("name", "numbers"), [(name, numbers) for name, case in CASES.items() for numbers in case[4]],
                         ids=str)
def test_what_is_dropped_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: dict[str, Any], name: str,
                                   numbers: tuple[int, ...]):
    task, program = program_of(name, monkeypatch)
    if name not in right:
        right[name] = run(name, task, program, tmp_path)[0]
    try:
        y, _ = run(name, task, program, tmp_path, numbers)
    except Fault:
        return
    assert not relative(y, right[name].astype(np.float64)) < 0.01


MESSAGE = """
extern "C" void message(unsigned* data, unsigned* flag, unsigned* found) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) { data[0] = 7; SEND; }
  else { unsigned seen = 0; while (!seen) { RECEIVE; emu::yield(); } found[0] = data[0]; }
}"""


@pytest.mark.parametrize(("send", "receive", "arrives"), [
    ("emu::add(flag, 1, true)", "seen = emu::acquire(flag)", True),
    ("emu::add(flag, 1, false)", "seen = emu::acquire(flag)", False),
    ("emu::add(flag, 1, true)", "seen = *flag", False),
    ("emu::fence(), *flag = 1", "seen = *flag, emu::fence()", True),
    ("emu::fence(), *flag = 1", "seen = emu::acquire(flag)", True),
    ("*flag = 1", "seen = *flag, emu::fence()", False),
    ("*flag = 1, emu::fence()", "seen = *flag, emu::fence()", False),
    ("emu::fence(), *flag = 1", "emu::fence(), seen = *flag", False)], ids=str)
def test_a_message(tmp_path: Path, send: str, receive: str, arrives: bool):
    """Data and a flag: what PTX promises arrives, and nothing else."""
    source = MESSAGE.replace("SEND", send).replace("RECEIVE", receive)
    data, flag, found = (np.zeros(1, np.uint32) for _ in range(3))
    library = compiled(source, ["message"], tmp_path, ordered=True)
    launch(library, "message", 2, 32, data, flag, found, together=True)
    assert found[0] == (7 if arrives else 0) and data[0] == 7 and flag[0] == 1
