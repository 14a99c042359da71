"""Weights that lie on a GPU, packed there by the module's own kernel (``build/pack_weights.cu``): in the caller's
stream, into memory that is there, as often as they change, also in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.dtypes import DTYPES, ITEMSIZE
from ecornn.errors import ModuleError
from ecornn.manifest import Manifest
from ecornn.program import ON_GPU, WHOLE, Packing
from ecornn.runtime.packing import consistent

# The structures of pack_weights.cu.
WORK = np.dtype([("place", "u8"), ("job", "i4"), ("piece", "i4")])
JOB = np.dtype([("to", "u8"), ("kind", "i4"), ("size", "i4"), ("places", "i4"), ("rows", "i4"), ("columns", "i4"),
                ("padded", "u4"), ("magic", "u4"), ("sources", "i4"), ("gates", "i4"), ("alike", "i4")])
SOURCE = np.dtype([("parameter", "i4"), ("gate", "i4")])

KINDS = {name: number for number, name in enumerate(ON_GPU)}  # of packed weights, as pack_weights.cu has them
TYPES = {name: number for name, number in KINDS.items() if name in DTYPES}  # of parameters
PARAMETERS = 128  # that one launch takes
PIECE = 1024  # elements that a warp makes; more where that is how long the last axis is


class DevicePacking:
    """The packings of a module, and where they are packed to.

    Parameters
    ----------
    packings : each once, and the address of its buffer
    place : brings a table to the device, for as long as the layer lives, and says where it is
    pack : of the module
    """

    def __init__(self, manifest: Manifest, packings: Mapping[Packing, int], place: Callable[[NDArray[Any]], int],
                 pack: Callable[..., Any], device: int) -> None:
        self._pack, self._device = pack, device
        self._launches = [_launch(manifest, group, packings, place) for group in _groups(manifest, packings)]

    def __call__(self, parameters: Sequence[int], dtype: str, queue: int) -> None:
        """Packs parameters at these addresses, in the manifest's order, contiguous and of one of TYPES; 0: zeros."""
        kind = TYPES[dtype]
        for tables, count, numbers in self._launches:
            given = parameters if numbers is None else [parameters[n] for n in numbers]
            self._pack(self._device, queue, *tables, count, kind, *given)


Launch = tuple[tuple[int, ...], int, list[int] | None]  # tables, pieces, and the numbers of its parameters unless all


def _groups(manifest: Manifest, packings: Mapping[Packing, int]) -> list[list[Packing]]:
    """Packings whose parameters one launch can take."""
    groups: list[list[Packing]] = []
    taken: set[str] = set()
    for packing in packings:
        names = {name for name, _ in packing.sources if name}
        if not groups or len(taken | names) > PARAMETERS:
            groups.append([])
            taken = set()
        taken |= names
        groups[-1].append(packing)
        if len(names) > PARAMETERS:
            raise ModuleError(f"the module packs {len(names)} parameters into one buffer; {PARAMETERS} are possible")
    return groups


def _launch(manifest: Manifest, group: Sequence[Packing], packings: Mapping[Packing, int],
            place: Callable[[NDArray[Any]], int]) -> Launch:
    """The tables of a launch, on the device."""
    known = {p.key: number for number, p in enumerate(manifest.parameters)}
    used = {name for packing in group for name, _ in packing.sources if name}
    if strangers := used - known.keys():
        raise ModuleError(f"the module packs parameters that it does not declare: {', '.join(sorted(strangers))}")
    numbers = [number for name, number in known.items() if name in used]
    every = len(known) <= PARAMETERS
    given = known if every else {manifest.parameters[number].key: n for n, number in enumerate(numbers)}
    works: list[NDArray[Any]] = []
    jobs: list[tuple[int, ...]] = []
    sources: list[NDArray[Any]] = []
    places: list[NDArray[np.uint64]] = []
    for number, packing in enumerate(group):
        rows, columns = _shape(manifest, packing)
        mixed = len(set(rows)) > 1  # each gate has rows of its own, which the kernel finds behind the sources
        pieces, own = tables_of(packing)
        padded = packing.pad[-2] if len(packing.pad) == 3 else 1
        jobs.append((packings[packing], KINDS[packing.dtype], len(own), sum(map(len, places)), max(rows, default=0),
                     columns, padded, _magic(padded, packing.pad[0]), sum(map(len, sources)), len(packing.sources),
                     2 if mixed else _alike(own, 16 // ITEMSIZE.get(packing.dtype, 4))))
        own_sources = [(given[name] if name else -1, max(gate, 0)) for name, gate in packing.sources]
        sources.append(np.array(own_sources + ([(count, 0) for count in rows] if mixed else []), SOURCE))
        places.append(own)
        work = np.zeros(len(pieces), WORK)
        work["place"], work["job"], work["piece"] = pieces, number, np.arange(len(pieces))
        works.append(work)
    tables = np.concatenate(works), np.array(jobs, JOB), np.concatenate(sources), np.concatenate(places)
    return tuple(map(place, tables)), len(tables[0]), None if every else numbers


def _shape(manifest: Manifest, packing: Packing) -> tuple[list[int], int]:
    """Rows of each source, and the columns of all; a vector is a row."""
    known = {p.key: p for p in manifest.parameters}
    shapes = [(known[name].shape[0] // (1 if gate == WHOLE else known[name].gates), *known[name].shape[1:])
              for name, gate in packing.sources if name] or [(0,) * (len(packing.pad) - 1)]
    room, fits = packing.pad[1:], len(packing.pad) in (2, 3) and packing.dtype in KINDS
    alike = len({shape[-1] for shape in shapes}) == 1
    if not alike or not fits or any(len(shape) != len(room) or any(
            a > b for a, b in zip(shape, room, strict=True)) for shape in shapes):
        raise ModuleError(f"the module packs parts of shapes {sorted(set(shapes))} into {packing.pad}, as "
                          f"{packing.dtype}")
    if len(room) == 1:
        return [1], shapes[0][0]
    rows = iter([shape[0] for shape in shapes])
    return [next(rows) if name else shapes[0][0] for name, _ in packing.sources], shapes[0][-1]


def _magic(divisor: int, most: int) -> int:
    """2^32 / divisor, rounded up: the high half of its product with a number below ``most * divisor`` is the quotient,
    which is checked."""
    magic = -(-(1 << 32) // divisor)
    last = np.arange(1, most + 1, dtype=np.uint64) * np.uint64(divisor) - np.uint64(1)
    if divisor > 1 and np.any(last * np.uint64(magic) >> np.uint64(32) != np.arange(most, dtype=np.uint64)):
        raise ModuleError(f"the module packs {most} parts of {divisor} rows each: too many")
    return magic % (1 << 32)


def _alike(places: NDArray[np.uint64], together: int) -> bool:
    """Whether all ``together`` neighbours lie as the first ones do, later rows and columns behind earlier ones: a
    thread then looks one place up for all of them. Modules whose kernel does not know of this look up each."""
    if len(places) % together:
        return False
    groups = places.reshape(-1, together)
    farther = groups - groups[:, :1]
    ahead = np.all(farther[0] >> np.uint64(32) < 1 << 16) and np.all(farther[0] & np.uint64(0xffffffff) < 1 << 31)
    return bool(ahead and np.all(groups >= groups[:, :1]) and np.all(farther == farther[0]))


def tables_of(packing: Packing) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Where the elements of a packed buffer come from: element ``i`` of piece ``p`` from the sum of ``pieces[p]`` and
    ``places[i]``, a row among those of all gates in the high 32 bits, and a column."""
    consistent(packing)
    split, columns = packing.split, packing.pad[-1]
    axes: list[tuple[int, int]] = []  # of the packed buffer: size, and how far apart in `pad` its neighbours are
    for axis in packing.order:
        size, stride = split[axis], prod(split[axis + 1:])
        if stride % columns and columns % (stride * size):
            raise ModuleError(f"the module packs pieces that are parts of several rows: {packing}")
        axes.append((size, stride))
    inner: list[tuple[int, int]] = []
    room = PIECE
    while axes and room > 1:
        size, stride = axes.pop()
        part = size if not inner else max(n for n in range(1, min(size, room) + 1) if size % n == 0)
        inner.insert(0, (part, stride))
        if part < size:
            axes.append((size // part, stride * part))
            break
        room //= part
    return _sums(axes, columns), _sums(inner, columns)


def _sums(axes: Sequence[tuple[int, int]], columns: int) -> NDArray[np.uint64]:
    """The places of all elements of such axes."""
    def along(size: int, stride: int) -> NDArray[np.uint64]:
        step = stride // columns << 32 if stride % columns == 0 else stride
        return np.arange(size, dtype=np.uint64) * np.uint64(step)

    start = np.zeros(1, np.uint64)
    return reduce(lambda a, b: np.add.outer(a, b).reshape(-1), (along(*axis) for axis in axes), start)
