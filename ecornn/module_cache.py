"""Modules that ``ecornn.torch`` need not compile: from folders of module files and from the build cache, without TVM.

``ECORNN_MODULES`` names folders, colons between them, which go with a program that PyTorch saved; a module there is
found by its manifest. An entry of the cache is found by all that a module depends on: layer, device, tuning logs,
ecornn's code, dependencies, compilers; where there is no compiler, the last entry of any of them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ecornn import host_cpu, host_gpu
from ecornn.boundary import public
from ecornn.build import cache, link, nvcc
from ecornn.errors import BuildError, EcornnError, ModuleError
from ecornn.layer_spec import LayerSpec
from ecornn.manifest import Manifest, versions
from ecornn.program import FINITE
from ecornn.runtime.loader import Module, check_host, from_bytes, load

VARIABLE = "ECORNN_MODULES"
ANY = "layer of any compiler"  # the kind of an entry
KINDS = {"cpu": "llvm", "cuda": "cuda"}  # target -> kind of device
_had: dict[int, Module] = {}  # modules that were used, for save_modules
_told: set[str] = set()  # hints that this process has given
_quiet: list[None] = []  # one for each of those that want no hints


def compiled_layer(layer: LayerSpec, target: str, config: Mapping[str, Any] | None = None) -> Module:
    """The module of a layer, as :func:`ecornn.compiler.compile_layer` makes it, for ``cpu`` or ``cuda``. The logger
    ``ecornn`` hears when a process first compiles. Raises :class:`~ecornn.errors.ModuleError` where that needs TVM."""
    if (ahead := find(layer, target, config)) is not None:
        return _remembered(ahead)
    if (kept := from_entry(str(_entry(layer, target, config) or ""))) is not None:
        return kept
    if importlib.util.find_spec("tvm") is None:
        places = ", ".join(map(str, _folders())) or "which is not set"
        raise ModuleError(f"{layer.workload} cannot be compiled without TVM, and {VARIABLE} ({places}) has no module "
                          "for it: make the same call on a machine with TVM, then ecornn.torch.save_modules(folder)")
    from ecornn import compiler

    def make() -> bytes:
        hint("compiling %s, which takes some seconds at the first call of every kind of layer; "
             "to compile ahead, call ecornn.torch.prepare(model, *example)", layer)
        module = compiler.compile_layer(layer, target=target, config=config)  # its file lives as long as it
        return module.path.read_bytes()

    if cache.folder() is None:
        return _remembered(from_bytes("layer.so", make()))
    parts = _parts(layer, target, config)
    content = cache.entry("layer", (*parts, *_compilers(target)), make)
    cache.keep(ANY, parts, content)
    return _remembered(from_bytes("layer.so", content))


def hint(text: str, layer: LayerSpec) -> None:
    """Logs that a layer is compiled, and what the user can do about it: once in a process, unless hints are off."""
    if text not in _told and not _quiet:
        _told.add(text)
        logging.getLogger("ecornn").warning(text, layer.workload)


@contextlib.contextmanager
def without_hints() -> Iterator[None]:
    """Turns hints off: ``prepare()``, which shows its progress, must not tell its caller to call ``prepare()``."""
    _quiet.append(None)
    try:
        yield
    finally:
        _quiet.pop()


def known(layer: LayerSpec, target: str) -> bool:
    """True where the module is in a folder or the cache already."""
    return find(layer, target) is not None or _entry(layer, target, None) is not None


@lru_cache
def get_ready() -> None:
    """Imports and reads, once, what the first module of a process takes besides the module: a tenth of a second, which
    calls would have to share with a thread, as Python's global lock has it, and then for longer."""
    import tvm_ffi  # noqa: F401

    _code(), _logs(), _device("cpu")


def found(layer: LayerSpec, target: str) -> Module | None:
    """The module from a folder or the cache; None where it is in neither. Takes some milliseconds of Python's time,
    which the first calls of a program do not have meanwhile: little is imported."""
    if (ahead := find(layer, target)) is not None:
        return ahead
    return from_entry(str(_entry(layer, target, None) or ""))


def from_entry(file: str) -> Module | None:
    """The module of an entry of the cache; None where it cannot be read."""
    content = cache.read(Path(file)) if file else None
    return None if content is None else _remembered(from_bytes("layer.so", content))


def _entry(layer: LayerSpec, target: str, config: Mapping[str, Any] | None) -> Path | None:
    """The file of a layer's entry; None where there is none."""
    parts = _parts(layer, target, config)
    try:
        return cache.file_of("layer", (*parts, *_compilers(target)))
    except BuildError:  # no compiler
        return cache.file_of(ANY, parts)


def _parts(layer: LayerSpec, target: str, config: Mapping[str, Any] | None) -> tuple[bytes, ...]:
    what = msgspec.json.encode((layer.workload, layer.stack, layer.training, sorted((config or {}).items())))
    return what, _device(target), _logs(), _code()


def _device(target: str) -> bytes:
    if target == "cuda":
        gpu = host_gpu.detect()
        return msgspec.json.encode(gpu and gpu.identity)
    info, allowed = host_cpu.cpuinfo(), sorted(os.sched_getaffinity(0))
    words = [info.get(name) for name in ("model name", "flags", "CPU part", "Features")]
    return msgspec.json.encode((words, host_cpu.physical_cores(allowed), host_cpu.l2_bytes(allowed[0])))


def _compilers(target: str) -> tuple[str, ...]:
    """The compilers that a target's code depends on. Raises :class:`BuildError` where one is missing."""
    return (nvcc.identity(), link.identity()) if target == "cuda" else (link.identity(),)


def _logs() -> bytes:
    """A digest of the tuning logs, the same wherever they lie."""
    from ecornn.tuning_logs import SUFFIXES, shipped_folder, user_folder

    files = [(str(path), state.st_size, state.st_mtime_ns) for folder in (user_folder(), shipped_folder())
             if folder.is_dir() for path in sorted(folder.glob("*.jsonl*"))
             if path.name.endswith(SUFFIXES) and path.is_file() for state in [path.stat()]]
    return b"".join(_log(*file) for file in files)


@lru_cache(maxsize=1024)
def _log(path: str, size: int, changed: int) -> bytes:
    """A digest of a log of this size, which was changed then; empty for one that has gone."""
    try:
        return hashlib.sha256(Path(path).name.encode() + b"\0" + Path(path).read_bytes()).digest()
    except OSError:
        return b""


@lru_cache
def _code() -> bytes:
    """A digest of ecornn's files and the versions of the packages that they use."""
    digest = hashlib.sha256(msgspec.json.encode(versions()))
    for package in ("ecornn", "ecornn.schedules"):  # which is found and not imported, which takes longer than this
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        place = Path(spec.submodule_search_locations[0])
        for path in sorted(place.rglob("*")):
            if path.suffix in (".py", ".cc", ".cu", ".h"):
                digest.update(path.relative_to(place).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


# -- folders of modules -------------------------------------------------------------------------
def find(layer: LayerSpec, target: str, config: Mapping[str, Any] | None = None) -> Module | None:
    """The module of the least batch that serves a layer for ``cpu`` or ``cuda`` on this machine; with ``config``, which
    has no products of pairs, one for infinite weights. None where there is none. Raises
    :class:`~ecornn.errors.ModuleError` for a folder that is missing and a file in it that cannot be loaded."""
    serving = [m for folder in _folders() for m in _modules(folder, _state(folder))
             if _is(m.manifest, layer, target, finite=not config) and _runs_here(m.manifest)]
    # one that does not train before one that does, whose kernels may be others
    return min(serving, key=lambda m: (m.manifest.workload.batch, m.manifest.stack.keep is not None), default=None)


def _folders() -> list[Path]:
    return [Path(name).expanduser() for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def _remembered(module: Module) -> Module:
    _had[id(module)] = module
    return module


@public
def save_modules(folder: str | os.PathLike[str]) -> list[Path]:
    """Copies the module files that ``ecornn.torch`` has used in this process to a folder, for processes with
    ``ECORNN_MODULES=folder``. They are named after their content, so that several programs may share a folder.

    Raises OSError where the folder cannot be written, and :class:`~ecornn.errors.ModuleError` where nothing has been
    used yet: call the model first, or :func:`ecornn.torch.prepare`."""
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
        raise ModuleError(f"{VARIABLE}: the folder {folder} does not exist")
    return tuple((path.name, state.st_ino, state.st_mtime_ns) for path in sorted(folder.glob("*.so"))
                 for state in [path.stat()])


@lru_cache(maxsize=64)
def _modules(folder: Path, state: tuple[tuple[str, int, int], ...]) -> tuple[Module, ...]:
    return tuple(load(folder / name) for name, *_ in state)


# -- in a worker process ------------------------------------------------------------------------
class Asked(msgspec.Struct, frozen=True):
    """A layer of a built-in cell to compile, as the fields of its LayerSpec, and the target."""

    fields: dict[str, Any]
    target: str

    @classmethod
    def of(cls, layer: LayerSpec, target: str) -> Asked:
        fields = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
        return cls(fields | {"cell": layer.workload.cell}, target)


def ready(_: None) -> None:
    _quiet.append(None)  # the process that asks gives hints


def compile_for_another(asked: Asked) -> str:
    """Compiles a layer; the file of its entry, empty if the cache keeps none."""
    from ecornn.compiler import host_code_for
    from ecornn.quick_tvm import import_tvm

    with host_code_for(asked.target):
        if importlib.util.find_spec("tvm") is not None:
            import_tvm()
        layer = LayerSpec(**asked.fields)
        parts = _parts(layer, asked.target, None), _compilers(asked.target)  # before: somebody may tune meanwhile
        compiled_layer(layer, asked.target)
    return str(cache.file_of("layer", (*parts[0], *parts[1])) or "")
