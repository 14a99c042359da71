"""The memory of inputs and outputs of a module that is measured, and the clock that fits."""

from __future__ import annotations

import time
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ecornn.dtypes import ITEMSIZE
from ecornn.tune.oracle import numpy_dtype
from ecornn.tune.timing import Run, event_clock, wall_clock

if TYPE_CHECKING:
    from ecornn.runtime.loader import Module


class Arrays:
    """Arrays of one workload's dtype, in one kind of memory: here NumPy's, for CPU modules, with the wall clock."""

    def __init__(self, dtype: str) -> None:
        self.dtype: Any = numpy_dtype(dtype)

    def put(self, values: Any) -> Any:
        """An array of the values."""
        return np.ascontiguousarray(np.asarray(values).astype(self.dtype))

    def weight(self, values: Any) -> Any:
        """Float32 values where ``bind`` packs them fastest."""
        return values

    def poison(self, shape: tuple[int, ...]) -> Any:
        """An array of NaN."""
        return self.put(np.full(shape, np.nan, np.float32))

    def cycled(self, values: Any, length: int) -> Any:
        """An array of ``values`` again and again, ``length`` of them along the first axis."""
        values = np.asarray(values)
        return self.put(np.resize(values, (length, *values.shape[1:])))

    def get(self, array: Any) -> Any:
        """An array's values in float64, once the device is done."""
        return np.asarray(array).astype(np.float64)

    def clock(self, run: Run) -> float:
        """Seconds of ``run``."""
        return wall_clock(run)


class TorchArrays(Arrays):
    """Tensors of torch on the GPU, timed between CUDA events."""

    def __init__(self, dtype: str) -> None:
        import torch

        self.torch, self.dtype = torch, getattr(torch, dtype)

    def put(self, values: Any) -> Any:
        return self.torch.from_numpy(np.array(values, np.float32)).cuda().to(self.dtype)

    def weight(self, values: Any) -> Any:
        return self.torch.from_numpy(values).cuda()

    def poison(self, shape: tuple[int, ...]) -> Any:
        return self.torch.full(shape, float("nan"), dtype=self.dtype, device="cuda")

    def cycled(self, values: Any, length: int) -> Any:
        once = self.put(values)
        return once.repeat(-(-length // len(once)), *(1 for _ in once.shape[1:]))[:length]

    def get(self, array: Any) -> Any:
        return array.to(self.torch.float64).cpu().numpy()

    def clock(self, run: Run) -> float:
        return event_clock(run)


class DeviceArrays(Arrays):
    """The module's own device memory, where there is no torch, timed by the wall clock around runs on the default
    stream and a synchronisation, which short runs share."""

    def __init__(self, dtype: str, module: Module) -> None:
        super().__init__(dtype)
        self.name, self.library = dtype, module.library

    def put(self, values: Any) -> Any:
        from ecornn.runtime.dlpack import CUDA, Block
        from ecornn.runtime.memory import DeviceMemory

        host = np.ascontiguousarray(np.asarray(values, np.float32).astype(self.dtype))
        memory = DeviceMemory(self.library, 0, max(host.nbytes, 1))
        self.library.copy(0, memory.pointer, host.ctypes.data, host.nbytes, 0)
        self.library.synchronize(0, 0)  # before the host's copy goes away
        return Block(memory, host.shape, self.name, (CUDA, 0))

    def get(self, array: Any) -> Any:
        host = np.empty(prod(array.shape) * ITEMSIZE[self.name], np.uint8)
        self.library.copy(0, host.ctypes.data, array.pointer, host.nbytes, 0)
        self.library.synchronize(0, 0)
        return host.view(self.dtype).reshape(array.shape).astype(np.float64)

    def clock(self, run: Run) -> float:
        begin = time.perf_counter()
        run()
        self.library.synchronize(0, 0)
        return time.perf_counter() - begin


@cache
def torch_sees_gpu() -> bool:
    """True where torch is installed and can use a GPU."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


host_arrays, torch_arrays = cache(Arrays), cache(TorchArrays)


def arrays_for(module: Module, dtype: str | None = None) -> Arrays:
    """The arrays to run ``module`` on, of ``dtype`` or else its own; the same object for modules whose arrays are
    interchangeable."""
    dtype = dtype or module.manifest.workload.dtype
    if module.manifest.device.kind == "llvm":
        return host_arrays(dtype)
    return torch_arrays(dtype) if torch_sees_gpu() else DeviceArrays(dtype, module)
