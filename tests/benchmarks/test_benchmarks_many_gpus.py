"""What benchmarks/run_many_gpus.py finds, and the model of docs/SCALING.md, on results that are made up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_many_gpus
from rooms import ROOT
from run_many_gpus import BEGIN, BUCKET, END, NETWORKS, PAGE, Link, Model, Stack

LINK = Link(20e-6, 300e9)
SPEECH = {"layers": 5, "bidirectional": True, "T": 300, "I": 101, "H": 800}
NETWORK = NETWORKS["8 adapters"]


def times(ms: float) -> dict[str, float]:
    return {"ms": ms, "p20": ms, "p80": ms, "runs": 5}


def results(cost: float) -> dict[str, Any]:
    """Of steps that are as the model has them, where what is hidden costs so much."""
    stack, messages = Stack(**SPEECH), [1 << shift for shift in range(18, 29, 2)]
    alone = {rows: {"ecornn": 8.0 + 0.1 * rows, "torch": 30.0 + 0.2 * rows} for rows in (4, 8, 16, 32)}
    many = {}
    for rows in (4, 8, 16):
        whole = stack.communication(2, LINK, NETWORK)
        exposed = stack.exposed(0.6e-3 * alone[rows]["ecornn"], 2, LINK, NETWORK, by_layer=True)
        step = {"ecornn": exposed + cost * (whole - exposed), "torch": whole}
        many[str(rows)] = {f"{side}{end}": times(alone[rows][side] + (0 if end else 1e3 * step[side]))
                           for side in step for end in ("", "_alone")}
    ready = {how: {"buckets_ms": [1.0, 2.0], "backward_ms": 6.0, "alone_ms": 6.0}
             for how in ("layer_by_layer", "one_node")}
    overlap = dict.fromkeys(("layer_by_layer", "layer_by_layer_alone", "one_node", "one_node_alone", "all_reduce"),
                            times(10.0))
    one = {str(rows): {side: times(ms) for side, ms in by.items()} for rows, by in alone.items()}
    return {"speech": {"sizes": SPEECH, "one": one, "many": many},
            "data_parallel": {"messages": {str(m): 1e3 * LINK.all_reduce(m, 2, 0.0) for m in messages}, "ready": ready,
                              "overlap": overlap, "rows": 8,
                              "gradients": {"many": 1e-3, "one": 1e-3, "most_of_limit": 0.5}}}


def test_buckets_are_of_all_gradients_the_last_layers_first():
    stack = Stack(**SPEECH)
    assert stack.bytes == [4.0 * 2 * 3200 * (width + 800 + 2) for width in (101, 1600, 1600, 1600, 1600)]
    ready = stack.ready()
    assert sum(size for size, _ in ready) == pytest.approx(sum(stack.bytes))
    assert all(size == BUCKET for size, _ in ready[:-1])
    shares = [share for _, share in ready]
    assert shares == sorted(shares) and shares[:3] == [0.2, 0.2, 0.4] and shares[-1] == 1.0  # a layer is 2.3 buckets


@pytest.mark.parametrize("cost", [0.0, 0.35, 1.0])
def test_it_finds_what_its_own_steps_are_made_of(cost: float):
    model = Model(results(cost))
    assert model.link.latency == pytest.approx(LINK.latency) and model.link.bandwidth == pytest.approx(LINK.bandwidth)
    assert model.cost == pytest.approx(cost, abs=1e-9)
    for side in ("ecornn", "torch"):
        for rows in (4, 8, 16):
            assert model.step("speech", side, rows, 2) == pytest.approx(
                results(cost)["speech"]["many"][str(rows)][side]["ms"] / 1e3)
    assert model.step("speech", "ecornn", 8, 1) == pytest.approx(8.8e-3)
    steps = [model.step("speech", "ecornn", 4, gpus, NETWORKS["1 adapter"]) for gpus in (2, 8, 16, 128)]
    assert steps == sorted(steps) and steps[2] > 1.5 * steps[1]  # one adapter is a tenth of what a host has within


def test_all_at_the_end_is_exposed_and_nothing_before_a_long_backward_pass_ends():
    stack = Stack(**SPEECH)
    whole, last = stack.communication(2, LINK, NETWORK), LINK.all_reduce(stack.ready()[-1][0], 2, NETWORK)
    assert stack.exposed(5e-3, 2, LINK, NETWORK, by_layer=False) == pytest.approx(whole)
    assert stack.exposed(5e-3, 2, LINK, NETWORK, by_layer=True) < whole / 2
    assert stack.exposed(10.0, 2, LINK, NETWORK, by_layer=True) >= last * (1 - 1e-9)
    assert LINK.all_reduce(1e9, 1, NETWORK) == 0.0


def test_the_page_has_what_the_results_say(tmp_path: Path):
    path = tmp_path / "made_up.json"
    data = {"environment": {"gpus": 2, "gpu": "A", "cores": 8, "torch": "2", "cuda": "13", "nccl": "2", "command": "c"},
            "parts": results(0.0)}
    path.write_text(json.dumps(data))
    text = run_many_gpus.section(path)
    assert "| speech | 8 | ecornn | 8.80" in text and "| 128 | 4 | " in text and "| 16 | 32 | " in text
    page = (ROOT / PAGE).read_text()
    shown = page.split(BEGIN)[1].split(END)[0]
    (name,) = {*re.findall(r"results/(\w+_many_gpus\.json)", page)}
    assert shown == run_many_gpus.section(ROOT / "benchmarks/results" / name)


def test_wrong_results_and_parts_that_hang_or_fail_are_said(tmp_path: Path):
    assert run_many_gpus.wrong("data_parallel", {"gradients": {"within": False}})
    run = {"failed": 0, "trials": 8, "wanted": 8}
    assert not run_many_gpus.wrong("tune", {"one": run, "many": run})
    assert "7 of 8 were made" in run_many_gpus.wrong("tune", {"one": run, "many": run, "killed": run | {"trials": 7}})
    sleeps, fails = (["-c", code] for code in ("import time; time.sleep(1e6)", "raise SystemExit('it is broken')"))
    assert "it is broken" in run_many_gpus.carry_out([(sleeps, {}), (fails, {})], 900.0, tmp_path)
    assert "took longer than 1 s" in run_many_gpus.carry_out([(sleeps, {})], 1.0, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_command_runs_on_a_cpu(tmp_path: Path):
    output = tmp_path / "cpu.json"
    done = subprocess.run([sys.executable, ROOT / "benchmarks/run_many_gpus.py", "--gpus", "2", "--seconds", "0.1",
                           "--trials", "6", "--limit", "600", "--output", output], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(output.read_text())["parts"]
    assert {*parts} == {*run_many_gpus.PARTS} and not any("fault" in part for part in parts.values())
