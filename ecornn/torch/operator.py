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
from torch.utils.flop_counter import register_flop_formula

from ecornn.boundary import public
from ecornn.errors import DerivativeError
from ecornn.runtime.columns import Columns
from ecornn.torch.engine import Engine, Passes, engine_for, kept_bytes
from ecornn.torch.kind import Kind, kind_of

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


def refuse_again(*_: Any) -> None:
    """Raises :class:`~ecornn.errors.DerivativeError` in place of computing gradients of gradients."""
    raise DerivativeError("compiled layers have no gradients of gradients. To compute them, call "
                          "ecornn.torch.restore(model) first, which makes the layers torch.nn's again; on a GPU also "
                          "set torch.backends.cudnn.flags(enabled=False)")


recurrent_forward.register_autograd(_backward, setup_context=_save)
recurrent_backward.register_autograd(refuse_again)


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
        ctx.passes = Passes()
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
        elif ctx.columns is not None:
            computed = ColumnsBackward.apply(engine, ctx.columns, ctx.states, len(gradients), *gradients, x, y, kept,
                                             *rest)
        else:
            computed = refusing_again(engine, x, state, lengths, weights, y, kept, gradients)
        return None, None, None, *(value if need else None for value, need in zip(computed, needed, strict=True))


def refusing_again(engine: Engine, x: torch.Tensor, state: Sequence[torch.Tensor], lengths: torch.Tensor | None,
                   weights: Sequence[torch.Tensor], y: torch.Tensor, kept: torch.Tensor,
                   gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The gradients of a layer where gradients of these may follow, which the operator refuses."""
    shapes = output_shapes(engine.kind, x)
    given = [x.new_zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=True)]
    found: list[torch.Tensor] = recurrent_backward(x, [*state], lengths, [*weights], engine.kind.text, y, kept, given)
    return found


# past the checks of Function.apply() for torch.func, whose calls go by operators
_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, RecurrentForward).apply


class ColumnsBackward(torch.autograd.Function):
    """The gradients of a layer on columns, which have none themselves."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, columns: Columns, states: int, outputs: int,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients, (x, y, kept, *rest) = tensors[:outputs], tensors[outputs:]
        return tuple(engine.backward(rest[states:], x, rest[:states], columns, y, kept, gradients))

    backward = staticmethod(refuse_again)


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
    if torch._C._functorch.maybe_current_level() is None:
        return [*recurrent_forward(x, [*state], lengths, [*weights], kind)]
    return [*Forward.apply(kind, len(state), lengths, x, *state, *weights)]


class Forward(torch.autograd.Function):
    """``recurrent_forward`` of a flat list of tensors."""

    @staticmethod
    def forward(kind: str, states: int, lengths: Any, x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(recurrent_forward(x, [*rest[:states]], lengths, [*rest[states:]], kind))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.kind, ctx.states, lengths, x, *rest = inputs
        ctx.save_for_backward(lengths, x, output[0], output[-1], *rest)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        lengths, x, y, kept, *rest = ctx.saved_tensors
        return None, None, None, *Backward.apply(ctx.kind, ctx.states, lengths, x, y, kept, *gradients[:-1], *rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Any, ...], ...]:
        stacked, dims = each_call(Forward.apply, info, in_dims, args)
        return tuple(stacked), tuple(dims)  # autograd takes a list for one output


class Backward(torch.autograd.Function):
    """``recurrent_backward`` of a flat list of tensors: gradients of y and each state, the first states, weights."""

    @staticmethod
    def forward(kind: str, states: int, lengths: Any, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor,
                *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = 1 + len(kind_of(kind).widths)
        gradients, rest = rest[:count], rest[count:]
        return tuple(recurrent_backward(x, [*rest[:states]], lengths, [*rest[states:]], kind, y, kept, [*gradients]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    backward = staticmethod(refuse_again)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Any, ...], ...]:
        stacked, dims = each_call(Backward.apply, info, in_dims, args)
        return tuple(stacked), tuple(dims)


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
