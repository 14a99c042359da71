"""A training step as two calls of C++ (``native.cc``), which is compiled in the background for programs that train long
enough: Python and autograd take longer for a small layer than its kernels. Results are the same bits.

A compiler and PyTorch's headers are needed; without them, and until it is compiled, steps go by Python."""

from __future__ import annotations

import ctypes
import logging
import os
import sysconfig
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ecornn import temporary
from ecornn.boundary import public
from ecornn.build import cache
from ecornn.build.link import package_library
from ecornn.program import BACKWARD, FORWARD
from ecornn.runtime.layer import Layer
from ecornn.runtime.memory import HostMemory
from ecornn.runtime.plan import TURNS, AddressedCall
from ecornn.runtime.torch_arrays import TorchMemory
from ecornn.runtime.weights import NEEDED, OPTIONAL
from ecornn.torch import compiling
from ecornn.torch.bound import BoundLayer
from ecornn.torch.by_address import BACK, BACK_TO_X, LayerStep, Spare
from ecornn.torch.engine import PLAIN, Engine, Passes
from ecornn.torch.operator import differentiable, each
from ecornn.torch.snapshot import renewals, suspect
from ecornn.worker import Worker

VARIABLE = "ECORNN_NATIVE_STEP"
CALLS = 256  # training calls of a process before the library is compiled, which takes ten seconds of a core's time
STEPS = 64  # made for a bound layer, at most
SMALL = 1 << 18  # elements of weights on a CPU: to pack more each time takes longer than to look for what has changed


def parts_of_library() -> dict[str, Any]:
    """The arguments with which :func:`ecornn.build.link.package_library` makes the library."""
    folder = Path(torch.__file__).parent
    flags = ("-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    return {"source": "torch/native.cc",
            "linked": (*flags, f"-L{folder / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
            "folders": (str(folder / "include"), str(folder / "include/torch/csrc/api/include")),
            "parts": (str(torch.__version__),)}


def load(content: bytes) -> Any:
    """The library's functions. Raises OSError where it does not fit this PyTorch."""
    def opened(folder: Path) -> ctypes.PyDLL:
        (folder / "native.so").write_bytes(content)
        return ctypes.PyDLL(str(folder / "native.so"), mode=os.RTLD_NOW)

    made = temporary.lasting(opened)
    made.ecornn_step.restype = ctypes.c_void_p
    made.ecornn_step_free.argtypes = [ctypes.c_void_p]
    made.ecornn_train.restype = ctypes.py_object
    made.ecornn_train.argtypes = [ctypes.c_void_p, *[ctypes.py_object] * 4, ctypes.c_int64]
    return made


class Library:
    """The library of a process: ``functions``, once there."""

    def __init__(self) -> None:
        self.functions: Any = None
        self.calls = 0

    def __call__(self) -> Any:
        """The functions; None where there are none, or not yet. So many calls have them compiled."""
        if self.functions is None:
            self.calls += 1
            if self.calls == CALLS and self.wanted():
                compiling.in_background(self)
        return self.functions

    def wanted(self) -> bool:
        """Tells whether this process may have the library: from a cache, since it takes too long to compile each time,
        and in a Python with a global lock, which guards what C++ and Python share."""
        folder = cache.folder()
        if os.environ.get(VARIABLE) == "0" or folder is None or sysconfig.get_config_var("Py_GIL_DISABLED"):
            return False
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return os.access(there, os.W_OK)

    def run(self, worker: Worker) -> None:
        """Compiles the library in a worker process, and loads it. Raises nothing: there is none, if that fails."""
        try:
            entry = compiling.behind_others(worker, "ecornn.build.link:package_library_file", parts_of_library())
            content = cache.read(Path(entry)) if entry else None
            if content is not None:
                self.functions = load(content)
        except Exception as error:
            logging.getLogger("ecornn").debug("training steps go by Python: %s", error)

    def compile(self) -> Any:
        """The functions, compiled now. Raises :class:`~ecornn.errors.BuildError` without a compiler, or if it fails."""
        if self.functions is None:
            self.functions = load(package_library(**parts_of_library()))
        return self.functions


library = Library()


# -- the description of a step, for native.cc -----------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Stands for an address that differs from call to call: ``base`` is a number of native.cc's enum."""

    base: int
    offset: int = 0

    def __add__(self, offset: int) -> Place:
        return Place(self.base, self.offset + offset)


QUEUE, WORKSPACE, KEPT, X, Y, DY, DX, SUMS = (Place(n) for n in range(1, 9))
STATES = 9


def _listed(numbers: Sequence[int]) -> list[int]:
    return [len(numbers), *numbers]


def _call(layer: Layer, entry: str, call: AddressedCall, addresses: Sequence[Place], on_cpu: bool) -> list[int]:
    function = ctypes.cast(getattr(layer.library.file, f"__tvm_ffi_{entry}"), ctypes.c_void_p).value
    arguments = call.arguments((*addresses,), KEPT, WORKSPACE, () if on_cpu else (QUEUE,))
    places = [a if isinstance(a, Place) else Place(0, int(a)) for a in arguments]
    return [int(function or 0), *_listed([p.base for p in places]), *_listed([p.offset for p in places])]


def _calls(layer: Layer, step: LayerStep, on_cpu: bool) -> tuple[list[int], int]:
    """The calls of a step's entries, and the bytes of a workspace for all of them."""
    count, size = len(layer.manifest.states), step.item
    before, after, d_after, d_before = ([Place(STATES + which * count + n) for n in range(count)] for which in range(4))
    sums = [SUMS + begin * size for begin in step.begins]
    ahead = layer.addressed(FORWARD, *step.sizes, ("x", "y", "state_in", "state_out"))
    numbers, room = _call(layer, FORWARD, ahead, (X, Y, *before, *after), on_cpu), ahead.room
    # of a module that always computes the gradients of first states both are the same
    for tensors, wanted in (BACK, d_before), (BACK_TO_X, []) if step.optional else (BACK, d_before):
        back = layer.addressed(BACKWARD, *step.sizes, tensors, not step.writes)
        numbers += _call(layer, BACKWARD, back, (X, Y, *before, DY, *d_after, DX, *wanted, *sums), on_cpu)
        room = max(room, back.room)
    return numbers, room


class NativeStep:
    """Training steps of a bound layer ``one`` with one T and B, on one stream, with the weights that it was made for.
    ``swaps``: x and y are (B, T, ...)."""

    def __init__(self, engine: Engine, one: BoundLayer, step: LayerStep, weights: Sequence[torch.Tensor], place: Any,
                 swaps: bool) -> None:
        layer, on_cpu, device = one.layer, weights[0].is_cpu, weights[0].device
        dtype, packed, self._kept = one.packing.readable(weights)
        if not dtype:
            raise ValueError("weights that must be rearranged")
        self.engine, self.one, self.step, self._swaps = engine, one, step, swaps
        self._queue, self._weights = 0 if on_cpu else place, [*map(weakref.ref, weights)]
        self._memory = [w.detach() for w in weights]  # its addresses stay theirs
        self._packed = [*packed]
        calls, room = _calls(layer, step, on_cpu)
        self._workspace = one.workspace(room, lambda nbytes: HostMemory(nbytes) if on_cpu else TorchMemory(
            torch, nbytes, device))
        later = bool(layer.manifest.packed_for_optional) and not on_cpu
        capturing = 0 if on_cpu else ctypes.cast(ctypes.CDLL("libcuda.so.1").cuStreamIsCapturing, ctypes.c_void_p).value
        numbers = [
            ctypes.addressof(one.shared), id(engine.trained.lock), ctypes.addressof(renewals), swaps,
            on_cpu and step.work <= TURNS, step.writes, step.optional, step.sums is torch.float32, later,
            step.kept_bytes, step.total, self._workspace.pointer, layer.zero_state(step.sizes[1])[1],
            *_listed(step.y_shape), *_listed(step.state_shape), len(layer.manifest.states),
            *_listed([w._cdata for w in weights]), *_listed([w.data_ptr() for w in weights]),
            len(step.parts), *[number for shape, strides, begin in step.parts
                               for number in (begin, *_listed(shape), *_listed(strides))],
            *layer.pack_call(dtype), NEEDED if later else NEEDED | OPTIONAL, *_listed(self._packed),
            int(capturing or 0), *calls]
        self._functions = library.functions
        self._at = self._functions.ecornn_step((ctypes.c_int64 * len(numbers))(*map(int, numbers)))

    def __call__(self, x: torch.Tensor, state: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Any:
        """y and the last states; None if the call is not like the one that this was made for."""
        return self._functions.ecornn_train(self._at, self, x, (*state,), (*weights,), self._queue)

    def __del__(self) -> None:
        if hasattr(self, "_at"):
            self._functions.ecornn_step_free(self._at)

    # -- called by native.cc
    def outdate(self) -> None:
        """Has Python pack the weights again before it uses the layer: C++ packs others, without a note."""
        self.one.snapshot.outdate()

    def suspect(self) -> None:
        suspect([w for ref in self._weights if (w := ref()) is not None])

    @public
    def backward(self, tensors: Sequence[torch.Tensor], gradients: Sequence[Any], wanted: bool,
                 packs: int) -> tuple[Any, ...]:
        """The gradients of x, states and weights, where they take more than a call of the entry."""
        swaps, count = self._swaps, len(self._weights)
        x, y, kept, *rest = tensors
        state, weights, (dy, *others) = rest[:-count], rest[-count:], gradients
        if swaps:
            x, y, dy = x.transpose(0, 1), y.transpose(0, 1), None if dy is None else dy.transpose(0, 1)
        if torch.is_grad_enabled():
            found = differentiable(self.engine, x, state, None, weights, y, kept, (dy, *others))
        else:
            passes = Passes()
            passes.one, passes.packs, passes.step = self.one, packs, self.step
            found = each(lambda given: self.engine.backward(weights, x, state, None, y, kept, given, wanted, passes),
                         (dy, *others))
        return (found[0].transpose(0, 1) if swaps else found[0], *found[1:])


def step_for(engine: Engine, y: torch.Tensor, weights: Sequence[torch.Tensor], place: Any, swaps: bool,
             before: NativeStep | None) -> NativeStep | None:
    """The step for calls like the one that has computed ``y`` by Python, after ``before`` has not served it; None where
    there can be none."""
    passes: Any = getattr(y.grad_fn, "passes", None)
    one, step = (None, None) if passes is None else (passes.one, passes.step)
    if one is None or step is None or one.shared.given_up or one.native_steps >= STEPS:
        return before
    if not all(w.requires_grad for w in weights) or not PLAIN.issuperset(map(type, weights)):
        return before
    if y.is_cpu and (step.kept_bytes >= Spare.LEAST or sum(prod(w.shape) for w in weights) > SMALL):
        return before
    one.native_steps += 1
    try:
        return NativeStep(engine, one, step, weights, place, swaps)
    except (ValueError, AttributeError, OSError):
        return None


