"""Whether the gradients of a stack are handed over layer by layer: who adds them up over processes can then begin with
the last layer's while those before it are still computed.

A compiled stack is one node of PyTorch's graph, and all of its gradients are there at once. Where somebody waits for
those of each layer, layers are compiled and called one after the other, as with dropout between them: a node each. That
costs a few calls more, and what layers of a stack would do at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed


def layers_of(module: Any, weights: Sequence[torch.Tensor],
              state: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[torch.Tensor], list[torch.Tensor]]]:
    """The weights of each layer, and its part of states (L*D, B, H)."""
    parts, each = 1 + module.bidirectional, len(weights) // module.num_layers
    for layer in range(module.num_layers):
        yield weights[layer * each:(layer + 1) * each], [s[layer * parts:(layer + 1) * parts] for s in state]


def wanted(module: Any, weights: Iterable[torch.Tensor]) -> bool:
    """Whether a training step of the module goes layer by layer: in one of several processes of ``torch.distributed``,
    whose DistributedDataParallel waits for gradients where nobody else sees it, or with hooks of the weights that run
    once a gradient is there (``register_post_accumulate_grad_hook``). Not in graphs of torch.compile, which runs the
    nodes of a graph's backward pass as one."""
    if module.num_layers == 1 or torch.compiler.is_compiling():
        return False
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return True
    return any(getattr(w, "_post_accumulate_grad_hooks", None) for w in weights)
