"""The short way of calls that are like an earlier one: on a CPU a short layer, or a cell, takes about as long as one of
PyTorch's operations, and on a GPU its launches take no longer.

The first two calls of a kind go through all checks. Then a :class:`Call` says what they were like, and later calls are
compared with that alone: any difference, an argument that does not fit among them, takes the long way, which says so.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from ecornn.program import RUN
from ecornn.runtime.torch_arrays import TorchMemory
from ecornn.torch import falling_back, stepping_training
from ecornn.torch.bound import BoundLayer
from ecornn.torch.compiling import precision_of
from ecornn.torch.engine import PLAIN, Engine, known_engine, watched, watching, weights_of
from ecornn.torch.stepping_training import TENSORS, ready

MOST = 64  # calls that a module remembers
_raw: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # of PyTorch with CUDA
_capturing = torch.cuda.is_current_stream_capturing
_tracing, _threads, _autocasts = torch._C._is_tracing, torch.get_num_threads, torch.is_autocast_enabled


def again(module: Any, x: Any, hx: Any) -> Any:
    """The results of a call of the module; None if it is like none before, or if more than results is asked for."""
    engine = known_engine(module)
    if engine is None or type(x) not in PLAIN:
        return None
    if engine.pending and (results := falling_back.again(engine, module, x, hx)) is not None:
        return results
    call: Call | None = engine.calls.get(_key(module, x))
    if (call is None or x.layout is not torch.strided or forward_ad._current_level >= 0 or watching() or _tracing()
            or _autocasts(call.kind) or (call.queue is not None and _capturing())):
        return None
    state = hx if call.count > 1 else (hx,)
    if hx is None:
        state = ()
    elif type(state) not in (tuple, list) or not call.takes(state):
        return None
    weights = weights_of(module)
    if torch.is_grad_enabled() and any([t.requires_grad for t in (x, *state, *weights)]):
        if not call.one_step or x.dtype is not torch.float32 or call.queue is not None:
            return None
        after = stepping_training.run(engine, weights, x, state)
        return after if call.count > 1 else after[0]
    if call.drops and module.training and module.dropout:
        return None
    one, layers = call.one, engine.inference
    if one is None or not layers.take_this(one, weights):
        return None
    try:
        return call(x, state)
    finally:
        layers.give(one)


def remember(engine: Engine, module: Any, x: torch.Tensor, weights: Sequence[torch.Tensor], asked: bool) -> None:
    """Has later calls like this one, which was well, go by :func:`again`; ``asked``: it was with gradients."""
    if engine.kind.projection or watched((x, *weights)) or not (x.is_cpu or (x.is_cuda and _raw and not _capturing())):
        return
    key, layers, calls = _key(module, x), engine.inference, engine.calls
    if not (asked or layers.serves(x, module.call_sizes(x))):
        return
    call: Call | None = calls.get(key)
    if call is None:
        if len(calls) >= MOST:
            calls.clear()
        # the first time it is None: with another T at each call there is nothing to make
        calls[key] = Call(module, x) if asked or key in calls else None
    elif not asked and (call.one is None or not call.one.snapshot.holds(weights)):
        one = layers.take(weights, x, module.call_sizes(x))
        try:
            calls[key] = call.bound(one)
        finally:
            layers.give(one)


def _key(module: Any, x: torch.Tensor) -> tuple[Any, ...]:
    if x.is_cpu:
        return x.shape, x.dtype, module.batch_first, _threads()
    return x.shape, x.dtype, module.batch_first, x.device, x.dtype is torch.float32 and precision_of(module, x)


class Call:
    """A call of a module on an x of this shape, without dropout and without values kept for gradients.

    Attributes
    ----------
    count : the number of states of the cell
    drops : True if dropout may come between layers
    one_step : True if the states are all that is returned
    kind : the device's
    queue : on a GPU a function that says which stream is the current one
    one : the layer, bound to weights, that computes it, once there is one
    """

    def __init__(self, module: Any, x: torch.Tensor) -> None:
        self._steps, self._batch = steps, batch = module.call_sizes(x)
        self.count, self.drops, self.one_step = len(module.state_names), module.num_layers > 1, module.one_step
        rows, hidden = module.num_layers * (1 + module.bidirectional), module.hidden_size
        single, self._dtype, self._device, self.kind = x.dim() == 2, x.dtype, x.device, x.device.type
        self.queue: Any = None if _raw is None or x.is_cpu else partial(_raw, x.device.index)
        self._swaps = bool(module.batch_first) and not single and min(steps, batch) > 1
        axes = (steps, batch) if self._swaps else (*x.shape[:-1],)
        self._y = (*axes, (1 + module.bidirectional) * len(module.output_names) * hidden)
        self._state = (*axes, hidden) if self.one_step else (rows, hidden) if single else (rows, batch, hidden)
        self.one: BoundLayer | None = None
        self._run: Any = None
        self._zeros: tuple[int, ...] = ()

    def bound(self, one: BoundLayer) -> Call:
        """The same call by this layer."""
        call = copy.copy(self)
        call.one, call._run = one, one.layer.addressed(RUN, self._steps, self._batch, TENSORS)
        call._zeros = (one.layer.zero_state(self._batch)[1],) * self.count
        return call

    def takes(self, state: Sequence[Any]) -> bool:
        """Tells whether such a call may have these states."""
        if len(state) != self.count:
            return False
        for s in state:
            if (type(s) not in PLAIN or s.dtype is not self._dtype or s.shape != self._state
                    or s.layout is not torch.strided or s.device != self._device):
                return False
        return True

    def __call__(self, x: torch.Tensor, state: Sequence[torch.Tensor]) -> Any:
        """The results of the module on x (T, B, I), or as ``batch_first`` and shapes without a batch say."""
        rows, given = ready(x.transpose(0, 1) if self._swaps else x), [*map(ready, state)]
        # never by torch.empty(), which has defaults of its own; a given one is quicker to repeat
        after = [*map(torch.empty_like, given)] or [x.new_empty(self._state) for _ in self._zeros]
        to = [s.data_ptr() for s in after]
        start = [s.data_ptr() for s in given] or self._zeros
        states = tuple(after) if self.count > 1 else after[0]
        y = None if self.one_step and self.queue is None else x.new_empty(self._y)
        pointers = rows.data_ptr(), to[0] if y is None else y.data_ptr(), *start, *to
        if self.queue is not None:
            self._run.on(self.queue(), pointers, lambda nbytes: TorchMemory(torch, nbytes, self._device))
        else:
            self._run(pointers)
        if y is None or self.one_step:
            return states
        return y.transpose(0, 1) if self._swaps else y, states
