"""`ecornn explain`: the structure of what it says, against the plan and the cell; not the numbers of estimates."""

from __future__ import annotations

import json
import math
import re

import pytest
from click.testing import CliRunner

from ecornn.cli import main
from ecornn.compiler import plan
from ecornn.explain import explain, step_of
from ecornn.floor import H100, floor, floor_of
from ecornn.schedules import all_schedules


@pytest.fixture(autouse=True)
def _no_logs_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path))


def run(*words: str) -> str:
    """What the command writes to standard output."""
    done = CliRunner().invoke(main, ["explain", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_layer_with_a_record():
    planned = plan("lstm", hidden=800, batch=20, seq=300, dtype="float16", target="sm_90a")
    found = explain(planned)
    (part,) = found.parts
    step = part.step
    assert (step.hoisted, step.products, step.travels, step.stays) == (4, 4, [["h"]], ["c"])
    assert step.weights == 4 * 800 * 800 and step.weight_bytes == 2 * step.weights
    assert step.multiplications == 20 * step.weights
    gpu = [name for name, schedule in all_schedules().items() if schedule.kind == "cuda"]
    assert [one.schedule for one in part.schedules] == gpu
    reasons = {one.schedule: one.refuses for one in part.schedules}
    assert "recurrent product" in reasons["elementwise"] and reasons["fused_step"] is None
    assert [one.schedule for one in part.schedules if one.chosen] == [planned.found.schedule.name] == [part.schedule]
    assert part.config == dict(planned.found.config) and part.why == planned.found.provenance
    line = planned.found.line
    assert (part.record.file, part.record.line) == (line.path.name, line.number)
    assert part.record.us == line.record.times.median and part.sequence_us == part.record.us * 300
    least = floor(H100, "lstm", 20, 800, 800, "float16")
    assert part.floor.total_us == least.total < part.record.us
    assert math.isclose(part.floor.total_us, part.floor.exchange_us + part.floor.products_us + part.floor.hoisted_us
                        + part.floor.bytes_us)
    assert set(part.stages_us) == {"product of x", "exchange", "products", "gates"}
    assert step.weight_bytes <= part.chip["blocks"] * sum(part.held_bytes.values())  # of padded tiles
    assert 0 < part.chip["shared_bytes"] <= planned.device.shared and 0 < part.chip["blocks"] <= 132


def test_two_exchanges_cost_two():
    planned = plan("gru_reset_before", hidden=512, batch=1, seq=50, dtype="float16", target="sm_90a")
    (part,) = explain(planned).parts
    step = step_of(planned.task.graph)
    assert (step.products, step.hoisted, step.exchanges) == (3, 3, 2)
    assert len(part.step.travels) == 2 and part.step.travels[0] == ["h"]
    one = floor_of(H100, type(step)(3, 3, 1), 1, 512, 512, "float16").total
    assert one < part.floor.total_us < 2 * one


def test_cpus_and_unmeasured_gpus_have_no_floor():
    for target, dtype in (("znver4", "float32"), ("sm_80", "float16")):
        found = explain(plan("gru", hidden=96, batch=2, seq=9, dtype=dtype, target=target))
        assert found.parts[0].floor is None and found.device in found.no_floor


def test_training_has_a_part_for_backward():
    found = explain(plan("lstm", hidden=64, batch=4, seq=20, dtype="float16", layers=2, bidirectional=True,
                         training=True, target="sm_90a"))
    assert [(part.entry, part.labels) for part in found.parts] == [
        ("run", ["l0", "l0_reverse"]), ("backward", ["l0", "l0_reverse"]),
        ("run", ["l1", "l1_reverse"]), ("backward", ["l1", "l1_reverse"])]
    assert all(part.floor is None for part in found.parts if part.entry == "backward")


def test_rounded_weights_have_fewer_bytes():
    sizes = {weights: explain(plan("lstm", hidden=48, batch=1, seq=9, weights=weights, target="znver4")
                              ).parts[0].step.weight_bytes for weights in (None, "int21", "int16", "int8")}
    weights = 4 * 48 * 48
    assert sizes == {None: 4 * weights, "int21": 8 * weights // 3, "int16": 2 * weights, "int8": weights}


def test_the_text_and_json():
    """Every line that people read, in order; what programs read is the same."""
    words = ("--cell", "lstm", "--hidden", "256", "--batch", "1", "--dtype", "float16", "--target", "sm_90a")
    text = run(*words)
    heads = [re.match(r" *(->)?\s*[\w:]+", line)[0].split()[-1] for line in text.splitlines() if line]
    assert [head for head in heads if not head.isdigit()] == [
        "lstm", "step", "c:", "schedules", *(name for name, one in all_schedules().items() if one.kind == "cuda"),
        "chosen:", "why:", "on", "weights", "expected:", "the", "floor:", "a"]
    found = json.loads(run(*words, "--json"))
    (part,) = found["parts"]
    assert found["device"] in text and part["why"] in text and part["schedule"] == "persistent"
    assert found["layer"] == "lstm T=300 B=1 I=256 H=256 float16", "T is the default"
    for name, value in part["config"].items():
        assert f"{name}={value}" in text


def test_a_schedule_that_is_asked_for():
    found = json.loads(run("--cell", "gru", "--hidden", "64", "--target", "sm_90a", "--schedule", "fused_step",
                           "--config", "units=16", "--json"))
    (part,) = found["parts"]
    assert part["schedule"] == "fused_step" and part["config"]["units"] == 16 and part["record"] is None


def test_what_no_schedule_serves_is_an_error():
    done = CliRunner().invoke(main, ["explain", "--cell", "lstm", "--hidden", "64", "--target", "sm_90a",
                                     "--dtype", "float64"])
    assert done.exit_code == 2 and done.stderr.startswith("error: dtype='float64'") and not done.stdout
