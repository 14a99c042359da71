"""Notebooks in a kernel: those of examples/, and what a notebook shows of objects, progress and errors."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest
from msgspec import structs
from nbclient import NotebookClient
from rooms import ROOT

import ecornn
from ecornn.compiler import plan_layer
from ecornn.explain import explain
from ecornn.layer_spec import LayerSpec
from ecornn.targets import resolve
from ecornn.torch import Profile, Report
from ecornn.torch.replacing import Gain
from ecornn.tune.record import Choice, Finish
from ecornn.tune.session import Result

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SECONDS = 60  # of a notebook, on two cores

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries that drive a kernel


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the kernel, which has its records there and sees no GPU."""
    for name, value in {"ECORNN_TUNING_LOGS": str(tmp_path / "logs"), "CUDA_VISIBLE_DEVICES": "",
                        "IPYTHONDIR": str(tmp_path / "ipython"), "OPENBLAS_NUM_THREADS": "1",
                        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def executed(cells: list[Any], folder: Path, errors: bool = False) -> list[dict[str, Any]]:
    """Outputs of the cells together, in their order."""
    book = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(book, timeout=SECONDS, kernel_name="python3", allow_errors=errors,
                   resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in book.cells for output in cell.get("outputs", [])]


def html(outputs: list[dict[str, Any]]) -> str:
    return "\n".join(output.get("data", {}).get("text/html", "") for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, alone: Path):
    text = path.read_text(encoding="utf-8").replace("SECONDS = 60", "SECONDS = 5")
    outputs = executed(nbformat.reads(text, 4).cells, alone)
    shown = html(outputs)
    assert {"13_replace": "as fast", "14_own_cell": ">cpu_sequence<", "15_tuning": "report.html"}[path.stem] in shown
    assert len(outputs) < 15 and (path.stem != "15_tuning" or "<svg" in (alone / "report.html").read_text())
    assert path.stem == "13_replace" or "<svg" in shown


def test_they_are_kept_without_outputs_and_listed():
    page = (ROOT / "docs" / "EXAMPLES.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 3 and all(f"(../examples/{path.name})" in page for path in NOTEBOOKS)
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text())["cells"]]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


CELL = """\
import ecornn, ecornn.tune
from ecornn import pointwise, product

class Leaky(ecornn.Cell):
    name, states = "leaky", ("h",)

    def __init__(self, rate, read="R"):
        self.rate, self.read = rate, read

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "R": (1, hidden, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        wx, rh = product(x, parameters["W"]), product(states[0], parameters[self.read])
        return [pointwise(lambda b, j: rh[b, 0, j] + te.tanh(wx[b, 0, j]) * self.rate, states[0])]
"""


@pytest.mark.slow
def test_a_class_of_a_notebook_and_its_errors(alone: Path):
    outputs = executed([*map(nbformat.v4.new_code_cell, (
        CELL, "found = ecornn.tune.tune(Leaky(0.5), hidden=8, target='cpu', trials=3)", "found",
        "def calls():\n    return ecornn.compile(Leaky(0.5, 'Q'), hidden=8, target='cpu')\n\ncalls()",
        "ecornn.compile('lstm', hidden=0)",
        "import ecornn.torch, torch\nmodel = torch.nn.Sequential(torch.nn.GRU(4, 5))\necornn.torch.replace(model)\n"
        "ecornn.torch.prepare(model, torch.zeros(3, 1, 4))"))], alone, errors=True)
    lines = [output["data"]["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert lines[0] == "tuning: done" and len(lines) == 2, "a line for each that changes"
    assert lines[1].startswith("ecornn: compiled 1 of 1 layers, gru")
    assert "3 in" in html(outputs) and "<svg" in html(outputs)
    cell, argument = ("\n".join(output.traceback).splitlines() for output in outputs if output.output_type == "error")
    assert cell[:3] == ["In[4], line 4: calls()",
                        "In[4], line 2: return ecornn.compile(Leaky(0.5, 'Q'), hidden=8, target='cpu')",
                        "CellError: cell 'leaky': step() failed: KeyError: 'Q'"]
    assert re.fullmatch(r"  In\[1\], line 16: wx, rh = product\(.*", cell[3]) and len(cell) == 4
    assert argument == ["In[5], line 1: ecornn.compile('lstm', hidden=0)",
                        "ArgumentError: hidden=0: expected an integer from 1 to 1048576"]


HOSTILE = "<script>alert('&')</script>"


def rows(text: str) -> list[list[str]]:
    """The texts of a page's tables, which are well-formed XML."""
    return [["".join(cell.itertext()) for cell in row] for row in ElementTree.fromstring(f"<p>{text}</p>").iter("tr")]


def test_tables_are_escaped_and_say_what_the_text_says():
    gain = Gain("", HOSTILE, 1, 0.004, 0.001)
    assert rows(Profile((gain,), gain)._repr_html_())[1] == [HOSTILE, "1", "4 ms", "1 ms", "4.00x"]
    report = Report(("a",), {HOSTILE: "it is <b>"}, {"a": "twice"})
    assert rows(report._repr_html_()) == [["layer", "", ""], ["a", "compiled", "twice"],
                                          [HOSTILE, "not compiled", "it is <b>"]]
    module = ecornn.compile("lstm", hidden=9, batch=2, seq=5, target="cpu", layers=2)
    shown = dict(rows(module._repr_html_()))
    assert (shown["module"], shown["sizes"], shown["stack"]) == ("lstm", "T=5 B=2 I=9 H=9 float32", "2 layers")
    assert shown["chosen"] == module.manifest.provenance and shown["schedule"] == module.manifest.schedule


def test_an_explanation_and_a_search_as_html():
    layer = LayerSpec("lstm", 800, batch=20, dtype="float16")
    found = explain(plan_layer(layer, target="sm_90a"))
    (part,), shown = found.parts, rows(found._repr_html_())
    assert ["by the record", f"{part.record.us:.4g} µs a step"] in shown and ["why", part.why] in shown
    assert {one.schedule for one in part.schedules} <= {name for name, _ in shown}

    best = Choice("fused_step", {"units": 4})
    finish = Finish(run="r", reason="trials", trials=2, seconds=3.0, best=best, best_us=5.0, default=best,
                    default_us=5.0)
    curve = ((1, 7.0, 7.0), (2, 5.0, 5.0))
    one = Result(layer.workload, resolve("sm_90a"), finish, Path("log.jsonl"), 0, 2, {HOSTILE: 3}, curve=curve)
    text = replace(one, backward=replace(one, workload=layer.workload.adjoint))._repr_html_()
    assert text.count("<svg") == 2 and "class=" not in text
    assert text.count(">trial</text>") == 2 and not re.search(r">[12]\.\d+</text>", text), "there is no half trial"
    assert re.search(r'overflow-wrap: anywhere">log\.jsonl<', text), "a path is wider than a phone"
    assert ["failed", f"3: {HOSTILE}"] in rows(text) and ["best", "fused_step units=4"] in rows(text)
    empty = replace(one, finish=structs.replace(finish, best=None, best_us=None), curve=())
    assert "<svg" not in empty._repr_html_() and ["trials", "2 in 3 s"] in rows(empty._repr_html_())


def test_names_that_are_listed_are_public():
    import ecornn.torch

    assert {*dir(ecornn)} - {*ecornn.__all__} <= {"jax", "onnx", "onnxruntime", "torch"} and "torch" in dir(ecornn)
    assert dir(ecornn.torch) == sorted(ecornn.torch.__all__)
