"""Compiled layers in ``torch.ao.quantization``, which goes by exact classes.

It gives each module a ``qconfig``, None where the class is none of those to quantize. A compiled layer that is given
one, by its name or its own class, becomes torch.nn's, which PyTorch then quantizes. One that is given none is left as
it is, as PyTorch leaves what it does not know; it warns, since ``torch.nn.LSTM`` among the classes may have meant it.
"""

from __future__ import annotations

import warnings
from typing import Any

from ecornn.torch.classes import COMPILED
from ecornn.torch.replacing import restore


def _get(module: Any) -> Any:
    try:
        return vars(module)["qconfig"]
    except KeyError:
        raise AttributeError("qconfig") from None


def _set(module: Any, value: Any) -> None:
    vars(module)["qconfig"] = value
    if value is not None:
        restore(module)
        return
    warnings.warn(f"torch.ao.quantization leaves a compiled {type(module).__name__} as it is, since it goes by exact "
                  "classes: to have it quantized, call ecornn.torch.restore(model) first, or name the layer in "
                  "qconfig_spec", stacklevel=2)


def _delete(module: Any) -> None:
    vars(module).pop("qconfig", None)


for _kind in COMPILED:
    _kind.qconfig = property(_get, _set, _delete)  # type: ignore[attr-defined]
