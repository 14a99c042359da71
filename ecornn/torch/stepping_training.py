"""One step of a cell with gradients. Each call is a node of its own in PyTorch's graph; all calls of a graph add their
gradients of weights to one place, from which they are handed on once, when the last of these calls has added its own.

So T calls add T times to one array, in place of T new ones that are added one by one. PyTorch's engine says when all
are there: calls depend on a token, which depends on the weights, and whose own backward pass comes after theirs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from ecornn.errors import ArgumentError
from ecornn.program import BACKWARD, FORWARD
from ecornn.torch.bound import BoundLayer
from ecornn.torch.engine import Engine
from ecornn.torch.operator import each, is_batched, recurrent_backward
from ecornn.torch.snapshot import suspect

ALIGNMENT = 16  # bytes, of what modules read
TENSORS = "x", "y", "state_in", "state_out"
BACK = "x", "y", "state_in", "dy", "dstate_out", "dx", "dstate_in", "gradient"


def run(engine: Engine, weights: Sequence[torch.Tensor], x: torch.Tensor,
        state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The states after x (B, I), or (I,), from ``state``, or from zeros if that is empty; callers check these."""
    known = engine.shared() if engine.shared is not None else None
    if known is None or not known.serves(weights):
        known = Shared(engine, weights)
        engine.shared = weakref.ref(known)
    return _apply(known, known.token, ready(x), *map(ready, state))


class Shared:
    """The common part of the calls of a graph, which lives as long as one of them does.

    Attributes
    ----------
    weights : the tensors
    sums : their gradients
    token : a tensor that all calls depend on
    """

    def __init__(self, engine: Engine, weights: Sequence[torch.Tensor]) -> None:
        self.engine, self.weights = engine, (*weights,)
        self._asked = [w.requires_grad for w in weights]
        self.sums = Sums(weights)
        self.token: torch.Tensor = _Hand.apply(self.sums, *weights)

    def serves(self, weights: Sequence[torch.Tensor]) -> bool:
        """Tells whether these are the weights."""
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
    """The gradients of weights of each backward pass that is under way."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = [w.detach() for w in weights]
        if len(weights) == 2:  # a module has biases, and adds to their gradients
            self._weights += [weights[0].new_empty(len(weights[0]))] * 2
        self._passes: dict[int, list[torch.Tensor]] = {}

    def of(self, suspects: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of the backward pass that calls, zeros at first."""
        number = torch._C._current_graph_task_id()
        sums = self._passes.get(number)
        if sums is None:
            sums = self._passes[number] = [w.new_zeros(w.shape) for w in self._weights]

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
        ctx.sums = sums
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        sums = ctx.sums.take()
        needed = ctx.needs_input_grad[1:]
        return None, *(sums[n] if sums is not None and need else None for n, need in enumerate(needed))


class TrainingStep:
    """A step forward and back for as many rows as x has, by a layer that is bound to weights, ``one``."""

    def __init__(self, engine: Engine, one: BoundLayer, x: torch.Tensor) -> None:
        self.one, batch = one, rows_of(x)
        self._forward = one.layer.addressed(FORWARD, 1, batch, TENSORS)
        self._backward = one.layer.addressed(BACKWARD, 1, batch, BACK)
        self._shape = (*x.shape[:-1], engine.kind.hidden)
        self._zero = one.layer.zero_state(batch)[1]
        self._zeros = [self._zero] * len(engine.kind.widths)
        self.kept_bytes = self._forward.kept_bytes
        self._bytes = self.kept_bytes + 4 * batch * engine.kind.hidden

    def forward(self, x: torch.Tensor, state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The memory that backward reads, y at its end, and the states after x."""
        memory = x.new_empty(self._bytes, dtype=torch.uint8)
        after = [*map(torch.empty_like, state)] or [x.new_empty(self._shape) for _ in self._zeros]
        start = memory.data_ptr()
        self._forward((x.data_ptr(), start + self.kept_bytes, *([s.data_ptr() for s in state] or self._zeros),
                       *[s.data_ptr() for s in after]), start)
        return memory, after

    def backward(self, memory: torch.Tensor, x: torch.Tensor, state: Sequence[torch.Tensor],
                 gradients: Sequence[torch.Tensor | None], sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of x and of the states before it; those of weights are added to ``sums``."""
        outputs = [torch.empty_like(x), *[x.new_empty(self._shape) for _ in self._zeros]]
        start, zero = memory.data_ptr(), self._zero
        self._backward((x.data_ptr(), start + self.kept_bytes, *([s.data_ptr() for s in state] or self._zeros), zero,
                        *[zero if g is None else g.data_ptr() for g in gradients], *[o.data_ptr() for o in outputs],
                        *[s.data_ptr() for s in sums]), start)
        return outputs


def _taken(shared: Shared, x: torch.Tensor, again: bool) -> TrainingStep:
    """Takes a step of the layer with the weights as they are now, or, ``again``, as they were in an earlier call."""
    engine, weights, key = shared.engine, shared.weights, (x.shape, torch.get_num_threads(), "training")
    step: TrainingStep | None = engine.calls.get(key)
    if step is None or again or not engine.trained.take_this(step.one, weights):
        one = engine.trained.take(weights, x, (1, rows_of(x)), again=again)
        if step is None or step.one is not one:
            step = engine.calls[key] = TrainingStep(engine, one, x)
    return step


class _Step(torch.autograd.Function):
    """Computes the states after x (B, I), or (I,), from ``state`` or from zeros."""

    @staticmethod
    def forward(ctx: Any, shared: Shared, token: torch.Tensor, x: torch.Tensor,
                *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step = ctx.step = _taken(shared, x, False)
        try:
            ctx.packs = step.one.packs
            memory, after = step.forward(x, state)
        finally:
            shared.engine.trained.give(step.one)
        ctx.shared, ctx.versions = shared, step.one.snapshot.versions
        ctx.save_for_backward(memory, x, *state)
        ctx.set_materialize_grads(False)
        return tuple(after)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        memory, x, *state = ctx.saved_tensors
        shared, step, trained = ctx.shared, ctx.step, ctx.shared.engine.trained
        sums = shared.sums.of(shared.weights)
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            kept, y = memory.split((step.kept_bytes, len(memory) - step.kept_bytes))
            shared.check(ctx.versions)
            return None, None, *_by_operator(shared, sums, x, state, y.view(x.dtype), kept, gradients)
        memory, x, *state = map(ready, (memory, x, *state))  # they may have been away, in a file
        if not trained.take_this(step.one, shared.weights, ctx.packs):
            shared.check(ctx.versions)
            step = _taken(shared, x, True)
        try:
            dx_and_states = step.backward(memory, x, state, [g if g is None else ready(g) for g in gradients], sums)
        finally:
            trained.give(step.one)
        return None, None, *dx_and_states[:1 + len(state)]


# past the checks of Function.apply() for torch.func, whose calls go by operators
_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Step).apply


def _by_operator(shared: Shared, sums: list[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
                 y: torch.Tensor, kept: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The gradients by the operator: it refuses gradients of these, and it takes several at once."""
    kind, weights = shared.engine.kind, shared.weights
    rows, *states = [t.reshape(1, -1, t.shape[-1]) for t in (x, *state)]
    shape = *rows.shape[:2], kind.hidden

    def call(given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        whole = [x.new_zeros(shape) if g is None else g.reshape(shape) for g in (None, *given)]
        computed: list[torch.Tensor] = recurrent_backward(rows, states, None, [*weights], kind.text, y.view(shape),
                                                          kept, whole)
        return computed

    dx, *rest = each(call, gradients)
    for number, gradient in enumerate(rest[len(state):]):
        sums[number] = sums[number] + gradient
    return [dx.view(x.shape), *(d.view(s.shape) for d, s in zip(rest, state, strict=False))]


def rows_of(x: torch.Tensor) -> int:
    """B of x (B, I), or (I,)."""
    return math.prod(x.shape[:-1])


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that a module can read. Raises :class:`ArgumentError` for a tensor that has no memory."""
    pointer = tensor.data_ptr()
    if pointer and not pointer % ALIGNMENT and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    if not pointer and tensor.numel() and not tensor._is_zerotensor():  # as autograd has zeros
        raise ArgumentError("an input", f"a {type(tensor).__name__} without memory of its own", "a tensor with memory")
    return tensor.clone(memory_format=torch.contiguous_format)
