"""A schedule compiler for recurrent neural networks, built on TVM.

    module = ecornn.compile("lstm", hidden=800, input=800, batch=20, dtype="float32")
    module.save("lstm800.so")
    layer = ecornn.load("lstm800.so").bind(weights)
    y, state = layer(x)

``import ecornn.torch`` has layers for PyTorch models.

What is listed in ``__all__`` is the public interface. Nothing of it is imported before its first
use: a program that only runs modules never loads the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecornn import errors, tune
    from ecornn.cells import Cell, derive, largest, mean, normalized, pointwise, product, softmax
    from ecornn.compiler import compile
    from ecornn.numpy_gradients import reference_gradients
    from ecornn.numpy_reference import reference
    from ecornn.runtime import Columns, Layer, Module, load

    __version__: str

__all__ = ["Cell", "Columns", "Layer", "Module", "__version__", "compile", "derive", "errors", "largest", "load",
           "mean", "normalized", "pointwise", "product", "reference", "reference_gradients", "softmax", "tune"]

# Public name -> (module, name in it); an empty name is the module itself.
_PLACES = {
    "Cell": ("ecornn.cells", "Cell"),
    "Columns": ("ecornn.runtime", "Columns"),
    "Layer": ("ecornn.runtime", "Layer"),
    "Module": ("ecornn.runtime", "Module"),
    "compile": ("ecornn.compiler", "compile"),
    "derive": ("ecornn.cells", "derive"),
    "errors": ("ecornn.errors", ""),
    "largest": ("ecornn.cells", "largest"),
    "load": ("ecornn.runtime", "load"),
    "mean": ("ecornn.cells", "mean"),
    "normalized": ("ecornn.cells", "normalized"),
    "pointwise": ("ecornn.cells", "pointwise"),
    "product": ("ecornn.cells", "product"),
    "reference": ("ecornn.numpy_reference", "reference"),
    "reference_gradients": ("ecornn.numpy_gradients", "reference_gradients"),
    "softmax": ("ecornn.cells", "softmax"),
    "tune": ("ecornn.tune", ""),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("ecornn")
    elif name in _PLACES:
        from importlib import import_module

        place, attribute = _PLACES[name]
        value = import_module(place)
        if attribute:
            value = getattr(value, attribute)
    else:
        raise AttributeError(f"module 'ecornn' has no attribute {name!r}")
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
