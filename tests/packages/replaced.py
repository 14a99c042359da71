"""A package's model against itself with compiled layers, and both against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

import ecornn.torch

OUTPUTS, GRADIENTS = 1e-5, 2e-5  # relative


def check(model: torch.nn.Module, run: Callable[[Any, Callable[[Any], Any]], Any], swapped: tuple[str, ...],
          kind: torch.dtype = torch.float64) -> None:
    """Replaces the layers ``swapped`` of a model, and compares what ``run`` gives for it, and the gradients of one
    training step, with those of the model itself in float64, or in ``kind`` where the package has no other.

    ``run(model, cast)`` calls the model; ``cast`` makes of floating-point tensors, also in containers, those of the
    model's type. Where the package itself is further from float64 than the limits, twice that far is near enough.
    """
    exact, plain = copy.deepcopy(model).to(kind), copy.deepcopy(model)
    report = ecornn.torch.replace(model)
    assert report.swapped == swapped, str(report)
    wanted, theirs, found = (step(one, run) for one in (exact, plain, model))
    with torch.no_grad():  # without gradients another module computes
        again = tensors(run(model, cast_for(model)))
    found |= {f"output {n} without gradients": t for n, t in enumerate(again)}
    least = 1e-2 * max(float(g.norm()) for name, g in wanted.items() if name.startswith("gradient"))
    for name, value in found.items():
        right = wanted[name.removesuffix(" without gradients")]
        limit, floor = (GRADIENTS, least) if name.startswith("gradient") else (OUTPUTS, 1e-12)
        near, far = error(theirs[name.removesuffix(" without gradients")], right, floor), error(value, right, floor)
        assert far <= max(limit, 2 * near), f"{name}: {far:.2g}, of the package {near:.2g}"
    assert ecornn.torch.restore(model) == swapped


def step(model: torch.nn.Module, run: Callable[[Any, Callable[[Any], Any]], Any]) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name."""
    model.zero_grad()
    torch.set_default_dtype(type_of(model))  # of what the package makes by itself
    try:
        outputs = tensors(run(model, cast_for(model)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert outputs
    sum((t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in outputs
        if t.requires_grad).backward()
    found = {f"output {n}": t.detach() for n, t in enumerate(outputs)}
    grads = {f"gradient of {n}": w.grad for n, w in model.named_parameters() if w.grad is not None}
    assert grads
    return found | grads


def type_of(model: torch.nn.Module) -> torch.dtype:
    return next(w.dtype for w in model.parameters() if w.is_floating_point())


def cast_for(model: torch.nn.Module) -> Callable[[Any], Any]:
    kind = type_of(model)

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(kind) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {name: cast(one) for name, one in value.items()}
        return type(value)(map(cast, value)) if isinstance(value, (list, tuple)) else value

    return cast


def tensors(value: Any) -> list[torch.Tensor]:
    """Those of floating-point numbers, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = value.values()
    return [t for part in value for t in tensors(part)] if hasattr(value, "__iter__") else []


def error(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """Relative; where less than ``floor`` is wanted, such as the zero gradient of a bias before a softmax, to that."""
    assert found.shape == wanted.shape
    value = float((found.double() - wanted).norm() / wanted.norm().clamp_min(floor))
    return value if value == value else float("inf")
