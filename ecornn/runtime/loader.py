"""Module files: load, save, bind where this machine can run them. What is bound keeps its module."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecornn import temporary
from ecornn.boundary import public
from ecornn.device import Device
from ecornn.errors import ArgumentError, DeviceError, ModuleError
from ecornn.host_cpu import FLAGS, TILES, cpuinfo, permit_tiles
from ecornn.manifest import Manifest, decode
from ecornn.notebook import table
from ecornn.runtime.layer import Layer
from ecornn.runtime.library import Library, open_library
from ecornn.runtime.turns import cores

_MOST_THREADS = 1024
_KERNEL_NAME = {feature: flag for flag, feature in FLAGS.items()}


def check_host(built_for: Device, index: int) -> None:
    """Raises where this machine, or GPU ``index`` of it, cannot run code for ``built_for``. :class:`ModuleError` for a
    CPU that lacks instructions or a GPU of another architecture; :class:`DeviceError` where there is no such GPU."""
    if built_for.kind == "cuda":
        from ecornn.host_gpu import detect

        found = detect(index)
        if found is None:
            raise DeviceError("device", index, "the number of a CUDA GPU that this process can use: the "
                              f"module was compiled for {built_for.arch}")
        if found.arch != built_for.arch:
            raise ModuleError(f"the module was compiled for {built_for.arch} ({built_for.name}), but GPU {index} "
                              f"is a {found.name}, {found.arch}: compile with target={found.arch!r}")
        return
    if index != 0:
        raise DeviceError("device", index, "0 for a module that was compiled for a CPU")
    info = cpuinfo()
    present = {_plain(flag) for flag in (info.get("flags") or info.get("Features") or "").split()}
    missing = [f for f in built_for.features if _plain(_KERNEL_NAME.get(f, f)) not in present]
    if present and missing:  # some kernels do not tell
        raise ModuleError(f"the module was compiled for {built_for.arch} ({built_for.name}) and uses "
                          f"{', '.join(missing)}, which this CPU lacks: compile it here with target='cpu'")


def _plain(name: str) -> str:
    """LLVM writes avx512vnni and sse4.1 where the kernel writes avx512_vnni and sse4_1."""
    return name.replace("_", "").replace("-", "").replace(".", "").lower()


class Module:
    """A compiled layer without weights; made by :func:`load` and ``ecornn.compile``. ``path`` is the file, ``manifest``
    what it says about itself, ``library`` the functions that it exports."""

    def __init__(self, path: Path, library: Library, manifest: Manifest) -> None:
        self.path, self.library, self.manifest = path, library, manifest

    def __repr__(self) -> str:
        m = self.manifest
        what = ", ".join(filter(None, (str(m.workload), str(m.stack), m.schedule)))
        return f"<ecornn.Module {what} for {m.device.name} ({m.device.arch}), {m.provenance}>"

    def _repr_html_(self) -> str:
        m = self.manifest
        return table([("module", m.workload.cell), ("sizes", str(m.workload).removeprefix(f"{m.workload.cell} ")),
                      *([("stack", m.stack)] if str(m.stack) else []), ("device", f"{m.device.name} ({m.device.arch})"),
                      ("schedule", m.schedule), ("chosen", m.provenance), ("file", self.path)])

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has the file's content: it may be read where the file is not."""
        if not self.path.is_file():
            raise ModuleError(f"the module's file {self.path} is gone")
        return from_bytes, (self.path.name, self.path.read_bytes())

    def __copy__(self) -> Module:
        return self  # nothing of it changes

    def __deepcopy__(self, memo: Any) -> Module:
        return self

    @public
    def save(self, path: str | os.PathLike[str]) -> None:
        """Copies the module file to ``path``, complete or not at all; an older file there is replaced.

        Raises :class:`ModuleError` where the file has been removed since it was loaded, and OSError
        where ``path`` cannot be written or is no regular file."""
        to = Path(path)
        if not self.path.is_file():
            raise ModuleError(f"the module's file {self.path} is gone")
        if to.exists() and not to.is_file():
            raise OSError(errno.EISDIR if to.is_dir() else errno.EINVAL, "not a regular file", str(to))
        try:
            with temporary.replacing(to) as beside:  # whoever has the old file loaded keeps it
                shutil.copyfile(self.path, beside)
                beside.chmod(0o755)
        except OSError as error:  # of the name beside it, which the caller does not know
            raise OSError(error.errno, error.strerror, str(to)) from error

    @public
    def bind(self, weights: Mapping[str, Any] | str | os.PathLike[str], device: int = 0, *,
             threads: int | None = None, prefix: str = "") -> Layer:
        """Packs ``weights`` for this module, once, and copies them to the GPU if it is for one. Torch tensors that
        are there already are packed there, on torch's current stream.

        Parameters
        ----------
        weights : by PyTorch's names, such as ``weight_ih_l0`` (G*H, I); NumPy arrays, torch tensors
            or others with DLPack, of any floating-point type; not needed any more after the call.
            Or the name of a safetensors file or a PyTorch checkpoint that has them
        prefix : of a file: what stands before the layer's names in it, such as ``encoder.rnn.``
        device : number of the GPU, as CUDA counts; 0 for a CPU
        threads : CPU threads of a call; default: the physical cores that this process may use

        Raises
        ------
        WeightsError : a name is missing or unexpected
        ShapeError, DTypeError : a weight does not fit
        NotFiniteError : a weight is infinite, and the module multiplies pairs (CPU) or weights of integers
        ModuleError : this machine cannot run the module
        DeviceError : there is no such device
        ArgumentError : ``threads`` is not 1 to 1024, or was given for a GPU"""
        _integer("device", device, 0, 1 << 16)
        check_host(self.manifest.device, device)
        if self.manifest.workload.dtype == "bfloat16" and TILES in self.manifest.device.features and not permit_tiles():
            raise ModuleError("the module uses the tile registers of AMX, which Linux does not let this process have: "
                              "compile the layer in float32 or float16")
        if self.manifest.device.kind == "cuda":
            if threads is not None:
                raise ArgumentError("threads", threads, "None: the module runs on a GPU")
        elif threads is None:
            threads = min(_MOST_THREADS, cores())
        else:
            _integer("threads", threads, 1, _MOST_THREADS)
        if isinstance(weights, (str, os.PathLike)):
            from ecornn.weight_files import read_layer

            weights = read_layer(weights, prefix)
        elif prefix:
            raise ArgumentError("prefix", prefix, "no prefix, since weights is not the name of a file")
        return Layer(self, weights, device, threads)


@public
def load(path: str | os.PathLike[str]) -> Module:
    """Loads a module file.

    The file's code runs in this process: load only files that you trust. It may be for another
    machine; :meth:`Module.bind` refuses it then. Raises :class:`ModuleError` where the file is missing,
    damaged, or not a module of this version."""
    library = open_library(file := Path(path).absolute())
    return Module(file, library, decode(str(library.manifest())))


def from_bytes(name: str, content: bytes) -> Module:
    """A module from its file's content, in a temporary file that lives as long as it; raises as :func:`load`."""
    def written(folder: Path) -> Module:
        (folder / name).write_bytes(content)
        return load(folder / name)

    return temporary.lasting(written, ModuleError)


def _integer(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ArgumentError(name, value, f"an integer from {least} to {most}")
