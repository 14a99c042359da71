"""Watched calls go through PyTorch's dispatcher, all others the short way past it.

Modes, functorch's transforms, tensor subclasses, tracers and the profiler see registered operators only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import forward_ad, profiler
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_functorch = torch._C._functorch
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
PLAIN = {torch.Tensor, torch.nn.Parameter}  # classes that run no code of a subclass


def watching() -> bool:
    """Tells whether somebody watches all calls."""
    if _modes() or _functorch.maybe_current_level() is not None or profiler._is_profiler_enabled:
        return True
    # torch.device(...) as a context has nothing to see here
    return _function_modes() > 0 and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def watched(tensors: Iterable[torch.Tensor]) -> bool:
    """Tells whether a call on these tensors must go through the dispatcher."""
    return watching() or not PLAIN.issuperset(map(type, tensors))


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
