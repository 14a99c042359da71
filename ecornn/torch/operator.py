"""``torch.ops.ecornn.recurrent``, ``recurrent_forward`` and ``recurrent_backward``: a layer, without and with
gradients, as operators that PyTorch's autograd, tracers, modes and transforms know.

They take the weights, and a text that says which kind of layer has such weights, also in another process. All that the
backward pass reads is saved as tensors: PyTorch sees changed weights, a graph used twice, and what hooks do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ecornn.boundary import public
from ecornn.runtime.columns import Columns
from ecornn.torch.engine import Engine, engine_for, kept_bytes
from ecornn.torch.engine import Passes as Taken
from ecornn.torch.kind import Kind, kind_of
from ecornn.torch.tangents import Passes, Point, changed, second, tangents

Tensors = list[torch.Tensor]


@torch.library.custom_op("ecornn::recurrent", mutates_args=())
def recurrent(x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None, weights: list[torch.Tensor],
              kind: str) -> list[torch.Tensor]:
    """y (T, B, D*H) and the states (L*D, B, H) for x (T, B, I), from ``state``, if empty from zeros. ``weights`` are as
    torch's ``_flat_weights``; ``kind`` is of :func:`ecornn.torch.kind.text_of`; ``lengths`` (B,): None: all of T."""
    return engine_for(kind_of(kind), weights).run(weights, x, state, lengths)


@torch.library.custom_op("ecornn::recurrent_forward", mutates_args=())
def recurrent_forward(x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None,
                      weights: list[torch.Tensor], kind: str) -> list[torch.Tensor]:
    """The results of ``recurrent``, and last the bytes (N,) that ``recurrent_backward`` reads besides these."""
    return engine_for(kind_of(kind), weights).forward(weights, x, state, lengths)


@torch.library.custom_op("ecornn::recurrent_backward", mutates_args=())
def recurrent_backward(x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None,
                       weights: list[torch.Tensor], kind: str, y: torch.Tensor, kept: torch.Tensor,
                       gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of x, ``state`` and ``weights``, from those of y and the last states."""
    return engine_for(kind_of(kind), weights).backward(weights, x, state, lengths, y, kept, gradients)


# -- shapes, for tracers ------------------------------------------------------------------------
@recurrent.register_fake
def _(x: torch.Tensor, state: Tensors, lengths: torch.Tensor | None, weights: Tensors, kind: str) -> Tensors:
    return [*map(x.new_empty, output_shapes(kind_of(kind), x))]


@recurrent_forward.register_fake
def _(x: torch.Tensor, state: Tensors, lengths: torch.Tensor | None, weights: Tensors, kind: str) -> Tensors:
    parsed = kind_of(kind)
    kept = x.new_empty(kept_bytes(parsed, x, lengths), dtype=torch.uint8)
    return [*map(x.new_empty, output_shapes(parsed, x)), kept]


@recurrent_backward.register_fake
def _(x: torch.Tensor, state: Tensors, lengths: torch.Tensor | None, weights: Tensors, kind: str, y: torch.Tensor,
      kept: torch.Tensor, gradients: Tensors) -> Tensors:
    return [of.new_empty(of.shape) for of in (x, *state, *weights)]


def output_shapes(kind: Kind, x: torch.Tensor) -> list[tuple[int, ...]]:
    rows, y = kind.layers * kind.directions, kind.directions * kind.outputs * kind.width
    return [(*x.shape[:2], y), *((rows, x.shape[1], width) for width in kind.widths)]


# -- gradients ----------------------------------------------------------------------------------
def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    x, state, lengths, weights, ctx.kind = inputs
    ctx.states = len(state)
    ctx.save_for_backward(x, output[0], output[-1], lengths, *state, *weights)


def _backward(ctx: Any, gradients: Tensors) -> tuple[Any, ...]:
    x, y, kept, lengths, *rest = ctx.saved_tensors
    state, weights = rest[:ctx.states], rest[ctx.states:]
    computed = recurrent_backward(x, state, lengths, weights, ctx.kind, y, kept, [*gradients[:-1]])
    needs = ctx.needs_input_grad
    needed = needs[0], *(needs[1] or ()), *needs[3]
    dx, *others = (value if need else None for value, need in zip(computed, needed, strict=True))
    return dx, others[:ctx.states], None, others[ctx.states:], None


def _save_again(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    x, state, lengths, weights, ctx.kind, _, _, gradients = inputs
    ctx.states, ctx.weights = len(state), len(weights)
    ctx.save_for_backward(lengths, x, *state, *weights, *gradients)


def _backward_again(ctx: Any, directions: Tensors) -> tuple[Any, ...]:
    lengths, *rest = ctx.saved_tensors
    given, count = [*rest[1 + ctx.states + ctx.weights:]], ctx.states
    at, direction = (Point.of(those, count) for those in (rest[:1 + count + ctx.weights], directions))
    d_gradients, (dx, *others) = second(ctx.kind, PASSES, lengths, at, direction, given)
    return dx, others[:count], None, others[count:], None, None, None, d_gradients


recurrent_forward.register_autograd(_backward, setup_context=_save)
recurrent_backward.register_autograd(_backward_again, setup_context=_save_again)


# -- past PyTorch's dispatcher ------------------------------------------------------------------
def directly(engine: Engine, x: torch.Tensor, state: Sequence[torch.Tensor], lengths: torch.Tensor | Columns | None,
             weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``recurrent`` with gradients if only autograd watches: the dispatcher takes longer than a layer's launch."""
    return [*_apply(engine, len(state), lengths, x, *state, *weights)]


class RecurrentForward(torch.autograd.Function):
    """``recurrent_forward`` of a flat list of tensors, which saves for the backward pass what the operator saves."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, states: int, lengths: Any, x: torch.Tensor,
                *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.passes = Taken()
        *outputs, kept = engine.forward(rest[states:], x, rest[:states], lengths, ctx.passes)
        ctx.engine, ctx.states, ctx.columns = engine, states, lengths if isinstance(lengths, Columns) else None
        ctx.save_for_backward(x, outputs[0], kept, lengths if ctx.columns is None else None, *rest)
        ctx.set_materialize_grads(ctx.columns is not None)
        return tuple(outputs)

    @staticmethod
    @public
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        x, y, kept, lengths, *rest = ctx.saved_tensors
        state, weights, engine = rest[:ctx.states], rest[ctx.states:], ctx.engine
        needed = ctx.needs_input_grad[3:]
        if not torch.is_grad_enabled():
            masks, wanted = ctx.columns if lengths is None else lengths, any(needed[1:1 + ctx.states])
            computed = each(lambda given: engine.backward(weights, x, state, masks, y, kept, given, wanted, ctx.passes),
                            gradients)
        else:
            computed = differentiable(engine, x, state, ctx.columns if lengths is None else lengths, weights, y, kept,
                                      gradients)
        return None, None, None, *(value if need else None for value, need in zip(computed, needed, strict=True))


def differentiable(engine: Engine, x: torch.Tensor, state: Sequence[torch.Tensor], lengths: Any,
                   weights: Sequence[torch.Tensor], y: torch.Tensor, kept: torch.Tensor,
                   gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The gradients of a layer where gradients of these may follow."""
    shapes = output_shapes(engine.kind, x)
    given = [x.new_zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=False)]
    return [*Backward.apply(engine.kind.text, len(state), lengths, x, y, kept, *given, *state, *weights)]


# past the checks of Function.apply() for torch.func, whose calls go by operators
_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, RecurrentForward).apply


def is_batched(gradient: torch.Tensor | None) -> bool:
    """Tells whether a gradient is several as one."""
    return gradient is not None and bool(torch._C._functorch.is_legacy_batchedtensor(gradient))


def each(call: Callable[[Sequence[Any]], list[Any]], gradients: Sequence[Any]) -> list[Any]:
    """The results of ``call`` on gradients; one by one, and stacked, of several as one (``is_grads_batched``)."""
    batched = [*map(is_batched, gradients)]
    if not any(batched):
        return call(gradients)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    rows = [torch._remove_batch_dim(g, level, 1, 0) if b else g for g, b in zip(gradients, batched, strict=True)]
    count = len(rows[batched.index(True)])
    results = [call([row[n] if b else row for row, b in zip(rows, batched, strict=True)]) for n in range(count)]
    return [None if one[0] is None else torch._add_batch_dim(torch.stack(one), 0, level)
            for one in zip(*results, strict=True)]


# -- transforms of torch.func -------------------------------------------------------------------
def forward(x: torch.Tensor, state: Sequence[torch.Tensor], lengths: torch.Tensor | None,
            weights: Sequence[torch.Tensor], kind: str) -> list[torch.Tensor]:
    """The results of ``recurrent_forward``, also under transforms of torch.func, which know no operator's formula."""
    if torch._C._functorch.maybe_current_level() is None and forward_ad._current_level < 0:
        return [*recurrent_forward(x, [*state], lengths, [*weights], kind)]
    return [*Forward.apply(kind, len(state), lengths, x, *state, *weights)]


class _Saved(torch.autograd.Function):
    """A pass of a flat list of tensors, that has ``lengths``, a tensor or columns, and notes what it reads."""

    @staticmethod
    def note(ctx: Any, kind: str, states: int, lengths: Any, *tensors: torch.Tensor) -> None:
        ctx.kind, ctx.states = kind, states
        ctx.columns, masks = (lengths, None) if isinstance(lengths, Columns) else (None, lengths)
        ctx.save_for_backward(masks, *tensors)
        ctx.save_for_forward(masks, *tensors)

    @staticmethod
    def noted(ctx: Any) -> tuple[Any, ...]:
        """The lengths, and the tensors."""
        masks, *tensors = ctx.saved_tensors
        return ctx.columns if masks is None else masks, *tensors


class Forward(_Saved):
    """``recurrent_forward`` of a flat list of tensors, which may be laid in columns."""

    @staticmethod
    def forward(kind: str, states: int, lengths: Any, x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state, weights = [*rest[:states]], [*rest[states:]]
        if isinstance(lengths, Columns):
            return tuple(engine_for(kind_of(kind), weights).forward(weights, x, state, lengths))
        return tuple(recurrent_forward(x, state, lengths, weights, kind))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        kind, states, lengths, x, *rest = inputs
        Forward.note(ctx, kind, states, lengths, x, output[0], output[-1], *rest)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        lengths, x, y, kept, *rest = Forward.noted(ctx)
        return None, None, None, *Backward.apply(ctx.kind, ctx.states, lengths, x, y, kept, *gradients[:-1], *rest)

    @staticmethod
    def jvp(ctx: Any, *directions: torch.Tensor | None) -> tuple[Any, ...]:
        lengths, x, _, _, *rest = Forward.noted(ctx)
        with _outer_directions():
            at = [*map(_primal, (x, *rest))]
            direction = Point.of(_whole(directions[3:], at), ctx.states)
            return *tangents(ctx.kind, PASSES, lengths, Point.of(at, ctx.states), direction), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Any, ...], ...]:
        stacked, dims = each_call(Forward.apply, info, in_dims, args)
        return tuple(stacked), tuple(dims)  # autograd takes a list for one output


class Backward(_Saved):
    """``recurrent_backward`` of a flat list of tensors: gradients of y and each state, the first states, weights."""

    @staticmethod
    def forward(kind: str, states: int, lengths: Any, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor,
                *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = 1 + len(kind_of(kind).widths)
        gradients, state, weights = [*rest[:count]], [*rest[count:count + states]], [*rest[count + states:]]
        if isinstance(lengths, Columns):
            return tuple(engine_for(kind_of(kind), weights).backward(weights, x, state, lengths, y, kept, gradients))
        return tuple(recurrent_backward(x, state, lengths, weights, kind, y, kept, gradients))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        kind, states, lengths, x, _, _, *rest = inputs
        Backward.note(ctx, kind, states, lengths, x, *rest)

    @staticmethod
    def _parts(ctx: Any) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        """The lengths; the gradients that were given; x, the first states and weights."""
        lengths, x, *rest = Backward.noted(ctx)
        count = 1 + len(kind_of(ctx.kind).widths)
        return lengths, rest[:count], [x, *rest[count:]]

    @staticmethod
    def backward(ctx: Any, *directions: torch.Tensor) -> tuple[Any, ...]:
        lengths, given, at = Backward._parts(ctx)
        changes, (dx, *others) = second(ctx.kind, PASSES, lengths, Point.of(at, ctx.states),
                                        Point.of(directions, ctx.states), given)
        return None, None, None, dx, None, None, *changes, *others

    @staticmethod
    def jvp(ctx: Any, *directions: torch.Tensor | None) -> tuple[Any, ...]:
        lengths, *parts = Backward._parts(ctx)
        dx, _, _, *rest = directions[3:]
        with _outer_directions():
            given, at = ([*map(_primal, those)] for those in parts)
            change, rest = _whole(rest[:len(given)], given), rest[len(given):]
            direction = Point.of(_whole([dx, *rest], at), ctx.states)
            return tuple(changed(ctx.kind, PASSES, lengths, Point.of(at, ctx.states), direction, given, change))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Any, ...], ...]:
        stacked, dims = each_call(Backward.apply, info, in_dims, args)
        return tuple(stacked), tuple(dims)


PASSES = Passes(lambda *args: Forward.apply(*args), lambda *args: Backward.apply(*args))


def _outer_directions() -> Any:
    """Within it directions of transforms around this one go on, which PyTorch would lose in a formula of one's own."""
    return forward_ad._set_fwd_grad_enabled(True)


def _primal(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the direction of the transform at hand."""
    return forward_ad.unpack_dual(tensor).primal


def _whole(directions: Sequence[torch.Tensor | None], at: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Directions with zeros for those that are none."""
    return [torch.zeros_like(t) if d is None else d for d, t in zip(directions, at, strict=True)]


@recurrent.register_vmap
def _(info: Any, in_dims: Any, x: torch.Tensor, state: Tensors, lengths: torch.Tensor | None, weights: Tensors,
      kind: str) -> tuple[Tensors, list[int]]:
    """The batching rule: more rows of one call; a call for each of several weights."""
    count, (x_dim, state_dims, lengths_dim, weight_dims, _) = info.batch_size, in_dims
    if any(dim is not None for dim in weight_dims or ()):
        return each_call(recurrent, info, in_dims, (x, state, lengths, weights, kind))

    def rows(tensor: torch.Tensor, dim: int | None, at: int) -> torch.Tensor:
        apart = tensor.unsqueeze(at) if dim is None else tensor.movedim(dim, at)
        return apart.expand(*apart.shape[:at], count, *apart.shape[at + 1:]).flatten(at, at + 1)

    results = recurrent(rows(x, x_dim, 1), [rows(s, d, 1) for s, d in zip(state, state_dims or (), strict=True)],
                        None if lengths is None else rows(lengths, lengths_dim, 0), weights, kind)
    return [t.unflatten(1, (count, -1)) for t in results], [1] * len(results)


def each_call(operator: Any, info: Any, in_dims: Any, args: Any) -> tuple[Tensors, list[int]]:
    """A batching rule: a call for each element of the batch, whose results are stacked along axis 0."""
    def one(value: Any, dim: Any, number: int) -> Any:
        if isinstance(value, list):
            return [one(v, d, number) for v, d in zip(value, dim or [None] * len(value), strict=True)]
        return value if dim is None else value.select(dim, number)

    calls = [operator(*(one(v, d, n) for v, d in zip(args, in_dims, strict=True))) for n in range(info.batch_size)]
    stacked = [torch.stack(parts) for parts in zip(*calls, strict=True)]
    return stacked, [0] * len(stacked)


for _operator in (recurrent_forward, recurrent_backward):
    _operator.register_vmap(lambda info, in_dims, *args, _call=_operator: each_call(_call, info, in_dims, args))


# -- floating-point operations ------------------------------------------------------------------
def flops(x: torch.Tensor, state: Any, lengths: torch.Tensor | None, weights: Tensors, *_: Any, **__: Any) -> int:
    """Operations of the products: each matrix with each row at each step, of all of T if lengths have no values."""
    steps = prod(x.shape[:2]) if lengths is None or isinstance(lengths, FakeTensor) else int(lengths.sum())
    return sum(2 * steps * w.numel() for w in weights if w.dim() == 2)


register_flop_formula(torch.ops.ecornn.recurrent, get_raw=True)(flops)
register_flop_formula(torch.ops.ecornn.recurrent_forward, get_raw=True)(flops)
# a backward pass computes the gradients of both factors of each product
register_flop_formula(torch.ops.ecornn.recurrent_backward, get_raw=True)(lambda *args, **rest: 2 * flops(*args, **rest))
