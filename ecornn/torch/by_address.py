"""A training step of a bound layer by the addresses of tensors alone: nothing is checked, and only results are made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from ecornn.errors import ArgumentError
from ecornn.program import BACKWARD, FORWARD
from ecornn.runtime.layer import Layer
from ecornn.runtime.memory import layout
from ecornn.runtime.plan import AddressedCall
from ecornn.runtime.torch_arrays import LOW, TorchMemory, address
from ecornn.torch.kind import Kind
from ecornn.workload import summed

ALIGNMENT = 16  # bytes, of what modules read
TENSORS = "x", "y", "state_in", "state_out"
BACK = "x", "y", "state_in", "dy", "dstate_out", "dx", "dstate_in", "gradient"
BACK_TO_X = tuple([name for name in BACK if name != "dstate_in"])
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # of PyTorch with CUDA


class Spare:
    """Hands the memory that one step on a CPU has kept its values in to the next one, once nothing else has it. The
    system would clear new memory page by page, which takes a tenth of a step."""

    LEAST = 1 << 22  # bytes; of smaller blocks malloc has some that were used before

    def __init__(self) -> None:
        self._known: list[torch.Tensor] = []  # one at most
        self._alone = 0  # what has its memory while nobody uses it, by count

    def take(self, x: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Returns a tensor of ``nbytes`` bytes (N,), uint8, on the device of ``x``. The memory is the caller's until
        the tensor, and all that shares it, is gone."""
        if not x.is_cpu or nbytes < self.LEAST or _holders is None:
            return x.new_empty(nbytes, dtype=torch.uint8)
        try:
            known = self._known.pop()  # no other thread takes it meanwhile
        except IndexError:
            known = None
        if known is not None and len(known) >= nbytes and _holders(known.untyped_storage()._cdata) == self._alone:
            taken = known[:nbytes]
        else:
            taken = x.new_empty(nbytes, dtype=torch.uint8)
            if known is None or len(known) < nbytes:
                known, taken = taken, taken[:]
                self._alone = _holders(known.untyped_storage()._cdata) - 1
        if not self._known:
            self._known.append(known)
        return taken


_holders: Any = getattr(torch._C, "_storage_Use_Count", None)


class LayerStep:
    """Forward and backward of a layer with one T and B, on a CPU or on a stream that no CUDA graph captures."""

    def __init__(self, kind: Kind, layer: Layer, steps: int, batch: int, spare: Spare) -> None:
        manifest, self._spare = layer.manifest, spare
        self._layer, self.sizes, self.writes = layer, (steps, batch), layer.training.writes
        self._forward = layer.addressed(FORWARD, steps, batch, TENSORS)
        self.kept_bytes, self.work = self._forward.kept_bytes, self._forward.work
        self.optional = "dstate_in" in (manifest.optional or ())  # gradients of first states
        self.y_shape = steps, batch, layer.width
        self.state_shape = kind.layers * kind.directions, batch, kind.hidden
        self._zeros = (layer.zero_state(batch)[1],) * len(manifest.states)
        self.sums: torch.dtype = getattr(torch, summed(manifest.workload.dtype))
        # of each parameter the shape, strides and begin of its gradient in one array: each tensor takes its time
        size = self.item = self.sums.itemsize
        starts, nbytes = layout([prod(p.shape) * size for p in manifest.parameters])
        parts = [(p.shape, tuple(prod(p.shape[n + 1:]) for n in range(len(p.shape))), start // size)
                 for p, start in zip(manifest.parameters, starts, strict=True)]
        self.total = nbytes // size
        names = [p.name for p in manifest.parameters]
        self.begins = [begin for _, _, begin in parts]
        # of each weight the shape, strides and begin
        self.parts = [parts[names.index(name)] for name in kind.names]

    def forward(self, x: torch.Tensor, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """y (T, B, D*H), the states (L*D, B, H) after x (T, B, I), and the bytes that :meth:`backward` reads."""
        kept = self._spare.take(x, self.kept_bytes)
        y, after = x.new_empty(self.y_shape), [x.new_empty(self.state_shape) for _ in self._zeros]
        self.ahead(ready(x), [*map(ready, state)], y.data_ptr(), after, kept.data_ptr())
        return [y, *after, kept]

    def ahead(self, x: torch.Tensor, state: Sequence[torch.Tensor], y: int, after: Sequence[torch.Tensor],
              kept: int) -> None:
        """The same, of tensors that are :func:`ready`, into memory: ``y`` and ``kept`` are addresses."""
        self._run(self._forward, x, (x.data_ptr(), y, *([s.data_ptr() for s in state] or self._zeros),
                                     *[s.data_ptr() for s in after]), kept)

    def backward(self, x: torch.Tensor, state: Sequence[torch.Tensor], y: torch.Tensor, kept: torch.Tensor,
                 gradients: Sequence[torch.Tensor | None], want_state: bool,
                 dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Gradients of x, of each state, None unless ``want_state``, and of the weights, of this ``dtype``;
        ``gradients``: of y and last states, None for zeros."""
        dy, *dstates = [g if g is None else ready(g) for g in gradients]
        dy = x.new_zeros(self.y_shape) if dy is None else dy
        rows, given, y, kept = ready(x), [*map(ready, state)], ready(y), ready(kept)
        dx = torch.empty_like(rows)
        before = [x.new_empty(self.state_shape) for _ in self._zeros] if want_state or not self.optional else []
        sums = x.new_empty(self.total, dtype=self.sums)
        if not self.writes:
            sums.zero_()
        start = sums.data_ptr()
        self._back(rows, given, y.data_ptr(), kept.data_ptr(), (dy, *dstates), dx, before,
                   [start + first * self.item for first in self.begins], not self.writes)
        sums = sums.to(dtype)
        return [dx, *(before if want_state else [None] * len(state)),
                *[sums.as_strided(*part) for part in self.parts]]

    def back(self, x: torch.Tensor, state: Sequence[torch.Tensor], y: int, kept: int,
             gradients: Sequence[torch.Tensor | None], dx: torch.Tensor, before: Sequence[torch.Tensor],
             sums: Sequence[torch.Tensor], add: bool) -> None:
        """The same, of tensors that are :func:`ready`, into memory. Those of first states go to ``before``, unless it
        is empty; those of the manifest's parameters are written to ``sums``, or added to them. The gradient of y may be
        None with T = 1 alone."""
        self._back(x, state, y, kept, gradients, dx, before, [s.data_ptr() for s in sums], add)

    def _back(self, x: torch.Tensor, state: Sequence[torch.Tensor], y: int, kept: int,
              gradients: Sequence[torch.Tensor | None], dx: torch.Tensor, before: Sequence[torch.Tensor],
              sums: Sequence[int], add: bool) -> None:
        call = self._layer.addressed(BACKWARD, *self.sizes, BACK if before else BACK_TO_X, add)
        zeros = self._zeros[0], *self._zeros
        self._run(call, x, (
            x.data_ptr(), y, *([s.data_ptr() for s in state] or self._zeros),
            *[zero if g is None else g.data_ptr() for g, zero in zip(gradients, zeros, strict=True)], dx.data_ptr(),
            *[s.data_ptr() for s in before], *sums), kept)

    def _run(self, call: AddressedCall, x: torch.Tensor, addresses: tuple[int, ...], kept: int) -> None:
        if x.is_cpu:
            call(addresses, kept)
        else:
            call.on(raw_stream(x.device.index), addresses, partial(TorchMemory, torch, device=x.device), kept)


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that a module can read. Raises :class:`ArgumentError` for a tensor that has no memory."""
    pointer = tensor.data_ptr()
    if ((pointer >= LOW or address(tensor)) and not pointer % ALIGNMENT and tensor.is_contiguous()
            and not tensor.is_neg()):
        return tensor
    if not address(tensor) and tensor.numel() and not tensor._is_zerotensor():  # as autograd has zeros
        raise ArgumentError("an input", f"a {type(tensor).__name__} without memory of its own", "a tensor with memory")
    return tensor.clone(memory_format=torch.contiguous_format)
