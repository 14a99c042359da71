"""The public face: what is imported, and when; and nothing untyped leaves the package."""

import copy
import inspect
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import files as files_of
from importlib.metadata import version
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
from ecornn.numpy_reference import random_weights

KINDS = (KeyError("x"), IndexError("list index out of range"), StopIteration(), AssertionError(), AttributeError("x"),
         TypeError("x"), RecursionError("maximum recursion depth exceeded"), ZeroDivisionError("x"))
LAYER = {"hidden": 8, "target": "cpu"}


def fault(error: Exception) -> Callable[..., Any]:
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
    return module.bind(sample.weights())


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
    "ecornn.torch.LSTM": ("ecornn.torch.engine", "engine_of", lambda m, _: ecornn.torch.LSTM(8, 8)(
        torch.zeros(2, 1, 8))),
    "ecornn.torch.LSTM, like before": ("ecornn.torch.like_before", "again", lambda m, _: ecornn.torch.LSTM(8, 8)(
        torch.zeros(2, 1, 8))),
    "ecornn.torch.LSTMCell": ("ecornn.torch.like_before", "again", lambda m, _: ecornn.torch.LSTMCell(64, 64)(
        torch.zeros(1, 64))),
    "ecornn.torch.Recurrent": ("ecornn.torch.recurrent", "get", lambda m, _: ecornn.torch.Recurrent("lstm", 8, 8)),
    "ecornn.torch.replace": ("ecornn.torch.replacing", "reclass", lambda m, _: ecornn.torch.replace(
        torch.nn.LSTM(8, 8))),
    "ecornn.torch.restore": ("ecornn.torch.replacing", "reclass", lambda m, _: ecornn.torch.restore(
        ecornn.torch.LSTM(8, 8))),
    "ecornn.torch.rebind": ("ecornn.torch.engine", "rebind", lambda m, _: ecornn.torch.rebind(ecornn.torch.LSTM(8, 8))),
    "ecornn.torch.prepare": ("ecornn.torch.replacing", "compile_all", lambda m, _: ecornn.torch.prepare(
        ecornn.torch.LSTM(8, 8), torch.zeros(2, 1, 8))),
    "ecornn.torch.profile": ("ecornn.torch.replacing", "prepare", lambda m, _: ecornn.torch.profile(
        ecornn.torch.LSTM(8, 8), torch.zeros(2, 1, 8))),
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
    with pytest.raises(InternalError, match=r"compiler\.compile_layer\(LayerSpec.*lstm.*KeyError: 'rest_v'") as caught:
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


def test_every_command_is_a_boundary():
    waiting = [main]
    for command in waiting:  # to which those of a group are added
        waiting += getattr(command, "commands", {}).values()
        assert hasattr(command, "commands") or hasattr(command.callback, "__wrapped__"), command.name
    assert len(waiting) > 10


def test_what_is_not_a_fault_here_stays_what_it_is():
    within = public(lambda function: function())
    for function, kind in ((lambda: {}["mine"], KeyError), (lambda: torch.zeros(2)[3], IndexError)):
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


# Parts of steps, which a cell's author calls, and types that hold values or are made by others here.
NO_BOUNDARY = {"ecornn.Cell", "ecornn.Layer", "ecornn.Module", "ecornn.derive", "ecornn.largest", "ecornn.mean",
               "ecornn.normalized", "ecornn.pointwise", "ecornn.product", "ecornn.softmax", "ecornn.Columns",
               "ecornn.custom_gradient", "ecornn.spike",
               "ecornn.tune.Result", "ecornn.torch.Profile", "ecornn.torch.Report", "ecornn.torch.TracedCell",
               "ecornn.onnx.Node", "ecornn.onnx.OnnxLayer", "ecornn.onnxruntime.Left", "ecornn.onnxruntime.Rewritten",
               "ecornn.onnxruntime.Taken", "ecornn.jax.Recurrent", "ecornn.torch.LSTM", "ecornn.torch.GRU",
               "ecornn.torch.RNN", "ecornn.torch.LSTMCell", "ecornn.torch.GRUCell", "ecornn.torch.RNNCell"}


def is_public(function: Any) -> bool:
    made = inspect.getattr_static(function, "__init__") if inspect.isclass(function) else function
    return isinstance(made, types.FunctionType) and made.__code__ is public(made).__code__


def test_methods_that_users_call_are_boundaries():
    named = {ecornn.Module: ("bind", "save"), ecornn.Layer: ("forward", "kept_in", "backward", "repack"),
             ecornn.tune.Session: ("tune", "tune_layer", "tune_workload"), ecornn.onnx.OnnxLayer: ("__call__",)}
    for kind, names in named.items():
        for name in names:
            assert is_public(getattr(kind, name)), (kind, name)


@pytest.mark.parametrize("place", ["ecornn", "ecornn.tune", "ecornn.torch", "ecornn.onnx", "ecornn.onnxruntime",
                                   "ecornn.jax"])
def test_every_public_function_is_a_boundary(place: str):
    """What a module lists in ``__all__``, or it is named here."""
    module = pytest.importorskip(place) if place == "ecornn.jax" else __import__(place, fromlist=["x"])
    names = {f"{place}.{name}": getattr(module, name) for name in module.__all__}
    left = {name for name, value in names.items()
            if callable(value) and not is_public(value) and not isinstance(value, types.ModuleType)}
    assert left == {name for name in NO_BOUNDARY if name.rpartition(".")[0] == place}


def test_every_public_name_is_there():
    assert {"compile", "load", "reference", "pointwise", "product"} <= set(ecornn.__all__) <= set(dir(ecornn))
    assert all(getattr(ecornn, name) is not None for name in ecornn.__all__) and ecornn.__version__ == version("ecornn")
    assert ecornn.errors.ShapeError.__module__ == "ecornn.errors"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'ecornn' has no attribute 'nothing'"):
        _ = ecornn.nothing


@pytest.mark.parametrize(("use", "heavy"), [
    ("ecornn", {"numpy", "msgspec", "torch", "tvm", "tvm_ffi", "xgboost"}), ("ecornn.load", {"tvm", "tvm_ffi"}),
    ("ecornn.errors", {"numpy", "tvm", "tvm_ffi"}), ("ecornn.reference", {"tvm", "tvm_ffi", "msgspec"}),
    ("ecornn.compile", {"tvm", "tvm_ffi"})])
def test_what_a_name_imports(use: str, heavy: set[str]):
    code = f"import sys, ecornn; {use}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(ecornn.__file__).parent.parent)
    assert not heavy & set(done.stdout.split())


PACKAGES = ("numpy", "apache-tvm-ffi", "msgspec", "typing-extensions")

RUN = """
import importlib.util, pathlib, shutil, sys
import numpy as np
import ecornn
for name in ("tvm", "torch", "ml_dtypes", "xgboost", "click"):
    assert importlib.util.find_spec(name) is None, f"{name} is here: this tests nothing"
for tool in ("nvcc", "g++", "c++", "cc"):
    assert shutil.which(tool) is None, f"{tool} is here: this tests nothing"
assert pathlib.Path(ecornn.__file__).is_relative_to(sys.argv[1])
data = np.load(sys.argv[3])
layer = ecornn.load(sys.argv[2]).bind({n[2:]: data[n] for n in data.files if n.startswith("w:")})
first, state = layer(data["x"][:3])
second, _ = layer(data["x"][3:], state)
np.save(sys.argv[4], np.concatenate([first, second]))
"""


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for package in PACKAGES:
        files = files_of(package)
        assert files, package
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(Path(str(files[0].locate())).parents[len(files[0].parts) - 1] / top)
    (folder / "ecornn").symlink_to(Path(ecornn.__file__).parent)
    return folder


MISSING = """
import sys
import ecornn
try:
    ecornn.compile("lstm", hidden=8, target="cpu")
except ecornn.errors.MissingPackageError as error:
    assert isinstance(error, ImportError) and "apache-tvm is not installed" in str(error)
    print("said")
"""


def test_what_is_missing_is_said(lonely: Path, tmp_path: Path):
    there = {"env": {"PATH": "", "PYTHONPATH": str(lonely), "HOME": os.environ["HOME"]}, "cwd": tmp_path,
             "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-S", "-c", MISSING], **there)
    assert done.stdout == "said\n", done.stderr
    done = subprocess.run([sys.executable, "-S", "-m", "ecornn", "doctor"], **there)
    assert done.returncode == 2 and done.stderr.startswith("error: click is not installed: "), done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.slow
def test_a_module_runs_where_there_is_no_compiler(lonely: Path, tmp_path: Path):
    ecornn.compile("lstm", hidden=40, input=24, batch=3, seq=8, target="cpu", out=tmp_path / "lstm.so")
    weights = random_weights("lstm", 24, 40)
    x = np.random.default_rng(2).standard_normal((8, 3, 24)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, **{f"w:{n}": v for n, v in weights.items()})
    (tmp_path / "bin").mkdir()
    environment = {"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(lonely), "HOME": os.environ["HOME"]}
    done = subprocess.run([sys.executable, "-S", "-c", RUN, lonely, "lstm.so", "data.npz", "y.npy"],
                          capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    wanted, _ = ecornn.reference("lstm", x, weights)
    assert np.linalg.norm(np.load(tmp_path / "y.npy") - wanted) <= 1e-5 * np.linalg.norm(wanted)
