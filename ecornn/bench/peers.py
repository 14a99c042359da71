"""The sides beside ours, by the names that ``--against`` takes."""

from __future__ import annotations

import importlib.util

import numpy as np

from ecornn.bench.sides import Side, Subject, Weights
from ecornn.errors import ArgumentError, CellError, DeviceError, MissingPackageError
from ecornn.tune.timing import torch_sees_gpu

PACKAGES = {"cudnn": ("torch",), "cudnn-tf32": ("torch",), "torch": ("torch",), "loop": ("torch",),
            "onnxruntime": ("onnxruntime", "onnx")}
NONE = "none"


def named(text: str) -> tuple[str, ...]:
    """The sides of a list with commas. Raises :class:`ArgumentError` for a name that is none."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if names == (NONE,):
        return ()
    for name in names:
        if name not in PACKAGES:
            raise ArgumentError("--against", text, f"{NONE}, or some of {', '.join(PACKAGES)} with commas between them")
    return names


def installed(names: tuple[str, ...], kind: str) -> None:
    """Raises :class:`MissingPackageError`, which names the extra, where a side's package is not there, and
    :class:`DeviceError` where PyTorch sees no GPU and the layer is for one (kind ``cuda``)."""
    for name in names:
        for package in PACKAGES[name]:
            if importlib.util.find_spec(package) is None:
                raise MissingPackageError(f"{package} is not installed, which --against {name} needs: install "
                                          f"ecornn's extra [bench], or pip install {package}")
    if kind == "cuda" and "torch" in {PACKAGES[name][0] for name in names} and not torch_sees_gpu():
        raise DeviceError("--against", ",".join(names), "a PyTorch that sees the GPU; this one sees none")


def usual(kind: str) -> tuple[str, ...]:
    """Who is compared with where nobody says: PyTorch's fastest, if it is installed for the device."""
    if importlib.util.find_spec("torch") is None or (kind == "cuda" and not torch_sees_gpu()):
        return ()
    return ("cudnn",) if kind == "cuda" else ("torch",)


def peer(name: str, subject: Subject, weights: Weights, rng: np.random.Generator) -> Side | str:
    """The side; or why it computes no such layer."""
    from ecornn.bench.onnx_layer import onnx_side
    from ecornn.bench.torch_layers import cudnn_side, loop_side, torch_side

    if name in ("cudnn", "cudnn-tf32"):
        return cudnn_side(name, subject, weights, rng)
    if name == "onnxruntime":
        return onnx_side(subject, weights)
    try:
        return loop_side(name, subject, weights) if name == "loop" else torch_side(subject, weights)
    except CellError as error:  # an operation that the loop over the step has not
        return str(error)
