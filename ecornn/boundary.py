"""Nothing untyped leaves the package: a fault of its own becomes an :class:`~ecornn.errors.InternalError`. Public
functions have the decorator :func:`public`. Calls that take microseconds have a ``try`` of their own, which costs
nothing, and :func:`refuse_untyped` behind it."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import PurePath
from typing import Any, TypeVar

from ecornn.errors import EcornnError, InternalError

F = TypeVar("F", bound=Callable[..., Any])

# Python raises these of a fault, and nobody on purpose. TVM's own errors count, too.
UNTYPED = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RecursionError, StopIteration,
           TypeError)
# The package calls these: an error that is raised there belongs to whoever called.
LIBRARIES = {"importlib", "ml_dtypes", "msgspec", "numpy", "onnx", "safetensors", "torch", "tvm", "tvm_ffi", "xgboost",
             *sys.stdlib_module_names}
INSTEAD = {"ecornn.torch.falling_back"}  # runs PyTorch's own layers, whose errors are PyTorch's
MOST, FEW = 200, 8  # characters of a value that is shown, and values of one that has several


def public(function: F) -> F:
    """The function, whose untyped errors are :class:`~ecornn.errors.InternalError`; see :func:`refuse_untyped`."""
    @functools.wraps(function)
    def boundary(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:  # else its caller gave what the function does not take
                refuse_untyped(error, lambda: f"{function.__module__}.{function.__qualname__}(" + ", ".join(
                    [*map(shown, args), *(f"{name}={shown(value)}" for name, value in kwargs.items())]) + ")")
            raise

    return boundary  # type: ignore[return-value]


def refuse_untyped(error: Exception, layer: Callable[[], str]) -> None:
    """Raises :class:`~ecornn.errors.InternalError` from an error that the package raised itself, and not on purpose;
    ``layer`` gives the call as text. The last frame that is not a library's decides whose it is: a step or a hook that
    a user wrote is so told from a fault here."""
    fault = isinstance(error, UNTYPED) or type(error).__module__.partition(".")[0] in ("tvm", "tvm_ffi")
    if fault and not isinstance(error, EcornnError) and ours(error):
        raise InternalError(error, layer(), versions()) from error


def ours(error: BaseException) -> bool:
    """Tells whether the package, or a library that it called, raised the error."""
    frame, own = error.__traceback__, False
    while frame is not None:
        name = str(frame.tb_frame.f_globals.get("__name__", "importlib"))  # C++ has none
        if (root := name.partition(".")[0]) not in LIBRARIES:
            own = root == "ecornn" and name not in INSTEAD
        frame = frame.tb_next
    return own


def versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    said, packages = [], {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}
    for module in ("ecornn", "tvm", "tvm_ffi", "torch", "numpy", "onnx", "jax"):
        if module in sys.modules:
            name = packages.get(module, module)
            try:
                said.append(f"{name} {version(name)}")
            except PackageNotFoundError:  # a checkout that is not installed
                said.append(f"{name} of unknown version")
    return ", ".join((*said, f"Python {platform.python_version()}", platform.platform()))


def shown(value: object) -> str:
    """A value in few words; arrays, whose memory may be gone, by type and shape. It may be the cause of the fault, and
    must not fail here."""
    try:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"<{value.dtype} {tuple(value.shape)}>"
        if isinstance(value, Mapping):
            text = "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in islice(value.items(), FEW)) + "}"
        elif isinstance(value, (list, tuple)):
            text = f"[{', '.join(map(shown, value[:FEW]))}]"
        elif value is None or isinstance(value, (str, bytes, int, float, PurePath)) or (
                type(value).__module__.partition(".")[0] == "ecornn"):
            text = repr(value)
        else:
            text = f"<{type(value).__name__}>"
    except Exception:
        return f"<{type(value).__name__}>"  # its own methods may raise anything, and hide the fault
    return text if len(text) <= MOST else f"{text[:MOST]}..."
