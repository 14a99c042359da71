"""A schedule compiler for recurrent neural networks, built on TVM.

    module = ecornn.compile("lstm", hidden=800, input=800, batch=20, dtype="float32")
    module.save("lstm800.so")
    layer = ecornn.load("lstm800.so").bind(weights)
    y, state = layer(x)

``import ecornn.torch`` has layers for PyTorch models.

What is listed in ``__all__`` is the public interface. Nothing of it is imported before its first
use: a program that only runs modules never loads the compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecornn import errors, tune
    from ecornn.cells import (
        Cell,
        custom_gradient,
        derive,
        largest,
        mean,
        normalized,
        pointwise,
        product,
        softmax,
        spike,
    )
    from ecornn.compiler import compile
    from ecornn.numpy_gradients import reference_gradients
    from ecornn.numpy_reference import reference
    from ecornn.runtime import Columns, Layer, Module, load

    __version__: str

__all__ = ["Cell", "Columns", "Layer", "Module", "__version__", "compile", "custom_gradient", "derive", "errors",
           "largest", "load", "mean", "normalized", "pointwise", "product", "reference", "reference_gradients",
           "softmax", "spike", "tune"]

_MODULES = {  # that have public names; errors and tune are such names themselves
    "ecornn.cells": ("Cell", "custom_gradient", "derive", "largest", "mean", "normalized", "pointwise", "product",
                     "softmax", "spike"),
    "ecornn.compiler": ("compile",), "ecornn.numpy_gradients": ("reference_gradients",),
    "ecornn.numpy_reference": ("reference",), "ecornn.runtime": ("Columns", "Layer", "Module", "load")}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ecornn' has no attribute {name!r}")
    from importlib import import_module

    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("ecornn")
    else:
        place = next((module for module, names in _MODULES.items() if name in names), None)
        value = getattr(import_module(place), name) if place else import_module(f"ecornn.{name}")
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *({"jax", "onnx", "onnxruntime", "torch"} & {*globals()})})
