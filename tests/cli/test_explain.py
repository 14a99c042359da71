"""What is said of a layer and its cell: by `ecornn explain`, held against the plan and the cell, but for the numbers of
estimates; by `compile --emit step`, whose formulas are the cell's; and by `check-cell`, of cells that are served, that
are not, and where something is wrong.

    pytest tests/cli/test_explain.py --renew    writes the two texts of steps anew"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import published
import pytest
import step_cells
from click.testing import Result
from step_cells import Chain, Peephole, Thrice
from test_cli import ended, folder, from_json  # noqa: F401  (a user's folder of its own for each test)

from ecornn.analysis import analyse
from ecornn.cells import Cell, get
from ecornn.cli import cell_checks
from ecornn.cli.cell_checks import Report
from ecornn.cli.check_cell_command import table
from ecornn.cli.compile_commands import text
from ecornn.cli.step_text import step_text
from ecornn.compiler import plan
from ecornn.device import Device
from ecornn.errors import ScheduleError
from ecornn.explain import explain, step_of
from ecornn.floor import H100, floor, floor_of
from ecornn.interpreter import interpret
from ecornn.layer_spec import LayerSpec
from ecornn.schedules import all_schedules
from ecornn.schedules.cpu import CPUSequence
from ecornn.schedules.step.fused_step import FusedStep
from ecornn.targets import resolve

CELLS = Path(step_cells.__file__)


def test_a_layer_with_a_record():
    planned = plan("lstm", hidden=800, batch=20, seq=300, dtype="float16", target="sm_90a")
    (part,) = explain(planned).parts
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
    assert part.floor.total_us == floor(H100, "lstm", 20, 800, 800, "float16").total < part.record.us
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


def test_cpus_and_gpus_that_no_table_has_have_no_floor():
    other = msgspec.structs.replace(resolve("sm_80"), name="another GPU")
    for target, dtype in (("znver4", "float32"), (other, "float16")):
        found = explain(plan("gru", hidden=96, batch=2, seq=9, dtype=dtype, target=target))
        assert found.parts[0].floor is None and found.device in found.no_floor


def test_floors_of_documents_are_told_from_measured_ones():
    for target, source in (("sm_120", "documents"), ("sm_90a", "measured")):
        found = explain(plan("gru", hidden=96, batch=2, seq=9, dtype="float16", target=target))
        assert found.floor_from == source and found.parts[0].floor is not None and found.no_floor is None
        assert any("by documents" in line for line in text(found, False)) == (source == "documents")


def test_it_says_how_states_depend_on_their_past():
    said = {"qrnn": {"c": "side by side", "h": "no later step"}, "brc": {"h": "nonlinear"},
            "gru1": {"h": "other units"}, "lru": {"re, im": "side by side"}}
    for name, words in said.items():
        found = explain(plan(published.CELLS[name], hidden=64, batch=2, seq=9, dtype="float32", target="sm_90a"))
        lines = [line for line in text(found, False) if line.startswith(tuple(f"  {states}: " for states in words))]
        assert len(lines) == len(words) and all(
            any(line.startswith(f"  {states}: ") and of in line for line in lines) for states, of in words.items())


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
    words = ("explain", "--cell", "lstm", "--hidden", "256", "--batch", "1", "--dtype", "float16", "--target", "sm_90a")
    text = ended(*words, "-v").stdout
    heads = [re.match(r" *(->)?\s*[\w:]+", line)[0].split()[-1] for line in text.splitlines() if line]
    assert [head for head in heads if not head.isdigit()] == [
        "lstm", "step", "c", "h", "schedules", *(name for name, one in all_schedules().items() if one.kind == "cuda"),
        "chosen:", "why:", "on", "weights", "expected:", "estimate", "floor:", "whole"]
    found = from_json(*words)
    (part,) = found["parts"]
    assert found["device"] in text and part["why"] in text and part["schedule"] == "persistent"
    assert found["layer"] == "lstm T=300 B=1 I=256 H=256 float16", "T is the default"
    for name, value in part["config"].items():
        assert f"{name}={value}" in text


def test_a_schedule_that_is_asked_for():
    found = from_json("explain", "--cell", "gru", "--hidden", "64", "--target", "sm_90a", "--schedule", "fused_step",
                  "--config", "units=16")
    (part,) = found["parts"]
    assert part["schedule"] == "fused_step" and part["config"]["units"] == 16 and part["record"] is None


def test_what_no_schedule_serves_is_an_error():
    done = ended("explain", "--cell", "lstm", "--hidden", "64", "--target", "sm_90a", "--dtype", "float64", code=2)
    assert done.stderr.startswith("error: dtype='float64'") and not done.stdout


GOLDEN = {"step_lstm.txt": ["--cell", "lstm", "--hidden", "800", "--dtype", "float32"],
          "step_gated.txt": ["--cell", f"{step_cells.__file__}:Gated", "--hidden", "96", "--input", "31", "--batch",
                             "7", "--dtype", "bfloat16", "--target", "sm_90a", "--layers", "3", "--bidirectional"]}


def printed(*arguments: str) -> Result:
    return ended("compile", *arguments, "--emit", "step")


def text_of(cell: Cell, input: int = 31, hidden: int = 30) -> str:
    spec = LayerSpec(cell, hidden, input, 20)
    return step_text(analyse(cell, input, hidden), spec.workload, spec.stack)


@pytest.mark.parametrize("file", GOLDEN)
def test_the_text_of_a_step(file: str, same_as_file: Callable[[str, str], None]):
    same_as_file(file, printed(*GOLDEN[file]).stdout)


def test_the_text_is_written_to_a_file_and_beside_a_module(tmp_path: Path):
    file, module = tmp_path / "step.txt", tmp_path / "m.so"
    layer = ["--cell", "rnn_tanh", "--hidden", "16", "--target", "cpu"]
    assert printed(*layer, "--emit-to", str(file)).stdout == ""
    result = printed(*layer, "-o", str(module))
    assert "wrote" in result.stderr and module.exists() and file.read_text() == result.stdout


@pytest.mark.parametrize("cell", [*step_cells.CELLS.values(), Thrice(), get("gru(layer_norm)"), get("slstm")],
                         ids=lambda c: c.name)
def test_the_text_is_readable_at_80_columns_and_names_every_parameter(cell: Cell):
    text = text_of(cell, 30)
    assert max(map(len, text.splitlines())) <= 80 and "__" not in text
    assert all(f"{name} (" in text for name in cell.parameters(30, 30))


@pytest.mark.parametrize("cell", [get("lstm"), get("gru_reset_before"), Chain(), Peephole(),
                                  *(step_cells.CELLS[n] for n in ("gated", "pair", "highway", "leaky"))])
def test_formulas_of_the_text_compute_the_step(cell: Cell):
    rng, hidden, batch = np.random.default_rng(0), 30, 4
    x, states = rng.normal(size=(batch, hidden)), [rng.normal(size=(batch, hidden)) for _ in cell.states]
    parameters = {n: rng.normal(size=s) for n, s in cell.parameters(hidden, hidden).items()}
    known: dict[str, Any] = {"x": x.T, **{n: s.T for n, s in zip(cell.states, states, strict=True)},
                             "tanh": np.tanh, "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
                             **{n: p if p.ndim == 3 else p[..., None] for n, p in parameters.items()}}
    lines = re.sub(r"\n {5,}(?! )(?=\S)", " ", text_of(cell, hidden).split("\n\n", 2)[-1].partition("Bytes")[0])
    new: dict[str, Any] = {}
    for line in lines.splitlines():
        formula = re.sub(r"([A-Za-z_]\w*)\.(\d+)", r"\1__\2", line.strip())
        if "'" in formula:
            new |= {n: known[v] if v in known else eval(v, {}, known)
                    for n, v in re.findall(r"(\w+)' = ([^,;]+)", formula)}
        elif " = " in formula:
            name, _, value = formula.partition(" = ")
            known[name] = eval(value, {}, known)
    _, expected = interpret(cell, x[None], parameters, states)
    for name, value in zip(cell.states, expected, strict=True):
        np.testing.assert_allclose(new[name].T, value, rtol=1e-6, atol=1e-6)  # constants have seven digits


@pytest.fixture(scope="module")
def gated() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUSequence, "weights", ("int16",))
        patch.setitem(cell_checks.SERVED, "cuda", ("float32", "float16"))
        return msgspec.convert(from_json("check-cell", f"{CELLS}:Gated", "--hidden", "24"), Report)


def test_a_cell_that_all_kinds_of_devices_serve(gated: Report):
    assert gated.good and (gated.input, gated.hidden, gated.exchanges) == (15, 24, 2)
    assert gated.analysis.result == gated.wide.result == "yes" and gated.derivative.result == "right"
    found = {(r.device, r.schedule, r.dtype): (r.forward, r.gradients) for r in gated.rows}
    for dtype, limits in (("float32", (1e-5, 2e-5)), ("float64", (1e-13, 1e-12))):
        for outcome, limit in zip(found["cpu", "cpu_sequence", dtype], limits, strict=True):
            assert outcome.result == "right" and outcome.error is not None
            assert 0 < outcome.error <= limit == outcome.limit
    rounded, _ = found["cpu", "cpu_sequence", "int16 weights"]
    assert rounded.result == "right" and rounded.error is not None and 1e-6 < rounded.error < 1e-4
    for schedule in ("persistent", "layout_transform"):
        assert {found["sm_90a", schedule, d][n].result for d in ("float32", "tf32", "float16")
                for n in (0, 1)} == {"yes"}
    for name, why in (("elementwise", "has a recurrent product"), ("persistent_wide", "exactly one recurrent")):
        refused, _ = found["sm_90a", name, "float16"]
        assert refused.result == "no" and why in refused.why
    assert found["sm_90a", "persistent_block", "float16"][1].why == "does not support backward passes"


def test_the_table_fits_80_columns_and_numbers_each_reason_once(gated: Report):
    text = table(gated)
    assert max(map(len, text.splitlines()[1:])) <= 80 and text.count("needs a 16-bit data type") == 1
    wanted = {o.why for r in gated.rows for o in (r.forward, r.gradients) if o.why}
    assert all(f"[{n}] " in text for n in range(1, len(wanted) + 1)) and f"[{len(wanted) + 1}]" not in text
    assert "cpu     cpu_sequence      float32                 right " in text
    assert "        persistent_block  float32, tf32, float16  yes            no [" in text


@pytest.mark.parametrize(("error", "result"), [(KeyError("d_h"), "fails"), (ScheduleError("no gradients"), "no")])
def test_a_backward_pass_that_fails_is_no_fault_of_forward(monkeypatch, error, result):
    monkeypatch.setattr("ecornn.schedules.cpu.training.training_program", Mock(side_effect=error))
    checks = cell_checks.Checks(step_cells.Gated(), 15, 24, 3)
    assert checks.derivative().result == "right"
    forward, gradients = checks.run_one(resolve("cpu"), CPUSequence(), "float32", None)
    assert forward.result == "right" and gradients.result == result and str(error) in gradients.why


def test_a_step_that_cannot_be_analysed_is_pointed_at_and_the_answer_is_no(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text('''from ecornn import Cell, pointwise


class Mine(Cell):
    name, states = "mine", ("h",)
    def parameters(self, input, hidden):
        return {"b": (1, hidden)}
    def step(self, x, states, parameters):
        (h,) = states
        return [pointwise(lambda b, j: h[b, 0] + parameters["b"][0, j], h)]
''')
    output = ended("check-cell", f"{file}:Mine", code=1).output
    assert "the step can be analysed: no [1]" in output and "outside a product must be read at [b, j]" in output
    assert f"{file}:10: return [pointwise(lambda b, j: h[b, 0]" in output
    found = from_json("check-cell", f"{file}:Mine", code=1)
    assert found["analysis"]["result"] == "no" and found["analysis"]["why"]
    assert "error: cell='" in ended("check-cell", f"{file}:Other", code=2).output


def test_a_check_without_a_compiler_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("ECORNN_CACHE", "off")
    found = msgspec.convert(from_json("check-cell", "rnn_tanh", "--hidden", "8", "--target", "cpu", code=1), Report)
    fails = [row.forward.why for row in found.rows if row.forward.result == "fails"]
    assert fails and all("no C++ compiler" in why for why in fails)


def check(cell: Any, *devices: Device) -> Report:
    return cell_checks.check_cell("mine", cell, 16, None, 3, list(devices))


def test_a_cell_that_reads_x_at_each_unit_is_tried_with_as_many_inputs():
    report = check(step_cells.Average(), H100)
    assert report.good and report.input == report.hidden == 16
    assert report.wide.result == "no" and "outside a product needs I = H" in report.wide.why
    assert "with I other than H: no [1]" in table(report)
    assert {r.schedule: r.forward.result for r in report.rows}["elementwise"] == "yes" and report.exchanges == 0


def test_a_result_that_is_not_the_te_steps_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CPUSequence, "weights", ())
    monkeypatch.setitem(cell_checks.SERVED, "llvm", ("float32",))
    right, derived = cell_checks.interpret, cell_checks.Checks.derived
    def moved(*arguments: Any) -> Any:
        y, last = right(*arguments)
        return y * (1 + 1e-4), last

    def shifted(*arguments: Any) -> Any:
        found = derived(*arguments)
        return replace(found, dx=found.dx * (1 + 1e-3))
    monkeypatch.setattr(cell_checks, "interpret", moved)
    monkeypatch.setattr(cell_checks.Checks, "derived", shifted)
    report = check(step_cells.Decay(), resolve("cpu"))
    (row,) = report.rows
    assert not report.good and row.forward.result == "wrong" and row.forward.why.startswith("relative error 1.0e-04")
    report = check(step_cells.Leaky())
    assert report.derivative.result == "wrong" and "of x" in report.derivative.why and not report.good


def test_errors_that_nobody_foresaw_are_failures_and_others_reasons(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FusedStep, "default", Mock(side_effect=ZeroDivisionError("no units")))
    report = check(step_cells.Decay(), H100)
    failed = [r for r in report.rows if r.forward.result == "fails"]
    assert not report.good and {r.schedule for r in failed} == {"fused_step"}
    assert failed[0].forward.why == "ZeroDivisionError: no units"
    monkeypatch.setattr(FusedStep, "default", Mock(side_effect=ScheduleError("none fits")))
    report = check(step_cells.Decay(), H100)
    assert report.good and {r.forward.why for r in report.rows if r.schedule == "fused_step"} == {"none fits"}


def test_answers_that_are_not_finite_are_no_verdict():
    outcome = cell_checks.attempt(lambda: cell_checks.compared([(np.ones(2), np.array([1.0, np.inf]))], 1e-5))
    assert outcome.result == "no" and "`nonnegative`" in outcome.why
    assert cell_checks.compared([(np.array([np.nan]), np.ones(1))], 1e-5).result == "wrong"
