"""What the commands share: options of a layer, and errors without a traceback."""

from __future__ import annotations

import contextlib
import functools
import io
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from ecornn.errors import EcornnError
from ecornn.workload import DTYPES, PRECISIONS, WEIGHTS

F = TypeVar("F", bound=Callable[..., Any])
SIZE = click.IntRange(min=1, max=1 << 20)


def plain_errors(function: F) -> F:
    """An :class:`EcornnError`, and what the system says of a file, become one message and exit code 2."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # an old locale may lack µ
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            return function(*args, **kwargs)
        except EcornnError as error:
            click.echo(f"error: {error}", err=True)
            raise SystemExit(2) from None
        except OSError as error:
            if error.filename is None:
                raise
            click.echo(f"error: {error}", err=True)
            raise SystemExit(2) from None

    return wrapper  # type: ignore[return-value]


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM, and SIGHUP unless it is ignored, as a KeyboardInterrupt: what is under way is ended, files are removed.

    Nothing in another thread than the main one, which gets no signals.
    """
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)
                  if signal.getsignal(s) == signal.SIG_DFL}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def layer_options(batch: int, seq: int, dtype_help: str, required: bool = True,
                  many: bool = False) -> Callable[[F], F]:
    """--cell, --hidden, --input, --batch, --seq, --dtype, --weights and --target, with these defaults.

    ``required``: --cell and --hidden must be given; ``many``: each but the last may be given several times,
    and the function gets tuples.
    """
    def option(*names: str, help: str, **settings: Any) -> Callable[[F], F]:
        if many:
            settings["multiple"] = True
            if "default" in settings:
                settings["default"] = (settings["default"],)
        return click.option(*names, help=help + ("  May be repeated." if many else ""), **settings)

    options = [
        option("--cell", required=required, metavar="NAME|FILE.py:NAME",
               help="lstm, gru, gru_reset_before, rnn_tanh, rnn_relu, indrnn, slstm; with options, as in "
                    "'lstm(peepholes,clip=3)'; or your own cell."),
        option("--hidden", required=required, type=SIZE, help="Hidden size H."),
        option("--input", "input_", type=SIZE, help="Input size I.  [default: H]"),
        option("--batch", default=batch, show_default=True, type=SIZE, help="Largest batch B to serve."),
        option("--seq", default=seq, show_default=True, type=SIZE,
               help="Sequence length T to expect; every T is served."),
        option("--dtype", type=click.Choice(DTYPES), help=dtype_help),
        option("--weights", type=click.Choice(WEIGHTS),
               help="Round matrices of weights (CPU): int21, relative error about 1e-6, int16, 2e-5, bfloat16, 2e-3, "
                    "or int8, 1e-2, which needs VNNI.  [default: as --dtype]"),
        option("--precision", type=click.Choice(PRECISIONS),
               help="Of float32 products on a GPU: exact, or tf32, which rounds their factors to 10 bits of mantissa "
                    "(relative error 3e-4 to 5e-4).  [default: exact]"),
        click.option("--target", metavar="cuda|cpu|ARCH",
                     help="The GPU at hand, this CPU, a GPU's architecture such as sm_90a, or LLVM's name of a "
                          "CPU such as neoverse-v1; to tune, one that is in this machine or behind --tracker.  "
                          "[default: cuda if there is a GPU, else cpu]"),
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def command_line(program: str, options: dict[str, object]) -> str:
    """A command that can be pasted into a shell; options that are None are left out."""
    words = [program]
    for name, value in options.items():
        if value is not None:
            words += [name, str(value)]
    return shlex.join(words)


def default_dtype(dtype: str | None, target: str | None) -> tuple[str, str]:
    """Data type and target with the defaults filled in: float32 on a CPU, bfloat16 on a GPU."""
    from ecornn.tune.choose import default_target

    chosen = target or default_target()
    gpu = chosen == "cuda" or chosen.startswith("sm_")
    return dtype or ("bfloat16" if gpu else "float32"), chosen
