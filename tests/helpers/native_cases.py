"""Training calls of a layer by C++ and by Python, which must give the same bits; for tests on a CPU and on a GPU."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ecornn.torch
from ecornn.torch import native

LAYERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("GRU", {}), ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    ("RNN", {"bias": False, "nonlinearity": "relu"}), ("LSTM", {"bias": False, "bidirectional": True}),
    ("GRU", {"num_layers": 2, "batch_first": True}))
INPUT, HIDDEN = 5, 6


@contextlib.contextmanager
def by_python() -> Iterator[None]:
    """Calls within the context make no native steps."""
    functions, native.library.functions = native.library.functions, None
    calls, native.library.calls = native.library.calls, native.CALLS  # and compile nothing
    try:
        yield
    finally:
        native.library.functions, native.library.calls = functions, calls


def is_native(y: torch.Tensor) -> bool:
    return y.grad_fn is not None and y.grad_fn.name() == "RecurrentBackward"


def pair(name: str, options: dict[str, Any], device: str = "cpu",
         dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Two layers with the same weights, for calls by C++ and for calls :func:`by_python`."""
    torch.manual_seed(0)
    layer = getattr(torch.nn, name)(INPUT, HIDDEN, **options).to(device, dtype)
    other = copy.deepcopy(layer)
    for one in (layer, other):
        ecornn.torch.replace(one, wait=True)
    return layer, other


def outcome(layer: Any, call: "RandomCall") -> list[torch.Tensor | None]:
    """Results, and gradients of x, states and weights."""
    x = call.x.detach().requires_grad_(call.x.requires_grad)
    x = x if call.view is None else call.view(x)
    state = [s.detach().requires_grad_(s.requires_grad) for s in call.state]
    y, after = layer(x, None if not state else tuple(state) if len(state) > 1 else state[0])
    after = after if isinstance(after, tuple) else (after,)
    results = [(y, after[0], after[-1])[n] for n in call.asked]
    leaves = [t for t in (x, *state, *layer.parameters()) if t.requires_grad]
    found = torch.autograd.grad(results, leaves, [call.weigh(r) for r in results], allow_unused=True)
    return [y, *after, *found]


class RandomCall:
    """A training call, drawn at random: sizes, first states or none, what has gradients, and how arrays lie."""

    def __init__(self, seed: int, layer: Any, sizes: tuple[tuple[int, int], ...]) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        weight = next(layer.parameters())
        steps, batch = draw.choice(sizes)
        make = {"device": weight.device, "dtype": weight.dtype}
        shape = (batch, steps) if layer.batch_first else (steps, batch)
        self.x = torch.randn(*shape, INPUT, **make, requires_grad=draw.random() < 0.5)
        self.view: Callable[[torch.Tensor], torch.Tensor] | None = draw.choice((
            None, None, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
            lambda x: torch.cat([x[..., :1], x], dim=2)[..., 1:]))
        if self.view is not None:
            self.x = self.x.detach()
        rows = layer.num_layers * (1 + layer.bidirectional)
        self.state = [torch.randn(rows, batch, HIDDEN, **make, requires_grad=draw.random() < 0.5)
                      for _ in range(draw.choice((0, 1)) * (2 if isinstance(layer, ecornn.torch.LSTM) else 1))]
        self.asked = draw.choice(((0,), (1,), (2,), (0, 1), (0, 1, 2)))
        self.scale = draw.choice((0.5, 2.0))
        self.expands = draw.random() < 0.5

    def weigh(self, result: torch.Tensor) -> torch.Tensor:
        """The gradient of a result: numbers of its own, or one number, which is expanded."""
        one = torch.full((), self.scale, device=result.device, dtype=result.dtype)
        return one.expand(result.shape) if self.expands else torch.sin(result.detach()) * one


def check(ours: Any, plain: Any, call: RandomCall) -> bool:
    """Compares bits; tells whether C++ has computed ours."""
    found = outcome(ours, call)
    with by_python():
        expected = outcome(plain, call)
    assert found[0] is not None
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or (one.shape == other.shape and one.stride() == other.stride()
                                                and torch.equal(one, other))
    return is_native(found[0])
