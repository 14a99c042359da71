"""``rewrite()`` times ONNX Runtime's own nodes and compiled ones, and leaves alone what does not gain."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from onnx import TensorProto, helper
from onnxruntime_sample import B, T, alike, model_of, operators, rewritten, session, value, whole
from onnxruntime_sample import recognizer as recognizer

import ecornn.onnxruntime
from ecornn.cli import main
from ecornn.compiler import device_of
from ecornn.onnxruntime import rewriting

TIMES = {"LSTM": (2e-3, 1e-3), "GRU": (1e-3, 2e-3), "RNN": (3e-3, 1e-3), "": (7e-3, 5e-3)}  # "": of the model


def timed(monkeypatch: pytest.MonkeyPatch, times: dict[str, Any]) -> list[str]:
    """Has ``times`` be what is measured, by operator. What it gives are the operators that were measured."""
    found = []
    def measured(own: bytes, compiled: Any, feeds: dict[str, Any], folder: Path, where: str) -> Any:
        nodes = [node.op_type for node in onnx.load_from_string(own).graph.node]
        found.append(nodes[0] if len(nodes) == 1 else "")
        return times[found[-1]]
    monkeypatch.setattr(rewriting, "measured", measured)
    return found


def test_a_node_that_does_not_gain_stays(recognizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = timed(monkeypatch, TIMES)
    made, fast = rewritten(recognizer, tmp_path, batch=4, seq=40, measure=True)
    assert measured == ["LSTM", "LSTM", "GRU", "RNN", ""] and made.times == TIMES[""]
    assert [(one.op, one.times) for one in made.taken] == [(op, TIMES[op]) for op in ("LSTM", "LSTM", "RNN")]
    assert [one.reason for one in made.left] == ["it is not faster when compiled (1 ms; compiled 2 ms)"]
    assert {"GRU"} == {"LSTM", "GRU", "RNN"} & {*operators(made.model)}
    assert {path.name for path in made.library.parent.glob("*-*.so")} == {one.module.name for one in made.taken}
    alike(fast, session(recognizer), {"x": np.random.default_rng(0).standard_normal((40, 4, 20)).astype(np.float32)})


@pytest.mark.parametrize("slow", ["nodes", "model"])
def test_a_model_that_does_not_gain_stays(slow: str, recognizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is written nevertheless, so that what reads it goes on; without ecornn, too."""
    times = dict.fromkeys(TIMES, (1e-3, 1e-3)) if slow == "nodes" else {**TIMES, "GRU": None, "": (5e-3, 7e-3)}
    timed(monkeypatch, times)
    out = tmp_path / "fast.onnx"
    result = CliRunner().invoke(main, ["onnx-rewrite", str(recognizer), "-o", str(out), "--batch", "4", "--seq", "40",
                                       "--target", "cpu"])
    assert result.exit_code == 0 and "no node was replaced, so the new model equals the old one" in result.output
    assert result.output.count("as it is") == 4 and not [*out.with_suffix(".modules").glob("*-*.so")]
    feeds = {"x": np.random.default_rng(0).standard_normal((40, 4, 20)).astype(np.float32)}
    for options in (None, ecornn.onnxruntime.session_options(out)):
        alike(session(out, options), session(recognizer), feeds, 0.0)


@pytest.mark.parametrize(("op", "inputs", "attributes"), [
    ("LSTM", ("lens", "h0", "c0", "P"), {"direction": "bidirectional"}), ("GRU", ("lens",), {"linear_before_reset": 1}),
    ("RNN", (), {})])
def test_nodes_and_models_are_timed(op, inputs, attributes, tmp_path, monkeypatch):
    seen, real = [], rewriting.measured
    monkeypatch.setattr(rewriting, "measured", lambda *given: seen.append(real(*given)) or (2.0, 1.0))
    made, _ = rewritten(model_of(op, inputs, **attributes), tmp_path, batch=B, seq=T, measure=True)
    assert len(seen) == 2 and all(0 < time < 60 for times in seen for time in times)
    assert made.times == made.taken[0].times == (2.0, 1.0)


def test_what_cannot_be_timed_is_compiled(tmp_path: Path):
    """ONNX Runtime does not have layout 1 itself; and another CPU's code does not run here."""
    made, _ = rewritten(model_of("GRU", layout=1), tmp_path, measure=True)
    assert len(made.taken) == 1 and made.times is made.taken[0].times is None
    here = device_of("cpu")
    assert rewriting.provider(here) == "CPUExecutionProvider" and rewriting.provider(replace(here, cores=999)) is None


@pytest.mark.parametrize(("shape", "dtype", "lengths", "found"), [
    (["T", "B", 5], "FLOAT", {""}, (7, 3, 5)), (["T", "B"], "INT64", set(), (7, 3)), ([3], "INT32", {"x"}, (3,)),
    (["T", "width"], "FLOAT", set(), None), ([], "INT64", set(), None), (["T", "B"], "FLOAT", {"computed"}, None)])
def test_feeds_for_a_model(shape: list[Any], dtype: str, lengths: set[str], found: tuple[int, ...] | None):
    given = [value("x", getattr(TensorProto, dtype), shape)]
    feeds = rewriting.feeds_of(whole(helper.make_graph([], "g", given, [])), {"T": 7, "B": 3}, lengths, 7)
    assert (None if feeds is None else feeds["x"].shape) == found
    if feeds is not None and dtype != "FLOAT":
        assert (feeds["x"] == (7 if lengths else 0)).all()
