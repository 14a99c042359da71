"""Programs of torch.export and AOTInductor in processes that compile nothing: modules from a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ecornn.torch
from ecornn import module_folders
from ecornn.errors import ModuleError
from ecornn.layer_spec import LayerSpec
from ecornn.torch.compiling import outcomes

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.torch.jit.script")
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


class Model(torch.nn.Module):
    def __init__(self, layers: type) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(I, 7), torch.nn.Linear(2 * H, 3)
        self.recurrent = layers(7, H, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.recurrent(torch.relu(self.before(x)))[0])


class Saved:
    """A program, the folder of its modules, and what it must compute."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, exact = folder, Model(torch.nn.GRU).double()
        model = Model(ecornn.torch.GRU)
        model.load_state_dict(exact.state_dict())
        x = torch.randn(T, B, I)
        dims = {0: torch.export.Dim("T", min=2, max=99), 1: torch.export.Dim("B", min=2, max=99)}
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module_folders, "_had", {})
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
        """In a process without TVM, compilers and a cache."""
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
    assert done.returncode == 1 and "no TVM here" in done.stderr and "save_modules(folder)" in done.stderr


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
    found = module_folders.find(LayerSpec(**layer), "cpu")
    assert found is not None and found.path in saved.modules and found.manifest.workload.batch == B
    for change in ({"batch": B + 1}, {"cell": "lstm"}, {"dtype": "float64"}, {"bidirectional": False}, {"hidden": 12},
                   {"lengths": True}, {"training": True}, {"weights": "bfloat16"}):
        assert module_folders.find(LayerSpec(**layer | change), "cpu") is None, change
    assert module_folders.find(LayerSpec(**layer), "cuda") is None
    monkeypatch.setattr(module_folders, "_runs_here", lambda manifest: False)
    assert module_folders.find(LayerSpec(**layer), "cpu") is None
    monkeypatch.setenv("ECORNN_MODULES", os.pathsep.join([str(tmp_path), str(tmp_path / "none")]))
    with pytest.raises(ModuleError, match="there is no folder"):
        module_folders.find(LayerSpec(**layer), "cpu")
    shutil.copy(saved.modules[0], tmp_path / "damaged.so")
    with (tmp_path / "damaged.so").open("r+b") as file:
        file.truncate(1000)
    monkeypatch.setenv("ECORNN_MODULES", str(tmp_path))
    with pytest.raises(ModuleError, match=r"damaged\.so"):
        module_folders.find(LayerSpec(**layer), "cpu")


def test_nothing_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module_folders, "_had", {})
    with pytest.raises(ModuleError, match="nothing to save"):
        ecornn.torch.save_modules(tmp_path)
