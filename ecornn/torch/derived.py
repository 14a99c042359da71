"""Weights of a ``Recurrent`` whose cell computes them from its parameters, by PyTorch's operations, once in a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ecornn.cells import Cell, derive
from ecornn.torch.dispatching import watched
from ecornn.torch.snapshot import Snapshot

# for calls without gradients: the parameters, the weights that were computed of them, and whether in inference mode
_known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Snapshot, list[torch.Tensor], bool]] = \
    weakref.WeakKeyDictionary()
_calls = threading.local()  # the weights of modules that this thread is calling


class Derived:
    """Computes the weights with these ``names``, in this order, of a module's ``learned`` ones, with their
    gradients."""

    def __init__(self, cell: Cell, input: int, hidden: int, learned: list[str], names: list[str]) -> None:
        self._cell, self._input, self._hidden, self._learned, self._names = cell, input, hidden, learned, names

    def weights(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The weights of the module as it is now."""
        calls: tuple[tuple[torch.nn.Module, list[torch.Tensor]], ...] = getattr(_calls, "now", ())
        for called, weights in calls:
            if called is module:
                return weights
        own = [getattr(module, name) for name in self._learned]
        if torch.compiler.is_compiling() or watched(own):
            return self._computed(own)
        if torch.is_grad_enabled() and any(w.requires_grad for w in own):
            weights = self._computed(own)
            for weight in weights:
                if weight.requires_grad:  # an optimizer comes next, and some leave no trace
                    weight.register_hook(partial(_trained, weakref.ref(module)))
            return weights
        known = _known.get(module)
        inference = torch.is_inference_mode_enabled()  # no graph keeps tensors of that
        if known is None or known[2] != inference or not known[0].holds(own):
            known = _known[module] = Snapshot(own), self._computed(own), inference
        return known[1]

    def _computed(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        weights = derive(self._cell, dict(zip(self._learned, own, strict=True)), self._input, self._hidden)
        return [torch.as_tensor(weights[name]).contiguous() for name in self._names]  # NumPy's if computed of none

    @contextmanager
    def once(self, module: torch.nn.Module) -> Iterator[None]:
        """Gives all calls within the context the same weights, whose gradients go one way back."""
        before = getattr(_calls, "now", ())
        _calls.now = ((module, self.weights(module)), *before)
        try:
            yield
        finally:
            _calls.now = before


def _trained(module: weakref.ref[torch.nn.Module], gradient: torch.Tensor) -> None:
    """Runs as a hook of a weight, when its gradient is there."""
    alive = module()
    if alive is not None:
        forget(alive)


def forget(module: torch.nn.Module) -> None:
    """Has the next call compute the module's weights again."""
    _known.pop(module, None)
