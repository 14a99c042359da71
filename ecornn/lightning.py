"""A callback of Lightning that compiles the recurrent layers of a model while a trainer runs it.

    trainer = lightning.Trainer(callbacks=[ecornn.lightning.CompileLayers()])

It serves ``lightning.pytorch`` and ``pytorch_lightning``, whichever of the two is imported or installed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ecornn.errors import ArgumentError, MissingPackageError
from ecornn.torch import Report, prepare, replace, restore

__all__ = ["CompileLayers"]

NAMES = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: sys.modules.get(name) is None)

_name = next((name for name in NAMES if find_spec(name.partition(".")[0])), None)
if _name is None:
    raise MissingPackageError("ecornn.lightning needs lightning, which is not installed: pip install lightning")
_lightning: Any = import_module(_name)


class CompileLayers(_lightning.Callback):  # type: ignore[misc]
    """Calls :func:`ecornn.torch.replace` on the ``LightningModule`` when ``fit``, ``validate``, ``test`` or ``predict``
    starts, once the model is on its device, and prints which layers are compiled.

    Checkpoints have the same contents with this callback and without it, so each loads with and without it.

    Parameters
    ----------
    example : arguments of the model's ``forward``, as Lightning's ``example_input_array`` has them: a tensor, a tuple
        or a dictionary. :func:`ecornn.torch.prepare` then compiles what a call with these needs before the first
        batch, for training with gradients. It calls the model once. None: layers compile while PyTorch's run
    restore : gives the model ``torch.nn``'s layers back when the trainer ends, or stops with an exception
    options : those of :func:`ecornn.torch.replace`

    Attributes
    ----------
    report : the :class:`ecornn.torch.Report` of the latest start that replaced layers, or of the first; None before it

    Raises :class:`~ecornn.errors.ArgumentError` for a wrong argument."""

    def __init__(self, example: Any = None, *, restore: bool = False, **options: Any) -> None:
        if not isinstance(example, (torch.Tensor, tuple, dict, type(None))):
            raise ArgumentError("example", type(example), "a tensor, a tuple or a dictionary of arguments, or None")
        replace(torch.nn.Identity(), **options)  # which checks them before anything is launched
        self.example, self.restore, self.options = example, restore, options
        self.report: Report | None = None
        self._prepared: set[bool] = set()  # with gradients, and without

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        report = replace(pl_module, **self.options)
        if report.swapped or self.report is None:
            self.report = report
            _lightning.utilities.rank_zero_info(f"Recurrent layers, by ecornn:\n{report}")
        asked = torch.is_grad_enabled()
        if self.example is not None and asked not in self._prepared:
            given = trainer.precision_plugin.convert_input(self.example)
            given = _lightning.utilities.move_data_to_device(given, pl_module.device)
            with trainer.precision_plugin.forward_context():
                if isinstance(given, dict):
                    prepare(pl_module, **given)
                else:
                    prepare(pl_module, *(given if isinstance(given, tuple) else (given,)))
            self._prepared.add(asked)

    # validation starts inside of a fit, too, where layers may compile for calls without gradients
    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.restore:
            restore(pl_module)
            self._prepared.clear()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")
