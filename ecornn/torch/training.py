"""A training step of an engine on torch's tensors: what is kept is one of them, and nothing else remembers the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ecornn.errors import ArgumentError
from ecornn.runtime.columns import Columns
from ecornn.runtime.training import kept_layout
from ecornn.torch.compiling import KEPT, NAMES, compiled, precision_of
from ecornn.torch.engine import Engine
from ecornn.torch.kind import Kind
from ecornn.torch.parameters import weight_gradients, widened_rows
from ecornn.torch.snapshot import suspect


def forward(engine: Engine, weights: Sequence[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
            lengths: torch.Tensor | Columns | None) -> list[torch.Tensor]:
    """As :meth:`Engine.run`, and what :func:`backward` reads besides these, as bytes; of sequences in columns, where
    x has these."""
    steps, batch = x.shape[:2]
    masks = _masks(lengths)
    with torch.no_grad(), engine.training(weights, x, "".join(masks), states=False) as layer:
        kept = x.new_empty(layer.kept_bytes(steps, batch), dtype=torch.uint8)
        y, after, _ = layer.forward(x, engine.given(state), **masks, memory=kept)
        # autograd lets nobody write to views of what several are returned of
        return [*(made.data if made._is_view() else made for made in engine.results(y, after)), kept]


def backward(engine: Engine, weights: Sequence[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
             lengths: torch.Tensor | Columns | None, y: torch.Tensor, kept: torch.Tensor,
             gradients: Sequence[torch.Tensor | None], want_state: bool = True) -> list[Any]:
    """The gradients of x, ``state`` and the weights, from those of y and the last states, None for zeros; where they
    are not wanted None for those of ``state``."""
    kind, masks, wanted = engine.kind, _masks(lengths), want_state and bool(state)
    with torch.no_grad(), engine.training(weights, x, "".join(masks), again=True, states=wanted) as layer:
        memory = kept.clone() if kept.data_ptr() % 16 else kept  # it may have been away, in a file or on the host
        again = layer.kept_in(memory, x, widened_rows(kind, y), engine.given(state), **masks)
        dy, *dstates = gradients
        found = layer.backward(again, None if dy is None else widened_rows(kind, dy), engine.given(dstates),
                               want_state=wanted)
        suspect(weights)  # an optimizer may come next
        before = engine.states(found.state) if wanted else [None] * len(state)
        made = [found.x, *before, *weight_gradients(kind, found.weights)]
        return [m if m is None else m.to(of.dtype) for m, of in zip(made, (x, *state, *weights), strict=True)]


def kept_bytes(kind: Kind, x: torch.Tensor, lengths: torch.Tensor | None) -> Any:
    """The bytes that :func:`forward` keeps for x (T, B, I), whose sizes may be symbols: they are multiples of those of
    any module for such a layer."""
    if x.dtype not in NAMES:
        raise ArgumentError("x.dtype", x.dtype, ", ".join(NAMES.values()))
    steps, batch = x.shape[:2]
    spec = kind.spec(_hint(batch, 8), _hint(steps, 64), NAMES[x.dtype], "".join(_masks(lengths)),
                     kind.keep or KEPT[x.device.type], precision_of(kind, x))
    return kept_layout(compiled(spec, "cuda" if x.is_cuda else "cpu").manifest, steps, batch)[1]


def _hint(size: Any, otherwise: int) -> int:
    """What a size was where it was traced."""
    hint = size if isinstance(size, int) else size.node.hint
    return otherwise if hint is None else hint


def _masks(lengths: torch.Tensor | Columns | None) -> dict[str, Any]:
    """What a layer is called with, by its name."""
    return {} if lengths is None else {"sequences" if isinstance(lengths, Columns) else "lengths": lengths}
