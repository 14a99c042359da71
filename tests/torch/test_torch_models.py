"""First calls that compile, prepare(), profile(), and programs of torch.export and AOTInductor with their modules."""

import copy
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ecornn.compiler
import ecornn.torch
from ecornn import module_cache
from ecornn.bench import turns
from ecornn.errors import ArgumentError, ModuleError
from ecornn.layer_spec import LayerSpec
from ecornn.torch import replacing
from ecornn.torch.compiling import outcomes
from ecornn.worker import Worker

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.torch.jit.script")
TWO_CALLS = """
import sys, torch, ecornn.torch
layer, x = ecornn.torch.GRU(5, 6), torch.ones(3, 2, 5)
for _ in range(2):
    with torch.no_grad():
        layer(x)
print("tvm" in sys.modules)
"""


def test_a_process_says_that_it_compiles_and_the_next_one_need_not(tmp_path: Path):
    environment = {**os.environ, "ECORNN_CACHE": str(tmp_path), "ECORNN_TUNING_LOGS": str(tmp_path / "logs")}
    def run() -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", TWO_CALLS], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr.strip()
    used, said = run()
    assert used == "True" and said.count("compiling gru T=4 B=2 I=5 H=6 float32, which takes some seconds") == 1
    assert "to compile ahead, call ecornn.torch.prepare(model, *example)" in said and len(said.splitlines()) == 1
    assert run() == ("False", "")
    nowhere = tmp_path / "nowhere"  # as in a container: no compiler, and logs that lie elsewhere
    nowhere.mkdir()
    environment |= {"PATH": str(nowhere), "CXX": "", "ECORNN_TUNING_LOGS": str(tmp_path / "other")}
    assert run() == ("False", "")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "new.jsonl").write_text("")  # a record might be there
    done = subprocess.run([sys.executable, "-c", TWO_CALLS], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "no C++ compiler" in done.stderr
    environment |= {"PATH": os.environ["PATH"], "CXX": os.environ.get("CXX", "")}
    assert run()[0] == "True"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.GRU(5, 7, batch_first=True)
        self.second, self.third = torch.nn.RNN(7, 4), torch.nn.RNN(7, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x)[0].transpose(0, 1)
        return self.second(y)[0] + self.third(input=y)[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    plain = ecornn.compiler.compile_layer
    monkeypatch.setattr(ecornn.compiler, "compile_layer", lambda layer, **k: (found.append(str(layer.workload)),
                                                                              plain(layer, **k))[1])
    outcomes.clear()
    return found


def test_what_is_prepared_is_what_first_calls_need(asked, capsys, caplog, monkeypatch):
    monkeypatch.setattr(module_cache, "_told", set())
    model, x = Model().eval(), torch.randn(2, 3, 5)
    ecornn.torch.replace(model)
    kinds, before = [type(m) for m in model.modules()], torch.random.get_rng_state()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "ecornn"):
        assert ecornn.torch.prepare(model, x, processes=1) == 2
    assert asked == ["gru T=4 B=2 I=5 H=7 float32", "rnn_tanh T=4 B=2 I=7 H=4 float32"]
    said = [line.partition(" layers")[0] for line in capsys.readouterr().err.splitlines()]
    assert said[-1] == "ecornn: compiled 2 of 2"
    assert [type(m) for m in model.modules()] == kinds and torch.equal(torch.random.get_rng_state(), before)
    assert not caplog.messages  # it must not say: call prepare()
    asked.clear()
    with torch.no_grad():
        model(x)
    assert not asked


def test_several_are_compiled_by_other_processes(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path))
    model, x = Model().eval(), torch.randn(2, 3, 5)
    ecornn.torch.replace(model)
    with torch.no_grad():
        assert ecornn.torch.prepare(model, x, processes=2) == 2
        model(x)
    assert not asked


def test_a_model_without_compiled_layers():
    with pytest.raises(ArgumentError, match=r"as after ecornn\.torch\.replace\(model\)"):
        ecornn.torch.prepare(Model(), torch.randn(2, 3, 5))


def test_a_forward_of_ones_own_is_left_to_its_first_call():
    class Own(torch.nn.GRU):
        def forward(self, x: torch.Tensor, more: int = 1) -> Any:
            return super().forward(more * x)

    layer = Own(5, 7)
    assert ecornn.torch.replace(layer).swapped == ("Own",)
    assert ecornn.torch.prepare(layer, x=torch.randn(3, 2, 5), more=2) == 0 and isinstance(layer, ecornn.torch.GRU)


def test_a_first_call_leaves_nothing_of_its_step_behind(monkeypatch: pytest.MonkeyPatch):
    """The compiler's frames may hold those that called them, and gradients' nodes, so that no graph is captured."""
    compiling = module_cache.compiled_layer
    def leaving(*args: Any) -> Any:
        cycle: list[Any] = [sys._getframe()]
        cycle.append(cycle)
        return compiling(*args)

    def step() -> weakref.ref[torch.Tensor]:
        x = torch.randn(3, 2, 5, requires_grad=True)
        layer(x)[0].sum().backward()
        return weakref.ref(x)
    layer = ecornn.torch.GRU(5, 9)
    monkeypatch.setattr(module_cache, "compiled_layer", leaving)
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


def test_a_process_that_stops_while_it_compiles_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path))
    monkeypatch.setattr(Worker, "call", lambda worker, *_: (worker.wake(), os.kill(worker.process.pid, signal.SIGSTOP),
                                                            threading.Event().wait()))
    monkeypatch.setattr(replacing, "WORK", 0.2)
    here: list[str] = []
    monkeypatch.setattr(replacing, "compiled", lambda spec, target: here.append(target))
    layer = ecornn.torch.GRU(5, 6)
    replacing.compile_all([spec for batch in (2, 3) for spec in replacing.specs(layer, torch.ones(3, batch, 5), None)],
                          2)
    assert here == ["cpu", "cpu"]


# -- profile() ----------------------------------------------------------------------------------
class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.LSTM(6, 8)
        self.norm, self.drop = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)
        self.cell, self.unused = torch.nn.GRUCell(8, 5), torch.nn.RNN(3, 3)

    def forward(self, x: torch.Tensor, *, times: int = 2) -> dict[str, Any]:
        y, (h, _) = self.encoder(x)
        state = None
        for step in y[:times]:
            state = self.cell(self.drop(self.norm(step)), state)
        return {"y": y, "states": (state, h)}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "SECONDS", 0.1)


@pytest.mark.parametrize("replaced", [False, True])
def test_layers_and_the_model_are_timed_and_stay_as_they_are(replaced: bool, fast: None):
    model, x = Reader(), torch.randn(4, 3, 6)
    if replaced:
        ecornn.torch.replace(model, keep="states")
    before, classes = copy.deepcopy(model.state_dict()), [type(one) for one in model.modules()]
    random, found = torch.get_rng_state(), ecornn.torch.profile(model, x, times=3)
    assert [(one.name, one.kind, one.calls) for one in found.layers] == [("encoder", "LSTM(6, 8)", 1),
                                                                        ("cell", "GRUCell(8, 5)", 3)]
    assert all(0 < time < 60 for one in (*found.layers, found.model) for time in (one.before, one.after))
    assert found.model.kind == "Reader" and found.model.before > found.layers[0].before / 10
    lines = str(found).removesuffix(f"\n{replacing.BUSY}").splitlines()
    assert len(lines) == 4 and len({*map(len, lines)}) == 1 and lines[1].startswith("encoder LSTM(6, 8)")
    assert lines[1].endswith(f"{found.layers[0].ratio:.2f}x")
    # nothing of it is seen in the model, nor in the order of random numbers
    assert [type(one) for one in model.modules()] == classes and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not model.encoder._forward_pre_hooks
    assert getattr(model.encoder, "keep", None) == ("states" if replaced else None)


@pytest.mark.parametrize("again, busy", [(6, False), (7, True)])
def test_a_busy_machine_is_said(again: int, busy: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "host_turns", lambda sides, *_: ({name: [[0.1]] * 7 for name in sides}, again))
    with torch.no_grad():
        found = ecornn.torch.profile(torch.nn.GRU(6, 7), torch.randn(4, 3, 6))
    assert (replacing.BUSY in str(found)) == (replacing.BUSY in found._repr_html_()) == busy == found.model.busy


@pytest.mark.parametrize("grad", [True, False])
def test_the_backward_pass_is_timed_if_gradients_are_enabled(grad: bool, fast: None, monkeypatch: pytest.MonkeyPatch):
    asked, own = [], []
    real, forward = torch.autograd.grad, torch.nn.GRU.forward
    monkeypatch.setattr(torch.autograd, "grad", lambda *given, **more: asked.append(1) or real(*given, **more))
    monkeypatch.setattr(torch.nn.GRU, "forward", lambda self, *given: own.append(type(self)) or forward(self, *given))
    layer = torch.nn.GRU(6, 7)
    with torch.set_grad_enabled(grad):
        found = ecornn.torch.profile(layer, pack_sequence([torch.randn(n, 6) for n in (4, 2)]))
    assert bool(asked) == grad and {*own} == {torch.nn.GRU}
    assert [one.name for one in found.layers] == [""] and isinstance(layer(pack_sequence([torch.randn(2, 6)]))[0],
                                                                     PackedSequence)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ArgumentError, match="a model with a layer that can be compiled: no recurrent layers"):
        ecornn.torch.profile(torch.nn.Linear(3, 3), torch.randn(2, 3))
    small = torch.nn.GRU(3, 3).to(torch.float8_e5m2)
    with pytest.raises(ArgumentError, match=r"not compiled, ecornn does not .* with torch\.float8_e5m2 weights"):
        ecornn.torch.profile(small, torch.randn(2, 3))


# -- exported programs --------------------------------------------------------------------------
T, B, I, H = 6, 4, 5, 11
LONELY = """
import sys
sys.modules["tvm"] = None  # import fails, as where there is none
import numpy, torch, ecornn.torch
file, x, y = sys.argv[1:]
x = torch.from_numpy(numpy.load(x))
program = torch._inductor.aoti_load_package(file) if file.endswith(".aoti.pt2") else torch.export.load(file).module()
try:
    with torch.no_grad():
        numpy.save(y, program(x).numpy())
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
assert not any(name.startswith("tvm.") for name in sys.modules)
"""


class Between(torch.nn.Module):
    def __init__(self, layers: type) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(I, 7), torch.nn.Linear(2 * H, 3)
        self.recurrent = layers(7, H, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.recurrent(torch.relu(self.before(x)))[0])


class Saved:
    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, exact = folder, Between(torch.nn.GRU).double()
        model = Between(ecornn.torch.GRU)
        model.load_state_dict(exact.state_dict())
        x = torch.randn(T, B, I)
        dims = {0: torch.export.Dim("T", min=2, max=99), 1: torch.export.Dim("B", min=2, max=99)}
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module_cache, "_had", {})
            outcomes.clear()  # which another test may have filled
            model(x)
            self.program = torch.export.export(model.eval(), (x,), dynamic_shapes=(dims,))
            self.modules = ecornn.torch.save_modules(folder / "modules")
            self.fixed = torch.export.export(model, (x,))
        torch.export.save(self.program, folder / "program.pt2")
        other = torch.randn(T + 3, B - 1, I)  # a smaller batch, as the first call of the process
        with torch.no_grad():
            self.given = {name: (value, exact(value.double())) for name, value in (("same", x), ("other", other))}

    def run(self, file: str, given: str, empty: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        np.save(self.folder / "x.npy", self.given[given][0].numpy())
        return subprocess.run(
            [sys.executable, "-c", LONELY, *(str(self.folder / name) for name in (file, "x.npy", "y.npy"))],
            capture_output=True, text=True, check=False,
            env=os.environ | {"PATH": str(empty), "ECORNN_CACHE": "off", **environment})

    def check(self, given: str) -> None:
        np.testing.assert_allclose(np.load(self.folder / "y.npy"), self.given[given][1], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("exported"))


def test_a_program_with_its_modules(saved: Saved, tmp_path: Path):
    done = saved.run("program.pt2", "other", tmp_path, ECORNN_MODULES=str(saved.folder / "modules"))
    assert done.returncode == 0, done.stderr
    saved.check("other")
    done = saved.run("program.pt2", "same", tmp_path, ECORNN_MODULES="")
    assert done.returncode == 1 and "compiled without TVM" in done.stderr and "save_modules(folder)" in done.stderr


@pytest.mark.exhaustive
def test_a_program_of_aot_inductor(saved: Saved, tmp_path: Path):
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(saved.fixed, package_path=str(saved.folder / "program.aoti.pt2"))
    done = saved.run("program.aoti.pt2", "same", tmp_path, ECORNN_MODULES=str(saved.folder / "modules"))
    assert done.returncode == 0, done.stderr
    saved.check("same")


def test_which_module_is_found(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_MODULES", str(saved.folder / "modules"))
    layer = dict(cell="gru", hidden=H, input=7, batch=2, bidirectional=True)
    found = module_cache.find(LayerSpec(**layer), "cpu")
    assert found is not None and found.path in saved.modules and found.manifest.workload.batch == B
    for change in ({"batch": B + 1}, {"cell": "lstm"}, {"dtype": "float64"}, {"bidirectional": False}, {"hidden": 12},
                   {"lengths": True}, {"training": True}, {"weights": "bfloat16"}):
        assert module_cache.find(LayerSpec(**layer | change), "cpu") is None, change
    assert module_cache.find(LayerSpec(**layer), "cuda") is None
    monkeypatch.setattr(module_cache, "_runs_here", lambda manifest: False)
    assert module_cache.find(LayerSpec(**layer), "cpu") is None
    monkeypatch.setenv("ECORNN_MODULES", os.pathsep.join([str(tmp_path), str(tmp_path / "none")]))
    with pytest.raises(ModuleError, match=r"the folder .* does not exist"):
        module_cache.find(LayerSpec(**layer), "cpu")
    shutil.copy(saved.modules[0], tmp_path / "damaged.so")
    with (tmp_path / "damaged.so").open("r+b") as file:
        file.truncate(1000)
    monkeypatch.setenv("ECORNN_MODULES", str(tmp_path))
    with pytest.raises(ModuleError, match=r"damaged\.so"):
        module_cache.find(LayerSpec(**layer), "cpu")


def test_nothing_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module_cache, "_had", {})
    with pytest.raises(ModuleError, match="nothing to save"):
        ecornn.torch.save_modules(tmp_path)
