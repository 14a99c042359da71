"""Layers of ours and torch.nn's in float64 on the same weights, of sizes that share what is compiled for them."""

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch_values import BACKWARD, close, flat

import ecornn.torch
from ecornn.torch import engine
from ecornn.torch.kind import text_of

I, H, T, B = 7, 11, 6, 4
LENGTHS = [3, 6, 1, 5]


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    ours = getattr(ecornn.torch, name)(I, H, **options).eval()
    theirs = getattr(torch.nn, name)(I, H, **options).double().eval()
    load(theirs, ours)
    return theirs, ours


def case(name: str, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    theirs, ours = pair(name, **options)
    shape = (B,) if "Cell" in name else (B, T) if ours.batch_first else (T, B)
    return theirs, ours, torch.randn(*shape, I)


def training_case(name: str, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    theirs, ours, x = case(name, **options)
    return theirs.train(), ours.train(), x


def of_both(limit: float = BACKWARD, **options: Any) -> Callable[[Any], Any]:
    """A test of a function of a layer that trains and an input: ours returns what torch.nn's does, of each ``name``."""
    def test_of(function: Any) -> Any:
        def test(name: str, **given: Any) -> None:
            theirs, ours, x = training_case(name, **options)
            close(function(ours, x, **given), function(theirs, x.double(), **given), limit)
        functools.update_wrapper(test, function)
        names = ["name", *[*inspect.signature(function).parameters][2:]]
        test.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
        return test
    return test_of


def load(theirs: torch.nn.Module, ours: torch.nn.Module) -> None:
    theirs.load_state_dict({name: value.double() for name, value in ours.state_dict().items()})


def operands(layer: Any, x: Any, *state: Any) -> tuple[Any, ...]:
    return x, list(state), None, engine.weights_of(layer), text_of(layer)


def primed(layer: Any, trains: bool = False) -> Any:
    with torch.set_grad_enabled(trains):
        layer(torch.zeros((B, T, I) if layer.batch_first else (T, B, I)))
    return layer


def states(name: str, parts: int, batch: int = B, width: int = H) -> Any:
    made = [torch.randn(*((parts, batch) if batch else (parts,)), w) for w in (width, H)[:1 + (name == "LSTM")]]
    return tuple(made) if len(made) > 1 else made[0]


def gradients(layer: Any, x: Any, hx: Any = None, directions: Any = None) -> tuple[Any, list[torch.Tensor]]:
    kind = next(layer.parameters()).dtype
    leaves = [t.detach().to(kind).requires_grad_() for t in (x, *(() if hx is None else flat(hx)))]
    given = None if hx is None else tuple(leaves[1:]) if isinstance(hx, tuple) else leaves[1]
    found = layer(leaves[0], given)
    parts = flat(found)
    if directions is None:
        directions = [torch.linspace(-1, 2, t.numel()).view(t.shape) for t in parts]
    loss = sum((t * d.to(kind)).sum() for t, d in zip(parts, directions, strict=True))
    return found, list(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))


def alike(theirs: Any, ours: Any, x: Any, hx: Any = None) -> None:
    wanted, exact = gradients(theirs, x, hx)
    found, made = gradients(ours, x, hx)
    close(found, wanted)
    close(made, exact, BACKWARD)


def with_seed(layer: Any, x: Any, seed: int) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(seed)
    y = flat(layer(x)[0])[0]
    return y, list(torch.autograd.grad(y.square().sum(), layer.parameters()))


def ancestors(tensor: torch.Tensor) -> str:
    seen, todo, names = set(), [tensor.grad_fn], []
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            todo += [before for before, _ in node.next_functions]
    return " ".join(names)


def copied(model: Any, how: str) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
