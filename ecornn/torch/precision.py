"""Whether float32 products on a GPU may be in TF32: as the user has allowed cuDNN's RNNs, unless a layer says more.

PyTorch's default is that they may. Where its settings differ, the one nearest to an RNN wins, as with cuDNN:
``torch.backends.cudnn.rnn.fp32_precision``, else ``torch.backends.cudnn.fp32_precision``, else
``torch.backends.fp32_precision``; ``torch.backends.cudnn.allow_tf32``, the older way, sets the first.
"""

from __future__ import annotations

from typing import Any

import torch

from ecornn.torch.kind import Kind


def precision_of(kind: Kind, x: Any) -> str | None:
    """``tf32`` where products of a layer of this kind on x may be in TF32, as things are set now."""
    if x.is_cpu or x.dtype != torch.float32:
        return None
    allowed = cudnn_allows() if kind.tf32 is None else kind.tf32
    return "tf32" if allowed else None


def cudnn_allows() -> bool:
    """Whether cuDNN's RNNs may use TF32."""
    rnn = getattr(torch.backends.cudnn, "rnn", None)  # PyTorch before 2.9 has one setting for all of cuDNN
    if rnn is None:
        return bool(torch.backends.cudnn.allow_tf32)
    return bool(rnn.fp32_precision == "tf32")
