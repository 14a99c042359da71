"""A kernel that never ends, a wild store, a wrong output, too little memory: each costs one trial, on
this CPU and on a real GPU."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tune_planted import FAULTS, FOLDER, planted

from ecornn.build.cuda import lower
from ecornn.cells import get
from ecornn.schedules.step.fused_step import FusedStep
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.tune.log import read
from ecornn.tune.pool import Entries
from ecornn.tune.session import tune
from ecornn.workload import Workload

TIMEOUT, HUNG, WRONG = 400.0, "run: took longer than 4 s and was stopped", "wrong output: relative error"
SAID = {"cuda": {"endless": HUNG, "astray": "illegal memory access|ILLEGAL_ADDRESS", "wrong": WRONG,
                 "vast": "out of memory|OUT_OF_MEMORY"},
        "cpu": {"endless": HUNG, "astray": "run: the process crashed with signal SIGSEGV", "wrong": WRONG,
                "vast": "run: MemoryError"}}


def program():
    task = make_task(get("lstm"), Workload("lstm", 64, 64, 4, 20, "bfloat16"), resolve("sm_90a"))
    return FusedStep().program(task, FusedStep().plan(task, FusedStep().default(task)))


@pytest.mark.parametrize(("fault", "text"), [("endless", "ptx_ld_acquire_gpu_global_u32"), ("astray", "68719476736"),
                                             ("wrong", "bfloat16")])
def test_what_is_planted_is_a_kernel(fault: str, text: str):
    kernels, source = lower(FAULTS[fault](program()), "sm_90a")
    assert "planted" in kernels and text in source[source.index("planted_kernel"):]


def test_what_is_planted_needs_more_memory_than_there_is():
    assert sum(b.nbytes(20) for b in FAULTS["vast"](program()).buffers) > 2 * resolve("sm_90a").memory


def test_every_kind_is_planted_whatever_is_proposed(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    faults = [planted({"units": n}) for n in range(16)]
    assert Counter(faults) == {None: 8, **dict.fromkeys(FAULTS, 2)}
    assert [planted({"units": n}) for n in reversed(range(16))] == faults[::-1]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_fault_costs_one_trial(target: str, tmp_path, monkeypatch, short_if_endless):
    monkeypatch.setenv(FOLDER, str(tmp_path / "planted"))
    (tmp_path / "planted").mkdir()
    layer = {"dtype": "bfloat16", "schedule": "fused_step", "trials": 32} if target == "cuda" else {"trials": 16}
    result = tune("lstm", hidden=64, batch=4, seq=20, target=target, timeout=TIMEOUT, early_stop=False,
                  output=tmp_path / "log.jsonl", entries=Entries(build="tune_planted:build"), **layer)
    trials = [t for t in read(tmp_path / "log.jsonl").trials() if t.stage == "search"]
    seen = Counter(planted(t.config) for t in trials)
    # An eighth of all for each fault; what is built last may be cut off.
    assert len(trials) == layer["trials"] and all(seen[fault] > len(trials) // 16 for fault in FAULTS), seen
    for trial in trials:
        fault = planted(trial.config)
        assert (trial.times is None) == (trial.error is not None)
        assert re.search(SAID[target][fault], trial.error or "") if fault else trial.times, (fault, trial.error)
    assert result.best is not None and planted(result.best.config) is None
