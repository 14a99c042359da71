"""Calls that PyTorch's own layer computes: where no compiled one can, with a warning, and until their module is there.

Where :func:`call` finds no module, one is compiled in the background for later calls; :func:`again` is the short way of
those in between, and :func:`waits` says which calls wait instead."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence

from ecornn.build import cache
from ecornn.errors import FallbackError, ScheduleError
from ecornn.torch.compiling import PendingError, accepting, serves
from ecornn.torch.engine import Engine, captured, check_type, engine_of, watching, weights_of
from ecornn.torch.snapshot import suspect
from ecornn.worker import MARK

OFF = "", "0"
MOST = 64  # kinds of calls that an engine notes as pending

_functorch = torch._C._functorch
_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


# -- where no compiled layer can ----------------------------------------------------------------
def obstacle(module: Any, input: Any, hx: Any) -> tuple[str, bool]:
    """The reason that PyTorch's own layer has to run, empty if it has not, and whether gradients are asked for."""
    if torch.jit.is_tracing():
        return "torch.jit.trace only records PyTorch's operators", False
    if exporting_to_onnx():
        return "torch.onnx.export only knows PyTorch's operators", False
    data = input.data if isinstance(input, PackedSequence) else input
    if not serves(data.device, data.dtype) or (data.is_cpu and torch.is_autocast_enabled("cpu")):
        check_type(data, module._flat_weights[0])
        return ("compiled layers serve float32, float64, float16 and bfloat16 on a CPU, without autocast, and float32, "
                f"float16 and bfloat16 on a GPU; the input is {data.dtype} on {data.device.type}"), False
    return "", bool(derivatives(lambda: (data, *tensors_of(hx), *weights_of(module))))


def exporting_to_onnx() -> bool:
    """Tells whether ``torch.onnx.export`` runs, which captures with ``torch.export`` first."""
    exporter = sys.modules.get("torch.onnx")
    return exporter is not None and bool(exporter.is_in_onnx_export())


# as torch.compiler.assume_constant_result(), which would import the whole of torch._dynamo here: that calls it as it is
exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def derivatives(tensors: Callable[[], Iterable[object]]) -> str:
    """The derivatives that may be asked for: ``forward derivatives`` now, ``gradients`` later; empty: none."""
    if forward_ad._current_level >= 0:
        return "forward derivatives"
    asked = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and requires_grad(t) for t in tensors())
    return "gradients" if asked else ""


def requires_grad(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor requires a gradient, or a tensor that functorch's transforms have wrapped in it does."""
    if tensor.requires_grad:
        return True
    if torch.compiler.is_compiling() or _functorch.maybe_current_level() is None:
        return False
    while _functorch.is_batchedtensor(tensor) or _functorch.is_gradtrackingtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def by_torch(module: Any, input: Any, hx: Any, why: str = "") -> Any:
    """Runs PyTorch's own forward, into which torch.compile looks as little as into ``torch.nn``'s; warns of a reason.
    Raises :class:`FallbackError` with ``ECORNN_STRICT=1``, and if PyTorch has no such layer."""
    # elsewhere the decorator has nothing to do, and imports the whole of torch._dynamo, for seconds
    return (_apart if torch.compiler.is_compiling() else _by_torch)(module, input, hx, why)


def _by_torch(module: Any, input: Any, hx: Any, why: str) -> Any:
    if why:
        if module.TORCH is None:
            raise FallbackError(f"no compiled layer serves this call, and PyTorch has no layer of this cell: {why}")
        if strict():
            raise FallbackError(f"PyTorch's own layer would run, which ECORNN_STRICT=1 forbids: {why}; "
                                "ecornn.torch.restore(model) makes the layers PyTorch's own again")
        warnings.warn(f"PyTorch's own layer runs: {why}", stacklevel=4)
    if torch.is_grad_enabled():
        suspect(weights_of(module))
    return module.TORCH.forward(module, input, hx)


_apart = torch._disable_dynamo(_by_torch)  # torch.compiler.disable() would import the whole of torch._dynamo here


def strict() -> bool:
    """Tells whether ``ECORNN_STRICT`` forbids that PyTorch's own layers run."""
    return os.environ.get("ECORNN_STRICT", "0") not in OFF


def tensors_of(hx: Any) -> tuple[Any, ...]:
    """The tensors of the initial states ``hx``, not checked."""
    return () if hx is None else tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)


# -- until the module is there ------------------------------------------------------------------
def waits(module: Any) -> bool:
    """Tells whether a call waits for its module: PyTorch has no such layer, the user wants it so, torch.func must see
    the operator, hooks of saved tensors may be a checkpoint's, which computes the call again and expects the same
    tensors, or no cache hands modules from one process to another."""
    if torch.compiler.is_compiling():  # also where a graph is broken around the call, and this function has its own
        return True
    set_to = os.environ.get
    return bool(module.TORCH is None or _now(module) or set_to(cache.VARIABLE) == cache.OFF
                or set_to("ECORNN_WAIT", "0") not in OFF or strict() or set_to(MARK) is not None)


def _now(module: Any) -> bool:
    """Tells what :func:`waits` does, of what may differ from one call to the next."""
    return (module.wait or torch.are_deterministic_algorithms_enabled() or _hooks(True) is not None
            or _functorch.maybe_current_level() is not None or forward_ad._current_level >= 0)


def call(module: Any, input: Any, hx: Any, kind: tuple[Any, ...], compiled: Callable[[], Any]) -> Any:
    """The results of ``compiled()``, or of PyTorch's layer while, or if, there is no module for this ``kind``."""
    engine = engine_of(module)
    if kind in engine.refused:
        return by_torch(module, input, hx)
    job = engine.pending.pop(kind, None)
    if job is None or not job.pending or captured(weights_of(module)[0]):
        try:
            with accepting():
                return compiled()
        except PendingError as pending:
            job, why = pending.job, ""
        except ScheduleError as error:
            job, why = None, f"no compiled layer serves this call: {error}"
        if job is None and not why:
            return by_torch(module, input, hx, "no module was compiled for this call before a CUDA graph captured "
                            "it; call ecornn.torch.prepare(model, *example) first")
        if job is not None and job.error:
            why = f"{job.spec.workload} could not be compiled: {job.error}"
        if job is None or why:
            engine.refused.add(kind)
            return by_torch(module, input, hx, why)
    if len(engine.pending) >= MOST:
        engine.pending.clear()
    engine.pending[kind] = job
    if isinstance(input, torch.Tensor):
        engine.pending[_like(input)] = job
    return by_torch(module, input, hx)


def again(engine: Engine, module: Any, x: torch.Tensor, hx: Any) -> Any:
    """The results of PyTorch's layer for a call like a pending one; None if this one is to be looked at."""
    job = engine.pending.get(like := _like(x))
    if job is not None and not job.pending:
        engine.pending.pop(like, None)
        return None
    if job is None or watching() or torch._C._is_tracing() or _now(module) or captured(x):
        return None
    if torch.is_grad_enabled():
        suspect(weights_of(module))
    return module.TORCH.forward(module, x, hx)


def _like(x: torch.Tensor) -> tuple[Any, ...]:
    """The properties that calls by :func:`again` have in common."""
    return x.shape, x.dtype, x.device, torch.is_grad_enabled()
