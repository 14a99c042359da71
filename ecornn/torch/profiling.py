"""``profile()``: times of a model and of its recurrent layers, as PyTorch's and as compiled ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ecornn.boundary import public
from ecornn.errors import ArgumentError
from ecornn.torch.replacing import COMPILED, prepare, replace, restore

ROUNDS, SECONDS = 7, 5.0  # turns of each side, and seconds of a row at most


@dataclass(frozen=True)
class Gain:
    """Seconds of one call ``before``, as PyTorch's, and ``after``, compiled; with backward if that would follow.

    Attributes
    ----------
    name : of the layer in the model; empty for the model itself
    kind : its class, such as ``LSTM(40, 64)``
    calls : how often one call of the model calls it
    """

    name: str
    kind: str
    calls: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How many times as fast it is."""
        return self.before / self.after


@dataclass(frozen=True)
class Profile:
    """The layers that were called, in the model's order, and the whole model. As text it is a table."""

    layers: tuple[Gain, ...]
    model: Gain

    def __str__(self) -> str:
        rows = [("layer", "calls", "before", "after", "as fast")]
        rows += [(f"{one.name} {one.kind}".strip(), str(one.calls), f"{one.before * 1e3:.3g} ms",
                  f"{one.after * 1e3:.3g} ms", f"{one.ratio:.2f}x") for one in (*self.layers, self.model)]
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join("  ".join((row[0].ljust(first), *map(str.rjust, row[1:], others))) for row in rows)


@public
def profile(model: torch.nn.Module, *example: Any, **named: Any) -> Profile:
    """Times a model and its recurrent layers as PyTorch's and as compiled ones, in turns, for calls like
    ``model(*example, **named)``: of these shapes, in the mode that the model is in, with the backward pass to its
    weights unless gradients are disabled.

    The model stays as it is, replaced or not: copies of it are timed, one with PyTorch's layers, and one with those
    that :func:`replace` swaps. What is not compiled yet is compiled first. Each layer is timed by itself, with the
    arguments of its first call in the model; of one that is called several times, one call. A row takes some seconds
    at most; turns in which other programs were busy are made again.

    Raises :class:`ArgumentError` for a model without a layer that can be compiled.
    """
    ours = copy.deepcopy(model)
    if not any(isinstance(module, COMPILED) for module in ours.modules()):
        report = replace(ours)
        if not report.swapped:
            raise ArgumentError("model", type(model), f"a model with a layer that can be compiled: {report}")
    theirs = copy.deepcopy(ours)
    restore(theirs)
    layers: dict[str, Any] = {name: one for name, one in ours.named_modules() if isinstance(one, COMPILED)}
    for layer in layers.values():
        layer.wait = True
    with torch.random.fork_rng():
        prepare(ours, *example, **named)
        calls = calls_of(theirs, [*layers], example, named)
        found = [Gain(name, f"{type(layer).__name__}({layer.input_size}, {layer.hidden_size})", len(calls[name]),
                      *seconds(theirs.get_submodule(name), layer, *calls[name][0]))
                 for name, layer in layers.items() if calls[name]]
        return Profile(tuple(found), Gain("", type(model).__name__, 1, *seconds(theirs, ours, example, named)))


def calls_of(model: torch.nn.Module, names: list[str], example: Any, named: Any) -> dict[str, list[tuple[Any, Any]]]:
    """The arguments of all calls of the layers with these names in a call of the model."""
    calls: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    hooks = [model.get_submodule(name).register_forward_pre_hook(
        lambda _, args, kwargs, name=name: calls[name].append((args, kwargs)), with_kwargs=True) for name in names]
    with torch.no_grad():
        model(*example, **named)
    for hook in hooks:
        hook.remove()
    return calls


def seconds(theirs: Any, ours: Any, args: Any, kwargs: Any) -> tuple[float, float]:
    """Medians of calls of a module as PyTorch's and as a compiled one, that take turns."""
    from ecornn.bench.turns import host_turns  # not with ecornn.torch, which is imported more often than it profiles

    sides = {"before": step_of(theirs, args, kwargs), "after": step_of(ours, args, kwargs)}
    turns, _ = host_turns(sides, lambda: None, ROUNDS, SECONDS, clock)
    before, after = (median(chain(*turns[side])) for side in sides)
    return before, after


def step_of(module: torch.nn.Module, args: Any, kwargs: Any) -> Callable[[], None]:
    """A call of a module, and the gradients of its weights if a user could ask for these."""
    weights = [p for p in module.parameters() if p.requires_grad]

    def step() -> None:
        results = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        if results and weights:
            torch.autograd.grad(results, weights, [*map(torch.ones_like, results)], allow_unused=True)

    return step


def clock(run: Callable[[], object]) -> float:
    """Seconds of a run, until the current GPU has done it, if there is one."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    begin = perf_counter()
    run()
    wait()
    return perf_counter() - begin
