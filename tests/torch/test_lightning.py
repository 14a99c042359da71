"""The callback of Lightning, in real trainers on a CPU: layers that it replaces and restores, and checkpoints."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ecornn.torch
from ecornn.errors import ArgumentError

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is in the extra `test`, but not installed here")

from ecornn.lightning import CompileLayers  # noqa: E402  (it needs Lightning)

pytestmark = [  # Lightning's advice about workers and folders, and its use of what torch has deprecated
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"), pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning")]
QUIET = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False,
         "enable_model_summary": False}


class Sums(lightning.LightningModule):
    """Learns the sum of a sequence; keeps the class of its layer during each hook that tests look at."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.sum = torch.nn.GRU(3, 8, batch_first=True), torch.nn.Linear(8, 1)
        self.compiled: dict[str, bool] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(self.encoder(x)[0][:, -1])

    def loss(self, where: str, x: torch.Tensor) -> torch.Tensor:
        self.compiled[where] = isinstance(self.encoder, ecornn.torch.GRU)
        return ((self(x) - x.sum((1, 2))[:, None]) ** 2).mean()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.loss("fit", batch)

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.loss("validate", batch)

    def test_step(self, batch: torch.Tensor, _: int) -> None:
        self.loss("test", batch)

    def predict_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.loss("predict", batch)
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def batches() -> Any:
    return torch.utils.data.DataLoader(torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(1)), batch_size=4)


def fitted(folder: Path, *callbacks: Any, model: Sums | None = None, **options: Any) -> tuple[Sums, Path]:
    """A model after a fit from the same weights each time, and its checkpoint."""
    torch.manual_seed(0)
    model = model or Sums()
    trainer = lightning.Trainer(default_root_dir=folder, callbacks=[*callbacks],
                                **QUIET | {"enable_checkpointing": False} | options)
    trainer.fit(model, batches(), batches())
    trainer.save_checkpoint(folder / "model.ckpt")
    return model, folder / "model.ckpt"


@pytest.mark.parametrize("where", ["fit", "validate", "test", "predict"])
def test_every_start_of_a_trainer_replaces(where: str, tmp_path: Path):
    callback, model = CompileLayers(), Sums()
    trainer = lightning.Trainer(default_root_dir=tmp_path, callbacks=[callback], enable_checkpointing=False, **QUIET)
    getattr(trainer, where)(model, batches())
    assert model.compiled[where] and callback.report.swapped == ("encoder",)
    assert isinstance(model.encoder, ecornn.torch.GRU)
    getattr(trainer, where)(model, batches())  # there is nothing to replace any more
    assert callback.report.swapped == ("encoder",)


def test_checkpoints_load_with_the_callback_and_without(tmp_path: Path):
    for name in ("plain", "ours"):
        (tmp_path / name).mkdir()
    plain, theirs = fitted(tmp_path / "plain")
    model, ours = fitted(tmp_path / "ours", CompileLayers())
    kept = [torch.load(path, weights_only=True) for path in (theirs, ours)]
    assert [*kept[0]] == [*kept[1]] and [*kept[0]["state_dict"]] == [*kept[1]["state_dict"]]
    assert kept[0]["callbacks"] == kept[1]["callbacks"] == {}
    for key, value in kept[0]["state_dict"].items():  # two updates of Adam, which sees rounding through its square root
        torch.testing.assert_close(kept[1]["state_dict"][key], value, rtol=1e-3, atol=1e-4)
    assert model.compiled == {"validate": True, "fit": True} and not any(plain.compiled.values())
    loaded = Sums.load_from_checkpoint(ours)
    assert type(loaded.encoder) is torch.nn.GRU
    torch.testing.assert_close(loaded(torch.ones(2, 5, 3)), model(torch.ones(2, 5, 3)))
    for path, callbacks in ((ours, []), (theirs, [CompileLayers()])):  # goes on from the other's, optimizer and all
        more = Sums()
        trainer = lightning.Trainer(default_root_dir=tmp_path, callbacks=callbacks, enable_checkpointing=False,
                                    **QUIET | {"max_epochs": 2})
        trainer.fit(more, batches(), ckpt_path=path)
        assert trainer.global_step == 4 and more.compiled["fit"] == bool(callbacks)


@pytest.mark.parametrize("example", [torch.zeros(4, 5, 3), (torch.zeros(4, 5, 3),), {"x": torch.zeros(4, 5, 3)}])
def test_an_example_is_compiled_ahead(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[bool, int]] = []

    def prepare(model: torch.nn.Module, *args: Any, **named: Any) -> int:
        seen.append((torch.is_grad_enabled(), count := ecornn.torch.prepare(model, *args, **named)))
        return count

    monkeypatch.setattr("ecornn.lightning.prepare", prepare)
    fitted(tmp_path, CompileLayers(example), max_epochs=2)
    assert sorted(seen) == [(False, 1), (True, 1)]  # once for validation, once for training


def test_layers_are_restored_at_the_end_and_after_an_error(tmp_path: Path):
    model, _ = fitted(tmp_path, CompileLayers(restore=True))
    assert model.compiled["fit"] and type(model.encoder) is torch.nn.GRU

    class Fails(Sums):
        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            raise RuntimeError("stopped")

    failing = Fails()
    with pytest.raises(RuntimeError, match="stopped"):
        fitted(tmp_path, CompileLayers(restore=True), model=failing)
    assert failing.compiled["validate"] and type(failing.encoder) is torch.nn.GRU


def test_options_are_those_of_replace_and_checked_at_once(tmp_path: Path):
    model, _ = fitted(tmp_path, copy.deepcopy(CompileLayers(wait=True, keep="states", tf32=False)))
    assert (model.encoder.wait, model.encoder.keep, model.encoder.tf32) == (True, "states", False)
    for name, value in (("wait", 1), ("keep", "all"), ("tf32", "no"), ("example", [1])):
        with pytest.raises(ArgumentError, match=name):
            CompileLayers(**{name: value})


@pytest.mark.parametrize(("before", "words"), [
    ("", "lightning.pytorch."), ("import pytorch_lightning", "pytorch_lightning."),
    ("import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None",
     "ecornn.lightning needs lightning, which is not installed: pip install lightning")])
def test_the_package_that_a_program_imported_is_used_and_a_missing_one_is_named(before: str, words: str):
    code = (f"{before}\ntry:\n    from ecornn.lightning import CompileLayers as C\n"
            "    print(C.__bases__[0].__module__)\nexcept ImportError as error:\n    print(error)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(words)
