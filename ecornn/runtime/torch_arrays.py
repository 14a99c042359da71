"""torch.Tensor in and out, without copies: on torch's current stream, in torch's memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ecornn.dtypes import DTYPES, SERVED
from ecornn.errors import ArgumentError, DTypeError
from ecornn.runtime.arrays import ALIGNMENT, Arrays, Facts, Placed, Shape
from ecornn.runtime.library import Library
from ecornn.runtime.memory import ALIGNMENT as WORKSPACE_ALIGNMENT
from ecornn.runtime.memory import HostMemory, Memory

OPERATOR = "the layers of ecornn.torch are operators that PyTorch knows"
LOW = 1 << 40  # no offset reaches it, and hardly any memory lies below it, so that pointers above need no second look


def address(tensor: Any) -> int:
    """The address of the first element; 0 if it has no memory, where ``data_ptr()`` is the offset of the view."""
    pointer: int = tensor.data_ptr()
    return 0 if pointer < LOW and pointer == tensor.storage_offset() * tensor.element_size() else pointer


def on_device(tensor: Any, like: Any) -> Any:
    """``tensor`` where ``like`` is. From the host by way of pinned memory, which is not waited for, except in a graph:
    that would read the memory again whenever it is replayed."""
    if like.is_cuda and tensor.is_cpu and not sys.modules["torch"].cuda.is_current_stream_capturing():
        return tensor.pin_memory().to(like.device, non_blocking=True)
    return tensor.to(like.device)


class TorchMemory:
    """A workspace from torch's allocator, which frees it in the order of the stream."""

    def __init__(self, torch: Any, nbytes: int, device: Any) -> None:
        self._tensor = torch.empty(nbytes + WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=device)
        start = self._tensor.data_ptr()
        self.pointer, self.nbytes = start + -start % WORKSPACE_ALIGNMENT, nbytes

    def array(self, dtype: Any, shape: Shape) -> Any:
        first = self.pointer - self._tensor.data_ptr()
        return self._tensor[first:first + self.nbytes].view(dtype)[:prod(shape)].view(shape)


class TorchArrays(Arrays):
    """Tensors on a CPU or a CUDA device. Those that require gradients are refused: autograd does not see a call."""

    name = "a torch.Tensor"

    def __init__(self) -> None:
        self._torch = torch = sys.modules["torch"]
        self._names = {getattr(torch, name): name for name in DTYPES}
        self._places = {torch.device("cpu"): "cpu"}
        self._plain = {torch.Tensor, torch.nn.Parameter}
        c, self._forward = torch._C, torch.autograd.forward_ad
        self._modes, self._function_modes = c._len_torch_dispatch_stack, c._len_torch_function_stack
        self._transform = c._functorch.maybe_current_level
        # The public call makes a Stream object, which takes longer than all the rest of a call.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)

    def take(self, value: Any, name: str) -> Any:
        if not isinstance(value, self._torch.Tensor):
            raise ArgumentError(name, type(value), f"{self.name}, as x is")
        if value.layout is not self._torch.strided:
            raise ArgumentError(f"{name}.layout", value.layout, "torch.strided")
        if value.is_nested or type(value) is self._torch.nn.UninitializedParameter:
            raise ArgumentError(name, type(value), "a tensor that has one shape")
        if value.requires_grad and self._torch.is_grad_enabled():
            raise ArgumentError(f"{name}.requires_grad", True, "False, or a call under torch.no_grad(): "
                                "autograd knows the layers of ecornn.torch")
        if name == "x" and (self._modes() or self._transform() is not None or self._function_modes()
                            or self._forward._current_level >= 0):
            self._check_unwatched(value)
        return value

    def _check_unwatched(self, x: Any) -> None:
        """Raises :class:`ArgumentError` if somebody traces, transforms or differentiates: he would not see the call."""
        torch, forward = self._torch, self._forward
        kinds = torch._C._TorchDispatchModeKey
        if torch._ops._len_torch_dispatch_stack_pre_dispatch() or any(
                map(torch._C._get_dispatch_mode, (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL))):
            raise ArgumentError("x", "a tensor that is traced", f"a call that nothing traces; {OPERATOR}")
        if self._transform() is not None:
            raise ArgumentError("x", "a tensor in a transform of torch.func", f"a call outside of it; {OPERATOR}")
        if forward._current_level >= 0 and forward.unpack_dual(x).tangent is not None:
            raise ArgumentError("x", "a dual tensor", "a tensor without a tangent: compiled layers have no derivatives")

    def facts(self, array: Any) -> Facts:
        dtype, device = array.dtype, array.device
        return (tuple(array.shape), self._names.get(dtype) or str(dtype).removeprefix("torch."),
                self._places.get(device) or self._places.setdefault(device, str(device)))

    def ready(self, array: Any, name: str) -> Placed:
        pointer = array.data_ptr()
        if ((pointer >= LOW or address(array)) and not pointer % ALIGNMENT and array.is_contiguous()
                and not array.is_neg()):
            return array, pointer
        if not address(array) and not array._is_zerotensor():  # as autograd has zeros
            raise ArgumentError(name, f"a {type(array).__name__} without memory of its own", "a tensor with memory")
        copy = array.detach().clone(memory_format=self._torch.contiguous_format)
        return copy, copy.data_ptr()

    def in_place(self, array: Any) -> Placed | None:
        pointer = address(array)
        fits = pointer and not pointer % ALIGNMENT and array.is_contiguous() and not array.is_neg()
        return (array, pointer) if fits else None

    def empty(self, shape: Shape, like: Any, library: Library) -> Placed:
        if type(like) in self._plain:  # a third of the other's time; of a subclass it would be one, too
            made = like.new_empty(shape)
        else:
            made = self._torch.empty(shape, dtype=like.dtype, device=like.device)
        return made, made.data_ptr()

    def zeros(self, shape: Shape, like: Any, dtype: str) -> Placed:
        made = self._torch.zeros(shape, dtype=getattr(self._torch, dtype), device=like.device)
        return made, made.data_ptr()

    def several(self, shapes: Sequence[Shape], like: Any, dtype: str, zeros: bool) -> list[Placed]:
        kind = getattr(self._torch, dtype)
        made = [self._torch.empty(shape, dtype=kind, device=like.device) for shape in shapes]
        if zeros:
            self._torch._foreach_zero_(made)  # one kernel for all
        return [(array, array.data_ptr()) for array in made]

    def beside(self, x: Any, others: Sequence[Any], width: int) -> Any:
        return self._torch.cat([x, *(o.expand(*x.shape[:2], width) for o in others)], dim=2)

    def swapped(self, array: Any) -> Any:
        return array.transpose(0, 1)

    def clear(self, array: Any, steps: int) -> bool:
        array[steps:].zero_()
        return True

    def rows(self, value: Any, dtype: str, like: Any, library: Any) -> Placed:
        tensor = self._torch.from_numpy(value.astype(dtype)) if isinstance(value, np.ndarray) else value
        made = on_device(tensor.resolve_neg(), like).to(dtype=getattr(self._torch, dtype)).contiguous()
        return made, made.data_ptr()

    def kept(self, copies: dict[Any, Placed], value: Any, dtype: str, like: Any, library: Any) -> Placed:
        # A stream has its own, since nothing orders it behind another one's copy, except in a capture, before which
        # the caller has called and waited.
        key = like.device, 0 if like.is_cpu else self.queue(like.device.index)
        found = copies.get(key)
        if found is None:
            capturing = like.is_cuda and not self.keeps_workspace()
            there = [copy for (device, _), copy in copies.items() if device == like.device] if capturing else []
            found = there[0] if there else self.rows(value, dtype, like, library)
            if not capturing:
                copies[key] = found
        return found

    def to_host(self, value: Any, name: str, library: Library) -> np.ndarray[Any, Any]:
        torch = self._torch
        if value.is_quantized or (value.dtype.is_floating_point and value.dtype not in self._names):
            raise DTypeError(f"{name}.dtype", str(value.dtype).removeprefix("torch."),
                             f"one of {', '.join(self._names.values())}")
        if not self._dense(value):
            kind = f"a {type(value).__name__} of layout {value.layout} on {value.device}"
            raise ArgumentError(name, kind, "a dense tensor with memory of its own")
        value = value.detach().resolve_neg()
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.to(torch.float32)
        # .numpy() would forbid for ever that its memory be given back, as FSDP does with weights between two calls
        return np.from_dlpack(value.cpu().resolve_conj())

    def _dense(self, value: Any) -> bool:
        """Tells whether a tensor's elements lie in its memory."""
        if value.layout is not self._torch.strided or value.is_nested:
            return False
        try:
            return bool(address(value)) or not value.numel()
        except RuntimeError:  # of a subclass, or a tensor that is traced
            return False

    def packs(self, value: Any, place: str) -> bool:
        # float64 would be rounded twice
        return self._names.get(value.dtype) in SERVED["cuda"] and self.facts(value)[2] == place and self._dense(value)

    def workspace(self, nbytes: int, like: Any, library: Library) -> Memory:
        return HostMemory(nbytes) if like.is_cpu else TorchMemory(self._torch, nbytes, like.device)

    def queue(self, device: int) -> int:
        if self._raw_stream is not None:
            stream: int = self._raw_stream(device)
        else:
            stream = self._torch.cuda.current_stream(device).cuda_stream
        return stream

    def over(self, memory: Memory, like: Any, shape: Shape) -> Placed | None:
        return (memory.array(like.dtype, shape), memory.pointer) if isinstance(memory, TorchMemory) else None

    def keeps_workspace(self) -> bool:
        # Memory that is allocated during a capture belongs to the graph, and to its replays alone.
        return not self._capturing()
