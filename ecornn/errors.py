"""Every error a user can cause, typed; all derive from :class:`EcornnError`."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import takewhile


class EcornnError(Exception):
    """Base class of the errors that ecornn raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows in place of a traceback: the caller's, and the message."""
        if os.environ.get("ECORNN_TRACEBACK") == "1" or isinstance(self, InternalError):
            return traceback.format_exception(self)
        frames = [(str(f.f_globals.get("__name__")).partition(".")[0], f.f_code.co_filename, line)
                  for f, line in traceback.walk_tb(self.__traceback__)]
        callers = [frame[1:] for frame in takewhile(lambda frame: frame[0] != "ecornn", frames)
                   if frame[0] not in ("IPython", "torch")]
        return [*(source_line(*caller) for caller in callers), f"{type(self).__name__}: {self}"]


class ArgumentError(EcornnError, ValueError):
    """An argument has a wrong value, or an option of a command has none. The message names both, what is expected, and
    the nearest name that is, if one was mistyped."""

    offers = True  # the nearest name

    def __init__(self, argument: str, value: object, allowed: str) -> None:
        missing = value is None and argument.startswith("--")
        given = f"{argument} is missing" if missing else f"{argument}={value!r}"
        super().__init__(f"{given}: {_meant(value, allowed) if self.offers else ''}expected {allowed}")
        self.argument, self.value, self.allowed = argument, value, allowed

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, object, str]]:
        return type(self), (self.argument, self.value, self.allowed)  # an error of a worker process reaches its parent


def _meant(value: object, allowed: str) -> str:
    """A question for a name that is nearly one of those that ``allowed`` lists."""
    listed = allowed.partition("one of ")[2] or allowed.partition(": ")[2]
    names = re.findall(r"(?:^|, |or |as )([\w.+-]+)(?=,| or |$)", listed)  # and no words of a sentence
    if not isinstance(value, str) or value in names:
        return ""
    nearest = get_close_matches(value, names, 1) or get_close_matches(value.lower().replace(" ", "-"), names, 1)
    return f"did you mean {nearest[0]}? " if nearest else ""


class ShapeError(ArgumentError, RuntimeError):
    """A tensor has the wrong shape. PyTorch has RuntimeError for that, as NumPy has ValueError; this is both."""


class DTypeError(ArgumentError, RuntimeError):
    """A tensor or an option has the wrong data type. It is both kinds of error, too."""

    offers = False  # float16 is near to bfloat16 in letters alone


class NotFiniteError(ArgumentError):
    """A weight is infinite, and the module's products need finite ones."""


class DeviceError(ArgumentError, RuntimeError):
    """A tensor lives on the wrong device, or a target cannot be served. It is both kinds of error, too."""


class WeightsError(EcornnError, KeyError):
    """The weights lack a parameter, or carry one that the cell does not have."""

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.message, self.names = message, tuple(names)

    def __str__(self) -> str:
        return self.message


class CellError(EcornnError):
    """A cell's step cannot be analysed or scheduled; the message points at the tensor, and ``at`` is the
    file and the line in which it was written, where they are known."""

    def __init__(self, message: str, at: tuple[str, int] | None = None) -> None:
        super().__init__(message)
        self.at = at


class ScheduleError(EcornnError):
    """No schedule serves the workload, or a configuration cannot be built."""


class MissingPackageError(EcornnError, ImportError):
    """A Python package that compiling or tuning needs is not installed; the message names it."""


class BuildError(EcornnError):
    """Code generation, the CUDA compiler or the linker failed."""


class FallbackError(EcornnError, RuntimeError):
    """PyTorch's own layer would have to run, which ``ECORNN_STRICT=1`` forbids."""


class DerivativeError(EcornnError, NotImplementedError):
    """A derivative that no compiled layer computes, of a kind or of a cell. PyTorch raises NotImplementedError for
    those that it lacks: this is one, too, so that a program that catches it there goes on as before."""


class CopyError(EcornnError, TypeError):
    """An object cannot be copied or pickled as it is; the message says what can."""


class ServerError(EcornnError):
    """No server measures any more."""


class ModuleError(EcornnError):
    """A module file is missing, damaged, or was built for another device or version."""


class RecordError(EcornnError, ValueError):
    """A tuning record or log line does not follow the format."""


class InternalError(EcornnError, RuntimeError):
    """A fault of ecornn's own, at a layer that it should have served or refused. ``__cause__`` is the error that showed
    it, ``layer`` the call as text, and ``versions`` those of all packages that took part."""

    def __init__(self, error: BaseException | str, layer: str, versions: str) -> None:
        what = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        super().__init__(f"ecornn failed in {layer}: {what}. This is a fault of ecornn, not of the call: please report "
                         f"it with this message and the traceback. Versions: {versions}")
        self.what, self.layer, self.versions = what, layer, versions

    def __reduce__(self) -> tuple[type[InternalError], tuple[str, str, str]]:
        return type(self), (self.what, self.layer, self.versions)


def source_line(file: str, line: int) -> str:
    """A place in source code as text, ``FILE:LINE: its text``; in a notebook's cell ``In[3], line 5: its text``."""
    ipython = sys.modules.get("IPython")
    compiler = getattr(ipython.get_ipython(), "compile", None) if ipython is not None else None
    cell = getattr(compiler, "format_code_name", lambda _: None)(file)
    text = linecache.getline(file, line).strip()
    return (f"{cell[1]}, line {line}" if cell else f"{file}:{line}") + (f": {text}" if text else "")


def missing(error: ModuleNotFoundError, by: str, package: str) -> ImportError:
    """The error of the ``package`` that ``by`` is written for: a :class:`MissingPackageError` that says how to install
    it; ``error`` itself if another one is missing."""
    if error.name != package:
        return error
    return MissingPackageError(f"{by} needs {package}, which is not installed: pip install {package}")
