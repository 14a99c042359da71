"""Calls for which PyTorch's own layer runs in place of a compiled one, with a warning that says why."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ecornn.errors import FallbackError
from ecornn.torch import engine
from ecornn.torch.compiling import serves
from ecornn.torch.dispatching import derivatives
from ecornn.torch.snapshot import suspect


def obstacle(module: Any, input: Any, hx: Any) -> tuple[str, bool]:
    """The reason that PyTorch's own layer has to run, empty if it has not, and whether gradients are asked for."""
    if torch.jit.is_tracing():
        return "torch.jit.trace records PyTorch's operators only", False
    if exporting_to_onnx():
        return "torch.onnx.export knows PyTorch's operators only", False
    data = input.data if isinstance(input, PackedSequence) else input
    if not serves(data.device, data.dtype) or (data.is_cpu and torch.is_autocast_enabled("cpu")):
        engine.check_type(data, module._flat_weights[0])
        return (f"compiled ones are for float32 and float64 on a CPU, without autocast, and for float32, float16 and "
                f"bfloat16 on a GPU, and this is {data.dtype} on {data.device.type}"), False
    asked = derivatives(lambda: (data, *tensors_of(hx), *engine.weights_of(module)))
    if asked == "forward derivatives":
        return "forward derivatives are asked for", False
    return "", bool(asked)


def exporting_to_onnx() -> bool:
    """Tells whether ``torch.onnx.export`` runs, which captures with ``torch.export`` first."""
    exporter = sys.modules.get("torch.onnx")
    return exporter is not None and bool(exporter.is_in_onnx_export())


# as torch.compiler.assume_constant_result(), which would import the whole of torch._dynamo here: that calls it as it is
exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def by_torch(module: Any, input: Any, hx: Any, why: str = "") -> Any:
    """Runs PyTorch's own forward, into which torch.compile looks as little as into ``torch.nn``'s.

    Warns if there is a reason. Raises :class:`FallbackError` with ``ECORNN_STRICT=1`` in the environment, and if
    PyTorch has no such layer.
    """
    # elsewhere the decorator has nothing to do, and imports the whole of torch._dynamo, for seconds
    return (_apart if torch.compiler.is_compiling() else _by_torch)(module, input, hx, why)


def _by_torch(module: Any, input: Any, hx: Any, why: str) -> Any:
    if why:
        if module.TORCH is None:
            raise FallbackError(f"PyTorch has no layer of this cell: {why}")
        if os.environ.get("ECORNN_STRICT", "0") not in ("", "0"):
            raise FallbackError(f"PyTorch's own layer would have to run: {why}; ecornn.torch.restore(model) has it run")
        warnings.warn(f"PyTorch's own layer runs: {why}", stacklevel=4)
    if torch.is_grad_enabled():
        suspect(engine.weights_of(module))
    return module.TORCH.forward(module, input, hx)


_apart = torch._disable_dynamo(_by_torch)  # torch.compiler.disable() would import the whole of torch._dynamo here


def tensors_of(hx: Any) -> tuple[Any, ...]:
    """The tensors of the initial states ``hx``, not checked."""
    return () if hx is None else tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
