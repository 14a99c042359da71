"""The short way of calls that are like an earlier one, which cost about as much as one of PyTorch's operations; and one
step of a cell with gradients.

The first two calls of a kind go through all checks, and a :class:`Call` says what they were like. Later calls that
differ in anything, an argument that does not fit among them, take the long way, which says so."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from ecornn.program import RUN
from ecornn.runtime.torch_arrays import TorchMemory
from ecornn.torch import falling_back, native
from ecornn.torch.bound import BoundLayer, place_of
from ecornn.torch.by_address import TENSORS, LayerStep, raw_stream, ready
from ecornn.torch.compiling import NAMES, precision_of
from ecornn.torch.engine import PLAIN, Engine, by_layer, captured, known_engine, watched, watching, weights_of
from ecornn.torch.operator import directly, each, is_batched, recurrent_backward
from ecornn.torch.snapshot import suspect
from ecornn.workload import summed

MOST = 64  # calls that a module remembers
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
    if (call is None or x.layout is not torch.strided or watching() or _tracing()
            or _autocasts(call.kind) or (call.queue is not None and _capturing())):
        return None
    state = hx if call.count > 1 else (hx,)
    if hx is None:
        state = ()
    elif type(state) not in (tuple, list) or not call.takes(state):
        return None
    weights = weights_of(module)
    if torch.is_grad_enabled() and any([t.requires_grad for t in (x, *state, *weights)]):
        if call.one_step:
            after = train_step(engine, weights, x, state)
            return after if call.count > 1 else after[0]
        return call.train(engine, module, x, state, weights) if call.trains else None
    if call.drops and module.training and module.dropout:
        return None
    one, layers = call.one, engine.inference
    if one is None or not layers.take_this(one, weights, place=call.queue and call.queue()):
        return None
    try:
        return call(x, state)
    finally:
        layers.give(one)


def remember(engine: Engine, module: Any, x: torch.Tensor, weights: Sequence[torch.Tensor], asked: bool) -> None:
    """Has later calls like this one, which was well, go by :func:`again`; ``asked``: it was with gradients."""
    if engine.kind.projection or watched((x, *weights)) or not (
            x.is_cpu or (x.is_cuda and raw_stream and not _capturing())):
        return
    key, layers, calls = _key(module, x), engine.inference, engine.calls
    if not (asked and module.one_step) and not (engine.trained if asked else layers).serves(x, module.call_sizes(x)):
        return
    call: Call | None = calls.get(key)
    if call is not None and asked:
        call.trains = x.dim() == 3
    elif call is None:
        if len(calls) >= MOST:
            calls.clear()
        # the first time it is None: with another T at each call there is nothing to make
        calls[key] = Call(module, x, asked) if asked or key in calls else None
    elif call.one is None or not call.one.holds(weights, call.queue and call.queue()):
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
    """A call of a module on an x of this shape, without dropout; ``trains``: there was one with gradients."""

    def __init__(self, module: Any, x: torch.Tensor, trains: bool = False) -> None:
        self._steps, self._batch = steps, batch = module.call_sizes(x)
        self.count, self.one_step = len(module.state_names), module.one_step  # whether states are all that is returned
        self.drops = module.num_layers > 1  # or may, if the module has a dropout
        self.trains = trains and x.dim() == 3
        rows, hidden = module.num_layers * (1 + module.bidirectional), module.hidden_size
        single, self._dtype, self._device, self.kind = x.dim() == 2, x.dtype, x.device, x.device.type
        # the current stream
        self.queue: Any = None if raw_stream is None or x.is_cpu else partial(raw_stream, x.device.index)
        self._batch_first = bool(module.batch_first) and not single
        self._swaps = self._batch_first and min(steps, batch) > 1
        axes = (steps, batch) if self._swaps else (*x.shape[:-1],)
        self._y = (*axes, (1 + module.bidirectional) * len(module.output_names) * hidden)
        self._state = (*axes, hidden) if self.one_step else (rows, hidden) if single else (rows, batch, hidden)
        self._native: dict[Any, native.NativeStep | None] = {}  # by stream
        self.one: BoundLayer | None = None  # which computes it
        self._run: Any = None
        self._zeros: tuple[int, ...] = ()

    def bound(self, one: BoundLayer) -> Call:
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
        y = None if self.one_step else x.new_empty(self._y)  # of one step it may be where h is
        pointers = rows.data_ptr(), to[0] if y is None else y.data_ptr(), *start, *to
        if self.queue is not None:
            self._run.on(self.queue(), pointers, lambda nbytes: TorchMemory(torch, nbytes, self._device))
        else:
            self._run(pointers)
        if y is None:
            return states
        return y.transpose(0, 1) if self._swaps else y, states


    def train(self, engine: Engine, module: Any, x: torch.Tensor, state: Sequence[torch.Tensor],
              weights: Sequence[torch.Tensor]) -> Any:
        """The results of a layer on x, with gradients; None if this call is to be looked at."""
        if (weights[0].dtype is not self._dtype or not PLAIN.issuperset(map(type, weights))
                or (self.drops and (module._drops or by_layer(module, weights)))):
            return None
        place = self.queue and self.queue()
        step = self._native.get(place)
        found = step and step(x, state, weights)
        if found:
            y, *after = found
        else:
            y, *after = directly(engine, x.transpose(0, 1) if self._batch_first else x, state, None, weights)
            if native.library():
                self._native[place] = native.step_for(engine, y, weights, place, self._batch_first, step)
            y = y.transpose(0, 1) if self._batch_first else y
        return y, tuple(after) if self.count > 1 else after[0]


# -- one step of a cell with gradients ----------------------------------------------------------
# Each call is a node of its own in PyTorch's graph; all calls of a graph add their gradients of weights to one place,
# from which they are handed on once, when the last of these calls has added its own. So T calls add T times to one
# array, in place of T new ones that are added one by one. PyTorch's engine says when all are there: calls depend on a
# token, which depends on the weights, and whose own backward pass comes after theirs.
def train_step(engine: Engine, weights: Sequence[torch.Tensor], x: torch.Tensor,
               state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The states after x (B, I), or (I,), from ``state``, or from zeros if that is empty; callers check these."""
    place = place_of(x)  # streams add up gradients apart, since nothing orders their calls
    known = reference() if (reference := engine.shared.get(place)) is not None else None
    if known is None or not known.serves(weights):
        known = Shared(engine, weights, place)
        engine.shared[place] = weakref.ref(known)
    return _apply(known, known.token, ready(x), *map(ready, state))


class Shared:
    """The common part of the calls of a graph, which depend on its ``token``, and live as long as one of them does."""

    def __init__(self, engine: Engine, weights: Sequence[torch.Tensor], place: Any) -> None:
        self.engine, self.weights, self.place = engine, (*weights,), place
        self._asked = [w.requires_grad for w in weights]
        self.sums = Sums(weights)
        self.token: torch.Tensor = _Hand.apply(self.sums, *weights)

    def serves(self, weights: Sequence[torch.Tensor]) -> bool:
        return len(weights) == len(self.weights) and all(
            w is known and w.requires_grad == asked
            for w, known, asked in zip(weights, self.weights, self._asked, strict=True))

    def check(self, versions: list[int]) -> None:
        """Raises RuntimeError, as PyTorch does, if weights have changed since they had these versions."""
        for name, was, now in zip(self.engine.kind.names, versions, self.weights, strict=True):
            if was != now._version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name.removesuffix('_l0')} is at version {now._version}; expected version {was} instead")


class Sums:
    """The gradients of weights of each backward pass that is under way, of float32 where weights have 16 bits."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weight, self._shapes = weights[0].detach(), [w.shape for w in weights]
        if len(weights) == 2:  # a module has biases, and adds to their gradients
            self._shapes += [weights[0].shape[:1]] * 2
        self._dtype: torch.dtype = getattr(torch, summed(NAMES[weights[0].dtype]))
        self._passes: dict[int, list[torch.Tensor]] = {}

    def of(self, suspects: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of the backward pass that calls, zeros at first."""
        number = torch._C._current_graph_task_id()
        sums = self._passes.get(number)
        if sums is None:
            sums = self._passes[number] = [self._weight.new_empty(s, dtype=self._dtype) for s in self._shapes]
            torch._foreach_zero_(sums)  # one kernel for all

            def end() -> None:
                self._passes.pop(number, None)  # nobody has asked for them
                suspect(suspects)  # an optimizer may come next

            Variable._execution_engine.queue_callback(end)
        return sums

    def take(self) -> list[torch.Tensor] | None:
        """The same gradients, once all calls have added theirs."""
        return self._passes.pop(torch._C._current_graph_task_id(), None)


class _Hand(torch.autograd.Function):
    """Makes the token of weights; backward hands on the gradients that calls have added up."""

    @staticmethod
    def forward(ctx: Any, sums: Sums, *weights: torch.Tensor) -> torch.Tensor:
        ctx.sums, ctx.dtype = sums, weights[0].dtype
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        sums = ctx.sums.take()
        needed = ctx.needs_input_grad[1:]
        return None, *(sums[n].to(ctx.dtype) if sums is not None and need else None for n, need in enumerate(needed))


def _taken(shared: Shared, x: torch.Tensor, again: bool) -> tuple[BoundLayer, LayerStep]:
    """Takes the layer with the weights as they are now, or, ``again``, as they were in an earlier call, and its step
    for as many rows as x has."""
    engine, weights, batch = shared.engine, shared.weights, math.prod(x.shape[:-1])
    key = x.shape, shared.place, "training"
    one: BoundLayer | None = engine.calls.get(key)
    if one is None or again or not engine.trained.take_this(one, weights):
        one = engine.calls[key] = engine.trained.take(weights, x, (1, batch), again=again)
    step = one.step(1, batch)
    assert step is not None
    return one, step


class _Step(torch.autograd.Function):
    """Computes the states after x (B, I), or (I,), from ``state`` or from zeros. What is saved has an h of its own: a
    program may write to the one that it gets."""

    @staticmethod
    def forward(ctx: Any, shared: Shared, token: torch.Tensor, x: torch.Tensor,
                *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.one, ctx.step = one, step = _taken(shared, x, False)
        kind = shared.engine.kind
        shape = *x.shape[:-1], kind.hidden
        try:
            ctx.packs = one.packs
            memory = x.new_empty(step.kept_bytes + x.itemsize * math.prod(shape), dtype=torch.uint8)
            after = [*map(torch.empty_like, state)] or [x.new_empty(shape) for _ in kind.widths]
            start = memory.data_ptr()
            step.ahead(x, state, start + step.kept_bytes, after, start)
        finally:
            shared.engine.trained.give(one)
        ctx.shared, ctx.versions = shared, one.snapshot.versions
        ctx.save_for_backward(memory, x, *state)
        ctx.set_materialize_grads(False)
        return tuple(after)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        memory, x, *state = ctx.saved_tensors
        shared, one, step, trained = ctx.shared, ctx.one, ctx.step, ctx.shared.engine.trained
        sums = shared.sums.of(shared.weights)
        if torch.is_grad_enabled() or any(map(is_batched, gradients)) or captured(x):
            kept, y = memory.split((step.kept_bytes, len(memory) - step.kept_bytes))
            shared.check(ctx.versions)
            return None, None, *_by_operator(shared, sums, x, state, y.view(x.dtype), kept, gradients)
        memory, x, *state = map(ready, (memory, x, *state))  # they may have been away, in a file
        if not trained.take_this(one, shared.weights, ctx.packs):
            shared.check(ctx.versions)
            one, step = _taken(shared, x, True)
        try:
            kind, start = shared.engine.kind, memory.data_ptr()
            dx, shape, wanted = torch.empty_like(x), (*x.shape[:-1], kind.hidden), state or not step.optional
            before = [x.new_empty(shape) for _ in kind.widths] if wanted else []
            step.back(x, state, start + step.kept_bytes, start,
                      (None, *[g if g is None else ready(g) for g in gradients]), dx, before, sums, True)
        finally:
            trained.give(one)
        return None, None, dx, *before[:len(state)]


# past the checks of Function.apply() for torch.func, whose calls go by operators
_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Step).apply


def _by_operator(shared: Shared, sums: list[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
                 y: torch.Tensor, kept: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The gradients by the operator: it refuses gradients of these, and it takes several at once."""
    kind, weights = shared.engine.kind, shared.weights
    rows, *states = [t.reshape(1, -1, t.shape[-1]) for t in (x, *state)]
    shape = *rows.shape[:2], kind.hidden

    def call(given: Sequence[torch.Tensor | None]) -> Any:
        whole = [x.new_zeros(shape) if g is None else g.reshape(shape) for g in (None, *given)]
        return recurrent_backward(rows, states, None, [*weights], kind.text, y.view(shape), kept, whole)

    dx, *rest = each(call, gradients)
    for number, gradient in enumerate(rest[len(state):]):
        sums[number] = sums[number] + gradient
    return [dx.view(x.shape), *(d.view(s.shape) for d, s in zip(rest, state, strict=False))]
