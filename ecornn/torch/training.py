"""A training step of an engine on torch's tensors. The values that it keeps are one of these, and nothing else
remembers the call.

A compiled stack is one node of PyTorch's graph, and all of its gradients are there at once. If somebody waits for the
gradients of each layer, as when they are added up over processes while earlier layers are still computed, layers are
compiled and called one after the other, as with dropout between them: a node each. That costs a few calls more, and
what layers of a stack would do at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed

from ecornn.errors import ArgumentError
from ecornn.runtime.columns import Columns
from ecornn.runtime.plan import kept_layout
from ecornn.torch.compiling import KEPT, NAMES, compiled, precision_of
from ecornn.torch.engine import Engine
from ecornn.torch.kind import Kind, weight_gradients, widened_rows
from ecornn.torch.snapshot import suspect


def forward(engine: Engine, weights: Sequence[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
            lengths: torch.Tensor | Columns | None) -> list[torch.Tensor]:
    """The results of :meth:`Engine.run`, and a tensor of bytes that :func:`backward` reads besides. ``lengths`` may be
    the columns that x has its sequences in."""
    steps, batch = x.shape[:2]
    masks = _masks(lengths)
    with torch.no_grad(), engine.training(weights, x, "".join(masks), states=False) as layer:
        kept = x.new_empty(layer.kept_bytes(steps, batch), dtype=torch.uint8)
        y, after, _ = layer.forward(x, engine.given(state), **masks, memory=kept)
        # autograd lets nobody write to views of what several are returned of
        return [*(t.data if t._is_view() else t for t in engine.results(y, after)), kept]


def backward(engine: Engine, weights: Sequence[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
             lengths: torch.Tensor | Columns | None, y: torch.Tensor, kept: torch.Tensor,
             gradients: Sequence[torch.Tensor | None], want_state: bool = True) -> list[Any]:
    """The gradients of x, ``state`` and the weights, from those of y and the last states, None for zeros. Without
    ``want_state`` those of ``state`` are None."""
    kind, masks, wanted = engine.kind, _masks(lengths), want_state and bool(state)
    with torch.no_grad(), engine.training(weights, x, "".join(masks), again=True, states=wanted) as layer:
        memory = kept.clone() if kept.data_ptr() % 16 else kept  # it may have been away, in a file or on the host
        again = layer.kept_in(memory, x, widened_rows(kind, y), engine.given(state), **masks)
        dy, *dstates = gradients
        computed = layer.backward(again, None if dy is None else widened_rows(kind, dy), engine.given(dstates),
                                  want_state=wanted)
        suspect(weights)  # an optimizer may come next
        before = engine.states(computed.state) if wanted else [None] * len(state)
        all_of_them = [computed.x, *before, *weight_gradients(kind, computed.weights)]
        return [g if g is None else g.to(of.dtype) for g, of in zip(all_of_them, (x, *state, *weights), strict=True)]


def kept_bytes(kind: Kind, x: torch.Tensor, lengths: torch.Tensor | None) -> Any:
    """The number of bytes that :func:`forward` keeps for x (T, B, I), whose sizes may be symbols; the same for any
    module of such a layer. Raises :class:`ArgumentError` for another data type."""
    if x.dtype not in NAMES:
        raise ArgumentError("x.dtype", x.dtype, ", ".join(NAMES.values()))
    steps, batch = x.shape[:2]
    spec = kind.spec(_hint(batch, 8), _hint(steps, 64), NAMES[x.dtype], "".join(_masks(lengths)),
                     kind.keep or KEPT[x.device.type], precision_of(kind, x))
    return kept_layout(compiled(spec, "cuda" if x.is_cuda else "cpu").manifest, steps, batch)[1]


def _hint(size: Any, otherwise: int) -> int:
    """The value that a size had when it was traced."""
    hint = size if isinstance(size, int) else size.node.hint
    return otherwise if hint is None else hint


def _masks(lengths: torch.Tensor | Columns | None) -> dict[str, Any]:
    """The keyword argument that a layer is called with."""
    return {} if lengths is None else {"sequences" if isinstance(lengths, Columns) else "lengths": lengths}


def layers_of(module: Any, weights: Sequence[torch.Tensor],
              state: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[torch.Tensor], list[torch.Tensor]]]:
    """The weights of each layer of a module, and its part of states (L*D, B, H)."""
    parts, each = 1 + module.bidirectional, len(weights) // module.num_layers
    for layer in range(module.num_layers):
        yield weights[layer * each:(layer + 1) * each], [s[layer * parts:(layer + 1) * parts] for s in state]


def by_layer(module: Any, weights: Iterable[torch.Tensor]) -> bool:
    """Tells whether a training step of the module goes layer by layer: it does in one of several processes of
    ``torch.distributed``, whose DistributedDataParallel waits for gradients and leaves no trace, and if hooks of the
    weights run once a gradient is there (``register_post_accumulate_grad_hook``). It does not in graphs of
    torch.compile, which runs the nodes of a graph's backward pass as one."""
    if module.num_layers == 1 or torch.compiler.is_compiling():
        return False
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return True
    return any(getattr(w, "_post_accumulate_grad_hooks", None) for w in weights)
