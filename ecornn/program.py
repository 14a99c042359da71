"""What a schedule makes: functions in TIR, the buffers they share, and the order of calls.

A program is everything that is needed to build a module file: the host code that carries it out
is generated from it (``ecornn/build/host_cuda.py``), and its manifest tells the loader how to pack
weights and how much workspace a call needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ecornn.workload import ITEMSIZE

Source = tuple[str, int]  # (parameter, gate)

# In ``sequences``, beside the number of a sequence that lies in two pieces, in neighbouring columns: this one is the
# first or the second of them in x's time. The one that a kernel works on first ends at least as many steps as
# ``PIECES_APART`` before the other begins, and leaves its state for it.
EARLIER, LATER = 1 << 30, 1 << 29
PIECES_APART = 2


class Extent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size that may grow with the sequence: ``fixed + per_step * T`` elements."""

    fixed: int = 0
    per_step: int = 0

    def at(self, steps: int) -> int:
        """The size for T = ``steps``."""
        return self.fixed + self.per_step * steps


class Packing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one packed weight buffer is made from the cell's parameters, done once by ``bind``.

    The ``sources`` are stacked on a new first axis (each is ``parameter[gate]``: (H, K) for a
    matrix, (H,) for a vector; a source ``("", 0)`` is zeros), padded at the end with zeros to
    ``pad``, reshaped to ``split``, transposed by ``order`` and stored as ``dtype``: a floating-point type;
    ``tf32``, float32 rounded to 10 bits of mantissa; ``int8``, each row (the last axis of ``pad``) divided by its
    scale, rounded to nearest even, with 128 added; ``scale``, float32, those scales: a row's largest magnitude /
    127, without the last axis; ``int16`` and ``int21`` with ``int16_scale`` and ``int21_scale``, see
    ``ecornn/runtime/fixed_point.py``; ``balanced``, float32, each row divided by the power of two at or below the mean
    magnitude of what is not zero in it; ``balance``, those powers; or ``pairs``, float32, of such rows as ``split`` has
    them, (..., sections, k): minus the sum over k of the products of sections 0 and 1, every other one with the
    opposite sign.
    """

    sources: tuple[Source, ...]
    pad: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    dtype: str


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer of the program, named in the calls.

    ``role``: ``x`` (T, B, I), ``y`` (T, B, D H), ``state_in`` or ``state_out`` (B, H; ``name`` is, or
    in a stack ends in, ``<state>_in`` or ``<state>_out``), ``lengths`` (B,) int32, ``resets`` (T, B)
    uint8, ``sequences`` (T, B) int32 (numbers, with marks where a sequence lies in two pieces), ``packed`` (made by
    ``packing``) or ``workspace`` (``extent`` elements, 256-byte aligned, contents undefined before a call).
    """

    name: str
    role: str
    dtype: str
    extent: Extent = Extent()
    packing: Packing | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 1 if self.dtype == "uint8" else ITEMSIZE.get(self.dtype, 4)

    def nbytes(self, steps: int) -> int:
        """Bytes for T = ``steps``."""
        return self.extent.at(steps) * self.itemsize


@dataclass(frozen=True)
class Fill:
    """Sets every byte of a workspace buffer to ``byte``, over its first ``extent`` elements."""

    buffer: str
    byte: int
    extent: Extent


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    A parameter of the function is the buffer that ``names`` gives for it, or the buffer of its own
    name, or one of the scalars ``T``, ``B`` (of the call) and ``t`` (of the step, in a loop), all int32.
    """

    function: str
    grid: int
    threads: int
    shared: int = 0  # dynamic shared memory, bytes
    cooperative: bool = False
    cluster: int = 1
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loop:
    """``calls`` for t = 0 .. T-1, in order."""

    calls: tuple[Launch, ...]


@dataclass(frozen=True)
class Parallel:
    """CPU: ``function`` once on each thread (scalars ``thread`` and ``threads`` besides T and B), of which there are
    no more than ``most`` (0: any number); ``names`` as of :class:`Launch`."""

    function: str
    names: Mapping[str, str] = field(default_factory=dict)
    most: int = 0


@dataclass(frozen=True)
class Beside:
    """CUDA: ``branches``, each some calls in order, at the same time: each on a share of the GPU and in a stream of
    its own. They must not write what another one uses."""

    branches: tuple[tuple[Call, ...], ...]


@dataclass(frozen=True)
class WaveLayer:
    """A layer of a :class:`Wave`: ``calls`` for one chunk, whose T is the chunk's steps.

    Attributes
    ----------
    rows : buffers that have rows of time -> elements of a row for each row of the batch; a chunk gets them from
        its first step on
    states : pairs of ``state_in`` and ``state_out``; all chunks but the first read the second of each
    """

    calls: tuple[Call, ...]
    rows: Mapping[str, int]
    states: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Wave:
    """CUDA: ``layers`` at the same time, in chunks: one of a layer comes after the one before it, and after the
    same one of the layer before."""

    layers: tuple[WaveLayer, ...]
    chunks: int
    least: int

    def steps(self, steps: int) -> int:
        """Steps of a chunk where T = ``steps``."""
        return chunk_steps(steps, self.chunks, self.least)


def chunk_steps(steps: int, chunks: int, least: int) -> int:
    """Steps of a chunk where T = ``steps``: there are ``chunks`` chunks at most, of ``least`` steps at least. Eight
    steps of any type are whole pieces of 16 bytes, to which x is aligned."""
    return -(-max(-(-steps // chunks), least) // 8) * 8


def chunk_extent(extent: Extent, chunks: int, least: int) -> Extent:
    """What one chunk needs of ``extent``, as an extent for all T: a chunk has at most T / chunks + least + 8 steps."""
    return Extent(extent.fixed + extent.per_step * (least + 8), -(-extent.per_step // chunks))


Call = Fill | Launch | Loop | Parallel | Beside | Wave


@dataclass(frozen=True)
class Program:
    """Functions (tirx PrimFuncs by name, parameters named after buffers and scalars) and calls.

    ``together``: neighbouring columns of ``sequences`` that may share one; 1 where none may, 0 where all may.
    """

    functions: dict[str, Any]
    buffers: tuple[Buffer, ...]
    calls: tuple[Call, ...]
    notes: dict[str, str] = field(default_factory=dict)  # shown by --emit and in the manifest
    together: int = 1


def launches(calls: Iterable[Call]) -> Iterator[Launch]:
    """Every launch among ``calls``."""
    for call in calls:
        if isinstance(call, Launch):
            yield call
        elif isinstance(call, Loop):
            yield from call.calls
        elif isinstance(call, Beside):
            for branch in call.branches:
                yield from launches(branch)
        elif isinstance(call, Wave):
            for layer in call.layers:
                yield from launches(layer.calls)
