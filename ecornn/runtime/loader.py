"""Module files: load, save, bind. What is bound keeps its module."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecornn import temporary
from ecornn.boundary import public
from ecornn.errors import ArgumentError, CopyError, ModuleError
from ecornn.manifest import Manifest, decode
from ecornn.runtime.host_check import check_host
from ecornn.runtime.library import Library, open_library
from ecornn.runtime.training_calls import TrainingCalls

_MOST_THREADS = 1024


class Module:
    """A compiled layer without weights; made by :func:`load` and ``ecornn.compile``.

    Attributes
    ----------
    path : the file
    manifest : what it says about itself
    library : the functions that it exports
    """

    def __init__(self, path: Path, library: Library, manifest: Manifest) -> None:
        self.path, self.library, self.manifest = path, library, manifest

    def __repr__(self) -> str:
        m = self.manifest
        what = ", ".join(filter(None, (str(m.workload), str(m.stack), m.schedule)))
        return (f"<ecornn.Module {what} for {m.device.name} ({m.device.arch}), "
                f"{m.provenance}>")

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
        where ``path`` cannot be written or is no regular file.
        """
        to = Path(path)
        if not self.path.is_file():
            raise ModuleError(f"the module's file {self.path} is gone")
        if to.exists() and not to.is_file():
            raise OSError(errno.EISDIR if to.is_dir() else errno.EINVAL, "not a regular file", str(to))
        # Beside its place, so that it gets there in one step: whoever has the old file loaded keeps it.
        made = to.parent / f".{to.name}.{secrets.token_hex(8)}"
        try:
            shutil.copyfile(self.path, made)
            made.chmod(0o755)
            made.replace(to)
        except OSError as error:  # of the name beside it, which the caller does not know
            raise OSError(error.errno, error.strerror, str(to)) from error
        finally:
            made.unlink(missing_ok=True)

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
        ArgumentError : ``threads`` is not 1 to 1024, or was given for a GPU
        """
        _integer("device", device, 0, 1 << 16)
        check_host(self.manifest.device, device)
        if self.manifest.device.kind == "cuda":
            if threads is not None:
                raise ArgumentError("threads", threads, "None: the module runs on a GPU")
        elif threads is None:
            from ecornn.host_cpu import physical_cores

            threads = min(_MOST_THREADS, physical_cores(sorted(os.sched_getaffinity(0))))
        else:
            _integer("threads", threads, 1, _MOST_THREADS)
        if isinstance(weights, (str, os.PathLike)):
            from ecornn.weight_files import WeightFile

            weights = WeightFile(weights, prefix).layer()
        elif prefix:
            raise ArgumentError("prefix", prefix, "none, unless weights is the name of a file")
        return Layer(self, weights, device, threads)


class Layer(TrainingCalls):
    """One recurrent layer, ready to run; made by :meth:`Module.bind`.

    Attributes
    ----------
    module : the module that it was bound from
    manifest : what the module says about itself
    device : number of the GPU; 0 for a CPU
    threads : CPU threads of a call; None on a GPU
    together : neighbouring columns that may share a sequence, for :meth:`Columns.of`; 1: none may

    Several Python threads may call one layer at the same time. A CUDA graph that has captured a call
    reads the layer's weights: keep the layer as long as the graph.
    """

    def __init__(self, module: Module, weights: Mapping[str, Any], device: int, threads: int | None) -> None:
        super().__init__(module.manifest, module.library, weights, device, threads)
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        raise CopyError("a Layer is packed weights where its code runs: copy or pickle layer.module, and bind it to "
                        "the weights again")

    def __repr__(self) -> str:
        where = f"GPU {self.device}" if self.threads is None else f"{self.threads} threads"
        m = self.manifest
        what = ", ".join(filter(None, (str(m.workload), str(m.stack), m.schedule)))
        return f"<ecornn.Layer {what} on {where}>"


@public
def load(path: str | os.PathLike[str]) -> Module:
    """Loads a module file.

    The file's code runs in this process: load only files that you trust. It may be for another
    machine; :meth:`Module.bind` refuses it then. Raises :class:`ModuleError` where the file is missing,
    damaged, or not a module of this version.
    """
    file = Path(path).absolute()
    library = open_library(file)
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
