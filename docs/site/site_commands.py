"""The reference of commands, from their options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

INTRO = """# Commands

`ecornn COMMAND`; `ecornn-tune` and `ecornn-compile` are `ecornn tune` and `ecornn compile`, and `python -m ecornn`
works where no script is installed. Results are written to standard output, everything else to standard error:
how it goes, what is wrong, and where a command writes a file, what it wrote. With `--json` standard output has one JSON
value and nothing else.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the command ran, and its answer is no: nothing was found that works, or a check failed; or ecornn has a fault |
| 2 | what was asked for cannot be done: wrong arguments, a file that is no log or module, a missing compiler |
| 130 | stopped by Ctrl-C; what was done is kept. `serve`, which has no other end, exits with 0 |
"""


def one_line(text: str) -> str:
    """The meaning of an option, in which nothing is markup but code."""
    return " ".join(text.split()).replace("<", "&lt;")


def described(command: click.Command, names: tuple[str, ...], parent: click.Context | None) -> Iterator[str]:
    """The sections of a command and those below it."""
    context = click.Context(command, info_name=names[-1], parent=parent)
    yield f"{'#' * (len(names))} ecornn {' '.join(names[1:])}\n" if len(names) > 1 else INTRO
    if len(names) > 1:
        yield re.sub(r"``(.+?)``", r"`\1`", click.formatting.wrap_text(
            inspect.cleandoc(command.help or "").replace("\b\n", ""), 118, preserve_paragraphs=True)) + "\n"
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"```text\necornn {' '.join(names[1:])} {usage}\n```\n"
    options = [record for p in command.params if (record := p.get_help_record(context)) is not None]
    if options and len(names) > 1:
        yield "\n".join(f"`{name}`\n:   {one_line(text)}\n" for name, text in options if text)
    if command.epilog and len(names) > 1:
        yield "```text\n" + command.epilog.replace("\b\n", "").strip() + "\n```\n"
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from described(command.commands[name], (*names, name), context)


def page() -> str:
    """The page as Markdown."""
    from ecornn.cli import main

    return "\n".join(described(main, ("ecornn",), None))
