"""Calls whose module is not there yet: PyTorch's own layer computes them, forward and backward, in the meantime.

:func:`call` makes a call. Where that finds no module, one is compiled in the background, and the first call once it is
there has the compiled layer. :func:`again` is the short way of the calls in between: PyTorch's layer may take less time
than the look at what a call is. Where :func:`waits` says so a call waits for its module.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ecornn.build import cache
from ecornn.errors import ScheduleError
from ecornn.torch.background import PendingError, accepting
from ecornn.torch.dispatching import watching
from ecornn.torch.engine import Engine, engine_of, weights_of
from ecornn.torch.falling_back import by_torch
from ecornn.torch.snapshot import suspect
from ecornn.worker import MARK

VARIABLE = "ECORNN_WAIT"
OFF = "", "0"
MOST = 64  # kinds of calls that an engine notes as pending

_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def waits(module: Any) -> bool:
    """Tells whether a call of a layer waits until its module is compiled: PyTorch has no such layer, the user wants it
    so (``module.wait``, ``ECORNN_WAIT``, ``ECORNN_STRICT``, deterministic algorithms), a transform of torch.func has to
    see the operator, hooks of saved tensors may be those of a checkpoint, which computes the call again and expects
    the same tensors, or no cache can hand a module from one process to another."""
    if torch.compiler.is_compiling():  # also where a graph is broken around the call, and this function has its own
        return True
    set_to = os.environ.get
    return bool(
        module.TORCH is None or _now(module) or set_to(cache.VARIABLE) == cache.OFF
        or set_to(VARIABLE, "0") not in OFF or set_to("ECORNN_STRICT", "0") not in OFF or set_to(MARK) is not None)


def _now(module: Any) -> bool:
    """Tells what :func:`waits` does, of what may differ from one call to the next."""
    return (module.wait or torch.are_deterministic_algorithms_enabled() or _hooks(True) is not None
            or torch._C._functorch.maybe_current_level() is not None)


def call(module: Any, input: Any, hx: Any, kind: tuple[Any, ...], compiled: Callable[[], Any]) -> Any:
    """The results of ``compiled()``, or of PyTorch's layer where the module of that is pending.

    ``kind``: what the modules of a call depend on, so that later calls of this kind need not look for them. If there
    will be none, PyTorch's layer warns once of the reason.
    """
    engine = engine_of(module)
    if kind in engine.refused:
        return by_torch(module, input, hx)
    job = engine.pending.pop(kind, None)
    if job is None or not job.pending or _captured(weights_of(module)[0].device):
        try:
            with accepting():
                return compiled()
        except PendingError as pending:
            job, why = pending.job, ""
        except ScheduleError as error:
            job, why = None, f"no compiled layer serves this: {error}"
        if job is None and not why:
            return by_torch(module, input, hx, "a CUDA graph captures this call, and no module was compiled for it "
                            "before; ecornn.torch.prepare(model, *example) compiles ahead")
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
    """The results of PyTorch's layer for a call like one whose module is pending; None if there is none, or if this
    call is to be looked at: somebody watches it, or it waits."""
    job = engine.pending.get(like := _like(x))
    if job is not None and not job.pending:
        engine.pending.pop(like, None)
        return None
    if job is None or watching() or torch._C._is_tracing() or _now(module) or _captured(x.device):
        return None
    if torch.is_grad_enabled():
        suspect(weights_of(module))
    return module.TORCH.forward(module, x, hx)


def _captured(device: torch.device) -> bool:
    """Tells whether a CUDA graph captures this call, and so keeps for ever what computes it."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _like(x: torch.Tensor) -> tuple[Any, ...]:
    """The properties that calls by :func:`again` have in common."""
    return x.shape, x.dtype, x.device, torch.is_grad_enabled()
