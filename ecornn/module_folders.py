"""Modules that were compiled elsewhere: folders of module files, in which ``ecornn.torch`` looks before it compiles.

A module is found by its manifest, so that programs which PyTorch saved run where there is no compiler: the
folder goes with the program, and ``ECORNN_MODULES`` names it, or several with colons between them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ecornn.boundary import public
from ecornn.errors import EcornnError, ModuleError
from ecornn.layer_spec import LayerSpec
from ecornn.manifest import Manifest
from ecornn.program import FINITE
from ecornn.runtime.loader import Module, check_host, load

VARIABLE = "ECORNN_MODULES"
KINDS = {"cpu": "llvm", "cuda": "cuda"}  # target -> kind of device
_had: dict[int, Module] = {}


def find(layer: LayerSpec, target: str, config: Mapping[str, Any] | None = None) -> Module | None:
    """The module of the least batch that serves a layer for ``cpu`` or ``cuda`` on this machine; with ``config``, which
    has no products of pairs, one for infinite weights. None where there is none.

    Raises :class:`~ecornn.errors.ModuleError` for a folder that is missing and a file in it that cannot be loaded.
    """
    serving = [m for folder in folders() for m in _modules(folder, _state(folder))
             if _is(m.manifest, layer, target, finite=not config) and _runs_here(m.manifest)]
    # one that does not train before one that does, whose kernels may be others
    return min(serving, key=lambda m: (m.manifest.workload.batch, m.manifest.stack.keep is not None), default=None)


def folders() -> list[Path]:
    """The folders that :data:`VARIABLE` names."""
    return [Path(name).expanduser() for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def had(module: Module) -> Module:
    """Remembers a module for :func:`save_modules`."""
    _had[id(module)] = module
    return module


@public
def save_modules(folder: str | os.PathLike[str]) -> list[Path]:
    """Copies the module files that ``ecornn.torch`` has used in this process to a folder, for processes with
    ``ECORNN_MODULES=folder``. They are named after their content, so that several programs may share a folder.

    Raises OSError where the folder cannot be written, and :class:`~ecornn.errors.ModuleError` where nothing has been
    used yet: call the model first, or :func:`ecornn.torch.prepare`.
    """
    if not _had:
        raise ModuleError("no compiled layer has been called in this process: there is nothing to save")
    place, saved = Path(folder), []
    place.mkdir(parents=True, exist_ok=True)
    for module in _had.values():
        digest = hashlib.sha256(module.path.read_bytes()).hexdigest()
        cell = re.sub(r"\W+", "-", module.manifest.workload.cell)[:40].strip("-")
        saved.append(place / f"{cell}-{digest[:16]}.so")
        module.save(saved[-1])
    return saved


def missing(layer: LayerSpec) -> ModuleError:
    """The error where there is no module and nothing can be compiled."""
    places = ", ".join(map(str, folders())) or "no folder: it is not set"
    return ModuleError(f"there is no TVM here to compile {layer.workload}, and no module of it in {VARIABLE} "
                       f"({places}): call ecornn.torch.save_modules(folder) where there is one, after such a call")


def _is(manifest: Manifest, layer: LayerSpec, target: str, finite: bool) -> bool:
    """True where a module serves a layer, for calls of its B and any T."""
    there, asked = manifest.workload, layer.workload
    keep = manifest.stack.keep
    trains = keep is not None and layer.keep in (None, keep)
    return (manifest.device.kind == KINDS[target] and there.batch >= asked.batch
            and replace(there, batch=asked.batch, seq=asked.seq) == asked
            and replace(manifest.stack, keep=None) == replace(layer.stack, keep=None)
            and (trains or not layer.training)
            and (finite or not any(b.packing is not None and b.packing.dtype in FINITE for b in manifest.buffers)))


def _runs_here(manifest: Manifest) -> bool:
    try:
        check_host(manifest.device, 0)
    except EcornnError:  # a folder may have modules for several machines
        return False
    return True


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    if not folder.is_dir():
        raise ModuleError(f"{VARIABLE}: there is no folder {folder}")
    return tuple(_files(folder))


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for path in sorted(folder.glob("*.so")):
        status = path.stat()
        yield path.name, status.st_ino, status.st_mtime_ns


@lru_cache(maxsize=64)
def _modules(folder: Path, state: tuple[tuple[str, int, int], ...]) -> tuple[Module, ...]:
    return tuple(load(folder / name) for name, *_ in state)
