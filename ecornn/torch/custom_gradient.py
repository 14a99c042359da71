"""Values with derivatives of their own in PyTorch, and reading them from a user's ``torch.autograd.Function``.

PyTorch's exporter traces the forward pass of a Function alone. While a step is exported, :func:`own_backwards` has each
Function also trace its backward pass, of ones. The results are the derivatives if the pass multiplies its argument by a
value for each element; any other is found when the cell is compared with its module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ecornn.errors import CellError, source_line


@torch.library.custom_op("ecornn::custom_gradient", mutates_args=())
def recorded(input: torch.Tensor, operands: Sequence[torch.Tensor],
             derivatives: Sequence[torch.Tensor]) -> torch.Tensor:
    """``input``, whose derivatives by ``operands`` are ``derivatives``, of shapes that broadcast to its own."""
    return input.clone()


@recorded.register_fake
def _(input: torch.Tensor, operands: Sequence[torch.Tensor], derivatives: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(input)


def _saved(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1], *inputs[2])


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    count = len(ctx.saved_tensors) // 2
    both = zip(ctx.saved_tensors[:count], ctx.saved_tensors[count:], strict=True)
    return None, [(gradient * d).sum_to_size(x.shape) for x, d in both], [None] * count


recorded.register_autograd(_backward, setup_context=_saved)


class Context:
    """The ``ctx`` of a Function whose passes are traced one behind the other."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()
        self.dirty, self.without = set[int](), set[int]()  # ids of tensors

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = {*map(id, tensors)}

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.without = {*map(id, tensors)}

    def set_materialize_grads(self, value: bool) -> None:
        """Gradients that are not there are zeros in any case."""

    def save_for_forward(self, *tensors: Any) -> None:
        """Forward derivatives are not traced."""


@contextmanager
def own_backwards() -> Iterator[None]:
    """Within it, and in this thread, results of Functions of the user's are nodes with the Functions' derivatives."""
    thread, kinds = threading.get_ident(), [*_functions(torch.autograd.Function)]
    before = [(kind, {name: vars(kind)[name] for name in ("forward", "setup_context") if name in vars(kind)},
               kind.forward, kind.setup_context) for kind in kinds]
    plain = torch.autograd.Function.setup_context
    try:
        for kind, _, forward, setup in before:  # by attribute, since apply() may have been taken from the class before
            kind.forward = staticmethod(_traced(kind, forward, None if setup is plain else setup, thread))
            if setup is not plain:
                kind.setup_context = staticmethod(_elsewhere(setup, thread))
        yield
    finally:
        for kind, own, _, _ in before:
            for name in ("forward", "setup_context"):
                if name in own:
                    setattr(kind, name, own[name])
                elif name in vars(kind):
                    delattr(kind, name)


def _functions(kind: Any) -> Iterator[Any]:
    """All Functions that are neither PyTorch's nor ecornn's."""
    for below in kind.__subclasses__():
        if below.__module__.partition(".")[0] not in ("torch", "ecornn"):
            yield below
        yield from _functions(below)


def _elsewhere(function: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """The function in any thread but this one, where it does nothing."""
    return lambda *args: None if threading.get_ident() == thread else function(*args)


def _traced(kind: Any, forward: Callable[..., Any], setup: Callable[..., Any] | None,
            thread: int) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
        if threading.get_ident() != thread:
            return forward(*args)
        given = args if setup else args[1:]  # the first one is PyTorch's own context, which has nothing to do
        ctx = Context([isinstance(a, torch.Tensor) and a.is_floating_point() for a in given])
        results = forward(*given) if setup else forward(ctx, *given)
        if setup:
            setup(ctx, given, results)
        if ctx.dirty:
            raise _fault(kind, "it writes to its argument")
        several = results if isinstance(results, tuple) else (results,)
        made = tuple(_node(kind, ctx, given, several, n) for n in range(len(several)))
        return made if isinstance(results, tuple) else made[0]

    return both


def _node(kind: Any, ctx: Context, given: Sequence[Any], results: Sequence[Any], n: int) -> Any:
    """Result ``n`` of a Function as a node that has its derivatives by what was ``given``."""
    value = results[n]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    operands, derivatives = [], []
    if id(value) not in ctx.without:
        upstream = [torch.full_like(r, float(m == n)) if isinstance(r, torch.Tensor) else None
                    for m, r in enumerate(results)]
        try:
            back = kind.backward(ctx, *upstream)
        except Exception as error:  # the user's own code, and PyTorch, raise what they like
            raise _fault(kind, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
        back = back if isinstance(back, tuple) else (back,)
        for operand, needs, derivative in zip(given, ctx.needs_input_grad, back, strict=False):
            if needs and derivative is not None:
                operands.append(operand)
                derivatives.append(derivative)
    return torch.ops.ecornn.custom_gradient(value, operands, derivatives)


def _fault(kind: Any, why: str) -> CellError:
    code = getattr(kind.backward, "__code__", None)
    at = (code.co_filename, code.co_firstlineno) if code else None
    return CellError(f"the backward of {kind.__name__}, a torch.autograd.Function, cannot be traced: {why}. It must be "
                     "grad_output times a value for each element, of saved tensors, without branches on values; "
                     "ecornn.custom_gradient in a cell of TVM expressions takes any derivative"
                     + (f"\n  {source_line(*at)}" if at else ""), at)
