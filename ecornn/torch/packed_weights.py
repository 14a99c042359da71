"""The weights of a torch module, as its compiled layer packs them: read where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ecornn.runtime.loader import Layer
from ecornn.torch.compiling import NAMES, serves
from ecornn.torch.kind import Kind
from ecornn.torch.parameters import parameters


class DeviceWeights:
    """Packs the weights of a module of this kind on a GPU in ``layer``, on the current stream. What only gradients of
    first states are made of waits for :meth:`pack_for_states`: most steps of training want none.

    Attributes
    ----------
    due : whether it waits
    """

    def __init__(self, kind: Kind, layer: Layer, weights: Sequence[torch.Tensor]) -> None:
        self._kind, self._layer = kind, layer
        self._names = [p.name for p in layer.manifest.parameters]
        self.due = False
        self._read(weights)

    def pack(self, weights: Sequence[torch.Tensor], same: bool, changed: Sequence[int]) -> None:
        """``same``: they are the tensors that they were, where they were. Checks others, as :meth:`Layer.repack`. All
        are packed, whichever have ``changed``."""
        if same and self._dtype:
            self._pack(False)
            self.due = bool(self._layer.manifest.packed_for_optional)
            return
        self._layer.repack(parameters(self._kind, weights))
        self.due = False
        self._read(weights)

    def pack_for_states(self) -> None:
        """Packs the rest of the same weights, if that was not done. Each graph does: it may be replayed without the one
        before it."""
        if self.due:
            self._pack(True)
            self.due = torch.cuda.is_current_stream_capturing()

    def _pack(self, optional: bool) -> None:
        queue = torch._C._cuda_getCurrentRawStream(self._layer.device)
        self._layer.repack_at(self._at, self._dtype, queue, optional)

    def _read(self, weights: Sequence[torch.Tensor]) -> None:
        """Where they are, and their data type; that is empty where they must be rearranged first."""
        known, dtype = dict(zip(self._kind.names, weights, strict=True)), weights[0].dtype
        plain = not self._kind.projection and all(w.dtype == dtype and w.is_contiguous() and not w.is_neg()
                                                  for w in weights)
        self._dtype = NAMES[dtype] if plain and serves(weights[0].device, dtype) else ""
        self._at = [known[name].data_ptr() if name in known else 0 for name in self._names]  # 0: zeros, of no bias


class HostWeights:
    """Packs the weights of a module of this kind on a CPU in ``layer``, always all."""

    due = False

    def __init__(self, kind: Kind, layer: Layer, weights: Sequence[torch.Tensor]) -> None:
        self._kind, self._layer = kind, layer
        self._parameters = [(p.name, torch.Size(p.shape)) for p in layer.manifest.parameters]

    def pack(self, weights: Sequence[torch.Tensor], same: bool, changed: Sequence[int]) -> None:
        """As :meth:`DeviceWeights.pack`; ``changed``: the numbers of those that are not as they were."""
        known, names = parameters(self._kind, weights), {self._kind.names[n] for n in changed}
        given = [known[name] for name, _ in self._parameters]
        plain = all(w.shape == shape and w.dtype == torch.float32 and w.is_cpu and w.is_contiguous() and not w.is_neg()
                    for w, (_, shape) in zip(given, self._parameters, strict=True))
        numbers = [n for n, (name, _) in enumerate(self._parameters) if name in names]
        pointers = [w.data_ptr() for w in given] if plain else [0]  # 0 of what has no memory, which is refused below
        if not all(pointers) or not self._layer.repack_here(pointers, numbers):
            self._layer.repack(known, names)

    def pack_for_states(self) -> None:
        """As :meth:`DeviceWeights.pack_for_states`: there is nothing to do."""
