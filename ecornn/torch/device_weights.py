"""The weights of a torch module on a GPU, as its compiled layer packs them: read where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ecornn.runtime.loader import Layer
from ecornn.torch.compiling import NAMES, serves
from ecornn.torch.kind import Kind
from ecornn.torch.parameters import parameters


class DeviceWeights:
    """Packs the weights of a module of this kind in ``layer``, on the current stream."""

    def __init__(self, kind: Kind, layer: Layer, weights: Sequence[torch.Tensor]) -> None:
        self._kind, self._layer = kind, layer
        self._names = [p.name for p in layer.manifest.parameters]
        self._read(weights)

    def pack(self, weights: Sequence[torch.Tensor], same: bool) -> None:
        """``same``: they are the tensors that they were, where they were. Checks others, as :meth:`Layer.repack`."""
        if same and self._dtype:
            device = self._layer.device
            self._layer.repack_at(self._at, self._dtype, torch._C._cuda_getCurrentRawStream(device))
            return
        self._layer.repack(parameters(self._kind, weights))
        self._read(weights)

    def _read(self, weights: Sequence[torch.Tensor]) -> None:
        """Where they are, and their data type; that is empty where they must be rearranged first."""
        known, dtype = dict(zip(self._kind.names, weights, strict=True)), weights[0].dtype
        plain = not self._kind.projection and all(w.dtype == dtype and w.is_contiguous() and not w.is_neg()
                                                  for w in weights)
        self._dtype = NAMES[dtype] if plain and serves(weights[0].device, dtype) else ""
        self._at = [known[name].data_ptr() if name in known else 0 for name in self._names]  # 0: zeros, of no bias
