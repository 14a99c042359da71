"""``ecornn check-cell``: what it says of cells that are served, that are not, and where something is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import step_cells
from click.testing import CliRunner

from ecornn.cli import cell_checks, main
from ecornn.cli.cell_checks import Report
from ecornn.cli.check_cell_command import table
from ecornn.device import Device
from ecornn.errors import ScheduleError
from ecornn.schedules.cpu import CPUSequence
from ecornn.schedules.step.fused_step import FusedStep
from ecornn.targets import KNOWN, resolve

CELLS = Path(step_cells.__file__)
H100 = KNOWN["sm_90a"]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["check-cell", *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output if code else result.stdout


@pytest.fixture(scope="module")
def gated() -> Report:
    """All that is tried of a cell, but for widths of weights and bfloat16, which take modules of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUSequence, "weights", ("int16",))
        patch.setitem(cell_checks.SERVED, "cuda", ("float32", "float16"))
        text = run(f"{CELLS}:Gated", "--hidden", "24", "--json")
    return msgspec.convert(json.loads(text), Report)


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
    for name, why in (("elementwise", "has a recurrent product"), ("persistent_wide", "not just one recurrent")):
        refused, _ = found["sm_90a", name, "float16"]
        assert refused.result == "no" and why in refused.why
    assert found["sm_90a", "persistent_block", "float16"][1].why == "persistent_block does not carry out adjoints"


def test_the_table_fits_80_columns_and_numbers_each_reason_once(gated: Report):
    text = table(gated)
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert text.count("needs a 16-bit data type") == 1
    wanted = {o.why for r in gated.rows for o in (r.forward, r.gradients) if o.why}
    assert all(f"[{n}] " in text for n in range(1, len(wanted) + 1)) and f"[{len(wanted) + 1}]" not in text
    assert "cpu     cpu_sequence      float32                 right " in text
    assert "        persistent_block  float32, tf32, float16  yes            no [" in text


@pytest.mark.parametrize(("error", "result"), [(KeyError("d_h"), "fails"), (ScheduleError("no gradients"), "no")])
def test_a_backward_pass_that_fails_is_no_fault_of_forward(monkeypatch: pytest.MonkeyPatch, error: Exception,
                                                           result: str):
    def training_program(*_: Any) -> None:
        raise error

    monkeypatch.setattr("ecornn.schedules.cpu.training.training_program", training_program)
    checks = cell_checks.Checks(step_cells.Gated(), 15, 24, 3)
    assert checks.derivative().result == "right"
    forward, gradients = checks.run_one(resolve("cpu"), CPUSequence(), "float32", None)
    assert forward.result == "right" and gradients.result == result and str(error) in gradients.why


def test_a_step_that_cannot_be_analysed_is_pointed_at(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(CELL.format("h[b, 0]"))
    output = run(f"{file}:Mine", code=1)
    assert "the step can be analysed: no [1]" in output and "outside a product must be read at [b, j]" in output
    assert f"{file}:10: return [pointwise(lambda b, j: h[b, 0]" in output
    assert "error: cell='" in run(f"{file}:Other", code=2)


CELL = '''from ecornn import Cell, pointwise


class Mine(Cell):
    name, states = "mine", ("h",)
    def parameters(self, input, hidden):
        return {{"b": (1, hidden)}}
    def step(self, x, states, parameters):
        (h,) = states
        return [pointwise(lambda b, j: {} + parameters["b"][0, j], h)]
'''


def check(cell: Any, *devices: Device) -> Report:
    return cell_checks.check_cell("mine", cell, 16, None, 3, list(devices))


def test_a_cell_that_reads_x_at_each_unit_is_tried_with_as_many_inputs():
    report = check(step_cells.Average(), H100)
    assert report.good and report.input == report.hidden == 16
    assert report.wide.result == "no" and "needs an input size of H" in report.wide.why
    assert "with I unlike H: no [1]" in table(report)
    served = {r.schedule: r.forward.result for r in report.rows}
    assert served["elementwise"] == "yes" and report.exchanges == 0


def test_a_result_that_is_not_the_te_steps_is_wrong(monkeypatch: pytest.MonkeyPatch):
    """The interpreter's answer is moved by 1e-4; and derived gradients by as much."""
    monkeypatch.setattr(CPUSequence, "weights", ())
    monkeypatch.setitem(cell_checks.SERVED, "llvm", ("float32",))
    right, derived = cell_checks.interpret, cell_checks.Checks.derived

    def moved(*arguments: Any) -> Any:
        y, last = right(*arguments)
        return y * (1 + 1e-4), last

    def shifted(*arguments: Any) -> Any:
        found = derived(*arguments)
        return dataclasses.replace(found, dx=found.dx * (1 + 1e-3))

    monkeypatch.setattr(cell_checks, "interpret", moved)
    monkeypatch.setattr(cell_checks.Checks, "derived", shifted)
    report = check(step_cells.Decay(), resolve("cpu"))
    (row,) = report.rows
    assert not report.good and row.forward.result == "wrong" and row.forward.why.startswith("relative error 1.0e-04")
    report = check(step_cells.Leaky())
    assert report.derivative.result == "wrong" and "of x" in report.derivative.why and not report.good


def test_errors_that_nobody_foresaw_are_failures_and_others_reasons(monkeypatch: pytest.MonkeyPatch):
    def raises(error: Exception) -> Any:
        def default(*_: Any) -> Any:
            raise error
        return default

    monkeypatch.setattr(FusedStep, "default", raises(ZeroDivisionError("no units")))
    report = check(step_cells.Decay(), H100)
    failed = [r for r in report.rows if r.forward.result == "fails"]
    assert not report.good and {r.schedule for r in failed} == {"fused_step"}
    assert failed[0].forward.why == "ZeroDivisionError: no units"
    monkeypatch.setattr(FusedStep, "default", raises(ScheduleError("none fits")))
    report = check(step_cells.Decay(), H100)
    assert report.good and {r.forward.why for r in report.rows if r.schedule == "fused_step"} == {"none fits"}


def test_answers_that_are_not_finite_are_no_verdict():
    outcome = cell_checks.attempt(lambda: cell_checks.compared([(np.ones(2), np.array([1.0, np.inf]))], 1e-5))
    assert outcome.result == "no" and "`nonnegative`" in outcome.why
    assert cell_checks.compared([(np.array([np.nan]), np.ones(1))], 1e-5).result == "wrong"
