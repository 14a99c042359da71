"""Parts of all commands: options of a layer, errors without a traceback, words on what takes long, help that fits."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ecornn.boundary import public
from ecornn.dtypes import DTYPES
from ecornn.errors import EcornnError, InternalError
from ecornn.heartbeat import Heartbeat
from ecornn.quick_tvm import import_tvm
from ecornn.workload import BATCH, KEEPS, PRECISIONS, SEQ, WEIGHTS, Workload

F = TypeVar("F", bound=Callable[..., Any])
STOPPED = 130  # as shells say of a program that SIGINT has ended
SIZE = click.IntRange(min=1, max=1 << 20)
PATH = click.Path(dir_okay=False, path_type=Path)
NARROW, NAMES = 70, 12  # columns; below NARROW names of options have so many, and stand above what they mean if longer
GAP = re.compile(r"( *)(\S.*?) {2,}(\S.*)")  # a command, or a word, and what it does
TOGETHER = re.compile(r"(?<= )--?[a-z][a-z-]* (?!-)|'[^']*'")  # an option with its value, and what is quoted


def plain_errors(function: F) -> F:
    """Decorates a command: an :class:`EcornnError`, and the system's error about a file, become one message and exit
    code 2; Ctrl-C 130; a fault of ecornn's own 1, with its traceback where ECORNN_TRACEBACK=1 is in the environment."""
    checked = public(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # an old locale may lack µ
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            return checked(*args, **kwargs)
        except InternalError as error:
            if os.environ.get("ECORNN_TRACEBACK") == "1":
                traceback.print_exception(error)
            click.echo(f"error: {error} (ECORNN_TRACEBACK=1 shows the traceback)", err=True)
            raise SystemExit(1) from None
        except (EcornnError, OSError) as error:
            if isinstance(error, OSError) and error.filename is None:
                raise
            click.echo(f"error: {error}", err=True)
            raise SystemExit(2) from None
        except KeyboardInterrupt:  # of which click would make a 1, which says that something failed
            click.echo("\nstopped", err=True)
            raise SystemExit(STOPPED) from None

    return wrapper  # type: ignore[return-value]


@contextlib.contextmanager
def said_while(what: str) -> Iterator[Callable[[str], None]]:
    """Says every few seconds, on stderr, that ``what`` continues, or what was told last, which a terminal shows at
    once."""
    now = what

    def told(text: str) -> None:
        nonlocal now
        now = text
        if sys.stderr.isatty():
            click.echo(f"... {text}", err=True)

    with Heartbeat(lambda: click.echo(f"... {now}", err=True)):
        yield told


@contextlib.contextmanager
def told_aloud() -> Iterator[Callable[[str], None]]:
    """Gives a function that says on standard error what comes next; where that takes long it is said again."""
    now, begun = "", time.monotonic()

    def told(text: str) -> None:
        nonlocal now, begun
        with clock.lock:
            now, begun = text, time.monotonic()
            clock.said()
            click.echo(text, err=True)

    def again() -> None:
        if now:
            click.echo(f"  still {now}, {time.monotonic() - begun:.0f} s", err=True)

    with Heartbeat(again) as clock:
        yield told


def load_tvm() -> None:
    """Imports TVM; the first time in an environment that takes many seconds."""
    with said_while("loading TVM"):
        import_tvm()


JSON = click.option("--json", is_flag=True, help="Print the result as JSON on standard output. Later versions may add "
                    "keys; they remove none.")
VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Show the values of the schedule's knobs; with `compile` "
                       "and `explain` also the records that were skipped.")


def with_json(function: F) -> F:
    """Decorates a command that has a result for programs, too: as :func:`plain_errors`, with the option --json."""
    return JSON(plain_errors(function))


def as_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


# The properties of a layer as options, by the names that LayerSpec has for them, in the order of the help texts.
PROPERTIES: dict[str, dict[str, Any]] = {
    "cell": {"metavar": "NAME|FILE.py:NAME",
             "help": "The cell: lstm, gru, gru_reset_before, rnn_tanh, rnn_relu, indrnn or slstm; one of these with "
                     "options, such as 'lstm(peepholes,clip=3)'; or a cell of your own."},
    "hidden": {"type": SIZE, "metavar": "N", "help": "Hidden size H."},
    "input": {"type": SIZE, "metavar": "N", "help": "Input size I.  [default: H]"},
    "batch": {"type": SIZE, "metavar": "N", "default": BATCH, "show_default": True,
              "help": "Largest batch size B to serve."},
    "seq": {"type": SIZE, "metavar": "N", "default": SEQ, "show_default": True,
            "help": "Expected sequence length T. Every other length is served, too."},
    "dtype": {"type": click.Choice(DTYPES),
              "help": "Data type of the layer.  [default: bfloat16 on a GPU; float32 on a CPU or with --precision]"},
    "weights": {"type": click.Choice(WEIGHTS),
                "help": "Round the weight matrices to this type. On a CPU the relative error is about 1e-6 with int21, "
                        "2e-5 with int16, 2e-3 with bfloat16 and 1e-2 with int8, which needs VNNI. On a GPU only "
                        "the recurrent weights of 16-bit layers can be int8; the error is 1e-3.  [default: --dtype]"},
    "precision": {"type": click.Choice(PRECISIONS),
                  "help": "Precision of float32 products on a GPU: exact, or tf32, which rounds the factors to 10 bits "
                          "of mantissa (relative error 3e-4 to 5e-4).  [default: exact]"},
    "layers": {"type": click.IntRange(1, 1024), "metavar": "N",
               "help": "Number L of layers in the stack; each reads the output of the one before it.  [default: 1]"},
    "bidirectional": {"is_flag": True, "help": "Run every layer in both directions; y has the shape (T, B, 2 H)."},
    "reverse": {"is_flag": True, "help": "Run from the end of each sequence to its start only."},
    "lengths": {"is_flag": True, "help": "Calls may pass the length of each sequence."},
    "resets": {"is_flag": True, "help": "Calls may pass a mask of the steps at which a new sequence starts."},
    "sequences": {"is_flag": True, "help": "Calls may put many sequences end to end into a column of the batch (GPU "
                  "only)."},
    "training": {"is_flag": True, "help": "Compile the gradients, too, for Layer.forward and Layer.backward."},
    "keep": {"type": click.Choice(KEEPS),
             "help": "With --training, what the forward pass keeps for the backward pass. Keeping gates takes more "
                     "memory and less time.  [default: gates up to 1 GiB, else states]"},
}

TARGET = click.option("--target", metavar="cuda|cpu|ARCH", help=(
    "The device: this machine's GPU (cuda) or CPU (cpu), a GPU architecture such as sm_90a, a product such as "
    "rtx-4090, or LLVM's name of a CPU, such as neoverse-v1. Measuring needs the device in this machine; `ecornn "
    "tune` can also reach one through --tracker.  [default: cuda if there is a GPU, else cpu]"))

# The headings of help texts, in their order, with the options that stand below each.
GROUPS = {"Layer": "cell hidden input batch seq dtype layers bidirectional reverse training lengths resets sequences "
                   "node weights_from prefix workloads",
          "Search": "trials time_limit early_stop resume",
          "Comparison": "against seconds grid only listed reproduce",
          "Output": "output emit emit_to embed csv json tensorboard verbose",
          "Machine": "target threads jobs tracker key allow_remote",
          "Advanced": "weights precision keep schedule config overlap timeout longest seed torch"}


def layer_options(required: bool = True, many: bool = False, target: bool = True) -> Callable[[F], F]:
    """A decorator that adds a workload's options; ``many``: each may be given several times, as a tuple."""
    options = []
    for name, settings in PROPERTIES.items():
        if name in Workload.__struct_fields__:
            more: dict[str, Any] = {"required": required and name in ("cell", "hidden")}
            if many:
                text, gap, default = settings["help"].partition("  [")
                more |= {"multiple": True, "help": f"{text} May be repeated.{gap}{default}"}
                more |= {"default": (settings["default"],)} if "default" in settings else {}
            options.append(click.option(f"--{name}", **settings | more))
    return every([*options, TARGET] if target else options)


def every(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    """A decorator that adds all of the options, which the help text lists in this order."""
    return lambda function: functools.reduce(lambda made, option: option(made), reversed(options), function)


def folded(paragraph: str, room: int) -> Iterator[str]:
    """Lines of a paragraph in ``room`` columns; indented commands go on behind a backslash, to be pasted."""
    lines = paragraph.splitlines()
    below = any(len(line) > room for line in lines if GAP.fullmatch(line))
    for line in lines:
        parts = GAP.fullmatch(line) if below else None
        indent, text, does = parts.groups() if parts else (" " * (len(line) - len(line.lstrip())), line.strip(), "")
        command, glued = bool(indent), TOGETHER.sub(lambda m: m[0].replace(" ", "\0"), text)
        wrapped = textwrap.wrap(glued, room - 2 * command, break_long_words=False, break_on_hyphens=False,
                                initial_indent=indent, subsequent_indent=indent + "    " * command) or [line]
        yield "\n".join(part + " \\" * (command and part is not wrapped[-1]) for part in wrapped).replace("\0", " ")
        yield from textwrap.wrap(does, room, initial_indent=indent + "    ", subsequent_indent=indent + "    ")


class Formatter(click.HelpFormatter):
    """Click's, for narrow terminals, too."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= NARROW else NAMES, col_spacing)

    def write_text(self, text: str) -> None:
        """Paragraphs; those that begin with a backspace stand as they are."""
        room = self.width - self.current_indent
        super().write_text("\n\n".join("\n".join(folded(part, room)) if part.startswith("\b") else part
                                       for part in text.split("\n\n")))


class Context(click.Context):
    formatter_class = Formatter


class GroupedCommand(click.Command):
    """A command of many options, which its help shows below the headings of :data:`GROUPS`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {option.name: record for option in self.get_params(ctx)
                   if isinstance(option, click.Option) and (record := option.get_help_record(ctx))}
        groups = {heading: [records.pop(name) for name in names.split() if name in records]
                  for heading, names in GROUPS.items()}
        for heading, rows in (groups | {"Other": [*records.values()]}).items():
            if rows:
                with formatter.section(f"{heading} options"):
                    formatter.write_dl(rows)


class Commands(click.Group):
    """A group whose commands' help fits, and whose own says of each what it does in a whole sentence."""

    context_class = Context

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.context_class = Context
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
