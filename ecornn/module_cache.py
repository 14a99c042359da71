"""Modules that a process has compiled, for the next one: from the build cache, and without TVM; or from a folder.

An entry is found by all that a module depends on: the layer, the device, the tuning logs as they lie there, the code of
ecornn, its dependencies and compilers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ecornn import module_folders
from ecornn.layer_spec import LayerSpec

if TYPE_CHECKING:
    from ecornn.runtime.loader import Module

_told: list[str] = []


def compiled_layer(layer: LayerSpec, target: str, config: Mapping[str, Any] | None = None) -> Module:
    """The module of a layer, as :func:`ecornn.compiler.compile_layer` makes it, for ``cpu`` or ``cuda``.

    Says on stderr, through the logger ``ecornn``, when a process first compiles something: it takes seconds. Raises
    :class:`~ecornn.errors.ModuleError` where that takes TVM, which is not there.
    """
    return module_folders.had(module_folders.find(layer, target, config) or _compiled(layer, target, config))


def _compiled(layer: LayerSpec, target: str, config: Mapping[str, Any] | None) -> Module:
    """The module from the build cache, or a new one."""
    if importlib.util.find_spec("tvm") is None:
        raise module_folders.missing(layer)
    from ecornn import compiler
    from ecornn.build import cache
    from ecornn.runtime.loader import from_bytes

    def make() -> bytes:
        if not _told:
            _told.append("said")
            logging.getLogger("ecornn").warning(
                "compiling %s, as the first call of every kind of layer does, for some seconds; "
                "ecornn.torch.prepare(model, *example) does it ahead", layer.workload)
        module = compiler.compile_layer(layer, target=target, config=config)  # its file lives as long as it
        return module.path.read_bytes()

    if cache.folder() is None:
        return from_bytes("layer.so", make())
    return from_bytes("layer.so", cache.entry("layer", _parts(layer, target, config), make))


def known(layer: LayerSpec, target: str) -> bool:
    """True where the module is in a folder or the cache already."""
    from ecornn.build import cache

    return (module_folders.find(layer, target) is not None
            or cache.file_of("layer", _parts(layer, target, None)) is not None)


def get_ready() -> None:
    """Imports and reads what the first module of a process takes, besides the module: a tenth of a second."""
    import tvm_ffi  # noqa: F401

    _code(), _logs(), _device("cpu")


def found(layer: LayerSpec, target: str) -> Module | None:
    """The module from a folder or the cache; None where it is in neither.

    Takes some milliseconds of Python's time, which the first calls of a program do not have meanwhile: little is
    imported.
    """
    if (ahead := module_folders.find(layer, target)) is not None:
        return ahead
    from ecornn.build import cache

    return from_entry(str(cache.file_of("layer", _parts(layer, target, None)) or ""))


def from_entry(file: str) -> Module | None:
    """The module of an entry of the cache; None where it cannot be read."""
    from ecornn.build import cache
    from ecornn.runtime.loader import from_bytes

    content = cache.read(Path(file)) if file else None
    return None if content is None else module_folders.had(from_bytes("layer.so", content))


def _parts(layer: LayerSpec, target: str, config: Mapping[str, Any] | None) -> tuple[bytes, ...]:
    what = msgspec.json.encode((layer.workload, layer.stack, layer.training, sorted((config or {}).items())))
    return what, *_device(target), _logs(), _code()


def _device(target: str) -> tuple[bytes, ...]:
    """The device and the compilers that a target's code depends on."""
    from ecornn import host_cpu, host_gpu
    from ecornn.build import link, nvcc

    compiler = link.identity().encode()
    if target == "cuda":
        gpu = host_gpu.detect()
        return msgspec.json.encode(gpu and gpu.identity), nvcc.identity().encode(), compiler
    info, allowed = host_cpu.cpuinfo(), sorted(os.sched_getaffinity(0))
    words = [info.get(name) for name in ("model name", "flags", "CPU part", "Features")]
    return msgspec.json.encode((words, host_cpu.physical_cores(allowed), host_cpu.l2_bytes(allowed[0]))), compiler


def _logs() -> bytes:
    """The tuning logs, by name, size and time of change."""
    from ecornn.tuning_logs import SUFFIXES, shipped_folder, user_folder

    files = [(str(path), state.st_size, state.st_mtime_ns) for folder in (user_folder(), shipped_folder())
             if folder.is_dir() for path in sorted(folder.glob("*.jsonl*"))
             if path.name.endswith(SUFFIXES) and path.is_file() for state in [path.stat()]]
    return msgspec.json.encode(files)


@cache
def _code() -> bytes:
    """A digest of ecornn's files and the versions of the packages that they use."""
    from ecornn.manifest import versions

    digest = hashlib.sha256(msgspec.json.encode(versions()))
    for package in ("ecornn", "ecornn.schedules"):  # which is found and not imported, which takes longer than this
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        place = Path(spec.submodule_search_locations[0])
        for path in sorted(place.rglob("*")):
            if path.suffix in (".py", ".cc", ".cu", ".h"):
                digest.update(path.relative_to(place).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


# -- in a worker process ------------------------------------------------------------------------
class Asked(msgspec.Struct, frozen=True):
    """A layer of a built-in cell to compile, as the fields of its LayerSpec, and the target."""

    fields: dict[str, Any]
    target: str

    @classmethod
    def of(cls, layer: LayerSpec, target: str) -> Asked:
        """The message that says this."""
        fields = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
        return cls(fields | {"cell": layer.workload.cell}, target)


def ready(_: None) -> None:
    """The first call of a worker process."""
    _told.append("by the other process")


def compile_for_another(asked: Asked) -> str:
    """Compiles a layer; the file of its entry, empty if the cache keeps none."""
    from ecornn.build import cache
    from ecornn.quick_tvm import import_tvm

    if importlib.util.find_spec("tvm") is not None:
        import_tvm()
    layer = LayerSpec(**asked.fields)
    parts = _parts(layer, asked.target, None)  # as the logs are before: somebody may tune meanwhile
    compiled_layer(layer, asked.target)
    return str(cache.file_of("layer", parts) or "")
