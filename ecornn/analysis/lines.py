"""The line of a user's file in which each tensor of a cell was written, so that errors can point there."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.te import Operation

OWN = str(Path(__file__).resolve().parent.parent)
FOREIGN = (".pxi", ".pyx", ".cc", ".h")  # what TVM's own code is named in traces, wherever it was built


class Lines:
    """Notes the caller of every function that makes tensors, such as ``te.compute``, while it is entered.

    It is a profiler of this thread, since tensor expressions keep no trace of their source. Where another profiler is
    at work nothing is noted: one of C, as ``cProfile``, could not be set again. Built-in cells are looked through as
    TVM is.
    """

    def __init__(self) -> None:
        import tvm
        import tvm_ffi
        from tvm import te

        # what te has besides compute() is refused, with its line
        self._makers = {f.__code__ for f in (te.compute, te.extern, te.scan)}
        self._tvm = tuple(str(Path(module.__file__ or OWN).parent) for module in (tvm, tvm_ffi))
        self._found: dict[Operation, tuple[str, int]] = {}  # operation -> file and line
        self._noting = False

    def __enter__(self) -> Lines:
        self._noting = sys.getprofile() is None
        if self._noting:
            sys.setprofile(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._noting:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, result: Any) -> None:
        if event == "return" and frame.f_code in self._makers and result is not None:
            caller = frame.f_back
            while caller is not None and not self._users(caller.f_code.co_filename):
                caller = caller.f_back
            tensor = result[0] if isinstance(result, (list, tuple)) else result
            if caller is not None and hasattr(tensor, "op"):
                self._found[tensor.op] = caller.f_code.co_filename, caller.f_lineno

    def _users(self, file: str) -> bool:
        return not (file.startswith((OWN, *self._tvm, "<frozen", "<unknown")) or file.endswith(FOREIGN))

    def located(self, error: CellError, op: Operation) -> CellError:
        """The error with the line of ``op``, unless it has one already or none is known."""
        if error.at is not None or op not in self._found:
            return error
        return pointed(error, *self._found[op])

    def declared(self, error: CellError, function: Any, word: str) -> CellError:
        """The error with the line of a user's ``function`` that has the string ``word``, or with its first one."""
        code = getattr(function, "__code__", None)
        if code is None or not self._users(code.co_filename):
            return error
        numbers = sorted({line for *_, line in code.co_lines() if line is not None})
        quoted = re.compile(rf"""["']{re.escape(word)}["']""")
        with_word = (n for n in numbers if quoted.search(linecache.getline(code.co_filename, n)))
        return pointed(error, code.co_filename, next(with_word, code.co_firstlineno))

    def failed(self, cell: str, error: Exception, what: str = "step()") -> CellError:
        """The error for an exception of the cell's own code, with the last of the user's lines that was running."""
        own = CellError(f"cell {cell!r}: {what} failed: {type(error).__name__}: {str(error).strip()}")
        return self.running(own, error)

    def running(self, own: CellError, error: Exception) -> CellError:
        """The error with the last of the user's lines that was running when ``error`` was raised, unless it has one."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if self._users(f.filename)]
        if own.at is not None or not frames:
            return own
        return pointed(own, frames[-1].filename, frames[-1].lineno or 0)


def pointed(error: CellError, file: str, line: int) -> CellError:
    """The error with a place, its source line below."""
    text = linecache.getline(file, line).strip()
    return CellError(f"{error}\n  {file}:{line}" + (f": {text}" if text else ""), (file, line))
