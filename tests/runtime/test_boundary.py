"""Nothing untyped leaves the package: an error of its own at each public function becomes an InternalError, one of a
user's code stays what it is."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import runtime_sample as sample
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import ecornn
import ecornn.onnx
import ecornn.onnxruntime
import ecornn.torch
from ecornn import compiler
from ecornn import explain as explaining
from ecornn.boundary import public
from ecornn.cli import main
from ecornn.errors import ArgumentError, InternalError

KINDS = (KeyError("x"), IndexError("list index out of range"), StopIteration(), AssertionError(), AttributeError("x"),
         TypeError("x"), RecursionError("maximum recursion depth exceeded"), ZeroDivisionError("x"))
LAYER = {"hidden": 8, "target": "cpu"}


def fault(error: Exception) -> Callable[..., Any]:
    """A function of the package, as it seems, that raises this."""
    there = {"__name__": "ecornn.somewhere", "error": error}
    exec(compile("def broken(*args, **kwargs): raise error", "somewhere.py", "exec"), there)
    return there["broken"]


def model(folder: Path) -> str:
    w, r = (np.zeros((1, 32, 8), np.float32) for _ in range(2))
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=8, name="one")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy"]
    made = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:], [
        numpy_helper.from_array(w, "w"), numpy_helper.from_array(r, "r")]))
    onnx.save(made, folder / "m.onnx")
    return str(folder / "m.onnx")


@pytest.fixture(scope="module")
def module() -> ecornn.Module:
    return ecornn.load(sample.build(sample.manifest()))


def spare(module: Any) -> Any:
    """A layer whose attributes a test may change."""
    return module.bind(sample.weights())


def lstm(**options: Any) -> Any:
    return ecornn.torch.LSTM(8, 8, **options)


# Public function -> (where its inner function is, the function's name, the call).
INNER: dict[str, tuple[str, str, Callable[[Any, Path], Any]]] = {
    "ecornn.compile": ("ecornn.compiler", "device_of", lambda m, _: ecornn.compile("lstm", **LAYER)),
    "ecornn.load": ("ecornn.runtime.loader", "open_library", lambda m, _: ecornn.load(m.path)),
    "ecornn.reference": ("ecornn.numpy_reference", "_lookup", lambda m, _: ecornn.reference(
        "lstm", np.zeros((2, 1, 8)), {})),
    "ecornn.reference_gradients": ("ecornn.numpy_gradients", "formula_of", lambda m, _: ecornn.reference_gradients(
        "lstm", np.zeros((2, 1, 8)), {}, dy=None)),
    "ecornn.tune.tune": ("ecornn.tune.session", "Session", lambda m, _: ecornn.tune.tune("lstm", **LAYER)),
    "ecornn.tune.Session": ("ecornn.tune.session", "present", lambda m, _: ecornn.tune.Session("cpu")),
    "ecornn.explain.explain": ("ecornn.explain", "measured", lambda m, _: explaining.explain(
        compiler.plan("lstm", **LAYER))),
    "Module.bind": ("ecornn.runtime.weights", "read_weights", lambda m, _: spare(m)),
    "Module.save": ("shutil", "copyfile", lambda m, folder: m.save(folder / "copy.so")),
    "Layer.__call__": ("ecornn.runtime.caller", "arrays_of", lambda m, _: spare(m)(sample.inputs())),
    "Layer.repack": ("ecornn.runtime.weights.PackedWeights", "repack", lambda m, _: spare(m).repack(sample.weights())),
    "Layer.kept_in": ("ecornn.runtime.layer.Layer", "_begun", lambda m, _: spare(m).kept_in(
        None, sample.inputs(), None)),
    "Columns.of": ("ecornn.runtime.columns", "_lay", lambda m, _: ecornn.Columns.of([1, 2], 2)),
    "ecornn.torch.LSTM": ("ecornn.torch.engine", "engine_of", lambda m, _: lstm()(torch.zeros(2, 1, 8))),
    "ecornn.torch.LSTM, like before": ("ecornn.torch.like_before", "again", lambda m, _: lstm()(torch.zeros(2, 1, 8))),
    "ecornn.torch.LSTMCell": ("ecornn.torch.like_before", "again", lambda m, _: ecornn.torch.LSTMCell(64, 64)(
        torch.zeros(1, 64))),
    "ecornn.torch.Recurrent": ("ecornn.torch.recurrent", "get", lambda m, _: ecornn.torch.Recurrent("lstm", 8, 8)),
    "ecornn.torch.replace": ("ecornn.torch.replacing", "reclass", lambda m, _: ecornn.torch.replace(
        torch.nn.LSTM(8, 8))),
    "ecornn.torch.restore": ("ecornn.torch.replacing", "reclass", lambda m, _: ecornn.torch.restore(lstm())),
    "ecornn.torch.rebind": ("ecornn.torch.engine", "rebind", lambda m, _: ecornn.torch.rebind(lstm())),
    "ecornn.torch.prepare": ("ecornn.torch.replacing", "compile_all", lambda m, _: ecornn.torch.prepare(
        lstm(), torch.zeros(2, 1, 8))),
    "ecornn.torch.profile": ("ecornn.torch.profiling", "prepare", lambda m, _: ecornn.torch.profile(
        lstm(), torch.zeros(2, 1, 8))),
    "ecornn.onnx.read": ("ecornn.onnx.node", "load", lambda m, folder: ecornn.onnx.read(model(folder))),
    "ecornn.onnx.compile": ("ecornn.onnx.layer", "spec_of", lambda m, folder: ecornn.onnx.compile(
        ecornn.onnx.read(model(folder)), target="cpu")),
    "ecornn.onnxruntime.rewrite": ("ecornn.onnxruntime.rewriting", "load", lambda m, folder: ecornn.onnxruntime.rewrite(
        model(folder), folder / "fast.onnx")),
    "ecornn.onnxruntime.session_options": ("ecornn.onnxruntime.library", "folder_of", lambda m, folder:
                                           ecornn.onnxruntime.session_options("fast.onnx")),
}


@pytest.mark.parametrize("name", INNER)
def test_a_fault_within_is_an_internal_error(name: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place, inner, call = INNER[name]
    for error in KINDS:
        with monkeypatch.context() as patch:
            patch.setattr(f"{place}.{inner}", fault(error))
            with pytest.raises(InternalError) as caught:
                call(module, tmp_path)
        found = caught.value
        assert found.__cause__ is error and type(error).__name__ in str(found) and "report" in str(found)
        assert f"ecornn {ecornn.__version__}" in found.versions and "Python 3." in found.versions
        assert found.layer and found.layer in str(found)


def test_it_says_of_which_layer_and_goes_between_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "device_of", fault(KeyError("rest_v")))
    with pytest.raises(InternalError, match=r"compiler\.plan_layer\(LayerSpec.*lstm.*KeyError: 'rest_v'") as caught:
        ecornn.compile("lstm", **LAYER)
    for again in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert str(again) == str(caught.value) and again.layer == caught.value.layer


def test_a_command_says_it_without_a_traceback_unless_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "device_of", fault(KeyError("x")))
    command = ["explain", "--cell", "lstm", "--hidden", "8", "--target", "cpu"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 1 and done.output.startswith("error: ecornn failed in ")
    assert "KeyError: 'x'" in done.output and "Traceback" not in done.output
    asked = CliRunner().invoke(main, command, env={"ECORNN_TRACEBACK": "1"})
    assert asked.exit_code == 1 and "Traceback" in asked.output and "somewhere.py" in asked.output


def commands(group: Any) -> Iterator[Any]:
    for command in group.commands.values():
        yield command
        yield from commands(command) if hasattr(command, "commands") else ()


def test_every_command_is_a_boundary():
    for command in commands(main):
        if not hasattr(command, "commands"):
            assert command.callback is not None and hasattr(command.callback, "__wrapped__"), command.name


def test_what_is_not_a_fault_here_stays_what_it_is():
    def users(*_: Any) -> None:
        raise KeyError("mine")

    @public
    def within(function: Callable[[], None]) -> None:
        function()

    for function, kind in ((users, KeyError), (lambda: torch.zeros(2)[3], IndexError)):
        with pytest.raises(kind):
            within(function)
    with pytest.raises(TypeError, match="unexpected keyword"):
        ecornn.compile("lstm", hiden=8)
    with pytest.raises(ArgumentError):
        ecornn.compile("lstm", hidden=-1)


def test_a_users_hook_within_a_call_of_ours_keeps_its_error():
    class Breaks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return {}["his own"]

    with pytest.raises(KeyError, match="his own"):
        ecornn.torch.prepare(torch.nn.Sequential(Breaks(), ecornn.torch.LSTM(8, 8)), torch.zeros(2, 1, 8))


def test_libraries_that_the_package_calls_are_its_own_doing():
    there: dict[str, Any] = {"__name__": "ecornn.somewhere", "np": np, "public": public}
    exec("@public\ndef call(): return np.zeros(2)[3]", there)
    with pytest.raises(InternalError, match="IndexError"):
        there["call"]()


MODULES = ("ecornn", "ecornn.tune", "ecornn.torch", "ecornn.onnx", "ecornn.onnxruntime", "ecornn.jax")
# Parts of steps, which a cell's author calls, and types that hold values or are made by others here.
NO_BOUNDARY = {"ecornn.Cell", "ecornn.Layer", "ecornn.Module", "ecornn.derive", "ecornn.largest", "ecornn.mean",
               "ecornn.normalized", "ecornn.pointwise", "ecornn.product", "ecornn.softmax", "ecornn.Columns",
               "ecornn.tune.Result", "ecornn.torch.Profile", "ecornn.torch.Report", "ecornn.torch.TracedCell",
               "ecornn.onnx.Node", "ecornn.onnx.OnnxLayer", "ecornn.onnxruntime.Left", "ecornn.onnxruntime.Rewritten",
               "ecornn.onnxruntime.Taken", "ecornn.jax.Recurrent", "ecornn.torch.LSTM", "ecornn.torch.GRU",
               "ecornn.torch.RNN", "ecornn.torch.LSTMCell", "ecornn.torch.GRUCell", "ecornn.torch.RNNCell"}


def is_public(function: Any) -> bool:
    made = inspect.getattr_static(function, "__init__") if inspect.isclass(function) else function
    return isinstance(made, types.FunctionType) and made.__code__ is public(made).__code__


def test_methods_that_users_call_are_boundaries():
    """But those of calls that take microseconds, which are held by name above."""
    named = {ecornn.Module: ("bind", "save"), ecornn.Layer: ("forward", "kept_in", "backward", "repack"),
             ecornn.tune.Session: ("tune", "tune_layer", "tune_workload"), ecornn.onnx.OnnxLayer: ("__call__",)}
    for kind, names in named.items():
        for name in names:
            assert is_public(getattr(kind, name)), (kind, name)


@pytest.mark.parametrize("place", MODULES)
def test_every_public_function_is_a_boundary(place: str):
    """What a module lists in ``__all__``, or it is named here."""
    module = pytest.importorskip(place) if place == "ecornn.jax" else __import__(place, fromlist=["x"])
    names = {f"{place}.{name}": getattr(module, name) for name in module.__all__}
    left = {name for name, value in names.items()
            if callable(value) and not is_public(value) and not isinstance(value, types.ModuleType)}
    assert left == {name for name in NO_BOUNDARY if name.rpartition(".")[0] == place}
