"""Compiled layers in JAX.

    import ecornn, ecornn.jax
    module = ecornn.compile("lstm", hidden=256, batch=16, training=True)
    layer = ecornn.jax.recurrent(module)
    y, (h, c) = layer(weights, x)  # under jax.jit, jax.grad and jax.vmap, too

The extra ``jax`` has what this needs. XLA calls modules by FFI handlers, a library that is compiled against jaxlib's
headers when it is first needed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ecornn.errors import missing

try:
    import jax
except ModuleNotFoundError as error:
    raise missing(error, "ecornn.jax", "jax") from error

import jax.numpy as jnp
import numpy as np

from ecornn import checksum, temporary
from ecornn.boundary import public
from ecornn.build.link import package_library
from ecornn.errors import ArgumentError, DTypeError, ModuleError, ShapeError, WeightsError
from ecornn.program import FORWARD
from ecornn.runtime.caller import named
from ecornn.runtime.library import spelling
from ecornn.runtime.loader import Module
from ecornn.runtime.plan import kept_layout
from ecornn.runtime.turns import cores
from ecornn.workload import summed

__all__ = ["Recurrent", "recurrent"]
TARGETS = {"cpu": "ecornn_jax_cpu", "CUDA": "ecornn_jax_cuda"}  # XLA's platform -> the library's function
TARGET = "ecornn"  # XLA's name of the handlers
ABI = 1


@functools.cache
def library() -> ctypes.CDLL:
    """The handlers, known to XLA. Raises :class:`~ecornn.errors.BuildError` without a C++ compiler."""
    content = package_library("jax/handler.cc", ("-ldl",), (jax.ffi.include_dir(),), (jax.version.__version__,))
    with temporary.folder() as folder:
        path = folder / "handler.so"
        path.write_bytes(content)
        handlers = ctypes.CDLL(str(path))  # it stays when its file goes
    for platform, name in TARGETS.items():
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(handlers, name)), platform=platform)
    return handlers


def register(module: Module) -> str:
    """Makes a module known to the handlers by its file's digest. Raises :class:`ModuleError` without a C interface."""
    path = module.path
    if not path.is_file():
        raise ModuleError(f"the module's file {path} is gone")
    digest = checksum.said(path.read_bytes()).hex()
    # never closed: programs of XLA may call it as long as they like
    function = getattr(ctypes.CDLL(spelling(path.resolve())), "ecornn_module_api", None)
    if function is None:
        raise ModuleError(f"{path} was compiled before modules had a C interface: compile it again")
    function.restype = ctypes.c_void_p
    table = function(ABI)
    if not table:
        raise ModuleError(f"{path} has another version of the C interface: compile it again")
    library().ecornn_jax_register(digest.encode(), ctypes.c_void_p(table))
    return digest


_RUN, _FORWARD, _BACKWARD = np.int32(0), np.int32(1), np.int32(2)
_MOST_THREADS = 1024
_call: Callable[..., Any] = functools.partial(jax.ffi.ffi_call, TARGET, vmap_method="sequential")

Arrays = tuple[jax.Array, ...]


@public
def recurrent(module: Module, *, threads: int | None = None) -> Recurrent:
    """A module as a function of JAX arrays.

    Parameters
    ----------
    module : compiled for where JAX's arrays lie; with ``training=True`` for gradients
    threads : CPU threads of a call; default: the physical cores that this process may use

    Raises
    ------
    ArgumentError : ``threads`` is not 1 to 1024, or was given for a GPU; a module with ``sequences``
    ModuleError : the file was compiled before modules had a C interface
    BuildError : there is no C++ compiler, which the first call in a machine's build cache needs"""
    cuda = module.manifest.device.kind == "cuda"
    if threads is not None and (cuda or isinstance(threads, bool) or not isinstance(threads, int)
                                or not 1 <= threads <= _MOST_THREADS):
        raise ArgumentError("threads", threads, "None on a GPU, and an integer from 1 to 1024 on a CPU")
    if module.manifest.stack.sequences:
        raise ArgumentError("module", str(module), "a module that was compiled without sequences=True")
    if threads is None and not cuda:
        threads = min(_MOST_THREADS, cores())
    return Recurrent(module, threads or 0)


class Recurrent:
    """A layer that ``module`` carries out, made by :func:`recurrent`; each call takes and packs the weights."""

    def __init__(self, module: Module, threads: int) -> None:
        self.module, self._manifest, dtype = module, module.manifest, module.manifest.workload.dtype
        self._attributes = {"module": register(module), "threads": np.int32(threads)}
        self._names = [p.name for p in self._manifest.parameters]
        self._dtype, self._sums = jnp.dtype(dtype), jnp.dtype(summed(dtype))
        self._function = jax.custom_vjp(_with_rows(self))
        self._function.defvjp(self._forward, self._backward)

    def __repr__(self) -> str:
        return f"<ecornn.jax.Recurrent of {self.module!r}>"

    @public
    def __call__(self, weights: Mapping[str, jax.Array], x: jax.Array, state: Sequence[jax.Array] | None = None, *,
                 lengths: Any = None, resets: Any = None) -> tuple[jax.Array, Arrays]:
        """Runs the sequence ``x``.

        Parameters
        ----------
        weights : by PyTorch's names, as :meth:`ecornn.Module.bind` takes them, of any floating-point type
        x : (T, B, I), T >= 1, 1 <= B <= the compiled batch, of the module's data type
        state : one array for each state of the cell, (B, H), or (L*D, B, H); default: zeros
        lengths : (B,) integers from 0 to T, for a module compiled with ``lengths=True``; default: all are T
        resets : (T, B) booleans, for one with ``resets=True``; default: none is set

        Returns
        -------
        y : (T, B, D*H), the output state after each step
        state : the states after the last step, of the shape of ``state``

        ``jax.vmap`` over x, states and masks puts the axis into B where that has room, and goes one after the other
        where it has none, over weights, and in gradients.

        Raises
        ------
        ShapeError, DTypeError : an array does not fit
        WeightsError : a name is missing or unexpected
        ArgumentError : ``lengths`` or ``resets`` for a module that was compiled without them"""
        steps, batch = self._check("x", x, 3, self._dtype)[:2]
        shape = self._state_shape(batch)
        work, names = self._manifest.workload, self._manifest.states
        if x.shape[2] != work.input or not 1 <= batch <= work.batch or not 1 <= steps <= self._manifest.longest:
            raise ShapeError("x.shape", x.shape, f"(T, B, {work.input}) with T from 1 to {self._manifest.longest} and "
                             f"B from 1 to {work.batch}, the batch that the module was compiled for")
        states = [jnp.zeros(shape, self._dtype)] * len(names) if state is None else list(state)
        if len(states) != len(names):
            raise ShapeError("len(state)", len(states), f"{len(names)}: ({', '.join(names)},)")
        for number, one in enumerate(states):
            if self._check(f"state[{number}]", one, len(shape), self._dtype) != shape:
                raise ShapeError(f"state[{number}].shape", one.shape, str(shape))
        masks = []
        for name, value, wanted, default, dtype in (("lengths", lengths, (batch,), steps, jnp.int32),
                                                    ("resets", resets, (steps, batch), 0, jnp.uint8)):
            if not getattr(self._manifest.stack, name):
                if value is not None:
                    raise ArgumentError(name, type(value), f"None: the module was compiled without {name}=True")
                continue
            mask = jnp.full(wanted, default, dtype) if value is None else jnp.asarray(value).astype(dtype)
            if mask.shape != wanted:
                raise ShapeError(f"{name}.shape", mask.shape, str(wanted))
            masks.append(mask)
        y, after = self._function(x, tuple(masks), tuple(states), self._ordered(weights))
        return named(self._manifest, y), after

    def _check(self, name: str, value: Any, axes: int, dtype: Any) -> tuple[int, ...]:
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise ArgumentError(name, type(value), "an array of JAX")
        if len(value.shape) != axes:
            raise ShapeError(f"{name}.shape", value.shape, f"{axes} axes")
        if value.dtype != dtype:
            raise DTypeError(f"{name}.dtype", str(value.dtype), f"{dtype}, as in the module")
        return tuple(value.shape)

    def _ordered(self, weights: Mapping[str, Any]) -> Arrays:
        if not isinstance(weights, Mapping) or {*weights} != {*self._names}:
            given = [*weights] if isinstance(weights, Mapping) else type(weights)
            raise WeightsError(f"weights of {self._manifest.workload.cell}: {given}; expected {', '.join(self._names)}")
        for parameter in self._manifest.parameters:
            value, name = weights[parameter.name], f"weights[{parameter.name!r}]"
            if tuple(value.shape) != parameter.shape:
                raise ShapeError(f"{name}.shape", value.shape, str(parameter.shape))
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise DTypeError(f"{name}.dtype", str(value.dtype), "a floating-point type")
        return tuple(jnp.asarray(weights[name]) for name in self._names)

    def _state_shape(self, batch: int) -> tuple[int, ...]:
        work, count = self._manifest.workload, self._manifest.stack.count
        return (batch, work.hidden) if count == 1 else (count, batch, work.hidden)

    # The functions that XLA calls: x (T, B, I), masks, states and weights as tuples of arrays.
    def _results(self, x: jax.Array) -> list[jax.ShapeDtypeStruct]:
        y, state = (*x.shape[:2], self._manifest.y_width), self._state_shape(x.shape[1])
        return [jax.ShapeDtypeStruct(shape, self._dtype) for shape in (y, *[state] * len(self._manifest.states))]

    def run(self, x: jax.Array, masks: Arrays, states: Arrays, weights: Arrays) -> tuple[jax.Array, Arrays]:
        y, *after = _call(self._results(x))(x, *masks, *states, *weights, entry=_RUN, **self._attributes)
        return y, tuple(after)

    def _forward(self, x: jax.Array, masks: Arrays, states: Arrays,
                 weights: Arrays) -> tuple[tuple[jax.Array, Arrays], tuple[Any, ...]]:
        """y and the last states; and what ``_backward`` takes, with the values that are kept for it, as bytes."""
        if FORWARD not in self._manifest.entries:
            raise ModuleError("the module was compiled without training=True: it has no gradients")
        results = [*self._results(x), jax.ShapeDtypeStruct((kept_layout(self._manifest, *x.shape[:2])[1],), jnp.uint8)]
        y, *after, kept = _call(results)(x, *masks, *states, *weights, entry=_FORWARD, **self._attributes)
        return (y, tuple(after)), (x, masks, states, weights, y, kept)

    def _backward(self, known: tuple[Any, ...], gradients: tuple[jax.Array, Arrays]) -> tuple[Any, ...]:
        """The gradients of x, of masks, which have none, of the first states, and of weights, of their types."""
        (x, masks, states, weights, y, kept), (dy, dafter) = known, gradients
        sums = [jnp.zeros(w.shape, self._sums) for w in weights]  # what gradients are added to: results in their memory
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, *states, *sums)]
        given = [x, *masks, *states, *weights, y, kept, dy, *dafter, *sums]
        places = {len(given) - len(sums) + n: 1 + len(states) + n for n in range(len(sums))}
        dx, *rest = _call(results, input_output_aliases=places)(*given, entry=_BACKWARD, **self._attributes)
        before, dweights = rest[:len(states)], rest[len(states):]
        none = tuple(np.zeros(mask.shape, jax.dtypes.float0) for mask in masks)
        return dx, none, tuple(before), tuple(g.astype(w.dtype) for g, w in zip(dweights, weights, strict=True))


def _with_rows(layer: Recurrent) -> Callable[..., tuple[jax.Array, Arrays]]:
    """``layer.run``, for which vmap's axis becomes rows of the batch, as many at a time as there is room for."""
    run = jax.custom_batching.custom_vmap(layer.run)

    @run.def_vmap
    def rows(size: int, batched: Any, x: jax.Array, masks: Arrays, states: Arrays, weights: Arrays) -> tuple[Any, Any]:
        def all_have_it(array: jax.Array, has: bool) -> jax.Array:
            return array if has else jnp.broadcast_to(array, (size, *array.shape))

        x, masks, states = (jax.tree.map(all_have_it, *pair) for pair in zip((x, masks, states), batched, strict=False))
        most = layer.module.manifest.workload.batch // x.shape[2]
        if any(batched[3]) or most < 2:  # the call's own way: one after the other
            axes = (0, 0, 0, tuple(0 if has else None for has in batched[3]))
            results = jax.vmap(layer.run, in_axes=axes)(x, masks, states, weights)
        else:
            parts = [_folded(layer, slice(n, n + most), x, masks, states, weights) for n in range(0, size, most)]
            results = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
        return results, jax.tree.map(lambda _: True, results)

    return run


def _folded(layer: Recurrent, part: slice, x: jax.Array, masks: Arrays, states: Arrays,
            weights: Arrays) -> tuple[jax.Array, Arrays]:
    """A part of vmap's axis as rows: (N, T, B, I) -> (T, N*B, I), and back."""
    x, masks, states = jax.tree.map(lambda array: array[part], (x, masks, states))
    count, batch = x.shape[0], x.shape[2]

    def fold(array: jax.Array, axis: int) -> jax.Array:
        moved = jnp.moveaxis(array, 0, axis)
        return moved.reshape(*moved.shape[:axis], count * batch, *moved.shape[axis + 2:])

    def unfold(array: jax.Array, axis: int) -> jax.Array:
        return jnp.moveaxis(array.reshape(*array.shape[:axis], count, batch, *array.shape[axis + 1:]), axis, 0)

    y, after = layer.run(fold(x, 1), tuple(fold(m, m.ndim - 2) for m in masks),
                         tuple(fold(s, s.ndim - 3) for s in states), weights)
    return unfold(y, 1), tuple(unfold(a, a.ndim - 2) for a in after)
