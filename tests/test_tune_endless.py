"""A kernel that never ends costs the tuner one trial, not the run: on a real GPU."""

from __future__ import annotations

import pytest
from tune_endless import endless, planted

from ecornn.build.cuda import lower
from ecornn.device import resolve
from ecornn.schedules.fused_step import FusedStep
from ecornn.tune.api import tune
from ecornn.tune.log import read
from ecornn.tune.pool import Entries


def test_the_planted_kernel_is_a_loop():
    from ecornn.cells import get
    from ecornn.task import make_task
    from ecornn.workload import Workload

    task = make_task(get("lstm"), Workload("lstm", 8, 8, 1, 4, "bfloat16"), resolve("sm_90a"))
    _, source = lower(endless(FusedStep().program(task, FusedStep().default(task))), "sm_90a")
    assert "spin_kernel" in source and "ld.acquire.gpu.global.u32" in source


@pytest.mark.gpu
def test_a_kernel_that_never_ends_costs_one_trial(tmp_path):
    result = tune("lstm", hidden=64, batch=4, seq=20, dtype="bfloat16", target="cuda", schedule="fused_step",
                  trials=12, timeout=8, output=tmp_path / "log.jsonl",
                  entries=Entries(build="tune_endless:build"))
    trials = [t for t in read(tmp_path / "log.jsonl").trials() if t.stage == "search"]
    ended = [t for t in trials if not planted(t.config)]
    hung = [t for t in trials if planted(t.config)]
    assert hung and len(ended) + len(hung) == 12
    assert {t.error for t in hung} == {"run: took longer than 8 s and was stopped"}
    assert all(t.times is not None and t.error is None for t in ended)
    assert result.best is not None and not planted(result.best.config)
